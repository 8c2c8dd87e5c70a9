"""grep, glob and list: bounds, ignored files, links, and patterns that look like options."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.protected import protect
from holdfast.workspace import Workspace
from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits

FILES = {
    "a.py": "import os\nprint('alpha')\n",
    "src/b.py": "alpha = 1\nbeta = 2\n",
    "src/deep/c.txt": "alpha beta\n",
    ".hidden/d.py": "alpha\n",
    ".env": "SECRET=alpha\n",
    "ignored/e.py": "alpha\n",
    ".gitignore": "ignored/\n",
}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def ws(tree):
    return Workspace(tree, sandbox="none")


async def run(ws, tool, **args):
    return await ws.tools.get(tool).handler(args, Call(tool=tool))


async def test_grep_returns_paths_lines_and_text_sorted_by_path(ws):
    found = await run(ws, "grep", pattern="alpha")
    assert found["lines"].splitlines() == [
        "a.py:2:print('alpha')",
        "src/b.py:1:alpha = 1",
        "src/deep/c.txt:1:alpha beta",
    ]
    assert found["matches"] == 3


async def test_grep_honours_gitignore_and_leaves_out_hidden_files_unless_asked(ws):
    found = await run(ws, "grep", pattern="alpha", hidden=True)
    paths = {line.split(":")[0] for line in found["lines"].splitlines()}
    assert ".hidden/d.py" in paths
    assert not {"ignored/e.py", ".env"} & paths


async def test_grep_can_show_files_or_counts(ws):
    files = await run(ws, "grep", pattern="alpha|beta", show="files")
    counts = await run(ws, "grep", pattern="alpha|beta", show="counts")
    assert files["paths"].splitlines() == ["a.py", "src/b.py", "src/deep/c.txt"]
    assert counts["paths"].splitlines() == ["a.py: 1", "src/b.py: 2", "src/deep/c.txt: 1"]


async def test_grep_searches_a_single_file_and_a_directory(ws):
    assert (await run(ws, "grep", pattern="alpha", path="src/b.py"))["lines"] == "src/b.py:1:alpha = 1"
    assert (await run(ws, "grep", pattern="alpha", path="src/deep"))["lines"] == "src/deep/c.txt:1:alpha beta"
    assert (await run(ws, "grep", pattern="alpha", path="src/b.py", show="counts"))["paths"] == "src/b.py: 1"


async def test_grep_shows_lines_around_a_match(ws):
    found = await run(ws, "grep", pattern="beta = 2", context=1)
    assert found["lines"].splitlines() == ["src/b.py-1-alpha = 1", "src/b.py:2:beta = 2"]


async def test_grep_says_that_there_are_more_matches_than_it_shows(ws, tree):
    (tree / "many.txt").write_text("alpha\n" * 500)
    found = await run(ws, "grep", pattern="alpha", path="many.txt", limit=10)
    assert found["matches"] == 10
    assert found["more"] is True
    assert "narrow" in found["note"]


@pytest.mark.parametrize("pattern", ["--pre=sh", "-e", "--help", "-f/etc/passwd"])
async def test_a_pattern_never_becomes_an_option_of_ripgrep(ws, tree, pattern):
    (tree / "options.txt").write_text(f"x {pattern} y\n")
    found = await run(ws, "grep", pattern=pattern, literal=True)
    assert found["lines"] == f"options.txt:1:x {pattern} y"


@pytest.mark.parametrize("glob", ["--pre=sh", "-e", "--files"])
async def test_a_glob_never_becomes_an_option_of_ripgrep(ws, glob):
    assert (await run(ws, "glob", pattern=glob))["count"] == 0
    assert (await run(ws, "grep", pattern="alpha", glob=glob))["matches"] == 0


async def test_a_pattern_that_is_not_a_regular_expression_is_an_error_that_shows_where(ws):
    with pytest.raises(ToolError) as caught:
        await run(ws, "grep", pattern="alpha(")
    assert caught.value.kind == "invalid_args"
    assert "unclosed group" in caught.value.message


async def test_nested_quantifiers_on_ten_megabytes_end(ws, tree):
    (tree / "long.txt").write_text("a" * 10_000_000 + "b\n")
    found = await run(ws, "grep", pattern="(a+)+$", path="long.txt")
    assert found["matches"] == 0


async def test_a_long_line_is_cut_with_its_size(ws, tree):
    (tree / "wide.txt").write_text("alpha" + "x" * 100_000 + "\n")
    found = await run(ws, "grep", pattern="alpha", path="wide.txt")
    assert len(found["lines"]) < 2200
    assert found["lines"].endswith("[cut: the line has 100,006 bytes]")


@pytest.mark.parametrize("tool", ["grep", "glob", "list"])
@pytest.mark.parametrize("path", ["../x", "/etc", "out", "src/../../x"])
async def test_a_search_outside_of_the_root_is_refused(ws, tree, tmp_path, tool, path):
    """`..`, absolute paths and links out are outside_workspace for grep and glob [B75]."""
    (tmp_path / "x").mkdir()
    (tree / "out").symlink_to(tmp_path / "x")
    args = {"path": path} if tool == "list" else {"path": path, "pattern": "alpha"}
    with pytest.raises(ToolError) as caught:
        await run(ws, tool, **args)
    assert caught.value.kind == "outside_workspace"


async def test_links_out_of_the_root_are_not_followed(ws, tree, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("alpha secret\n")
    (tree / "way-out").symlink_to(secret)
    (tree / "file-out").symlink_to(secret / "key.txt")
    found = await run(ws, "grep", pattern="alpha secret")
    assert found["matches"] == 0
    assert "way-out/key.txt" not in (await run(ws, "glob", pattern="*"))["paths"]


SWAP = """
import os, sys
directory, aside, outside = sys.argv[1:]
print("ready", flush=True)
while True:
    os.rename(directory, aside)
    os.symlink(outside, directory)
    os.unlink(directory)
    os.rename(aside, directory)
