"""What the sandbox levels hold, tried with real processes, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from shell_world import ENVIRONMENT, SECRET, Probe, World, give_to, make_root, python_for, run_as, user_number

import holdfast.workspace.files.root as root_module
import holdfast.workspace.sandbox.probe as sandbox_module
from holdfast.errors import DeclarationError, ToolError
from holdfast.workspace.files.root import Root as WorkspaceRoot
from holdfast.workspace.sandbox import bubblewrap, cgroup
from holdfast.workspace.sandbox.base import Released
from holdfast.workspace.sandbox.covers import MOST_COVERS, STUB_MARK, Covers
from holdfast.workspace.sandbox.probe import Confinement, Sandbox, find_sandbox, probe_bubblewrap
from holdfast.workspace.sandbox.seccomp import build_filter

PROTECTED = [".git/hooks", ".git/config", ".vscode", ".config/git", ".bashrc"]


class Listener:
    """A server on the loopback interface and on a Unix socket in the workspace, which records who comes."""

    def __init__(self, root: Path):
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(root / "s"))
        (root / "s").chmod(0o777)
        self.unix.listen()
        self.sockets = {"tcp": self.tcp, "udp": self.udp, "unix": self.unix}

    @property
    def commands(self) -> dict[str, str]:
        unix = "socket(S, PF_UNIX, SOCK_STREAM, 0) && connect(S, sockaddr_un(q(s))) ? print q(in) : die $!"
        return {
            "tcp": f"echo x > /dev/tcp/127.0.0.1/{self.tcp.getsockname()[1]}",
            "udp": f"echo x > /dev/udp/127.0.0.1/{self.udp.getsockname()[1]}",
            "unix": f"perl -MSocket -e '{unix}'",
        }

    def visited(self) -> set[str]:
        ready = select.select(list(self.sockets.values()), [], [], 0)[0]
        return {name for name, each in self.sockets.items() if each in ready}

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()


class Attack:
    """A workspace with secrets around it, and what a list of commands did to it."""

    def __init__(self, sandbox: str, user: str):
        number = user_number(user)
        self.root, self.outside = make_root(), make_root()
        (self.root / ".git/hooks").mkdir(parents=True)
        (self.root / ".git/config").write_text("[core]\n")
        (self.root / ".env").write_text("KEY=in-the-env-file\n")
        (self.root / "store.db").write_text("the-log-itself")
        (self.root / "link").symlink_to(self.outside / "secret")
        (self.outside / "secret").write_text("outside-secret")
        (self.outside / "secret").chmod(0o666)
        self.outside.chmod(0o777)
        self.before = sorted(os.listdir(self.root))
        self.listener = Listener(self.root)
        commands = {**COMMANDS, **self.listener.commands}
        commands = {name: text.replace("OUTSIDE", str(self.outside)) for name, text in commands.items()}
        order: dict[str, Any] = {"protected": PROTECTED, "secrets": [".env", "store.db"]}
        order["settings"] = {"temporary_bytes": 2**20}
        answer = Probe(self.root, sandbox, number, list(commands.values()), **order).read()
        self.results: dict[str, dict[str, Any]] = dict(zip(commands, answer["results"], strict=True))

    def output(self, name: str) -> str:
        return self.results[name]["output"]


FIND_SECRET = "cat /proc/SERVER_PID/environ | tr '\\0' '\\n' | grep -a ^SERVER_TOKEN="
"""Prints the server's secret if it can; the probe puts its own number in."""
COMMANDS = {
    "write": "echo x > OUTSIDE/new; echo x > OUTSIDE/secret; echo x >> link; echo x > /usr/new; echo x > /etc/new; "
    "echo x > /new; echo x > /dev/new; rm -rf OUTSIDE/secret",
    "read": "cat OUTSIDE/secret link /etc/shadow /etc/ssl/private/* ; ls /root /home /run /var /boot",
    "environment": f"env; {FIND_SECRET}",
    "namespace": "ls /proc | grep '^[0-9]' | wc -l; cat /proc/1/environ | tr '\\0' '\\n'; cat /proc/1/cmdline",
    "settings": ": >> /proc/sys/kernel/core_pattern && echo OPENED; : >> /proc/sysrq-trigger && echo OPENED; "
    "find /proc/sys -type f -writable | head -3",
    "mounts": "mount -o remount,bind,rw /usr && echo REMOUNTED; mount -t tmpfs x /tmp && echo MOUNTED; "
    "umount /proc/sys && echo UNMOUNTED",
    "namespaces": "unshare -U true && echo UNSHARED; unshare -m true && echo UNSHARED",
    "set-id": "cp /bin/true s1; chmod 4755 s1 && echo SET; chmod g+s s1 && echo SET; "
    "perl -e 'use Fcntl; sysopen(F, q(s2), O_CREAT|O_WRONLY, 04755) && print q(SET)'",
    "calls": "perl -MSocket -e 'print socketpair(A, B, AF_UNIX, SOCK_STREAM, PF_UNSPEC) ? q(pair ) : q(no pair );"
    " for (101, 250, 321, 323, 298, 425) { print syscall($_, 0, 0, 0, 0, 0, 0), q(:), $! + 0, q( ) }'",
    "protected": "echo x > .git/hooks/pre-commit; echo x >> .git/config; rm -rf .git/hooks; "
    "mv .git moved && echo MOVED; mkdir -p .vscode/x; echo x > .bashrc; mkdir -p .config/git; "
    "mv .config c && echo MOVED; rmdir .vscode; ln -s OUTSIDE .bashrc",
    "secrets": "cat .env store.db; echo x > .env; echo x > store.db; rm -f store.db; mv store.db x",
    "allowed": "echo a > new && cat new; echo b > .git/index && cat .git/index; echo c > /tmp/t && cat /tmp/t; "
    "cat .git/config; echo d > ~/h && cat ~/h; rm new .git/index; git --version | cut -c-3",
    "fresh": "ls -A /tmp /tmp/home | grep -v home:",
    "sizes": "head -c 3M /dev/zero > /tmp/big; head -c 3M /dev/zero > /dev/shm/big; stat -c %s /tmp/big /dev/shm/big",
}


