"""read, write and edit: bytes, pages, plans, conflicts, atomic replacement, crashes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from workspace.conftest import FileTools, snapshot

from holdfast.core.tool import Result
from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.workspace.files import beneath
from holdfast.workspace.files import changes as changes_module
from holdfast.workspace.files.beneath import Directory
from holdfast.workspace.files.changes import PREFIX, Change, commit_changes
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import hash_content
from holdfast.workspace.files.tools import Seen
from holdfast.workspace.limits import Limits

CONTENTS = {
    "lines": b"one\ntwo\nthree\n",
    "crlf": b"one\r\ntwo\r\n",
    "mixed": b"one\r\ntwo\nthree\rfour\n",
    "no final newline": b"one\ntwo",
    "byte order mark": b"\xef\xbb\xbfone\n",
    "nul": b"some text with a NUL \0 in it\nand more\n",
    "unicode": "naïve ☃ \U0001f600 \u2028 \x85 \x0c end\n".encode(),
    "blank lines": b"\n\n\n",
    "one newline": b"\n",
    "empty": b"",
    "replacement character": "a genuine \ufffd\n".encode(),
}


async def fail(call, tool: str, kind: str, **args) -> ToolError:
    with pytest.raises(ToolError) as refused:
        await call(tool, **args)
    assert refused.value.kind == kind, refused.value.message
    return refused.value


# --- read ---


@pytest.mark.parametrize("name", CONTENTS)
async def test_a_small_file_is_read_byte_for_byte(files, name):
    """Line ends, marks and a missing final line end come back as they are [B74]."""
    (files.path / "file").write_bytes(CONTENTS[name])
    page = await files.run("read", path="file")
    assert page["text"].encode() == CONTENTS[name]
    assert page["version"] == hashlib.sha256(CONTENTS[name]).hexdigest()
    assert page["next_offset"] is None
    assert page.get("notes") == (["The file is empty."] if name == "empty" else None)


@pytest.mark.parametrize("name", CONTENTS)
async def test_what_is_written_is_read_byte_for_byte(files, name):
    await files.run("write", path="new/file", content=CONTENTS[name].decode())
    assert (files.path / "new/file").read_bytes() == CONTENTS[name]


async def test_paging_visits_every_line_once(files):
    """Pages of any size, put together, are the file [B74]."""
    content = "".join(f"line {number}\r\n" for number in range(1, 500)) + "last"
    (files.path / "file").write_bytes(content.encode())
    for limit in (1, 7, 499, 500, 501, 2000):
        offset, texts = 1, []
        while offset is not None:
            page = await files.run("read", path="file", offset=offset, limit=limit)
            assert page["lines_total"] == 500
            assert page["offset"] == offset
            texts.append(page["text"])
            offset = page["next_offset"]
        assert "".join(texts) == content
        assert len(texts) == -(-500 // limit)


async def test_a_page_is_bounded_in_bytes_and_paging_goes_on(files):
    """48 KiB of one read, at a line's end [B74]."""
    content = ("x" * 1000 + "\n") * 200
    (files.path / "file").write_text(content)
    offset, texts = 1, []
    while offset is not None:
        page = await files.run("read", path="file", offset=offset)
        assert len(page["text"].encode()) <= files.limits.read_bytes
        texts.append(page["text"])
        offset = page["next_offset"]
    assert "".join(texts) == content
    assert len(texts) == 5


async def test_an_oversized_line_is_cut_with_a_marker_and_paging_advances(files):
    """A line of 1 MB does not stop the reading of the next one [B74]."""
    (files.path / "file").write_bytes(b"first\n" + "é".encode() * 500_000 + b"\r\nlast\n")
    page = await files.run("read", path="file")
    lines = page["text"].split("\n")
    assert lines[1] == "é" * 2000 + "…[cut: 996000 more bytes of this line]\r"
    assert lines[2] == "last"
    assert page["lines_total"] == 3
    assert "Lines that were cut because they are too long: 2." in page["notes"][0]
    second = await files.run("read", path="file", offset=2, limit=1)
    assert second["next_offset"] == 3


@pytest.mark.parametrize("offset", [4, 5, 1000])
async def test_reading_past_the_end_says_so(files, offset):
    """Not an error: the note has the number of lines [B74]."""
    page = await files.run("read", path="a.txt", offset=offset)
    assert (page["text"], page["lines_total"], page["next_offset"]) == ("", 3, None)
    assert page["notes"] == [f"Offset {offset} is past the end: the file has 3 lines."]


async def test_offset_zero_is_the_first_line(files):
    assert (await files.run("read", path="a.txt", offset=0))["text"] == "one\ntwo\nthree\n"


async def test_a_file_that_is_not_utf8_is_shown_with_replacements_and_says_so(files):
    """Latin-1 text is readable; the note says what was replaced [B79]."""
    (files.path / "latin").write_bytes("naïve\ncafé\n".encode("latin-1"))
    page = await files.run("read", path="latin")
    assert page["text"] == "na\ufffdve\ncaf\ufffd\n"
    assert "not UTF-8" in page["notes"][0]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
    ],
)
async def test_an_image_is_known_by_its_first_bytes_and_kept(files, head, kind):
    content = head + bytes(range(256)) * 100
    (files.path / "picture.txt").write_bytes(content)
    call = Call(tool="read")
    result = await files.result("read", call, path="picture.txt")
    (artifact,) = result.images
    assert (artifact.media_type, artifact.name) == (kind, "picture.txt")
    assert call.kept[artifact.sha256] == content
    assert result.output["media_type"] == kind