"""


async def test_a_directory_that_is_swapped_for_a_link_while_grep_runs_leaks_nothing(ws, tree, tmp_path):
    """A link swapped in between check and use never leads out [B75]."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "b.py").write_text("alpha OUTSIDE\n")
    names = [str(tree / "src"), str(tmp_path / "aside"), str(secret)]
    swapper = await asyncio.create_subprocess_exec(sys.executable, "-c", SWAP, *names, stdout=subprocess.PIPE)
    assert swapper.stdout is not None
    await swapper.stdout.readline()
    try:
        for _ in range(60):
            found = await run(ws, "grep", pattern="alpha")
            assert "OUTSIDE" not in found["lines"]
    finally:
        swapper.kill()
        await swapper.communicate()


async def test_glob_finds_files_at_any_depth_sorted(ws):
    assert (await run(ws, "glob", pattern="*.py"))["paths"].splitlines() == ["a.py", "src/b.py"]
    assert (await run(ws, "glob", pattern="src/**"))["paths"].splitlines() == ["src/b.py", "src/deep/c.txt"]


async def test_list_shows_directories_links_and_sizes_and_leaves_nothing_out(ws, tree):
    (tree / "link").symlink_to("a.py")
    found = await run(ws, "list")
    assert found["entries"].splitlines() == [
        ".env (13 bytes)",
        ".gitignore (9 bytes)",
        ".hidden/",
        "a.py (25 bytes)",
        "ignored/",
        "link@",
        "src/",
    ]


async def test_a_long_directory_is_read_in_pages_that_show_every_entry_once(ws, tree):
    big = tree / "big"
    big.mkdir()
    for n in range(250):
        (big / f"f{n:03}").touch()
    names, offset = [], 0
    while offset is not None:
        page = await run(ws, "list", path="big", offset=offset, limit=100)
        names += [entry.split(" ")[0] for entry in page["entries"].splitlines()]
        offset = page.get("next_offset")
    assert names == [f"f{n:03}" for n in range(250)]
    assert "past the end" in (await run(ws, "list", path="big", offset=250))["note"]


