"""The routes of the history of decisions: filters, rights, verification and export."""

import csv
import io
import json
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import httpx
import pytest
from support.web_site import refund_agent, site

from holdfast import Deny
from holdfast.server.problems import HTTPProblem

NAMES = ("ann1", "ben1", "ann2")


def may_see(by, conversation):
    return conversation.startswith(by.id) or by.id == "boss"


class Desk:
    """Requests of several principals to one server."""

    def __init__(self, s):
        self.rt, self._site = s.runtime, s

    async def history(self, asks, expect=200, **query):
        return await self._site.get(f"/api/decisions?{urlencode(query)}", expect, headers={"x-who": asks})

    async def names(self, asks, **query):
        return [one["conversation"] for one in (await self.history(asks, **query))["decisions"]]

    async def export(self, asks, **query):
        response = await self._site.http.get(f"/api/decisions/export?{urlencode(query)}", headers={"x-who": asks})
        assert response.status_code == 200, response.text
        return response


async def decide_all(s):
    for name in NAMES:
        await s.runtime.run("A lamp", conversation=name)
        (entry,) = await s.runtime.pending(name)
        await s.runtime.resolve(entry, Deny(f"=no, {name}"), by="boss")
        await s.runtime.wait(name)


@asynccontextmanager
async def open_desk():
    auth = lambda request: request.headers.get("x-who")  # noqa: E731
    async with site(refund_agent(), auth=auth, may_see=may_see) as s:
        await decide_all(s)
        yield Desk(s)


async def test_a_principal_sees_the_decisions_of_the_conversations_that_it_may_see():
    """Others do not exist for it: neither in pages and filters nor in an export."""
    async with open_desk() as desk:
        assert await desk.names("boss") == ["ann2", "ben1", "ann1"]
        assert await desk.names("ann") == ["ann2", "ann1"]
        assert await desk.names("ben", verify="true") == ["ben1"]
        assert await desk.names("ann", conversation="ben1") == []
        assert await desk.names("carl", who="boss") == []
        page = await desk.history("ann", limit=1)
        assert "ben" not in page["next"]
        assert await desk.names("ann", limit=1, cursor=page["next"]) == ["ann1"]
        for format in ("csv", "jsonl"):
            text = (await desk.export("ann", format=format)).text
            assert text.count("=no, ann") == 2
            assert "ben" not in text


async def test_decisions_are_filtered_and_verified_over_http():
    async with open_desk() as desk:
        (record,) = (await desk.history("boss", conversation="ann1", kinds="deny,refused", verify="true"))["decisions"]
        assert (record["kind"], record["by"]["id"], record["reason"]) == ("deny", "boss", "=no, ann1")
        assert (record["verified"], record["problem"]) == (True, None)
        assert await desk.names("boss", text="ben1", tool=record["tool"], who="boss", since=1.5) == ["ben1"]
        assert await desk.names("boss", kinds="approve") == await desk.names("boss", until=1.5) == []
        for wrong in (
            {"kinds": "no"},
            {"cursor": "x"},
            {"limit": 0},
            {"since": "-1"},
            {"since": "nan"},
            {"unknown": 1},
        ):
            await desk.history("boss", 422, **wrong)


async def test_an_export_is_a_file_that_no_browser_shows_as_a_page():
    async with open_desk() as desk:
        response = await desk.export("boss")
        assert response.headers["content-type"] == "text/csv; charset=utf-8"
        assert response.headers["content-disposition"] == "attachment; filename*=UTF-8''decisions.csv"
        assert "sandbox" in response.headers["content-security-policy"]
        rows = list(csv.DictReader(io.StringIO(response.text, newline="")))
        assert [row["reason"] for row in rows] == ["'=no, ann2", "'=no, ben1", "'=no, ann1"]
        lines = (await desk.export("boss", format="jsonl", verify="true", who="boss")).text.splitlines()
        assert [json.loads(line)["verified"] for line in lines] == [True] * 3


async def test_an_export_ends_when_the_principal_loses_access(monkeypatch):
    """The principal is authenticated again after each page; the response is then visibly incomplete."""
    monkeypatch.setattr("holdfast.server.routes.EXPORT_PAGE", 1)
    asked = []

    def auth(request):
        asked.append(request)
        return "boss" if len(asked) <= allowed else None

    allowed = 100
    async with site(refund_agent(), auth=auth) as s:
        await decide_all(s)
        whole = await s.http.get("/api/decisions/export?format=jsonl")
        assert len(whole.text.splitlines()) == len(NAMES)
        assert len(asked) >= 1 + len(NAMES)
        allowed = len(asked) + 2
        with pytest.raises((HTTPProblem, httpx.HTTPError)):
            await s.http.get("/api/decisions/export?format=jsonl")
