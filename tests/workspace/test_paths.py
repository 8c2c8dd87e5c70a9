"""Paths: nothing leads out of the root, links are resolved by the kernel, protected paths stay untouched."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workspace.conftest import OPENERS, FileTools, make_root, snapshot

from holdfast.errors import ToolError
from holdfast.workspace.files import beneath
from holdfast.workspace.files import root as root_module
from holdfast.workspace.files.beneath import (
    KernelOpener,
    NotRegular,
    PortableOpener,
    WalkOpener,
    choose_opener,
    open_root,
)
from holdfast.workspace.files.changes import Change, commit_changes
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import hash_content

OPENS = int(os.environ.get("HOLDFAST_LINK_SWAPS", "20000"))
"""Opens against a link that another process swaps; `make chaos` takes more."""
EXAMPLES = int(os.environ.get("HOLDFAST_PATH_EXAMPLES", "2000"))


@pytest.fixture(params=[*OPENERS])
def opener(request) -> str:
    return request.param


@pytest.fixture
def root(tree, opener):
    with make_root(tree, opener) as made:
        yield made


def read(root: Root, path: str) -> bytes:
    with os.fdopen(root.open_file(path), "rb") as file:
        return file.read()


def write(root: Root, path: str, content: bytes) -> None:
    commit_changes(root, [Change(path, root.hash_file(path), hash_content(content), content)])


def add_links(tree: Path) -> None:
    outside = tree.parent / "outside"
    (tree / "out_file").symlink_to(outside / "secret.txt")
    (tree / "out_relative").symlink_to("../outside/secret.txt")
    (tree / "out_directory").symlink_to(outside)
    (tree / "out_chain").symlink_to("src/../out_relative")
    (tree / "proc_root").symlink_to("/proc/self/root")
    (tree / "proc_cwd").symlink_to("/proc/self/cwd")
    (tree / "up").symlink_to("..")
    (tree / "sibling").symlink_to("../root-sibling")
    (tree / "dangling_out").symlink_to("../outside/new.txt")


ESCAPES = [
    "../outside/secret.txt",
    "..",
    "src/../../outside/secret.txt",
    "./../outside/secret.txt",
    "//etc/passwd",
    "/etc/passwd",
    "/",
    "{root}-sibling/secret.txt",
    "{root}/../outside/secret.txt",
    "{root}/../root-sibling/secret.txt",
    "out_file",
    "out_relative",
    "out_directory/secret.txt",
    "out_chain",
    "proc_root/etc/passwd",
    "proc_cwd/pyproject.toml",
    "up/outside/secret.txt",
    "sibling/secret.txt",
    "/proc/self/root/etc/passwd",
    "/proc/self/cwd/a.txt",
]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("tool", ["read", "write", "edit", "apply_patch"])
async def test_a_path_that_leads_out_is_refused_by_every_file_tool(tree, opener, path, tool):
    """Parents, absolute paths, sibling prefixes and links out give outside_workspace [B75]."""
    add_links(tree)
    files = FileTools(tree)
    files.root.close()
    files.root = make_root(tree, opener)
    before = snapshot(tree.parent)
    path = path.format(root=tree)
    args = {
        "read": {"path": path},
        "write": {"path": path, "content": "x"},
        "edit": {"path": path, "old": "outside", "new": "x"},
        "apply_patch": {"patch": f"*** Begin Patch\n*** Add File: {path}\n+x\n*** End Patch\n"},
    }[tool]
    for call in (files.run, files.plan):
        with pytest.raises(ToolError) as refused:
            await call(tool, **args)
        assert refused.value.kind == "outside_workspace"
    assert snapshot(tree.parent) == before
    files.root.close()


@pytest.mark.parametrize("opener", ["kernel", "walk"])
def test_a_way_that_leaves_the_root_and_comes_back_is_refused(tree, opener):
    """The portable way compares only where a path ends [B75]."""
    add_links(tree)
    with make_root(tree, opener) as root, pytest.raises(ToolError) as refused:
        root.open_file("up/root/a.txt")
    assert refused.value.kind == "outside_workspace"


@pytest.mark.parametrize("path", ["", "a\0b", "\0", "a.txt\0/../../x", "x" * 5000, "y" * 300, "\ud800"])
def test_text_that_is_no_path_is_refused_before_the_system_sees_it(root, path):
    with pytest.raises(ToolError) as refused:
        root.open_file(path)
    assert refused.value.kind == "invalid_args"


def test_a_write_through_a_dangling_link_makes_nothing_outside(tree, root):
    """A link to a file outside that does not exist yet is refused too [B75]."""
    add_links(tree)
    with pytest.raises(ToolError) as refused:
        commit_changes(root, [Change("dangling_out", None, hash_content(b"x"), b"x")])
    assert refused.value.kind == "outside_workspace"
    assert not (tree.parent / "outside" / "new.txt").exists()


def test_absolute_paths_inside_and_detours_mean_the_relative_path(tree, root):
    assert root.normalise(f"{tree}/src/app.py") == "src/app.py"
    assert root.normalise(str(tree)) == root.normalise(".") == root.normalise("src/..") == "."
    assert root.normalise("./src//nowhere/../app.py") == "src/app.py"
    assert read(root, f"{tree}/src/app.py") == (tree / "src/app.py").read_bytes()


def test_a_root_given_through_a_link_takes_both_names(tree, tmp_path):
    (tmp_path / "alias").symlink_to(tree)
    with Root(tmp_path / "alias") as root:
        assert root.path == tree.resolve()
        assert root.normalise(f"{tmp_path}/alias/a.txt") == root.normalise(f"{tree}/a.txt") == "a.txt"


def test_relative_links_inside_are_followed_by_reads_and_writes(tree, root):
    (tree / "link").symlink_to("src/app.py")
    (tree / "directory").symlink_to("src")
    (tree / "src" / "back").symlink_to("../a.txt")
    assert read(root, "link") == read(root, "directory/app.py") == (tree / "src/app.py").read_bytes()
    assert read(root, "directory/back") == b"one\ntwo\nthree\n"
    write(root, "directory/back", b"new")
    assert (tree / "a.txt").read_bytes() == b"new"
    assert (tree / "src" / "back").is_symlink()
    assert root.real_path("directory/back") == "a.txt"


@pytest.mark.parametrize("opener", ["kernel", "walk"])
def test_an_absolute_link_that_points_inside_is_refused_with_advice(tree, opener):
    (tree / "absolute").symlink_to(tree / "a.txt")
    with make_root(tree, opener) as root, pytest.raises(ToolError) as refused:
        root.open_file("absolute")
    assert refused.value.kind == "outside_workspace"
    assert "absolute links are not followed, even inside: name its target" in refused.value.message


def test_loops_of_links_end(tree, root):
    (tree / "one").symlink_to("two")
    (tree / "two").symlink_to("one")
    with pytest.raises(ToolError) as refused:
        root.open_file("one")
    assert refused.value.kind in ("outside_workspace", "read_failed")


def test_a_system_without_openat2_or_proc_gets_the_walk(tree, monkeypatch):
    """The strongest way that works is taken; the weakest says that it is weaker."""

    def missing(*_):
        raise OSError(errno.ENOSYS, "no such system call")

    with open_root(str(tree)) as directory:
        assert isinstance(choose_opener(directory), KernelOpener)
        monkeypatch.setattr(beneath, "_openat2", missing)
        assert isinstance(choose_opener(directory), WalkOpener)
    monkeypatch.setattr(os, "supports_dir_fd", set())
    with Root(tree) as root:
        assert isinstance(root.opener, PortableOpener)
        assert "swapped" in root.weakness
        assert read(root, "a.txt") == b"one\ntwo\nthree\n"
        write(root, "new/file.txt", b"x")
        with pytest.raises(ToolError) as refused:
            root.open_directory(".")
        assert refused.value.kind == "resource_missing"
    assert (tree / "new/file.txt").read_bytes() == b"x"


def test_openat2_is_tried_again_while_renames_disturb_it(tree, monkeypatch):
    real, calls = beneath._libc(), []

    class Disturbed:
        def syscall(self, *args):
            calls.append(args)
            if len(calls) < 5:
                beneath.ctypes.set_errno(errno.EAGAIN)
                return -1
            return real.syscall(*args)

    monkeypatch.setattr(beneath, "_libc", Disturbed)
    with make_root(tree, "kernel") as root:
        assert root.hash_file("a.txt") == hash_content(b"one\ntwo\nthree\n")
    assert len(calls) == 5


# --- races ---

SWAPPER = """
import ctypes, os, sys
os.chdir(sys.argv[1])
swap = ctypes.CDLL(None).renameat2
print("ready", flush=True)
while True:
    for _ in range(1000):
        swap(-100, b"swapped", -100, b"other", 2)