async def test_an_image_that_is_too_large_is_described(files):
    (files.path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(6 * 1024 * 1024))
    call = Call(tool="read")
    result = await files.result("read", call, path="huge.png")
    assert result.output["media_type"] == "image/png"
    assert "too large" in result.output["note"]
    assert not call.kept


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(100), "application/x-elf"),
        (b"PK\x03\x04" + random.Random(1).randbytes(9000), "application/zip"),
        ("text".encode("utf-16"), "text/plain; charset=utf-16"),
        (bytes(5000), "application/octet-stream"),
    ],
)
async def test_other_binary_content_is_described(files, content, kind):
    (files.path / "blob").write_bytes(content)
    found = await files.run("read", path="blob")
    assert (found["media_type"], found["size"]) == (kind, len(content))
    assert found["first_bytes"] == content[:32].hex(" ")
    assert "text" not in found


READ_HUGE = """
import asyncio, json, resource, sys
from pathlib import Path
from workspace.conftest import FileTools

async def main():
    files = FileTools(Path(sys.argv[1]))
    await files.run("read", path="small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = [await files.run("read", path=path, **more) for path, more in
             [("sparse", {}), ("line", {}), ("lines", {}), ("lines", {"offset": 3_000_000, "limit": 2})]]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"grown": grown, "pages": pages}))

asyncio.run(main())
"""


