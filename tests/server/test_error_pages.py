"""Every error kind has a page on the server, and the ``type`` of every problem document links to it."""

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
from support.web_site import TOKEN, desk, refund_agent, site

import holdfast
from holdfast.errors import KINDS, StoreError
from holdfast.server import static_files

ROOT = Path(__file__).parent.parent.parent
WITH_TOKEN = {"authorization": f"Bearer {TOKEN}"}


def mounted_at(path) -> dict[str, Any]:
    """Return the options of ``site`` that mount the application at a path."""
    return {"wrap": lambda served: Starlette(routes=[Mount(path, served)])} if path else {}


mounted = pytest.mark.parametrize("root", ["", "/desk/holdfast", "/a&b c/ü"])


def test_errors_toml_is_packaged_and_has_a_note_for_every_kind():
    package = Path(holdfast.__file__).parent
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/holdfast"]}
    assert package == ROOT / "src" / "holdfast"
    assert (package / "errors.toml").is_file()
    assert list(static_files.error_notes()) == list(KINDS)
    assert all(note.when and note.do for note in static_files.error_notes().values())


@mounted
async def test_every_kind_has_a_public_page_that_the_list_links_to(root):
    async with site(desk("x"), token=None, **mounted_at(root)) as s:
        listed = await s.http.get(f"{root}/errors/")
        links = re.findall('<a href="([^"]+)">([a-z_]+)</a>', listed.text)
        assert [kind for _, kind in links] == list(KINDS)
        for link, kind in links:
            answer = await s.http.get(link)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert f"<h1>{kind}</h1>" in answer.text
            for part in (KINDS[kind][1:], "When it happens", "What to do"):
                assert part in answer.text
            assert not re.search(r"`|\]\(", answer.text), "Markdown is rendered"
            [up] = re.findall('<a href="([^"]+)">', answer.text)
            assert (await s.http.get(up)).text == listed.text


@mounted
async def test_the_type_of_a_problem_is_the_address_of_the_page_about_its_kind(root):
    """In a refusal, in one result of a batch and in a stream that fails. The page needs no token."""
    async with site(refund_agent(), token=None, **mounted_at(root)) as s:

        async def check_page(problem, asked):
            assert re.fullmatch(r"[a-z_/%A-Z0-9]+", problem["type"]), "other characters are percent-encoded"
            page = await s.http.get(urljoin(f"{s.base}{asked}", problem["type"]))
            assert (page.status_code, f"<h1>{problem['kind']}</h1>" in page.text) == (200, True), problem

        for path, status, headers in (
            ("/api/me", 401, {}),
            ("/api/conversations/none/log", 404, WITH_TOKEN),
            ("/nothing/at/all", 404, WITH_TOKEN),
            ("/api/pending?limit=x", 422, WITH_TOKEN),
        ):
            await check_page(await s.get(f"{root}{path}", status, headers=headers), f"{root}{path}")

        batch = f"{root}/api/pending/resolve"
        one = {"conversation": "none", "call": "x", "decision": {"type": "deny"}}
        results = (await s.post(batch, {"decisions": [one]}, headers=WITH_TOKEN))["results"]
        await check_page(results[0]["problem"], batch)

        await s.runtime.open("c", agent="desk")

        async def fail(*_, **__):
            raise StoreError("the disk is gone", kind="log_read_failed")

        s.runtime.store.read = fail
        stream = f"{root}/api/conversations/c/events"
        async with s.events(stream, headers=WITH_TOKEN) as reader:
            kind, _, problem = await reader.next()
        assert kind == "problem"
        await check_page(problem, stream)


async def test_the_page_of_an_unknown_kind_is_404_and_error_pages_are_read_only():
    async with site(desk("x"), token=None) as s:
        for path in ("nothing/", "busy/more/", "/", "Busy/", "%3Cb%3E/", "..%2Fbusy/"):
            await s.get(f"/errors/{path}", 404)
        for path in ("/errors", "/errors/busy"):  # also without the trailing slash
            assert (await s.http.get(path)).text == (await s.http.get(f"{path}/")).text
        head = await s.http.head("/errors/busy/")
        assert (head.status_code, head.content) == (200, b"")
        await s.post("/errors/busy/", status=401)
        await s.post("/errors/busy/", status=405, headers=WITH_TOKEN)


async def test_an_error_page_is_served_only_for_known_hosts_and_has_no_script():
    async with site(desk("x"), token=None, hosts=["localhost"]) as s:
        await s.get("/errors/busy/", 421, headers={"host": "evil.example"})
        answer = await s.http.get("/errors/busy/")
        [look] = re.findall("<style>(.*)</style>", answer.text)
        allowed = base64.b64encode(hashlib.sha256(look.encode()).digest()).decode()
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(f"default-src 'none'; style-src 'sha256-{allowed}';")
        assert "script" not in policy + answer.text
        assert answer.headers["x-frame-options"] == "DENY"