"""


@pytest.fixture
def swapper(tree):
    """Another process exchanges `swapped` (inside) and `other` (a link out) without a pause."""
    started: list[subprocess.Popen] = []

    def start() -> None:
        process = subprocess.Popen([sys.executable, "-c", SWAPPER, str(tree)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        started.append(process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("opener", ["kernel", "walk"])
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_link_swapped_in_a_race_never_leads_out(tree, opener, kind, swapper):
    """Another process swaps a link all the time; no open ever reaches the outside [B75] [B91]."""
    if kind == "directory":
        (tree / "swapped").mkdir()
        (tree / "swapped" / "secret.txt").write_bytes(b"inside")
        (tree / "other").symlink_to("../outside")
    else:
        (tree / "swapped").write_bytes(b"inside")
        (tree / "other").symlink_to("../outside/secret.txt")
    path = "swapped/secret.txt" if kind == "directory" else "swapped"
    swapper()
    found: Counter[str | bytes] = Counter()
    with make_root(tree, opener) as root:
        for _ in range(OPENS // 4):
            try:
                found[read(root, path)] += 1
            except ToolError as error:
                found[error.kind] += 1
    assert found[b"inside"]
    assert found["outside_workspace"]
    assert {*found} <= {b"inside", "outside_workspace", "not_found", "read_failed"}


@pytest.mark.parametrize("opener", ["kernel", "walk"])
def test_writes_in_a_race_with_a_swapped_link_change_nothing_outside(tree, opener, swapper):
    """A write goes to the directory that was opened, wherever its name leads by now [B75] [B91]."""
    (tree / "swapped").mkdir()
    (tree / "other").symlink_to("../outside")
    before = snapshot(tree.parent / "outside")
    swapper()
    written = refused = 0
    with make_root(tree, opener) as root:
        for number in range(400):
            content = b"%d" % number
            try:
                commit_changes(root, [Change(f"swapped/new{number}.txt", None, hash_content(content), content)])
                written += 1
            except ToolError:
                refused += 1
    assert written
    assert refused
    assert snapshot(tree.parent / "outside") == before


# --- the resolver against os.path.realpath ---

PARTS = st.sampled_from(["a", "b", "f", "g", "l1", "l2", "l3", "..", ".", "", "missing"])
RELATIVE = st.lists(PARTS, min_size=1, max_size=6).map("/".join)
TARGETS = st.one_of(RELATIVE, st.just("/"), st.just("../outside"), st.just("../outside/f")).filter(bool)
LINKS = st.dictionaries(st.sampled_from(["l1", "l2", "a/l3", "a/b/l1", "b/l2"]), TARGETS, max_size=5)


def outcome(opener, directory, path: str) -> tuple[str, str]:
    """Return what became of an open: the real path, or the class of the error."""
    try:
        fd, real = opener.open_file(directory, path)
    except NotRegular:
        return "directory", ""
    except OSError as error:
        return errno.errorcode[error.errno or 0], ""
    with os.fdopen(fd, "rb") as file:
        assert file.read() == b"content of " + real.encode()
    return "opened", real


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    base = tmp_path_factory.mktemp("arena")
    for name in ("root/a/b", "root/b", "outside"):
        (base / name).mkdir(parents=True)
    for name in ("f", "a/g", "a/b/f", "b/g"):
        (base / "root" / name).write_text(f"content of {name}")
    (base / "outside/f").write_text("outside")
    return base


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(links=LINKS, path=RELATIVE)
def test_resolving_agrees_with_realpath_on_a_tree_without_races(arena, links, path):
    """What is opened is what realpath names, inside; what is refused as outside ends or passes outside [B91]."""
    root = arena / "root"
    for name, target in links.items():
        (root / name).symlink_to(target)
    try:
        _compare_with_realpath(root, path)
    finally:
        for name in links:
            (root / name).unlink()


def _compare_with_realpath(root: Path, path: str) -> None:
    if not path.strip("/"):
        return
    path = path.lstrip("/") or "."
    with open_root(str(root)) as directory:
        kernel, real = outcome(KernelOpener(), directory, path)
        assert outcome(WalkOpener(), directory, path) == (kernel, real)
    try:
        reference = os.path.realpath(root / path, strict=True)
    except OSError:
        reference = None
    if kernel == "opened":
        assert reference == str(root / real)
    elif kernel == "directory":
        assert reference is None or os.path.isdir(reference)
    elif reference is not None and (reference == str(root) or reference.startswith(f"{root}/")):
        # realpath ends inside, but the way is refused: over a file as directory, over an absolute link, or too long
        assert kernel in ("ENOTDIR", "EXDEV", "ELOOP")
        if kernel == "EXDEV":
            assert _passes_outside(root, path)
    with Root(root) as whole:  # the public way, with the text resolved first
        try:
            content = read(whole, path)
        except ToolError as error:
            content = error.kind.encode()
        assert content.startswith((b"content of ", b"outside_workspace", b"not_found", b"read_failed"))


def _passes_outside(root: Path, path: str) -> bool:
    """Return whether a step on the way, by the system's own resolution, is outside of the root."""
    here, parts, steps = str(root), path.split("/")[::-1], 0
    while parts and steps < 200:
        steps += 1
        part = parts.pop()
        step = os.path.join(here, part)
        if os.path.islink(step):
            target = os.readlink(step)
            if target.startswith("/"):
                return True
            parts += target.split("/")[::-1]
            continue
        here = os.path.normpath(step)
        if here != str(root) and not here.startswith(f"{root}/"):
            return True
    return False