def test_huge_files_are_paged_in_bounded_memory(tmp_path):
    """A sparse file of 100 GB, a line of 100 MB and 100 MB of lines are read in less than 64 MB."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "small").write_text("x\n")
    with open(root / "sparse", "wb") as file:
        file.truncate(100 * 1024**3)
    with open(root / "line", "wb") as file:
        for _ in range(100):
            file.write(b"y" * 1024 * 1024)
        file.write(b"\nend\n")
    with open(root / "lines", "wb") as file:
        thousand = b"".join(b"line %3d\n" % number for number in range(1000))
        for _ in range(8000):
            file.write(thousand)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", READ_HUGE, str(root)],
        env=os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{Path(changes_module.__file__).parents[3]}"},
        capture_output=True,
        check=True,
    )
    found = json.loads(done.stdout)
    sparse, line, lines, deep = found["pages"]
    assert found["grown"] < 64 * 1024
    assert sparse["binary"]
    assert line["text"].endswith("more bytes of this line]\nend\n")
    assert (lines["lines_total"], lines["version"], lines["next_offset"]) == (None, None, 2001)
    assert deep["text"] == "line 999\nline   0\n"
    assert deep["next_offset"] == 3_000_002


async def test_a_read_that_would_pass_too_many_bytes_is_refused(tree):
    files = FileTools(tree, limits=Limits(paged_bytes=1000, scanned_bytes=1_000_000))
    (tree / "file").write_bytes(b"z" * 3_000_000)
    error = await fail(files.run, "read", "too_large", path="file", offset=2)
    assert "grep" in error.message


async def test_a_missing_file_is_not_found(files):
    for path in ("nowhere.txt", "nowhere/deep.txt", "a.txt/below"):
        for call in (files.run, files.plan):
            await fail(call, "read", "not_found", path=path)


async def test_the_plan_of_a_read_says_what_it_opens(files):
    (files.path / "link").symlink_to("a.txt")
    assert await files.plan("read", path="link") == {"path": "link", "bytes": 14, "leads_to": "a.txt"}


# --- write ---


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o755, 0o664])
async def test_a_write_keeps_the_mode_and_leaves_no_temporary(files, mode):
    """Replaced in one step; parents are made [B76]."""
    (files.path / "a.txt").chmod(mode)
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="new\n")
    await files.run("write", path="x/y/z.txt", content="made\n")
    assert (files.path / "a.txt").stat().st_mode & 0o777 == mode
    assert (files.path / "x/y/z.txt").read_text() == "made\n"
    assert not [name for name in snapshot(files.path) if PREFIX in name]


async def test_a_new_file_has_the_default_mode_of_the_process(files):
    old = os.umask(0o027)
    try:
        await files.run("write", path="new.txt", content="x")
    finally:
        os.umask(old)
    assert (files.path / "new.txt").stat().st_mode & 0o777 == 0o640


async def test_a_write_keeps_the_owner_and_extended_attributes(files):
    path = files.path / "a.txt"
    try:
        os.chown(path, 1234, 1235)
        os.setxattr(path, "user.note", b"kept")
    except OSError as error:
        pytest.skip(f"this machine cannot: {error}")
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="new\n")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)
    assert os.getxattr(path, "user.note") == b"kept"


async def test_a_write_drops_the_setuid_bit(files):
    (files.path / "a.txt").chmod(0o4755)
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="new\n")
    assert (files.path / "a.txt").stat().st_mode & 0o7777 == 0o755


async def test_a_reader_of_the_old_file_keeps_the_old_content(files):
    """The file is replaced, not overwritten: no reader ever sees half of it [B76]."""
    await files.run("read", path="a.txt")
    reader = os.open(files.path / "a.txt", os.O_RDONLY)
    await files.run("write", path="a.txt", content="new\n")
    assert os.read(reader, 100) == b"one\ntwo\nthree\n"
    os.close(reader)


async def test_a_write_is_synced_before_it_is_renamed_and_its_directory_after(files, monkeypatch):
    """The new content, then the new name, are durable when the call returns [B76]."""
    steps: list[str] = []
    sync, exchange = os.fsync, Directory.exchange

    def note_sync(fd):
        steps.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        sync(fd)

    def note_exchange(self, one, other):
        steps.append("rename")
        return exchange(self, one, other)

    await files.run("read", path="a.txt")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Directory, "exchange", note_exchange)
    await files.run("write", path="a.txt", content="new\n")
    assert steps == ["file", "rename", "directory"]


@pytest.mark.parametrize("path", ["a.txt/below", "a.txt/deep/er"])
async def test_a_file_as_a_directory_cannot_be_written_below(files, path):
    """The dry run gives the same error as the run [B72] [B76]."""
    for call in (files.run, files.plan):
        error = await fail(call, "write", "write_failed", path=path, content="x")
        assert "is a file, not a directory" in error.message
    assert (files.path / "a.txt").read_text() == "one\ntwo\nthree\n"


async def test_a_link_that_leads_nowhere_is_no_directory(files):
    (files.path / "dangling").symlink_to("nowhere")
    for call in (files.plan, files.run):
        await fail(call, "write", "write_failed", path="dangling/x/y", content="x")
    assert {*os.listdir(files.path)} == {"a.txt", "src", "dangling"}


async def test_lone_surrogates_are_refused(files):
    for call in (files.run, files.plan):
        await fail(call, "write", "invalid_args", path="new", content="\ud800")


async def test_content_over_the_limit_is_refused(tree):
    files = FileTools(tree, limits=Limits(edited_bytes=10))
    for call in (files.run, files.plan):
        await fail(call, "write", "too_large", path="new", content="x" * 11)
        await fail(call, "edit", "too_large", path="a.txt", old="one", new="1")


async def test_an_edit_or_a_patch_that_makes_a_file_too_large_is_refused(tree):
    """The size is known before each replacement, so ten small edits do not take gigabytes [B95]."""
    files = FileTools(tree, limits=Limits(edited_bytes=1000))
    (tree / "file").write_text("a")
    edits = [{"old": "a", "new": "a" * 10, "replace_all": True}] * 30
    patch = "*** Begin Patch\n*** Update File: a.txt\n-one\n+" + "1" * 1000 + "\n*** End Patch\n"
    for call in (files.run, files.plan):
        error = await fail(call, "edit", "too_large", path="file", edits=edits)
        assert error.details["size"] == 10_000
        await fail(call, "apply_patch", "too_large", patch=patch)
    await files.run("edit", path="file", edits=edits[:3])
    assert (tree / "file").stat().st_size == 1000
    assert (tree / "a.txt").read_text() == "one\ntwo\nthree\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_ordinary_user_cannot_write_what_the_modes_forbid(tree):
    """A read-only file is not replaced behind its mode; the dry run says so too [B72]."""
    os.chmod(tree / "a.txt", 0o444)
    os.chmod(tree / "src", 0o555)
    os.chmod(tree, 0o777)
    for parent in tree.parents:
        if str(parent).startswith("/dev/shm/") or str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    code = (
        "import asyncio, concurrent.futures.thread, fcntl, os, sys\n"
        "from pathlib import Path\nfrom workspace.conftest import FileTools\n"
        "from holdfast.errors import ToolError\n"
        "os.setgid(65534); os.setuid(65534)\n"  # after the imports: the interpreter may be in root's home
        "async def main():\n"
        "    files = FileTools(Path(sys.argv[1]))\n"
        "    for path in ('a.txt', 'src/new.txt', 'src/deep/new.txt'):\n"
        "        for call in (files.plan, files.run):\n"
        "            try: await call('write', path=path, content='x')\n"
        "            except ToolError as error: print(error.kind)\n"
        "    await files.run('write', path='free.txt', content='x')\n"
        "asyncio.run(main())\n"
    )
    source = Path(changes_module.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tree)],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["write_failed"] * 6, done.stderr
    assert (tree / "free.txt").exists()


# --- edit ---


async def test_edit_replaces_exactly_one_place(files):
    (files.path / "file").write_bytes(b"a\r\nb\xff\r\nc")
    found = await files.run("edit", path="file", old="c", new="see")
    assert (files.path / "file").read_bytes() == b"a\r\nb\xff\r\nsee"
    assert (found["added"], found["removed"]) == (1, 1)


async def test_text_that_is_not_there_gives_the_nearest_places(files):
    """With line and similarity; the file is unchanged [B77]."""
    (files.path / "file").write_text("import os\n\n\ndef compute_total(items):\n    return sum(items)\n\n\nprint(1)\n")
    for call in (files.run, files.plan):
        error = await fail(call, "edit", "no_match", path="file", old="def compute_totals(item):\n", new="x")
        best = error.details["candidates"][0]
        assert best["line"] == 4
        assert best["similarity"] > 0.9
        assert best["text"] == "def compute_total(items):\n"
    assert "compute_total(items)" in (files.path / "file").read_text()


async def test_a_mismatch_of_line_ends_or_blanks_is_explained(files):
    (files.path / "crlf").write_bytes(b"one\r\ntwo\r\n")
    error = await fail(files.run, "edit", "no_match", path="crlf", old="one\ntwo", new="x")
    assert "CRLF" in error.message
    (files.path / "blanks").write_text("if  x:\n\treturn\n")
    error = await fail(files.run, "edit", "no_match", path="blanks", old="if x:\n    return\n", new="x")
    assert "white space" in error.message


async def test_looking_for_candidates_in_a_large_file_is_bounded(files):
    lines = "".join(f"value_{number % 977} = compute(first, second, third)  # {number}\n" for number in range(120_000))
    (files.path / "large").write_text(lines)
    error = await fail(
        files.run, "edit", "no_match", path="large", old="value_5 = compute(first, second)\n" * 5, new=""
    )
    assert len(error.details["candidates"]) <= 3
    assert len(json.dumps(error.details)) < 4000


async def test_text_that_is_there_three_times_gives_the_count_and_the_lines(files):
    """Nothing is changed; replace_all changes all [B77]."""
    (files.path / "file").write_text("x\nab\nx\nx\n")
    for call in (files.run, files.plan):
        error = await fail(call, "edit", "not_unique", path="file", old="x", new="y")
        assert (error.details["count"], error.details["lines"]) == (3, [1, 3, 4])
    assert (files.path / "file").read_text() == "x\nab\nx\nx\n"
    result = await files.run("edit", path="file", old="x", new="y", replace_all=True)
    assert (files.path / "file").read_text() == "y\nab\ny\ny\n"
    assert result["added"] == 3


@pytest.mark.parametrize(
    "args",
    [
        {"old": "", "new": "x"},
        {"old": "one", "new": "one"},
        {"old": "one"},
        {"new": "one"},
        {},
        {"edits": []},
        {"old": "one", "new": "1", "edits": [{"old": "two", "new": "2"}]},
        {"edits": [{"old": "one", "new": "1"}, {"old": "", "new": "2"}]},
    ],
)
async def test_an_edit_that_makes_no_sense_is_refused(files, args):
    """An empty old text, no difference, both forms at once [B77]."""
    for call in (files.run, files.plan):
        await fail(call, "edit", "invalid_args", path="a.txt", **args)
    assert (files.path / "a.txt").read_text() == "one\ntwo\nthree\n"


async def test_several_edits_are_all_made_or_none(files):
    """The second does not fit, so the first is not made either [B95]."""
    edits = [{"old": "one", "new": "1"}, {"old": "four", "new": "4"}]
    for call in (files.run, files.plan):
        error = await fail(call, "edit", "no_match", path="a.txt", edits=edits)
        assert error.details["edit"] == 2
    assert (files.path / "a.txt").read_text() == "one\ntwo\nthree\n"
    edits[1]["old"] = "1\ntwo"
    await files.run("edit", path="a.txt", edits=edits)
    assert (files.path / "a.txt").read_text() == "4\nthree\n"


async def test_a_missing_file_cannot_be_edited(files):
    for call in (files.run, files.plan):
        await fail(call, "edit", "not_found", path="nowhere.txt", old="a", new="b")


# --- plans ---


async def test_a_dry_run_shows_the_whole_diff_and_changes_nothing(files):
    """The diff with the versions before and after [B71]."""
    before = snapshot(files.path)
    plan = await files.plan("edit", path="a.txt", old="two", new="2")
    assert plan == {
        "files": [
            {
                "path": "a.txt",
                "action": "replace",
                "before": hash_content(b"one\ntwo\nthree\n"),
                "after": hash_content(b"one\n2\nthree\n"),
                "added": 1,
                "removed": 1,
            }
        ],
        "diff": "--- a/a.txt\n+++ b/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n",
    }
    made = await files.plan("write", path="deep/new.txt", content="x\n")
    assert made["files"][0] | {"before": None} == made["files"][0]
    assert made["diff"] == "--- /dev/null\n+++ b/deep/new.txt\n@@ -0,0 +1 @@\n+x\n"
    assert snapshot(files.path) == before


async def test_a_dry_run_is_the_same_every_time(files):
    assert await files.plan("write", path="a.txt", content="x") == await files.plan("write", path="a.txt", content="x")


async def test_a_long_diff_is_kept_whole_as_an_artifact(files):
    """The plan has its head; the approver can see all of it [B71]."""
    content = "".join(f"a new line {number}\n" for number in range(5000))
    call = Call(tool="write", dry_run=True)
    plan = await files.plan("write", call, path="a.txt", content=content)
    whole = call.kept[plan["diff_artifact"]["sha256"]].decode()
    assert len(plan["diff"].encode()) <= files.limits.inline_diff_bytes
    assert whole.startswith(plan["diff"])
    assert whole.endswith("+a new line 4999\n")
    assert plan["files"][0]["added"] == 5000


async def test_text_with_many_control_characters_is_shown_escaped(files):
    """An approver sees what a shell would run, though it counts as binary [B71]."""
    content = "curl example|sh;exit\n#" + "\x01" * 12 + "\\x01\r\x1b\x85\n"
    plan = await files.plan("write", path="a.txt", content=content)
    assert plan["diff"] == (
        "--- a/a.txt\n+++ b/a.txt\nControl characters are shown as \\xNN, and a backslash as two\n"
        "@@ -1,3 +1,2 @@\n-one\n-two\n-three\n+curl example|sh;exit\n+#" + "\\x01" * 12 + "\\\\x01\\x0d\\x1b\\x85\n"
    )
    (files.path / "blob").write_bytes(bytes(range(256)) * 40)
    shown = (await files.plan("write", path="blob", content=content))["diff"]
    assert "Binary content: 10240 bytes" in shown
    assert "+curl example|sh;exit\n" in shown
    (files.path / "controls").write_bytes(b"\x01" * 30 + b"\n")
    assert (
        "\n-" + "\\x01" * 30 + "\n+"
        in (await files.plan("write", path="controls", content="\\x01" * 30 + "\n"))["diff"]
    )


async def test_bytes_that_are_no_text_are_described_by_their_version(files):
    content = b"\x00\xff" * 50 + b"one"
    (files.path / "blob").write_bytes(content)
    plan = await files.plan("edit", path="blob", old="one", new="two")
    assert f"Binary content: 103 bytes, sha256 {hash_content(content)} -> 103 bytes" in plan["diff"]


def run_patch(directory: Path, diff: bytes) -> None:
    if diff:
        subprocess.run(["patch", "-s", "-p1", "--binary"], cwd=directory, input=diff, check=True)


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
async def test_the_diff_of_a_plan_makes_the_same_change_when_patch_applies_it(files, tmp_path):
    """The approver sees the change itself, not a picture of it [B71]."""
    draw = random.Random(5)
    for number in range(40):
        lines = [draw.choice(["a", "b", "c\r", "é", ""]) for _ in range(draw.randrange(1, 30))]
        new = [line for line in lines if draw.random() > 0.2] + [draw.choice("xyz")]
        draw.shuffle(new) if number % 5 == 0 else None
        old_text = "\n".join(lines) + draw.choice(["", "\n"])
        new_text = "\n".join(new) + draw.choice(["", "\n"])
        if not old_text:
            continue
        (files.path / "file").write_bytes(old_text.encode())
        plan = await files.plan("write", path="file", content=new_text)
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        (copy / "file").write_bytes(old_text.encode())
        await asyncio.to_thread(run_patch, copy, plan["diff"].encode())
        assert (copy / "file").read_bytes() == new_text.encode()


async def test_a_run_is_bound_to_the_versions_of_its_plan(files):
    """The file changed after the plan was approved: conflict, nothing written [B73]."""
    plan = await files.plan("edit", path="a.txt", old="two", new="2")
    (files.path / "a.txt").write_text("zero\none\ntwo\n")
    await fail(
        lambda tool, **args: files.run(tool, Call(tool=tool, plan=plan), **args),
        "edit",
        "conflict",
        path="a.txt",
        old="two",
        new="2",
    )
    assert (files.path / "a.txt").read_text() == "zero\none\ntwo\n"


async def test_a_denied_call_is_refused_also_in_the_handler(tree):
    """A grant does not walk around a mode that denies [B98]."""
    files = FileTools(tree, effect="deny")
    for tool, args in (("write", {"path": "a.txt", "content": "x"}), ("read", {"path": "a.txt"})):
        for call in (files.run, files.plan):
            await fail(call, tool, "permission_denied", **args)


async def test_rules_see_the_path_and_where_its_link_leads(files):
    (files.path / "link").symlink_to("src/app.py")
    await files.run("read", path="link")
    assert files.policy.asked[-1] == ("read", ["link", "src/app.py"], False)


# --- versions ---


@pytest.mark.parametrize("tool", ["write", "edit", "apply_patch"])
async def test_a_file_that_changed_since_it_was_read_is_a_conflict_with_the_diff(files, tool):
    """The diff since then is enough to repeat the call: no read is needed [B94]."""
    await files.run("read", path="a.txt")
    (files.path / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    given = {
        "write": {"path": "a.txt", "content": "mine\n"},
        "edit": {"path": "a.txt", "old": "one", "new": "1"},
        "apply_patch": {"patch": "*** Begin Patch\n*** Update File: a.txt\n-one\n+1\n*** End Patch\n"},
    }[tool]
    error = await fail(files.plan, tool, "conflict", **given)
    assert error.details["diff"].endswith("@@ -1,3 +1,4 @@\n one\n two\n three\n+four\n")
    assert error.details["version"] == hash_content(b"one\ntwo\nthree\nfour\n")
    assert (files.path / "a.txt").read_text() == "one\ntwo\nthree\nfour\n"
    await files.run(tool, **given)
    assert (files.path / "a.txt").read_text() == ("mine\n" if tool == "write" else "1\ntwo\nthree\nfour\n")


async def test_a_new_time_stamp_alone_is_no_conflict(files):
    """Staleness is by content, never by time [B94]."""
    await files.run("read", path="a.txt")
    os.utime(files.path / "a.txt", (1, 1))
    (files.path / "a.txt").write_text("one\ntwo\nthree\n")
    await files.run("edit", path="a.txt", old="one", new="1")
    assert (files.path / "a.txt").read_text() == "1\ntwo\nthree\n"


async def test_a_large_change_since_the_read_asks_for_another_read(files):
    await files.run("read", path="a.txt")
    (files.path / "a.txt").write_text("other\n" * 5000)
    for _ in range(2):  # until it is read again
        error = await fail(files.run, "write", "conflict", path="a.txt", content="mine\n")
        assert "Read it again" in error.message
        assert "diff" not in error.details
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="mine\n")


async def test_a_removed_file_is_a_conflict_once(files):
    await files.run("read", path="a.txt")
    (files.path / "a.txt").unlink()
    error = await fail(files.run, "write", "conflict", path="a.txt", content="mine\n")
    assert error.details["version"] is None
    await files.run("write", path="a.txt", content="mine\n")


async def test_a_conversation_knows_what_it_wrote_and_only_that(files):
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="mine\n")
    await files.run("write", path="a.txt", content="again\n")
    other = Call(tool="write", conversation="other")
    with pytest.raises(ToolError) as refused:
        await files.run("write", other, path="a.txt", content="theirs\n")
    assert refused.value.kind == "conflict"
    await files.run("write", other, path="a.txt", content="theirs\n", expected=hash_content(b"again\n"))
    error = await fail(files.run, "write", "conflict", path="a.txt", content="mine\n")
    assert "+theirs" in error.details["diff"]


async def test_the_expected_version_decides_where_one_is_given(files):
    version = hash_content(b"one\ntwo\nthree\n")
    for call in (files.plan, files.run):
        await fail(call, "write", "conflict", path="a.txt", content="x", expected="0" * 64)
        await fail(call, "write", "conflict", path="new.txt", content="x", expected="0" * 64)
        await fail(call, "edit", "conflict", path="a.txt", old="one", new="1", expected="0" * 64)
    await files.run("write", path="a.txt", content="x", expected=version)


async def test_a_file_that_was_never_read_is_not_replaced_unseen(tree):
    """After a restart the versions that were read are forgotten: a person's change is not overwritten [B73]."""
    await FileTools(tree).run("read", path="a.txt")
    (tree / "a.txt").write_text("a person's work\n")
    files = FileTools(tree)  # as after a restart
    error = await fail(files.run, "write", "conflict", path="a.txt", content="model\n")
    assert "Read it first" in error.message
    assert "`expected`" in error.message
    assert (tree / "a.txt").read_text() == "a person's work\n"
    await files.run("write", path="a.txt", content="a person's work\n")  # no change
    await FileTools(tree).run("write", path="a.txt", content="1\n", expected=hash_content(b"a person's work\n"))
    files = FileTools(tree)
    await files.run("read", path="a.txt")
    await files.run("write", path="a.txt", content="2\n")
    assert (tree / "a.txt").read_text() == "2\n"


