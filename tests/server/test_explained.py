"""Every kind of error has a page on the server, and the link of every error leads there."""

import base64
import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.web_site import TOKEN, desk, refunding, site

import holdfast
from holdfast.errors import KINDS, StoreError
from holdfast.server import static_files

ROOT = Path(__file__).parent.parent.parent
LET_IN = {"authorization": f"Bearer {TOKEN}"}


def below(path) -> dict[str, Any]:
    return {"wrap": lambda served: Starlette(routes=[Mount(path, served)])} if path else {}


mounted = pytest.mark.parametrize("root", ["", "/desk/holdfast", "/a&b c/ü"])


def test_what_is_said_of_the_kinds_is_packaged_and_says_something_of_each():
    package = Path(holdfast.__file__).parent
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/holdfast"]}
    assert package == ROOT / "src" / "holdfast"
    assert (package / "errors.toml").is_file()
    assert list(static_files.error_notes()) == list(KINDS)
    assert all(note.when and note.do for note in static_files.error_notes().values())


@mounted
async def test_every_kind_has_a_page_that_anybody_can_read_and_all_are_listed(root):
    async with site(desk("x"), token=None, **below(root)) as s:
        listed = await s.http.get(f"{root}/errors/")
        links = re.findall('<a href="([^"]+)">([a-z_]+)</a>', listed.text)
        assert [kind for _, kind in links] == list(KINDS)
        for link, kind in links:
            answer = await s.http.get(link)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert f"<h1>{kind}</h1>" in answer.text
            for part in (KINDS[kind][1:], "When it happens", "What to do"):
                assert part in answer.text
            assert not re.search(r"`|\]\(", answer.text), "as it is written, not as it is read"
            [up] = re.findall('<a href="([^"]+)">', answer.text)
            assert (await s.http.get(up)).text == listed.text


@mounted
async def test_the_type_of_an_error_leads_to_the_page_about_its_kind(root):
    """Of a refusal, of one result of a batch and of a stream that fails. Whoever follows it needs no token."""
    async with site(refunding(), token=None, **below(root)) as s:

        async def explains(problem, asked):
            assert re.fullmatch(r"[a-z_/%A-Z0-9]+", problem["type"]), "what an address cannot have is quoted"
            page = await s.http.get(urljoin(f"{s.base}{asked}", problem["type"]))
            assert (page.status_code, f"<h1>{problem['kind']}</h1>" in page.text) == (200, True), problem

        for path, status, headers in (
            ("/api/me", 401, {}),
            ("/api/conversations/none/log", 404, LET_IN),
            ("/nothing/at/all", 404, LET_IN),
            ("/api/pending?limit=x", 422, LET_IN),
        ):
            await explains(await s.get(f"{root}{path}", status, headers=headers), f"{root}{path}")

        batch = f"{root}/api/pending/resolve"
        one = {"conversation": "none", "call": "x", "decision": {"type": "deny"}}
        results = (await s.post(batch, {"decisions": [one]}, headers=LET_IN))["results"]
        await explains(results[0]["problem"], batch)

        await s.runtime.open("c", agent="desk")

        async def away(*_, **__):
            raise StoreError("the disk is gone", kind="log_read_failed")

        s.runtime.store.read = away
        stream = f"{root}/api/conversations/c/events"
        async with s.events(stream, headers=LET_IN) as reader:
            kind, _, problem = await reader.next()
        assert kind == "problem"
        await explains(problem, stream)


async def test_what_is_no_kind_is_404_and_the_pages_are_only_read():
    async with site(desk("x"), token=None) as s:
        for path in ("nothing/", "busy/more/", "/", "Busy/", "%3Cb%3E/", "..%2Fbusy/"):
            await s.get(f"/errors/{path}", 404)
        for path in ("/errors", "/errors/busy"):  # without the last slash too
            assert (await s.http.get(path)).text == (await s.http.get(f"{path}/")).text
        head = await s.http.head("/errors/busy/")
        assert (head.status_code, head.content) == (200, b"")
        await s.post("/errors/busy/", status=401)
        await s.post("/errors/busy/", status=405, headers=LET_IN)


async def test_the_page_about_a_kind_is_for_our_hosts_alone_loads_nothing_and_has_no_script():
    async with site(desk("x"), token=None, hosts=["localhost"]) as s:
        await s.get("/errors/busy/", 421, headers={"host": "evil.example"})
        answer = await s.http.get("/errors/busy/")
        [look] = re.findall("<style>(.*)</style>", answer.text)
        allowed = base64.b64encode(hashlib.sha256(look.encode()).digest()).decode()
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(f"default-src 'none'; style-src 'sha256-{allowed}';")
        assert "script" not in policy + answer.text
        assert answer.headers["x-frame-options"] == "DENY"