# --- protected paths ---

PROTECTED = [
    ".git/hooks/pre-commit",
    ".git/hooks",
    ".git/hooks/deep/er",
    ".GIT/Hooks/post-checkout",
    ".git/config",
    ".git/CONFIG",
    ".git/config.worktree",
    ".git/modules/sub/hooks/pre-commit",
    ".git",
    "sub/.git/config",
    "sub/.git",
    ".gitmodules",
    ".GitModules",
    ".env",
    ".env.local",
    ".ENV.production",
    "deep/.env",
    ".envrc",
    ".bashrc",
    ".Bash_Profile",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".mcp.json",
    ".MCP.json",
    ".vscode/settings.json",
    ".idea/workspace.xml",
    ".vscode",
    "holdfast.db",
    "holdfast.db-wal",
    "holdfast-dev.db-shm",
    "HOLDFAST.db-owners",
    "data/holdfast.db",
    # names that other file systems take for the same
    ".git./config",
    ".git/config ",
    ".git/config::$DATA",
    ".g\u200cit/config",
    ".\uff47\uff49\uff54/config",
    "private/key.pem",
    "PRIVATE/other",
]


@pytest.mark.parametrize("path", PROTECTED)
async def test_protected_paths_are_refused_before_they_exist(tree, path):
    """In any case of letters, at any depth, also what is below them [B92]."""
    files = FileTools(tree, protected=["private"])
    before = snapshot(tree)
    patch = f"*** Begin Patch\n*** Update File: a.txt\n*** Move to: {path.strip()}\n*** End Patch\n"
    for call in (files.run, files.plan):
        for tool, args in (("write", {"path": path, "content": "x"}), ("apply_patch", {"patch": patch})):
            with pytest.raises(ToolError) as refused:
                await call(tool, **args)
            assert refused.value.kind == "protected_path"
    assert snapshot(tree) == before