async def test_an_approved_plan_may_replace_a_file_that_was_never_read(files):
    """The approver has seen the diff [B71]."""
    plan = await files.plan("write", path="a.txt", content="x")
    await files.run("write", Call(tool="write", plan=plan), path="a.txt", content="x")
    assert (files.path / "a.txt").read_text() == "x"


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" + bytes(100), bytes(9000)])
async def test_an_image_or_other_binary_file_can_be_replaced_after_a_read(files, content):
    (files.path / "blob").write_bytes(content)
    await fail(files.run, "write", "conflict", path="blob", content="x")
    assert (await files.run("read", path="blob"))["version"] == hash_content(content)
    await files.run("write", path="blob", content="x")
    assert (files.path / "blob").read_text() == "x"


def test_what_was_seen_is_forgotten_oldest_first():
    seen = Seen(files=2, total_bytes=100, file_bytes=60)
    seen.record("c", "a", "1", b"x" * 50)
    seen.record("c", "b", "2", b"x" * 70)
    assert seen.content("c", "a", "1") == b"x" * 50
    assert seen.content("c", "b", "2") is None
    assert seen.version("c", "a") == "1"
    seen.record("c", "d", "3", b"x" * 50)
    assert seen.version("c", "b") is None
    seen.record("c", "e", "4", b"x" * 51)
    assert [seen.version("c", path) for path in "ade"] == [None, None, "4"]


