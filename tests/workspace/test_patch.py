"""apply_patch: unified diffs and the V4A format, exact, all or nothing."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess

import pytest
from workspace.conftest import FileTools, snapshot

from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.workspace.files.diff import diff_files
from holdfast.workspace.files.patch import FilePatch, Hunk, _Unified, apply_hunks, parse_patch
from holdfast.workspace.files.text import hash_content, split_lines

NUMBERS = b"".join(b"line %d\n" % number for number in range(1, 31))


@pytest.fixture
def project(files) -> FileTools:
    (files.path / "numbers").write_bytes(NUMBERS)
    (files.path / "old.txt").write_bytes(b"to go\n")
    (files.path / "run.sh").write_bytes(b"#!/bin/sh\n")
    (files.path / "run.sh").chmod(0o755)
    return files


def v4a(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch", ""])


async def fail(files: FileTools, kind: str, patch: str) -> ToolError:
    """Check that neither the plan nor the run changes anything, and that both give the error."""
    before = snapshot(files.path)
    for call in (files.plan, files.run):
        with pytest.raises(ToolError) as refused:
            await call("apply_patch", patch=patch)
        assert refused.value.kind == kind, refused.value.message
    assert snapshot(files.path) == before
    return refused.value


# --- unified ---


async def test_a_unified_diff_over_several_files_makes_changes_deletes_and_moves(project):
    patch = """\
diff --git a/numbers b/numbers
index 123..456 100644
--- a/numbers
+++ b/numbers
@@ -1,3 +1,3 @@
 line 1
-line 2
+second
 line 3
@@ -28,3 +28,4 @@ some heading
 line 28
 line 29
+added
 line 30