@pytest.fixture(scope="module", params=["root", "nobody"])
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    made = Attack("required", request.param)
    yield made
    made.listener.close()
    shutil.rmtree(made.root)
    shutil.rmtree(made.outside)


def test_nothing_outside_the_root_is_written(attack: Attack) -> None:
    """Level A: no write outside the root and /tmp [B102]."""
    assert os.listdir(attack.outside) == ["secret"]
    assert (attack.outside / "secret").read_text() == "outside-secret"
    assert not any(os.path.exists(path) for path in ("/usr/new", "/etc/new", "/new", "/dev/new"))


def test_nothing_outside_the_root_is_read(attack: Attack) -> None:
    """Level A: only the root and system directories are there [B102]."""
    assert "outside-secret" not in attack.output("read")
    assert "root:" not in attack.output("read")
    for name in ("/root", "/home", "/run", "/var", "/boot"):
        assert f"'{name}': No such file" in attack.output("read")


def test_no_secret_of_the_servers_environment_is_seen(attack: Attack) -> None:
    """Level A: not in the environment, not through /proc, not in any other output [B102, B78]."""
    assert "HOME=/tmp/home" in attack.output("environment")
    assert "HOME=/tmp/home" in attack.output("namespace")
    assert int(attack.output("namespace").split()[0]) < 10, "only its own processes"
    for result in attack.results.values():
        assert SECRET not in str(result)
        assert "SERVER_TOKEN" not in str(result)


def test_settings_of_the_kernel_cannot_be_changed(attack: Attack) -> None:
    """User id 0 may write to /proc/sys without capabilities: it is bound read-only [B102]."""
    assert "OPENED" not in attack.output("settings")
    assert "/proc/sys/" not in attack.output("settings").replace("/proc/sys/kernel/core_pattern:", "")


def test_mounts_and_namespaces_cannot_be_changed(attack: Attack) -> None:
    """The read-only directories stay read-only, also for root [B102]."""
    assert "MOUNTED" not in attack.output("mounts")
    assert "UNSHARED" not in attack.output("namespaces")