async def test_edits_of_one_file_at_the_same_time_are_all_made(files):
    """One process reads and replaces a file under a lock: no edit is lost."""
    (files.path / "file").write_text("".join(f"<{number}>\n" for number in range(20)))
    await asyncio.gather(
        *(files.run("edit", path="file", old=f"<{number}>", new=f"[{number}]") for number in range(20))
    )
    assert (files.path / "file").read_text() == "".join(f"[{number}]\n" for number in range(20))


# --- results and recovery ---


async def test_the_result_keeps_the_old_content_for_undo(files):
    await files.run("read", path="a.txt")
    call = Call(tool="write")
    result = await files.result("write", call, path="a.txt", content="new\n")
    (change,) = result.data["changes"]
    assert call.kept[change["kept"]] == b"one\ntwo\nthree\n"
    assert change == {
        "path": "a.txt",
        "before": hash_content(b"one\ntwo\nthree\n"),
        "after": hash_content(b"new\n"),
        "kept": hash_content(b"one\ntwo\nthree\n"),
        "mode": 0o644,
    }
    made = await files.result("write", path="new.txt", content="x")
    assert made.data["changes"] == [{"path": "new.txt", "before": None, "after": hash_content(b"x"), "kept": None}]


async def test_a_file_with_a_very_long_path_is_changed_and_its_old_content_kept(files):
    """The name of an artifact is shorter than a path may be: the result does not fail after the change [B95]."""
    path = f"{'d' * 200}/{'e' * 200}/file.txt"
    await files.run("write", path=path, content="old\n")
    call = Call(tool="write")
    result = await files.result("write", call, path=path, content="new\n")
    (change,) = result.data["changes"]
    assert change["path"] == path
    assert call.kept[change["kept"]] == b"old\n"
    assert (files.path / path).read_text() == "new\n"