async def test_a_name_that_is_not_utf_8_is_listed(ws, tree):
    os.close(os.open(os.fsencode(tree) + b"/\xff\xfe", os.O_CREAT))
    assert "\ufffd\ufffd (0 bytes)" in (await run(ws, "list"))["entries"]


@pytest.fixture
def secret(tree):
    """A file that this process protects, as a server does with its token; `read` refuses it."""
    (tree / "state").mkdir()
    (tree / "state" / "token").write_text("tok-alpha\n")
    end = protect(tree / "state" / "token")
    yield "state/token"
    end()


@pytest.mark.parametrize("show", ["lines", "files", "counts"])
async def test_grep_does_not_tell_whether_a_secret_matches(ws, tree, secret, show):
    """A search is no way round a read that is refused [B92]."""
    (tree / "holdfast.db").write_text("tok-alpha\n")
    found = [await run(ws, "grep", pattern=pattern, show=show) for pattern in ("tok-alpha", "tok-beta")]
    assert found[0] == found[1]
    assert "state/token" not in (await run(ws, "glob", pattern="**"))["paths"]


@pytest.mark.parametrize("show", ["lines", "files", "counts"])
async def test_a_secret_that_matches_does_not_change_what_else_is_shown(ws, tree, secret, show):
    """A secret that took one of the places up to the limit would tell that it matches [B92]."""
    for name in ("y", "z"):
        (tree / f"{name}.txt").write_text("tok-alpha\n tok-beta\n")
    first, second = [await run(ws, "grep", pattern=f"^ ?{p}", show=show, limit=1) for p in ("tok-alpha", "tok-beta")]
    assert first["more"] is second["more"] is True
    assert first.get("paths") == second.get("paths")


async def test_grep_shows_only_files_that_it_could_read(ws, tree, monkeypatch):
    monkeypatch.setattr(Root, "open_file", _refuse("src/b.py", Root.open_file))
    for show in ("files", "counts"):
        assert "src/b.py" not in (await run(ws, "grep", pattern="alpha", show=show))["paths"]


def _refuse(name, real):
    def open_file(self, path):
        if path == name:
            raise ToolError("read_failed", "refused by the test")
        return real(self, path)

    return open_file


async def test_glob_stops_at_its_limit_however_many_names_there_are(tree):
    """A bound on the output never hides all of the result."""
    (tree / "many").mkdir()
    for number in range(300):
        (tree / "many" / f"{'n' * 195}{number:04}").touch()
    ws = Workspace(tree, sandbox="none", limits=Limits(search_bytes=20_000))
    found = await run(ws, "glob", pattern="many/*", limit=5)
    assert (found["count"], found["more"]) == (5, True)
    everything = await run(ws, "glob", pattern="many/*", limit=1000)
    assert everything["count"] > 90
    assert "20,000 bytes" in everything["note"]


async def test_a_name_with_a_newline_is_found_and_shown_as_one_line(ws, tree):
    (tree / "x\ny.txt").write_text("gamma\ngamma\n")
    (tree / "z.txt").write_text("gamma\n")
    shown = r'"x\ny.txt"'
    assert (await run(ws, "glob", pattern="*.txt"))["paths"].splitlines() == ["src/deep/c.txt", shown, "z.txt"]
    assert (await run(ws, "grep", pattern="gamma", show="files"))["paths"].splitlines() == [shown, "z.txt"]
    counts = await run(ws, "grep", pattern="gamma", show="counts")
    assert counts["paths"].splitlines() == [f"{shown}: 2", "z.txt: 1"]
    assert (await run(ws, "grep", pattern="gamma"))["lines"].splitlines()[0] == f"{shown}:1:gamma"