diff --git a/deep/new.sh b/deep/new.sh
new file mode 100755
--- /dev/null
+++ b/deep/new.sh
@@ -0,0 +1,2 @@
+#!/bin/sh
+true
diff --git a/old.txt b/old.txt
deleted file mode 100644
--- a/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-to go
diff --git a/run.sh b/bin/start.sh
similarity index 100%
rename from run.sh
rename to bin/start.sh
"""
    plan = await project.plan("apply_patch", patch=patch)
    assert [(one["path"], one["action"]) for one in plan["files"]] == [
        ("numbers", "replace"),
        ("deep/new.sh", "create"),
        ("old.txt", "delete"),
        ("run.sh", "delete"),
        ("bin/start.sh", "create"),
    ]
    call = Call(tool="apply_patch", plan=plan)
    result = await project.result("apply_patch", call, patch=patch)
    new = NUMBERS.replace(b"line 2\n", b"second\n", 1).replace(b"line 30\n", b"added\nline 30\n")
    assert (project.path / "numbers").read_bytes() == new
    assert (project.path / "deep/new.sh").stat().st_mode & 0o777 == 0o755
    assert (project.path / "bin/start.sh").stat().st_mode & 0o777 == 0o755
    assert not (project.path / "old.txt").exists()
    assert not (project.path / "run.sh").exists()
    kept = {one["path"]: one["kept"] for one in result.data["changes"]}
    assert call.kept[kept["old.txt"]] == b"to go\n"
    assert call.kept[kept["numbers"]] == NUMBERS


@pytest.mark.parametrize(
    "patch",
    [
        "--- numbers\n+++ numbers\n@@ -2 +2 @@\n-line 2\n+second\n",
        "--- a/numbers\t2026-01-01\n+++ b/numbers\t2026-01-01\n@@ -2,1 +2,1 @@\n-line 2\n+second\n",
        "--- a/numbers\n+++ b/numbers\n@@ -12,1 +12,1 @@\n-line 2\n+second",
        "--- a/numbers\n+++ b/numbers\n@@\n line 1\n-line 2\n+second\n\n",
        "Some words of a model.\n\n--- a/numbers\n+++ b/numbers\n@@ ... @@\n-line 2\n+second\n",
        'diff --git "a/numbers" "b/numbers"\n--- "a/numbers"\n+++ "b/n\\165mbers"\n'
        "@@ -2 +2 @@\n-line 2\n+second\n-- \n2.39.2\n",
    ],
)
async def test_common_spellings_of_a_unified_diff_are_understood(project, patch):
    """Without prefixes, with times, with wrong or no line numbers, with words before it, quoted."""
    await project.run("apply_patch", patch=patch)
    assert (project.path / "numbers").read_bytes() == NUMBERS.replace(b"line 2\n", b"second\n", 1)


async def test_missing_final_line_ends_and_carriage_returns_are_exact(project):
    (project.path / "file").write_bytes(b"one\r\ntwo")
    patch = "--- a/file\n+++ b/file\n@@ -1,2 +1,2 @@\n one\r\n-two\n\\ No newline at end of file\n+2\n"
    await project.run("apply_patch", patch=patch)
    assert (project.path / "file").read_bytes() == b"one\r\n2\n"
    patch = "--- a/file\n+++ b/file\n@@ -1,2 +1,2 @@\n one\r\n-2\n+two\n\\ No newline at end of file\n"
    await project.run("apply_patch", patch=patch)
    assert (project.path / "file").read_bytes() == b"one\r\ntwo"
    error = await fail(project, "no_match", "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-one\n+1\n")
    assert "CRLF" in error.message


async def test_a_mode_alone_can_be_changed(project):
    await project.run("apply_patch", patch="diff --git a/numbers b/numbers\nold mode 100644\nnew mode 100755\n")
    assert (project.path / "numbers").stat().st_mode & 0o777 == 0o755
    assert (project.path / "numbers").read_bytes() == NUMBERS


async def test_an_empty_file_can_be_made_and_deleted(project):
    await project.run("apply_patch", patch="diff --git a/empty b/empty\nnew file mode 100644\nindex 000..e69\n")
    assert (project.path / "empty").read_bytes() == b""
    await project.run("apply_patch", patch="diff --git a/empty b/empty\ndeleted file mode 100644\n")
    assert not (project.path / "empty").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_patches_that_git_makes_give_what_git_gives(tmp_path):
    """Random changes of random files, with and without context."""
    draw = random.Random(11)
    for number in range(30):
        old = b"".join(
            draw.choice([b"a\n", b"b\n", b"c\r\n", b"\n", "é\n".encode()]) for _ in range(draw.randrange(40))
        )
        lines = [line for line in split_lines(old) if draw.random() > 0.15]
        for _ in range(draw.randrange(1, 5)):
            lines.insert(draw.randrange(len(lines) + 1), draw.choice([b"x\n", b"+y\n", b"-z\n", b"--- q\n"]))
        new = b"".join(lines) if draw.random() > 0.3 else b"".join(lines).removesuffix(b"\n")
        (tmp_path / "old").write_bytes(old)
        (tmp_path / "new").write_bytes(new)
        made = subprocess.run(
            ["git", "diff", "--no-index", "--text", f"-U{number % 4}", "old", "new"],
            cwd=tmp_path,
            capture_output=True,
            env=os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"},
            check=False,
        ).stdout.decode()
        if made:
            (patch,) = parse_patch(made)
            assert apply_hunks(old, patch) == new, made
        ours = diff_files("f", old, new).text
        if ours and old:
            (patch,) = parse_patch(ours)
            assert apply_hunks(old, patch) == new, ours


@pytest.mark.parametrize("count", [10, 30_000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_diff_of_a_long_file_is_complete_and_applies(count, end):
    """Also where it is too long to be compared line by line, or differs at both ends of many equal blocks."""
    old = b"\n".join(b"line %d" % (number % 977) for number in range(count)) + end
    cases = [
        old.replace(b"line 5\n", b"five\nand more\n", 1),
        old.replace(b"line 5\n", b"five\n"),
        b"first\n" + old,
        old + b"last",
        old[: len(old) // 2],
        b"\n".join(b"other %d" % number for number in range(count)),
    ]
    for new in cases:
        diff = diff_files("f", old, new)
        (patch,) = parse_patch(diff.text)
        assert apply_hunks(old, patch) == new
        assert diff.added - diff.removed == len(split_lines(new)) - len(split_lines(old))


# --- V4A ---


async def test_the_v4a_format_adds_updates_deletes_and_moves(project):
    patch = v4a(
        "*** Add File: made/by.txt",
        "+hello",
        "+",
        "*** Update File: numbers",
        "@@ line 10",
        " line 11",
        "-line 12",
        "+twelve",
        "@@",
        "-line 20",
        "*** Delete File: old.txt",
        "*** Update File: run.sh",
        "*** Move to: bin/run.sh",
        " #!/bin/sh",
        "+true",
    )
    await project.run("apply_patch", patch=patch)
    assert (project.path / "made/by.txt").read_bytes() == b"hello\n\n"
    new = NUMBERS.replace(b"line 12\n", b"twelve\n").replace(b"line 20\n", b"")
    assert (project.path / "numbers").read_bytes() == new
    assert not (project.path / "old.txt").exists()
    assert (project.path / "bin/run.sh").read_bytes() == b"#!/bin/sh\ntrue\n"
    assert (project.path / "bin/run.sh").stat().st_mode & 0o777 == 0o755


CLASSES = b"class A:\n    def run(self):\n        return 1\n\n\nclass B:\n    def run(self):\n        return 1\n"


async def test_anchors_choose_among_equal_places(project):
    (project.path / "classes.py").write_bytes(CLASSES)
    change = ("-        return 1", "+        return 2")
    error = await fail(project, "not_unique", v4a("*** Update File: classes.py", *change))
    assert error.details["lines"] == [3, 8]
    await fail(project, "not_unique", v4a("*** Update File: classes.py", "@@     def run(self):", *change))
    await project.run(
        "apply_patch", patch=v4a("*** Update File: classes.py", "@@ class B:", "@@     def run(self):", *change)
    )
    assert (project.path / "classes.py").read_bytes() == CLASSES[:-2] + b"2\n"
    error = await fail(project, "no_match", v4a("*** Update File: classes.py", "@@ class C:", *change))
    assert "class C:" in error.message


class CountedLine(bytes):
    """A line that counts how often it is compared."""

    compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other):
        CountedLine.compared += 1
        return bytes.__eq__(self, other)


@pytest.mark.parametrize(
    ("anchors", "old"),
    [([b"x", b"missing"], [b"a\n"]), ([b"x", b"x", b"x"], [b"a\n"]), ([], [b"x\n"] * 1000 + [b"y\n"])],
)
def test_each_line_of_a_file_is_compared_a_few_times_only(monkeypatch, anchors, old):
    """Anchors that are on every line, and a long block that nearly fits everywhere, are no quadratic work."""
    monkeypatch.setattr(CountedLine, "compared", 0)
    hunk = Hunk([*map(CountedLine, old)], [b"b\n"], anchors=[*map(CountedLine, anchors)])
    with contextlib.suppress(ToolError):
        apply_hunks(b"x\n" * 3000 + b"a\n", FilePatch("f", "f", [hunk]))
    assert 0 < CountedLine.compared < 10 * 3000


def test_a_block_is_found_at_every_place():
    """The same places as by comparing the whole block at each line, overlapping ones too."""
    draw = random.Random(7)
    for _ in range(300):
        lines = [draw.choice([b"x\n", b"y\n"]) for _ in range(draw.randrange(40))]
        block = [draw.choice([b"x\n", b"y\n"]) for _ in range(draw.randrange(1, 6))]
        plain = [at for at in range(len(lines)) if lines[at : at + len(block)] == block]
        try:
            found = [apply_hunks(b"".join(lines), FilePatch("f", "f", [Hunk(block, [b"!\n"])])).index(b"!") // 2]
        except ToolError as error:
            found = [line - 1 for line in error.details.get("lines", [])]
        assert found == plain[:20]


def test_a_row_of_blank_lines_in_a_patch_is_looked_at_once():
    """A hunk without counts may hold blank lines: which of them end it is not searched anew at each."""

    class Lines(list):
        read = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Lines.read += len(found) if isinstance(key, slice) else 1
            return found

    lines = Lines(["--- a/f\n", "+++ b/f\n", "@@\n", *["\n"] * 1000, "-a\n"])
    (patch,) = _Unified(lines, 0).parse()
    assert len(patch.hunks[0].old) == 1001
    assert Lines.read < 20_000


async def test_the_end_of_a_file_can_be_named_and_a_missing_line_end_stays(project):
    (project.path / "file").write_bytes(b"x\ny\nx")
    await project.run("apply_patch", patch=v4a("*** Update File: file", "-x", "+z", "*** End of File"))
    assert (project.path / "file").read_bytes() == b"x\ny\nz"
    await project.run("apply_patch", patch=v4a("*** Update File: file", "@@", "+last"))
    assert (project.path / "file").read_bytes() == b"x\ny\nz\nlast"
    await project.run("apply_patch", patch=v4a("*** Update File: file", "@@ y", "+after y"))
    assert (project.path / "file").read_bytes() == b"x\ny\nafter y\nz\nlast"


# --- all or nothing ---

GOOD = "--- a/numbers\n+++ b/numbers\n@@ -2 +2 @@\n-line 2\n+second\n"


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("no_match", "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-absent\n+x\n"),
        ("not_found", "--- a/nowhere\n+++ b/nowhere\n@@ -1 +1 @@\n-absent\n+x\n"),
        ("not_found", "diff --git a/gone b/gone\ndeleted file mode 100644\n"),
        ("conflict", "--- /dev/null\n+++ b/a.txt\n@@ -0,0 +1 @@\n+x\n"),
        ("conflict", "diff --git a/old.txt b/a.txt\nrename from old.txt\nrename to a.txt\n"),
        ("no_match", "--- a/a.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n"),
        ("outside_workspace", "--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"),
        ("protected_path", "--- /dev/null\n+++ b/.git/hooks/pre-commit\n@@ -0,0 +1 @@\n+x\n"),
        ("protected_path", "diff --git a/a.txt b/.env\nrename from a.txt\nrename to .env\n"),
        ("write_failed", "--- /dev/null\n+++ b/a.txt/below\n@@ -0,0 +1 @@\n+x\n"),
        ("invalid_args", "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,1 @@\n-one\n+x\n"),
        ("invalid_args", "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+x\n+y\n"),
        ("invalid_args", "diff --git a/p b/p\nindex 1..2\nGIT binary patch\nliteral 3\n"),
        ("invalid_args", "diff --git a/p b/p\nnew file mode 120000\n--- /dev/null\n+++ b/p\n@@ -0,0 +1 @@\n+/etc\n"),
        ("invalid_args", "diff --git a/p b/q\ncopy from p\ncopy to q\n"),
    ],
)
async def test_one_file_that_does_not_fit_leaves_every_file_unchanged(project, kind, bad):
    """The first file of the patch fits, and is not changed [B95]; the dry run gives the same error [B72]."""
    await fail(project, kind, GOOD + bad)


@pytest.mark.parametrize(
    "patch",
    [
        "",
        "   \n",
        "just words",
        "*** Begin Patch\n*** Update File: a.txt\n-one\n+1\n",
        v4a(),
        v4a("*** Update File: a.txt"),
        v4a("*** Update File: a.txt", "@@ one"),
        v4a("*** Update File: "),
        v4a("*** Add File: new", "no plus"),
        v4a("*** Update File: a.txt", "one"),
        v4a("*** Remove File: a.txt"),
        "@@ -1 +1 @@\n-one\n+1\n",
        "\ud800",
    ],
)
async def test_what_is_no_patch_is_refused_with_its_line(project, patch):
    error = await fail(project, "invalid_args", patch)
    assert "patch" in error.message


async def test_a_hunk_that_does_not_fit_gives_the_nearest_place(project):
    error = await fail(project, "no_match", v4a("*** Update File: src/app.py", "-def mian():", "+def start():"))
    assert error.details["candidates"][0]["line"] == 1


async def test_one_file_may_have_several_parts(project):
    """Each part works on what the part before left."""
    patch = v4a(
        "*** Update File: a.txt", "-one", "+1", "*** Update File: a.txt", "-1", "+eins", "*** Delete File: old.txt"
    )
    patch = patch.replace("*** End Patch", "*** Add File: old.txt\n+anew\n*** End Patch")
    plan = await project.plan("apply_patch", patch=patch)
    assert [one["path"] for one in plan["files"]] == ["a.txt", "old.txt"]
    await project.run("apply_patch", patch=patch)
    assert (project.path / "a.txt").read_bytes() == b"eins\ntwo\nthree\n"
    assert (project.path / "old.txt").read_bytes() == b"anew\n"


async def test_expected_versions_of_a_patch_are_checked(project):
    given = {"patch": GOOD, "expected": {"./numbers": "0" * 64}}
    for call in (project.plan, project.run):
        with pytest.raises(ToolError) as refused:
            await call("apply_patch", **given)
        assert refused.value.kind == "conflict"
    given["expected"] = {"numbers": hash_content(NUMBERS)}
    await project.run("apply_patch", **given)


async def test_rules_see_every_path_of_a_patch(project):
    await project.plan(
        "apply_patch", patch=v4a("*** Update File: a.txt", "*** Move to: b.txt", "*** Delete File: old.txt")
    )
    assert project.policy.asked[-1] == ("apply_patch", ["a.txt", "b.txt", "old.txt"], True)