async def test_a_change_whose_old_contents_cannot_be_kept_changes_nothing(files):
    """An error means that nothing was changed: five files of 14 MiB are more than one call keeps [B95]."""
    for number in range(5):
        (files.path / f"big{number}").write_bytes(b"first\n" + bytes([65 + number]) * (14 * 2**20) + b"\n")
    parts = "".join(f"*** Update File: big{number}\n@@\n-first\n+second\n" for number in range(5))
    for call in (files.run, files.plan):
        error = await fail(call, "apply_patch", "too_large", patch=f"*** Begin Patch\n{parts}*** End Patch\n")
        assert "Nothing was changed" in error.message
    assert all((files.path / f"big{number}").read_bytes().startswith(b"first\n") for number in range(5))


@pytest.mark.parametrize("tool", ["write", "edit", "apply_patch"])
async def test_an_interrupted_run_is_settled_by_the_file(files, tool):
    """It has the new content: the result; the old one: run again; another: a person decides."""
    given = {
        "write": {"path": "a.txt", "content": "1\ntwo\nthree\n"},
        "edit": {"path": "a.txt", "old": "one", "new": "1"},
        "apply_patch": {"patch": "*** Begin Patch\n*** Update File: a.txt\n-one\n+1\n*** End Patch\n"},
    }[tool]
    plan = await files.plan(tool, **given)
    assert await files.recover(tool, Call(tool=tool, plan=plan), **given) == "redispatch"
    (files.path / "a.txt").write_text("1\ntwo\nthree\n")
    settled = await files.recover(tool, Call(tool=tool, plan=plan), **given)
    assert isinstance(settled, Result)
    assert settled.output["version"] == hash_content(b"1\ntwo\nthree\n")
    (files.path / "a.txt").write_text("another\n")
    assert await files.recover(tool, Call(tool=tool, plan=plan), **given) == "ask"


async def test_an_interrupted_change_of_a_mode_is_settled_by_the_mode(files):
    """The content is the same before and after: the mode tells whether it was made."""
    given = {"patch": "diff --git a/a.txt b/a.txt\nold mode 100644\nnew mode 100755\n"}
    (files.path / "a.txt").chmod(0o644)
    plan = await files.plan("apply_patch", **given)
    assert await files.recover("apply_patch", Call(tool="apply_patch", plan=plan), **given) == "redispatch"
    await files.run("apply_patch", Call(tool="apply_patch", plan=plan), **given)
    assert isinstance(await files.recover("apply_patch", Call(tool="apply_patch", plan=plan), **given), Result)
    (files.path / "a.txt").write_text("another\n")
    assert await files.recover("apply_patch", Call(tool="apply_patch", plan=plan), **given) == "ask"