@pytest.mark.parametrize("path", ["a.git/hooks", "git/config", "environment", ".github/workflows/ci.yml", ".gitignore"])
def test_names_that_only_resemble_protected_ones_are_free(tree, path):
    with Root(tree) as root:
        assert not root.is_protected(path)


def test_the_directory_of_a_repository_is_not_protected_but_a_file_in_its_place_is(tree):
    """A file named .git would make git read its configuration from elsewhere [B92]."""
    with Root(tree) as root:
        assert root.is_protected(".git")
        (tree / ".git").mkdir()
        assert not root.is_protected(".git")
        assert not root.is_protected(".git/HEAD")


@pytest.mark.parametrize("opener", ["kernel", "walk"])
async def test_a_link_does_not_rename_a_protected_path(tree, opener):
    """The path without links decides [B92]."""
    (tree / ".git/hooks").mkdir(parents=True)
    (tree / ".git/config").write_text("[core]\n")
    (tree / ".env").write_text("TOKEN=x\n")
    (tree / "harmless").symlink_to(".git/hooks")
    (tree / "settings").symlink_to(".git/config")
    (tree / "notes").symlink_to(".env")
    (tree / "repository").symlink_to(".git")
    files = FileTools(tree)
    files.root = make_root(tree, opener)
    for path in ("harmless/pre-commit", "settings", "notes", "repository/hooks/x", "repository/hooks/new/x"):
        for call in (files.run, files.plan):
            with pytest.raises(ToolError) as refused:
                await call("write", path=path, content="x")
            assert refused.value.kind == "protected_path", path
    with pytest.raises(ToolError) as refused:
        await files.run("read", path="notes")
    assert refused.value.kind == "protected_path"