def test_no_file_becomes_set_user_id(attack: Attack) -> None:
    """A command that runs as root leaves nothing that others could run as root."""
    assert "SET" not in attack.output("set-id")
    assert not [path for path in attack.root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are those of x86_64")
def test_dangerous_calls_are_refused(attack: Attack) -> None:
    """ptrace, keyctl, bpf, userfaultfd, perf_event_open, io_uring: EPERM; socketpair works."""
    assert attack.output("calls").split() == ["pair", *["-1:1"] * 6]


@pytest.mark.parametrize("kind", ["tcp", "udp", "unix"])
def test_there_is_no_network(attack: Attack, kind: str) -> None:
    """Level A: no TCP, no UDP, no Unix socket, not even on the loopback interface [B102]."""
    # A datagram is sent into the loopback interface of the sandbox, where nobody listens.
    assert attack.results[kind]["ok"] == (kind == "udp")
    assert attack.listener.visited() == set()


def test_protected_paths_stay_as_they_are(attack: Attack) -> None:
    """Existing ones are read-only, missing ones cannot be made, and no stub is left on the host [B92]."""
    assert sorted(os.listdir(attack.root / ".git")) == ["config", "hooks"]
    assert os.listdir(attack.root / ".git/hooks") == []
    assert (attack.root / ".git/config").read_text() == "[core]\n"
    assert "MOVED" not in attack.output("protected")
    made = set(os.listdir(attack.root)) - set(attack.before)
    assert made <= {"s", "s1", "s2"}


def test_secrets_in_the_workspace_are_neither_read_nor_changed(attack: Attack) -> None:
    """The store and .env files are covered [B80, B92]."""
    assert "in-the-env-file" not in attack.output("secrets")
    assert "the-log-itself" not in attack.output("secrets")
    assert (attack.root / ".env").read_text() == "KEY=in-the-env-file\n"
    assert (attack.root / "store.db").read_text() == "the-log-itself"


def test_ordinary_work_is_possible(attack: Attack) -> None:
    """Files of the root and a private /tmp can be written, and the next call has an empty /tmp."""
    assert attack.output("allowed") == "a\nb\nc\n[core]\nd\ngit\n"
    assert set(attack.output("fresh").split()) <= {"/tmp:", "home", attack.root.name}


def test_memory_of_temporary_files_is_bounded(attack: Attack) -> None:
    """/tmp and /dev/shm have a size."""
    sizes = [int(line) for line in attack.output("sizes").split() if line.isdigit()]
    assert len(sizes) == 2
    assert max(sizes) <= 2**20


def test_the_attacks_work_without_a_sandbox() -> None:
    """The tests above can fail: without a sandbox the same commands reach the network, files and the environment."""
    root, outside = make_root(), make_root()
    (outside / "secret").write_text("outside-secret")
    listener = Listener(root)
    commands = [*listener.commands.values(), f"cat {outside}/secret; echo x > {outside}/new; {FIND_SECRET}"]
    results = Probe(root, "none", os.geteuid(), commands).read()["results"]
    assert listener.visited() == {"tcp", "udp", "unix"}
    assert "outside-secret" in results[-1]["output"]
    assert (outside / "new").exists()
    assert SECRET in results[-1]["output"]
    listener.close()


# --- level B ---


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_level_b_holds_what_it_says_and_no_more(user: str) -> None:
    """Landlock: contents outside, the network and the environment are held; protected paths are not."""
    if not find_level("landlock"):
        pytest.skip("no Landlock here")
    attack = Attack("landlock", user)
    assert (attack.outside / "secret").read_text() == "outside-secret"
    assert os.listdir(attack.outside) == ["secret"]
    assert "outside-secret" not in attack.output("read")
    assert "root:" not in attack.output("read")
    assert SECRET not in str(attack.results)
    assert attack.listener.visited() == set()
    assert attack.output("calls").startswith("pair -1:1")
    attack.listener.close()
    # what it does not hold
    assert not find_sandbox("landlock").guarantees.protected
    assert "MOVED" in attack.output("protected")


def find_level(choice: Any) -> str:
    try:
        return find_sandbox(choice).level
    except DeclarationError:
        return ""


# --- the choice ---


def test_required_without_level_a_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything runs, with what to install [B103]."""
    monkeypatch.setattr(bubblewrap, "find_program", lambda: None)
    probe_bubblewrap.cache_clear()
    try:
        for choice in ("required", "bubblewrap"):
            with pytest.raises(DeclarationError, match="apt-get install bubblewrap") as caught:
                find_sandbox(choice)
            assert caught.value.kind == "resource_missing"
        weaker = find_sandbox("auto")
        assert weaker.level in ("B", "none")
        assert "apt-get install bubblewrap" in weaker.missing
    finally:
        probe_bubblewrap.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The probe really starts one: an old or forbidden bubblewrap counts as none, with its own message [B103]."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_program", lambda: str(fake))
    probe_bubblewrap.cache_clear()
    try:
        with pytest.raises(DeclarationError, match="setting up uid map: Permission denied"):
            find_sandbox("required")
    finally:
        probe_bubblewrap.cache_clear()


def test_other_systems_say_why_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "LINUX", False)
    probe_bubblewrap.cache_clear()
    try:
        with pytest.raises(DeclarationError, match="needs Linux"):
            find_sandbox("required")
    finally:
        probe_bubblewrap.cache_clear()


def test_a_list_of_hosts_is_refused() -> None:
    """Nothing would enforce it: there is no proxy yet."""
    with pytest.raises(DeclarationError, match="proxy"):
        find_sandbox("none", network=["registry.example"])
    with pytest.raises(DeclarationError, match="unknown sandbox"):
        find_sandbox("chroot")  # pyright: ignore[reportArgumentType]


async def test_a_shared_network_is_named_in_the_guarantees(tmp_path: Path) -> None:
    """network=True shares the host's network, and the guarantees say so; a read-only run never has it [B104]."""
    shared = find_sandbox("required", network=True)
    assert not shared.held().net_tcp
    assert not shared.held().net_udp
    assert shared.held(writable=False).net_tcp
    assert "DOES NOT HOLD: UDP and DNS are possible" in shared.describe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = await World(tmp_path, shared).run(f"echo hi > /dev/tcp/127.0.0.1/{server.getsockname()[1]}")
        assert result["ok"]


def test_guarantees_are_stated_in_words() -> None:
    """The words name each guarantee as held or not, and the limit of processes [B104]."""
    for choice in ("required", "landlock", "none"):
        if not find_level(choice):
            continue
        found = find_sandbox(choice)
        words = found.describe()
        held = [line for line in words if line.startswith("holds: ")]
        missing = [line for line in words if line.startswith("DOES NOT HOLD: ")]
        assert len(held) + len(missing) >= 8
        assert (len(missing) == 0) == (found.level == "A" and found.process_limit != "none")


async def test_a_workspace_at_the_top_is_refused(tmp_path: Path) -> None:
    world = World(Path("/"), find_sandbox("required"))
    with pytest.raises(ToolError, match="could protect nothing"):
        await world.run("true")


# --- covers ---


class Root:
    def __init__(self, path: Path, protected: list[str]):
        self.path, self._protected = path, protected

    def protected_paths(self, unsearched: list[str] | None = None) -> list[str]:
        return self._protected

    def is_secret(self, path: str) -> bool:
        return path.endswith(".env")


def test_a_stub_is_removed_by_the_last_command_that_uses_it(tmp_path: Path) -> None:
    """Removing it earlier would uncover the path in the other command."""
    root = Root(tmp_path, [".vscode", ".git/hooks"])
    first, second = Covers(root, True), Covers(root, True)
    assert sorted(os.listdir(tmp_path)) == [".git", ".vscode"]
    assert first.release() == Released()
    assert sorted(os.listdir(tmp_path)) == [".git", ".vscode"]
    assert second.release() == Released()
    assert os.listdir(tmp_path) == []


def test_many_commands_at_once_leave_no_stub(tmp_path: Path) -> None:
    """Threads that cover and release the same paths never find theirs uncovered."""
    root, problems = Root(tmp_path, [".vscode", ".idea"]), []

    def cover() -> None:
        for _ in range(50):
            covers = Covers(root, True)
            if not {".vscode", ".idea"} <= set(os.listdir(tmp_path)):
                problems.append("uncovered")
            covers.discard()

    threads = [threading.Thread(target=cover) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert problems == []
    assert os.listdir(tmp_path) == []


def test_a_stub_that_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    """It is recognised by its mode, which it has from its creation on, and because it is empty."""
    os.mkdir(tmp_path / ".vscode", STUB_MARK | 0o555)
    Covers(Root(tmp_path, [".vscode"]), True).release()
    assert os.listdir(tmp_path) == []


def test_a_directory_of_the_user_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / ".vscode").mkdir()
    Covers(Root(tmp_path, [".vscode", ".idea"]), True).release()
    assert os.listdir(tmp_path) == [".vscode"]


@pytest.mark.parametrize("mode", [0o755, 0o555])
async def test_a_directory_that_looks_like_a_stub_is_still_covered(tmp_path: Path, mode: int) -> None:
    """A command can set any mode: what has content is no stub, and secrets below it stay covered [B80, B92]."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.env").write_text("secret")
    (tmp_path / "data/.vscode").mkdir()
    (tmp_path / "data").chmod(mode)
    (tmp_path / "empty").mkdir()
    for name in ("data/.vscode", "data", "empty"):
        (tmp_path / name).chmod(STUB_MARK | stat.S_IMODE(os.stat(tmp_path / name).st_mode))
    protected = ["data/.vscode", "empty/.env"]
    world = World(tmp_path, find_sandbox("required"), protected=protected, secrets=["data/.env"])
    result = await world.run("cat data/.env; echo x > data/.env; echo x > data/.vscode/x")
    assert "secret" not in result["output"]
    assert (tmp_path / "data/.env").read_text() == "secret"
    assert os.listdir(tmp_path / "data/.vscode") == []
    assert (tmp_path / "empty").is_dir()


async def test_a_directory_swapped_for_a_link_does_not_bind_the_host(tmp_path: Path) -> None:
    """Another command swaps it after the check: what was checked is bound, or nothing runs [B102].

    /dev/shm exists on the host and, as an empty one, in the sandbox: the link resolves in both.
    """
    (tmp_path / "sub").mkdir()

    def swap() -> None:
        (tmp_path / "sub").rename(tmp_path / "moved")
        (tmp_path / "sub").symlink_to(os.path.relpath("/dev/shm", tmp_path))

    with tempfile.NamedTemporaryFile(dir="/dev/shm") as outside:
        outside.write(b"outside-secret")
        outside.flush()
        covered = f"sub/{Path(outside.name).name}"
        (tmp_path / covered).write_text("")
        script = f"cat {outside.name}; echo x > {outside.name}"
        output = await run_with(Root(tmp_path, [covered]), find_sandbox("required"), True, script, swap)
        assert "outside-secret" not in output
        assert os.stat(outside.name).st_size == len("outside-secret")


async def test_no_descriptor_of_the_host_is_left_in_the_sandbox(tmp_path: Path) -> None:
    """Through a directory that was opened outside a command could leave the sandbox [B102]."""
    (tmp_path / "sub/.vscode").mkdir(parents=True)
    script = "ls -l /proc/1/fd /proc/self/fd"
    output = await run_with(Root(tmp_path, ["sub/.vscode", ".idea"]), find_sandbox("required"), True, script)
    assert "pipe:" in output
    assert str(tmp_path) not in output


async def test_a_protected_link_that_was_replaced_is_reported(tmp_path: Path) -> None:
    """A link cannot be covered by a mount: the result says that it changed."""
    (tmp_path / "real").write_text("x")
    (tmp_path / ".bashrc").symlink_to("real")
    world = World(tmp_path, find_sandbox("required"), protected=[".bashrc"])
    assert "protected_changed" not in await world.run("cat .bashrc")
    result = await world.run("rm .bashrc; echo evil > .bashrc")
    assert result["protected_changed"] == [".bashrc"]


async def test_a_secret_below_a_protected_directory_is_hidden(tmp_path: Path) -> None:
    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode/x.env").write_text("secret")
    (tmp_path / ".vscode/y").write_text("visible")
    sandbox = find_sandbox("required")
    for writable in (True, False):
        launch_output = await run_with(Root(tmp_path, [".vscode", ".vscode/x.env"]), sandbox, writable)
        assert "secret" not in launch_output
        assert "visible" in launch_output
        assert not (tmp_path / ".vscode/z").exists()


async def run_with(
    root: Root,
    sandbox: Sandbox,
    writable: bool,
    script: str = "cat .vscode/*; echo x > .vscode/z",
    between: Callable[[], None] = lambda: None,
) -> str:
    """Return the output. ``between`` is called when the launch is made and not yet started."""
    from holdfast.workspace.limits import Limits
    from holdfast.workspace.shell.output import Output
    from holdfast.workspace.shell.process import run_process

    output = Output(Limits())
    launch = sandbox.wrap(["/bin/sh", "-c", script], root=root, cwd=".", writable=writable, env={})
    between()
    await run_process(launch, output, seconds=30)
    return output.kept().decode()


async def test_registered_files_are_hidden_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's files cannot be read, also in a directory that was made readable [B80]."""
    root, other = tmp_path / "root", tmp_path / "other"
    for place in (root, other):
        place.mkdir()
        (place / "log.db").write_text("the-log-itself")
        (place / "plain").write_text("plain")
    monkeypatch.setattr(bubblewrap, "registered_files", lambda: [str(root / "log.db"), str(other / "log.db")])
    world = World(root, find_sandbox("required", settings=Confinement(readable=(str(other),))))
    result = await world.run(f"cat log.db plain {other}/log.db {other}/plain; rm -f log.db; echo x >> log.db")
    assert result["output"].count("plain") == 2
    assert "the-log-itself" not in result["output"]
    assert (root / "log.db").read_text() == "the-log-itself"


async def test_a_journal_beside_the_store_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would play it back into the store. What stands in for it meanwhile is an empty file [B80]."""
    for name in ("log", "log-wal", "holdfast.db"):
        (tmp_path / name).write_text("x")
    files = [str(tmp_path / f"log{end}") for end in ("", "-wal", "-journal")]
    monkeypatch.setattr(bubblewrap, "registered_files", lambda: files)
    world = World(tmp_path, find_sandbox("required"), secrets=["holdfast.db"])
    result = await world.run(
        "for n in log holdfast.db; do stat -c %F $n-journal; echo y > $n-journal; rm $n-journal; done"
    )
    assert result["output"].count("Permission denied") == 2
    assert result["output"].count("Device or resource busy") == 2
    assert sorted(os.listdir(tmp_path)) == ["holdfast.db", "log", "log-wal"]
    assert "protected_changed" not in result


async def test_a_command_is_refused_while_a_file_of_the_store_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for it would disturb the store, and without one the command could make the file [B80]."""
    monkeypatch.setattr(bubblewrap, "registered_files", lambda: [str(tmp_path / "log-wal")])
    with pytest.raises(ToolError, match="log-wal") as caught:
        await World(tmp_path, find_sandbox("required")).run("echo forged > log-wal")
    assert caught.value.kind == "resource_missing"
    assert os.listdir(tmp_path) == []


def real_world(path: Path) -> World:
    """Return a world with the real root."""
    world = World(path, find_sandbox("required"))
    world.root = WorkspaceRoot(path)  # pyright: ignore[reportAttributeAccessIssue]
    return world


async def test_protected_paths_that_a_command_made_are_renamed_when_it_ends(tmp_path: Path) -> None:
    """They cannot be covered before they exist: no program finds them afterwards, and nothing is lost [B92]."""
    (tmp_path / ".git").mkdir()
    made = [".env.local", ".git/commondir", "new.git/deep/.env", "sub/.git/config", "sub/.vscode"]
    world = real_world(tmp_path)
    result = await world.run(
        "mkdir -p sub/.vscode sub/.git new.git/deep; echo x > sub/.git/config; echo KEY=1 > .env.local; "
        "echo ../x > .git/commondir; echo KEY=2 > new.git/deep/.env"
    )
    assert sorted(result["quarantined"]) == made
    assert "ask the user" in result["quarantine_note"]
    assert "protected_changed" not in result
    for path, now in result["quarantined"].items():
        assert not (tmp_path / path).exists()
        assert (tmp_path / now).exists()
        assert now.startswith(f"{path}.quarantined-")
    secret = result["quarantined"][".env.local"]
    result = await world.run(f"cat {secret}; echo y > sub/.git/config")
    assert "KEY" not in result["output"], "what was named .env is still a secret"
    assert list(result["quarantined"]) == ["sub/.git/config"], "again, whatever the command tries"


@pytest.mark.parametrize("name", ["root", "nobody"])
def test_a_quarantine_finds_what_a_command_hides(name: str) -> None:
    """Directories that cannot be listed or written, the longest names, links; as root and as another user [B92]."""
    root, long = make_root(), ".env" + "x" * 251
    script = (
        f"mkdir -p a/b c; echo x > a/b/.env; echo x > c/{long}; ln -s /etc plain; ln -s /etc c/.idea; "
        "chmod 300 a/b; chmod 500 c; chmod 400 a"
    )
    (result,) = Probe(root, "required", user_number(name), [script], real_root=True).read()["results"]
    assert set(result["quarantined"]) == {"a/b/.env", "c/.idea", f"c/{long}"}
    assert "protected_changed" not in result
    assert [stat.S_IMODE(os.stat(root / path).st_mode) for path in ("a", "c")] == [0o400, 0o500]
    (root / "a").chmod(0o700)
    assert stat.S_IMODE(os.stat(root / "a/b").st_mode) == 0o300
    (root / "a/b").chmod(0o700)
    left = {path.name for path in root.rglob("*") if path.name.startswith(".")}
    assert not left & {".env", ".idea", long}
    assert (root / "plain").is_symlink()


async def test_hooks_of_a_repository_in_a_subdirectory_cannot_be_made(tmp_path: Path) -> None:
    """Git runs them at any moment, so that renaming them afterwards would be too late; no stub is left [B92]."""
    (tmp_path / "sub/.git").mkdir(parents=True)
    result = await real_world(tmp_path).run("mkdir sub/.git/hooks; echo evil > sub/.git/hooks/pre-commit")
    assert not result["ok"]
    assert "quarantined" not in result
    assert os.listdir(tmp_path / "sub/.git") == []


async def test_files_of_a_store_are_named_and_not_renamed(tmp_path: Path) -> None:
    """Another process may use the store: without its log of changes it would break [B92]."""
    (tmp_path / "holdfast.db").touch()
    result = await real_world(tmp_path).run("echo x > holdfast.db-wal")
    assert result["protected_changed"] == ["holdfast.db-wal"]
    assert (tmp_path / "holdfast.db-wal").exists()


async def test_a_path_that_was_renamed_while_another_command_ran_counts_as_new_for_that_one(tmp_path: Path) -> None:
    """That command could make it again: it started when the path existed [B92]."""
    world = real_world(tmp_path)
    waits = "for n in $(seq 600); do [ -e {} ] && break; sleep 0.05; done"
    first = asyncio.create_task(world.run(f"mkdir sub; echo a > sub/.env; touch made; {waits.format('started')}"))
    while not (tmp_path / "made").exists():
        await asyncio.sleep(0.01)
    script = f"touch started; {waits.format('ended')}; echo b > sub/.env"
    second = asyncio.create_task(world.run(script))
    assert list((await first)["quarantined"]) == ["sub/.env"]
    (tmp_path / "ended").touch()
    assert list((await second)["quarantined"]) == ["sub/.env"]
    assert not (tmp_path / "sub/.env").exists()


async def test_a_command_that_is_killed_by_its_timeout_leaves_no_protected_path(tmp_path: Path) -> None:
    """The error says what was renamed [B92]."""
    with pytest.raises(ToolError) as caught:
        await real_world(tmp_path).run("mkdir s; echo x > s/.env; sleep 60", timeout=1.5)
    assert caught.value.kind == "timeout"
    assert list(caught.value.details["quarantined"]) == ["s/.env"]


async def test_the_target_of_a_protected_link_is_covered(tmp_path: Path) -> None:
    """Hooks in another directory of the workspace are not changed, a secret behind a link is not read [B92]."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "githooks").mkdir()
    (tmp_path / ".git/hooks").symlink_to("../githooks")
    (tmp_path / "production").write_text("KEY=1")
    (tmp_path / ".env").symlink_to("production")
    world = real_world(tmp_path)
    result = await world.run("echo x > githooks/pre-commit; cat production; rm .git/hooks && mkdir .git/hooks")
    assert os.listdir(tmp_path / "githooks") == []
    assert "KEY" not in result["output"]
    assert result["protected_changed"] == [".git/hooks"], "the link itself cannot be covered"


async def test_a_workspace_too_large_to_search_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protected paths behind the last entry that is looked at would be open: no command runs [B92]."""
    monkeypatch.setattr(root_module, "MAX_SCANNED", 20)
    for number in range(15):
        (tmp_path / f"f{number}").touch()
    world = real_world(tmp_path)
    result = await world.run("mkdir more; for n in 1 2 3 4 5 6; do touch more/$n; done; echo x > more/.env")
    assert list(result["quarantined"]) == ["more/.env"], "a command cannot hide it behind many files"
    with pytest.raises(ToolError, match="more than 20 entries") as caught:
        await world.run("true")
    assert caught.value.kind == "too_large"
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


async def test_a_directory_too_deep_to_search_is_named_and_the_next_command_is_refused(tmp_path: Path) -> None:
    """A path that is longer than the kernel takes cannot be opened, so nothing in it can be renamed [B92]."""
    world, name = real_world(tmp_path), "n" * 200
    result = await world.run(f"for n in $(seq 25); do mkdir {name}; cd {name}; done; echo x > .env")
    (found,) = result["protected_changed"]
    assert found == f"{name} (cannot be searched)"
    with pytest.raises(ToolError, match="cannot be searched for protected paths") as caught:
        await world.run("true")
    assert caught.value.kind == "too_large"


MANY_UNLISTABLE = """
import os, resource, sys
from holdfast.workspace.files.root import Root
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.chdir(sys.argv[1])
for number in range(200):
    os.mkdir(f"d{number}")
    os.close(os.open(f"d{number}/.env", os.O_CREAT))
    os.chmod(f"d{number}", 0)
found = [path for path in Root(".").protected_paths() if path.endswith("/.env")]
print(len(found), {os.stat(f"d{number}").st_mode & 0o777 for number in range(200)})
"""


def test_many_directories_that_cannot_be_listed_hide_nothing() -> None:
    """Each needs a descriptor while it is searched: a command could use up those that the server may have [B92]."""
    root, user = make_root(), user_number("nobody")
    give_to(root, user)
    command = [python_for(user), "-c", MANY_UNLISTABLE, str(root)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, **run_as(user))
    assert done.stdout == "200 {0}\n", done.stderr


async def test_a_protected_path_whose_name_is_not_utf_8_is_in_the_result(tmp_path: Path) -> None:
    """A result that cannot be stored would be lost, with the output and with what was renamed [B79]."""
    result = await real_world(tmp_path).run("mkdir $'d\\xff'; echo x > $'d\\xff/.env'; echo done")
    assert list(result["quarantined"]) == ["d\\xff/.env"]
    assert msgspec.json.decode(msgspec.json.encode(result)) == result


async def test_very_many_renamed_paths_are_counted(tmp_path: Path) -> None:
    """The result stays short, whatever the command makes [B92]."""
    result = await real_world(tmp_path).run("for n in $(seq 150); do mkdir d$n; echo x > d$n/.env; done")
    assert len(result["quarantined"]) == 100
    assert "(150 in all)" in result["quarantine_note"]
    assert not any(".env" in names for _, _, names in os.walk(tmp_path))


def test_too_many_protected_paths_are_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    """The rest would be uncovered: no command runs, and no descriptor is lost [B92]."""
    paths = [f"d{number}/.env" for number in range(MOST_COVERS)]
    for path in paths:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ToolError, match="too many to cover"):
        Covers(Root(tmp_path, [*paths, ".vscode"]), True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / ".vscode").exists()


# --- small parts ---


def test_the_filter_is_made_for_both_machines() -> None:
    """Every jump stays inside of the program, and the program ends with a return."""
    for machine in ("x86_64", "aarch64"):
        for families in ((), (2, 10, 16)):
            code = list(struct.iter_unpack("=HBBI", build_filter(families, machine)))
            for number, (operation, yes, no, _) in enumerate(code):
                if operation & 7 == 5:
                    assert number + 1 + max(yes, no) < len(code)
            assert code[-1][0] == 6


def test_a_control_group_is_removed_after_use() -> None:
    group = cgroup.make_group(10)
    if group is None:
        pytest.skip("no control group can be made here")
    assert (group / "pids.max").read_text().strip() == "10"
    cgroup.remove_group(group)
    assert not group.exists()


async def test_no_control_group_is_left_by_a_command(tmp_path: Path) -> None:
    parent = cgroup.find_parent()
    if parent is None:
        pytest.skip("no control group can be made here")
    mine = f"holdfast-{os.getpid()}-*"
    for choice in ("required", "none"):
        await World(tmp_path, find_sandbox(choice, settings=Confinement(processes=50))).run("sleep 0.01 & true")
    assert list(parent.glob(mine)) == []