async def test_without_a_plan_the_texts_decide(files):
    given = {"path": "a.txt", "old": "one", "new": "1"}
    assert await files.recover("edit", **given) == "redispatch"
    await files.run("edit", **given)
    assert isinstance(await files.recover("edit", **given), Result)
    assert await files.recover("edit", path="a.txt", old="two", new="two\nmore") == "redispatch"
    await files.run("edit", path="a.txt", old="two", new="two\nmore")
    assert await files.recover("edit", path="a.txt", old="two", new="two\nmore") == "ask"
    assert await files.recover("write", path="none.txt", content="x") == "redispatch"
    assert await files.recover("write", path="a.txt", content="x") == "ask"
    assert isinstance(await files.recover("write", path="a.txt", content="1\ntwo\nmore\nthree\n"), Result)
    patch = "*** Begin Patch\n*** Update File: a.txt\n-three\n+3\n*** End Patch\n"
    assert await files.recover("apply_patch", patch=patch) == "redispatch"
    await files.run("apply_patch", patch=patch)
    assert await files.recover("apply_patch", patch=patch) == "ask"


async def test_without_a_plan_a_change_that_only_removes_is_never_made_twice(files):
    """What is removed leaves nothing to find, and the same text may be there again: a person decides [B95]."""
    (files.path / "file").write_text("x\nx\nx\n")
    patch = "--- a/file\n+++ b/file\n@@ -1,1 +0,0 @@\n-x\n"
    await files.run("apply_patch", patch=patch)
    assert (files.path / "file").read_text() == "x\nx\n"
    assert await files.recover("apply_patch", patch=patch) == "ask"
    (files.path / "other").write_text("aabb\n")
    await files.run("edit", path="other", old="ab", new="")
    assert await files.recover("edit", path="other", old="ab", new="") == "ask"


async def test_without_a_plan_lines_added_after_an_open_end_are_found(files):
    (files.path / "file").write_text("x")
    patch = "*** Begin Patch\n*** Update File: file\n@@\n+more\n*** End Patch\n"
    assert await files.recover("apply_patch", patch=patch) == "redispatch"
    await files.run("apply_patch", patch=patch)
    assert await files.recover("apply_patch", patch=patch) == "ask"


async def test_a_cancelled_call_changes_nothing(files):
    await files.run("read", path="a.txt")
    call = Call(tool="write")
    call._cancel()
    with pytest.raises(ToolError) as refused:
        await files.run("write", call, path="a.txt", content="x")
    assert refused.value.kind == "cancelled"
    assert (files.path / "a.txt").read_text() == "one\ntwo\nthree\n"


# --- all or nothing ---


def make_changes(root: Root) -> list[Change]:
    """Replace, create (in new directories) and delete."""
    new, made = b"1\n2\n", b"made\n"
    return [
        Change("a.txt", root.hash_file("a.txt"), hash_content(new), new),
        Change("x/y/made.txt", None, hash_content(made), made),
        Change("src/app.py", root.hash_file("src/app.py"), None, None),
    ]


STEPS = [
    (os, "write"),
    (os, "fsync"),
    (os, "fchmod"),
    (Directory, "open"),
    (Directory, "make_directory"),
    (Directory, "exchange"),
    (Directory, "rename"),
    (Directory, "rename_new"),
    (Directory, "link"),
    (Directory, "unlink"),
]


class Interruption:
    """Counts the steps of a commit; the step of that number fails, before or after it is done."""

    def __init__(self, monkeypatch, at: int, *, after: bool):
        self.at, self.after, self.count, self.hit = at, after, 0, ""
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name, function):
        def step(*args, **kwargs):
            self.count += 1
            mine = self.count == self.at
            if mine and not self.after:
                self.hit = name
                raise OSError(errno.EIO, "injected")
            value = function(*args, **kwargs)
            if mine:
                self.hit = name
                raise OSError(errno.EIO, "injected")
            return value

        return step


def commit_kind(root: Root, planned: list[Change]) -> str | None:
    """Return the kind of the error that a commit gives; None for none."""
    try:
        commit_changes(root, planned)
    except ToolError as error:
        return error.kind
    return None


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails_leaves_everything_or_nothing_changed(tmp_path, monkeypatch, exchange, after):
    """Each system call of a commit over three files fails once; no temporary and no directory stays [B95]."""
    if not exchange:
        monkeypatch.setattr(beneath, "_rename_with_flag", lambda *_: False)
    failures = 0
    for at in range(1, 200):
        tree = tmp_path / f"{at}"
        (tree / "src").mkdir(parents=True)
        (tree / "a.txt").write_bytes(b"one\n")
        (tree / "src/app.py").write_bytes(b"pass\n")
        old = snapshot(tree)
        with Root(tree) as root, monkeypatch.context() as patched:
            planned = make_changes(root)
            interruption = Interruption(patched, at, after=after)
            kind = commit_kind(root, planned)
        assert kind in (None, "write_failed")
        failed = kind is not None
        now = snapshot(tree)
        left = [name for name in now if PREFIX in name]
        # Undone in mid-step: the system has done what it reports as failed, and no one can know. Only for a rename or
        # an open that made a temporary; it is removed by the next write.
        unknowable = after and interruption.hit in (
            "open",
            "rename_new",
            "rename",
            "exchange",
            "link",
            "make_directory",
        )
        if failed and not unknowable:
            assert now == old, (at, interruption.hit)
        elif not failed:
            assert {name for name in now if PREFIX not in name} == {"a.txt", "src", "x", "x/y", "x/y/made.txt"}
        if interruption.hit != "unlink" and not unknowable:
            assert not left, (at, interruption.hit)
        failures += failed
        if not interruption.hit:
            break
    assert failures >= 15


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_file_that_changed_meanwhile_stops_the_whole_commit(tree, which):
    """Every version is checked again before the first rename [B95]."""
    with Root(tree) as root:
        planned = make_changes(root)
        path = tree / planned[which].path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody else's\n")
        before = snapshot(tree)
        with pytest.raises(ToolError) as refused:
            commit_changes(root, planned)
        assert refused.value.kind == "conflict"
        assert snapshot(tree) == before