@pytest.mark.parametrize("path", [".env", "holdfast.db", "deep/.ENV.local", "store/log.sqlite", "store/log.sqlite-wal"])
async def test_secrets_and_the_store_are_not_shown(tree, path, monkeypatch):
    """The log itself and .env files can be neither read nor written [B80] [B92]."""
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text("TOKEN=x\n")
    monkeypatch.setattr(root_module, "_registered_files", lambda: [str(tree / "store/log.sqlite")])
    files = FileTools(tree)
    for tool, args in (("read", {}), ("write", {"content": "x"}), ("edit", {"old": "TOKEN", "new": "x"})):
        for call in (files.run, files.plan):
            with pytest.raises(ToolError) as refused:
                await call(tool, path=path, **args)
            assert refused.value.kind == "protected_path"
    assert (tree / path).read_text() == "TOKEN=x\n"


async def test_protected_files_without_secrets_can_be_read(tree):
    (tree / ".vscode").mkdir()
    (tree / ".vscode/settings.json").write_text("{}\n")
    (tree / ".env.example").write_text("TOKEN=\n")
    files = FileTools(tree)
    assert (await files.run("read", path=".vscode/settings.json"))["text"] == "{}\n"
    assert (await files.run("read", path=".env.example"))["text"] == "TOKEN=\n"


def test_protected_paths_are_listed_for_the_sandbox(tree):
    """Those that exist at any depth, and those of the top directory that could be made [B92]."""
    (tree / "deep/er").mkdir(parents=True)
    (tree / "deep/er/.ENV").write_text("")
    (tree / "deep/.git").mkdir()
    (tree / "deep/.git/config").write_text("")
    with Root(tree, protected=["private"]) as root:
        found = root.protected_paths()
    assert {".git/hooks", ".git/config", ".env", ".bashrc", "private", "deep/er/.ENV", "deep/.git/config"} <= {*found}
    assert not any("*" in path for path in found)


# --- special files ---


@pytest.fixture
def special(tree):
    os.mkfifo(tree / "fifo")
    (tree / "link_to_fifo").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        os_cwd = os.getcwd()
        os.chdir(tree)  # the path of a socket must be short
        try:
            bound.bind("socket")
        finally:
            os.chdir(os_cwd)
        yield tree


@pytest.mark.parametrize("name", ["fifo", "link_to_fifo", "socket", "src"])
@pytest.mark.parametrize("tool", ["read", "write", "edit"])
async def test_special_files_and_directories_are_refused_without_blocking(special, opener, name, tool):
    """A FIFO that nobody writes to would block a plain open for ever [B93]."""
    files = FileTools(special)
    files.root = make_root(special, opener)
    args = {"read": {}, "write": {"content": "x"}, "edit": {"old": "a", "new": "b"}}[tool]
    for call in (files.run, files.plan):
        with pytest.raises(ToolError) as refused:
            await call(tool, path=name, **args)
        assert refused.value.kind == ("read_failed" if tool == "read" else "write_failed")
        assert ("a directory" if name == "src" else "a FIFO" if "fifo" in name else "a socket") in refused.value.message


def test_devices_are_refused(tree, opener):
    """A device in the workspace is neither read nor written [B93]."""
    try:
        os.mknod(tree / "zero", 0o666 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make devices")
    with make_root(tree, opener) as root:
        for action in (lambda: root.open_file("zero"), lambda: write(root, "zero", b"x")):
            with pytest.raises(ToolError) as refused:
                action()
            assert refused.value.kind == "read_failed"


@pytest.mark.parametrize("tool", ["write", "edit", "apply_patch"])
async def test_a_file_with_other_names_is_not_written_unless_allowed(tree, tool):
    """The other name may be outside of the root, where no rule looks [B93]."""
    os.link(tree.parent / "outside/secret.txt", tree / "hard")
    args = {
        "write": {"path": "hard", "content": "new", "expected": hash_content(b"outside")},
        "edit": {"path": "hard", "old": "outside", "new": "new"},
        "apply_patch": {"patch": "*** Begin Patch\n*** Update File: hard\n-outside\n+new\n*** End Patch\n"},
    }[tool]
    files = FileTools(tree)
    for call in (files.run, files.plan):
        with pytest.raises(ToolError) as refused:
            await call(tool, **args)
        assert refused.value.kind == "write_failed"
        assert "2 names" in refused.value.message
    await FileTools(tree, allow_hard_links=True).run(tool, **args)
    assert (tree / "hard").read_text() == "new"
    assert (tree.parent / "outside/secret.txt").read_text() == "outside"