def test_a_file_that_another_process_writes_at_the_last_moment_is_put_back(tree, monkeypatch):
    """The exchanged file is looked at again: what somebody wrote in between is not lost [B94]."""
    exchange = Directory.exchange

    def write_first(self, one, other):
        (tree / "a.txt").write_text("at the last moment\n")
        return exchange(self, one, other)

    with Root(tree) as root:
        planned = make_changes(root)
        monkeypatch.setattr(Directory, "exchange", write_first)
        with pytest.raises(ToolError) as refused:
            commit_changes(root, planned)
    assert refused.value.kind == "conflict"
    assert (tree / "a.txt").read_text() == "at the last moment\n"
    assert {*snapshot(tree)} == {"a.txt", "src", "src/app.py"}


def test_one_file_changed_twice_in_one_commit_is_refused(tree):
    (tree / "link").symlink_to("a.txt")
    with Root(tree) as root:
        version = root.hash_file("a.txt")
        twice = [Change(path, version, hash_content(b"x"), b"x") for path in ("a.txt", "link")]
        with pytest.raises(ToolError) as refused:
            commit_changes(root, twice)
    assert refused.value.kind == "invalid_args"
    assert (tree / "a.txt").read_text() == "one\ntwo\nthree\n"


def test_a_full_disk_changes_nothing(tree, monkeypatch):
    def no_space(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = snapshot(tree)
    with Root(tree) as root:
        planned = make_changes(root)
        monkeypatch.setattr(os, "write", no_space)
        with pytest.raises(ToolError) as refused:
            commit_changes(root, planned)
    assert refused.value.kind == "write_failed"
    assert "No space left" in refused.value.message
    assert snapshot(tree) == before


KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from holdfast.workspace.files import beneath
from holdfast.workspace.files.changes import Change, commit_changes, PREFIX
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import hash_content
from workspace.conftest import snapshot
from workspace.test_files import STEPS, make_changes

base, exchange = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchange:
    beneath._rename_with_flag = lambda *_: False

def die_at(number):
    count = 0
    def wrap(function):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            value = function(*args, **kwargs)
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return value
        return step
    for owner, name in STEPS:
        setattr(owner, name, wrap(getattr(owner, name)))

for number in range(1, 500):
    tree = base / str(number)
    (tree / "src").mkdir(parents=True)
    (tree / "a.txt").write_bytes(b"one\\n")
    (tree / "src/app.py").write_bytes(b"pass\\n")
    child = os.fork()
    if child == 0:
        with Root(tree) as root:
            planned = make_changes(root)
            die_at(number)
            commit_changes(root, planned)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = {name: value[1].decode() for name, value in snapshot(tree).items() if isinstance(value, tuple)}
    with Root(tree) as root:
        for where in ("", "src/", "x/y/"):
            if (tree / where).is_dir():
                commit_changes(root, [Change(where + "next.txt", None, hash_content(b""), b"")])
    left = [name for name in snapshot(tree) if PREFIX in name]
    print(json.dumps({"killed": status != 0, "found": found, "left": left}))
    shutil.rmtree(tree)
    if status == 0:
        break
"""


@pytest.mark.parametrize("way", ["exchange", "links"])
def test_a_process_killed_at_any_step_leaves_old_or_new_files(tmp_path, way):
    """kill -9 at each system call of a commit; the next write removes what it left [B76] [B95]."""
    source = Path(changes_module.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), way],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(run["killed"] for run in runs) >= 30
    assert not runs[-1]["killed"]
    for run in runs:
        found = {name: text for name, text in run["found"].items() if PREFIX not in name}
        assert found["a.txt"] in ("one\n", "1\n2\n")
        assert found.get("x/y/made.txt", "made\n") == "made\n"
        assert found.get("src/app.py", "pass\n") == "pass\n"
        assert run["left"] == []


def test_a_temporary_of_a_living_process_is_left_alone(tree):
    """Its lock is held; once the process is gone the next write removes it."""
    with Root(tree) as root:
        name = f"{PREFIX}{'0' * 16}.tmp"
        fd = os.open(tree / name, os.O_RDWR | os.O_CREAT)
        assert beneath.lock_file(fd)
        for number, expected in ((1, True), (2, False)):
            content = b"%d" % number
            commit_changes(root, [Change(f"new{number}", None, hash_content(content), content)])
            assert (tree / name).exists() is expected
            if expected:
                os.close(fd)


async def test_no_descriptor_stays_open(files):
    """Neither after success nor after any of the refusals."""
    os.mkfifo(files.path / "fifo")
    os.symlink("/etc", files.path / "out")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a.txt", "new/x.txt", "fifo", "out/x", "a.txt/x", "src", ".git/hooks/x", "nowhere/../b", ".env"):
        for tool, args in (("read", {}), ("write", {"content": "one\n"}), ("edit", {"old": "one", "new": "1"})):
            for call in (files.plan, files.run):
                with contextlib.suppress(ToolError):
                    await call(tool, path=path, **args)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_that_commit_to_one_file_lose_nothing(tree):
    """Each counts the file up; a conflict is tried again."""
    (tree / "count").write_text("0")
    with Root(tree) as root:
        kinds: set[str | None] = set()

        def count_up() -> None:
            for _ in range(10):
                kind = "conflict"
                while kind == "conflict":
                    old = (tree / "count").read_bytes()
                    new = b"%d" % (int(old) + 1)
                    kind = commit_kind(root, [Change("count", hash_content(old), hash_content(new), new)])
                kinds.add(kind)

        threads = [threading.Thread(target=count_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tree / "count").read_text() == "40"
    assert kinds == {None}
