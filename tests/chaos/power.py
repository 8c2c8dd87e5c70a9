"""Power cuts: the possible contents of a disk after one, and whether they include all acknowledged events.

    python tests/chaos/power.py --cuts 2000 --seed 7

After a power cut a disk holds everything that was synced, and any part of what was written since: some writes and not
others, whole or torn at the borders of sectors, in any order. A live machine never shows that, because its page cache
has everything. So the runtime works on a ``Disk``, a layer under SQLite that keeps a trace of every write, truncation,
sync, creation and deletion, and in the same trace the answers to clients and the effects of tools. A ``Platter``
replays the trace up to a moment and returns possible contents. A new store opens these, and then a new runtime, which
continues the conversations.

The assumptions are those of SQLite: a sync that returned is durable; a write does not change the bytes beside it; and a
directory is synced with the first sync of a journal or -wal file that was opened to be created. A sync that *failed*
leaves its writes in doubt for ever: a later sync that succeeds says nothing about them.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent / "src")]

import apsw  # noqa: E402

from holdfast import Agent, Approve, Call, Runtime, ScriptedModel, ToolCall, tool  # noqa: E402
from holdfast.core import codec  # noqa: E402
from holdfast.core.events import AssistantSaid, CallResolved, CallReturned, CallStarted  # noqa: E402
from holdfast.errors import HoldfastError, Refused, StoreError  # noqa: E402
from holdfast.stores.base import GENESIS, hash_chain  # noqa: E402
from holdfast.stores.sqlite import writer  # noqa: E402
from holdfast.stores.sqlite.store import SQLiteStore  # noqa: E402

SECTOR = 512
STORE = "holdfast.db"
CONVERSATIONS = 6
REST_SECONDS = 60.0
"""Seconds in which everything must come to rest."""
CHECKPOINT = 25
"""Pages in the -wal file after which it is checkpointed: few, so that cuts fall into checkpoints and after them."""

# --- the disk ------------------------------------------------------------------------------------------


class Disk(apsw.VFS):
    """SQLite's file layer, as the default of this process, with a trace of all that reaches the file system.

    ``failing``: called at every sync; True makes it fail as on a broken disk.
    """

    def __init__(self, names=()):
        self.trace = []
        self.inodes = {name: name for name in names}
        self.made = 0
        self.failing = lambda: False
        super().__init__("power", "unix", makedefault=True, iVersion=3)

    def note(self, *fact):
        self.trace.append(("note", *fact))

    def xOpen(self, name, flags):
        return TracedFile(self, name, flags)

    def xDelete(self, name, sync):
        started = len(self.trace)
        super().xDelete(name, sync)
        self.inodes.pop(os.path.basename(name), None)
        self.trace.append(("link", os.path.basename(name), None))
        if sync:
            self.trace.append(("sync directory", started + 1))


class TracedFile(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        kind, self.disk = flags[0], disk
        super().__init__("unix", name, flags)
        path = os.path.basename(name if isinstance(name, str) else name.filename())
        if path not in disk.inodes:
            disk.made += 1
            disk.inodes[path] = f"{path}#{disk.made}"
            disk.trace.append(("link", path, disk.inodes[path]))
        self.inode = disk.inodes[path]
        journal = kind & (apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL)
        self.new = bool(journal and kind & apsw.SQLITE_OPEN_CREATE)

    def xWrite(self, data, offset):
        self.disk.trace.append(("write", self.inode, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size):
        self.disk.trace.append(("write", self.inode, size, None))
        super().xTruncate(size)

    def xSync(self, flags):
        started = len(self.disk.trace)
        if self.disk.failing():
            self.disk.trace.append(("sync failed", self.inode, started))
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
        super().xSync(flags)
        self.disk.trace.append(("sync", self.inode, started))
        if self.new:
            self.new = False
            self.disk.trace.append(("sync directory", started))


class Platter:
    """The synced contents of the disk, and the writes that may have reached it since."""

    def __init__(self, files, rng):
        self.rng = rng
        self.synced = {name: bytearray(data) for name, data in files.items()}  # by inode
        self.unsynced = {name: [] for name in files}  # by inode: (when, offset, data, doubtful)
        self.names = {name: name for name in files}
        self.links = []  # (when, name, inode), not synced yet

    def apply_entry(self, when, entry):
        match entry:
            case "link", name, inode:
                self.links.append((when, name, inode))
                if inode is not None:
                    self.synced[inode], self.unsynced[inode] = bytearray(), []
            case "write", inode, offset, data:
                self.unsynced[inode].append((when, offset, data, False))
            case "sync", inode, started:
                for _, offset, data, doubtful in (op for op in self.unsynced[inode] if op[0] < started):
                    if doubtful:
                        self._write_maybe(self.synced[inode], offset, data, junk=False)
                    else:
                        put(self.synced[inode], offset, data)
                self.unsynced[inode] = [op for op in self.unsynced[inode] if op[0] >= started]
            case "sync failed", inode, started:
                self.unsynced[inode] = [(*op[:3], op[3] or op[0] < started) for op in self.unsynced[inode]]
            case "sync directory", started:
                for _, name, inode in (link for link in self.links if link[0] < started):
                    self.names[name] = inode
                self.links = [link for link in self.links if link[0] >= started]

    def cut(self):
        """Return files that a power cut might leave now."""
        names = self.names | {name: inode for _, name, inode in self.links if self.rng.random() < 0.5}
        return {name: self._left(inode) for name, inode in names.items() if inode is not None}

    def _left(self, inode):
        data, unsynced = bytearray(self.synced[inode]), self.unsynced[inode]
        match self.rng.choice(["nothing", "everything", "first", "some", "some", "some"]):
            case "nothing":
                unsynced = []
            case "everything" | "first" as how:
                for _, offset, new, _ in (
                    unsynced if how == "everything" else unsynced[: self.rng.randint(0, len(unsynced))]
                ):
                    put(data, offset, new)
            case _:
                for _, offset, new, doubtful in unsynced:
                    self._write_maybe(data, offset, new, junk=not doubtful)
        return bytes(data)

    def _write_maybe(self, data, offset, new, *, junk):
        fate = self.rng.random()
        if fate < 0.4:
            put(data, offset, new)
        elif fate > 0.7 and new is not None:
            end = offset + len(new)
            while offset < end:
                border = min(end, (offset // SECTOR + 1) * SECTOR)
                part, new = new[: border - offset], new[border - offset :]
                match self.rng.choice(["old", "new", "junk" if junk else "old"]):
                    case "new":
                        put(data, offset, part)
                    case "junk":
                        put(data, offset, self.rng.randbytes(len(part)))
                offset = border


def put(data, offset, new):
    """Apply a write, or with None a truncation, to the bytes of a file."""
    if new is None:
        del data[offset:]
    data.extend(bytes(max(0, offset - len(data))))
    if new is not None:
        data[offset : offset + len(new)] = new


# --- the runtime ---------------------------------------------------------------------------------------


class RecordingStore(SQLiteStore):
    """A store that records every append and its outcome in the trace."""

    def __init__(self, disk, path, *, early=False, **options):
        super().__init__(path, **options)
        self._disk, self._early = disk, early

    async def append(self, append):
        name, artifacts = append.conversation, [sha for sha, _ in append.artifacts]
        places = [((name, append.expected + n), body) for n, body in enumerate(append.events, 1)]
        self._disk.note("append", "asked", places, [])
        if self._early:  # the negative control: acknowledges before the commit
            self._disk.note("append", "acknowledged", places, artifacts)
        try:
            await super().append(append)
        except StoreError as failure:
            self._disk.note("append", failure.details["outcome"], places, [])
            raise
        except HoldfastError:
            self._disk.note("append", "nothing", places, [])
            raise
        self._disk.note("append", "acknowledged", places, artifacts)


def make_agent(effect):
    """Return an agent with two gated tools: one that must not run again, one that may."""

    @tool(approval="required", recovery="fail", expires="1h")
    async def charge(n: int, call: Call) -> str:
        """Charge a card."""
        effect(call)
        return "charged " * n

    @tool(approval="required", recovery="redispatch", expires="1h")
    async def mail(n: int, call: Call) -> str:
        """Send a mail."""
        effect(call)
        return "sent"

    def calls(request):
        n = 10_000 if len(request.messages) % 3 == 0 else len(request.messages)  # over 64 KiB: an artifact
        return [ToolCall("charge", {"n": n}), ToolCall("mail", {"n": n})]

    return Agent("till", model=ScriptedModel([calls, "Done."] * 20, follow=True), tools=[charge, mail])


async def settle(rt, name, record):
    """Approve pending calls until the conversation is at rest; retry if the disk fails."""
    while True:
        row = await rt.store.row(name)
        if row is None or (row.status == "idle" and not row.owes):
            return
        for entry in await rt.pending(name):
            by = f"boss of {entry.call}"
            try:
                accepted = await rt.resolve(name, entry.call, Approve(digest=entry.digest), by=by)
            except (Refused, StoreError):
                continue  # the next iteration reads the pending calls again
            record("answer", name, entry.call, accepted.seq, by)
        await asyncio.sleep(0.001)


@contextmanager
def trace_disk(names):
    disk = Disk(names)
    frames, writer.CHECKPOINT_FRAMES = writer.CHECKPOINT_FRAMES, CHECKPOINT
    try:
        yield disk
    finally:
        writer.CHECKPOINT_FRAMES = frames
        disk.unregister()


async def run_life(directory, rng, *, synchronous="FULL", early=False, failing=0.0):
    """Return the trace of a runtime in which users write to some conversations and approve calls."""
    with trace_disk(os.listdir(directory)) as disk:
        agent = make_agent(lambda call: disk.note("effect", call.conversation, call.id))
        store = RecordingStore(disk, directory / STORE, synchronous=synchronous, early=early)
        async with asyncio.timeout(REST_SECONDS), Runtime(agent, store=store, drain=0) as rt:
            disk.failing = lambda: rng.random() < failing

            async def converse(name):
                await asyncio.sleep(rng.random() / 20)
                words = rng.randbytes(rng.choice([5, 50, 9000])).hex()
                while True:
                    try:
                        await rt.send(name, words, by=name, agent="till", when_busy="queue")
                        break
                    except StoreError:
                        continue
                await settle(rt, name, disk.note)

            await asyncio.gather(*(converse(f"c{n}") for n in range(CONVERSATIONS)))
            disk.failing = lambda: False
    return disk.trace


# --- checks --------------------------------------------------------------------------------------------


class Facts:
    """The records of clients and tools at the moment of the cut."""

    def __init__(self, bodies=None, effects=()):
        self.outcomes = {place: {body: "acknowledged"} for place, body in (bodies or {}).items()}
        self.artifacts, self.answers, self.effects = [], [], Counter(effects)

    def record(self, fact):
        match fact:
            case "append", outcome, places, artifacts:
                for place, body in places:
                    outcomes = self.outcomes.setdefault(place, {})
                    if outcomes.get(body) != "acknowledged":
                        outcomes[body] = outcome
                self.artifacts += artifacts
            case "answer", *answer:
                self.answers.append(answer)
            case "effect", conversation, call:
                self.effects[conversation, call] += 1


def images(files, facts, trace, moments, rng):
    """Yield possible contents after cuts at these moments; meanwhile the facts are those of the moment."""
    platter, done = Platter(files, rng), 0
    for moment in moments:
        for at in range(done, moment):
            platter.apply_entry(at, trace[at])
            if trace[at][0] == "note":
                facts.record(trace[at][1:])
        done = moment
        yield moment, platter.cut()


class Power:
    """A run: a series of lives of a runtime, each on the disk that a power cut left of the one before."""

    def __init__(self, directory, *, cuts, seed=1, lives=3, cuts_a_life=50, **options):
        self.directory, self.cuts, self.lives, self.cuts_a_life = Path(directory), cuts, lives, cuts_a_life
        self.options, self.rng = options, random.Random(seed)
        self.count, self.violations = Counter(), []

    async def run(self):
        started = time.monotonic()
        while self.count["cuts"] < self.cuts:
            files, facts = {}, Facts()
            for _ in range(self.lives):
                place = self._write_files(files)
                trace = await run_life(Path(place.name), self.rng, **self.options)
                place.cleanup()
                self.count["failed syncs"] += sum(entry[0] == "sync failed" for entry in trace)
                left = await self._cut(files, facts, trace)
                if left is None:
                    break
                files, facts = left
        self.seconds = time.monotonic() - started
        return self

    async def _cut(self, files, facts, trace):
        """Cut this life at many moments; return the result of one of them for the next life, if it has no violation."""
        delicate = [at + 1 for at, entry in enumerate(trace) if entry[0].startswith(("sync", "note"))]
        delicate += [at for at, entry in enumerate(trace) if entry[0].startswith("sync")]
        half = self.cuts_a_life // 2
        moments = sorted(self.rng.choices(range(len(trace) + 1), k=half) + self.rng.choices(delicate, k=half))
        next_life, left = self.rng.randrange(len(moments)), None
        moments = moments[: self.cuts - self.count["cuts"]]
        for number, (moment, image) in enumerate(images(files, facts, trace, moments, self.rng)):
            bodies = await self._examine(image, facts, f"cut {self.count['cuts']}, at {moment} of {len(trace)}")
            if number == next_life and bodies is not None:
                left = image, Facts(bodies, facts.effects)
        return left

    def _write_files(self, files):
        place = tempfile.TemporaryDirectory(dir=self.directory)
        for name, data in files.items():
            (Path(place.name) / name).write_bytes(data)
        return place

    async def _examine(self, image, facts, where):
        """Open the files after a cut; count lost events and answers; return the logs if nothing is wrong."""
        self.count["cuts"] += 1
        due = {
            place: body
            for place, outcomes in facts.outcomes.items()
            for body in outcomes
            if outcomes[body] == "acknowledged"
        }
        self.count["acknowledged events"] += len(due)
        self.count["acknowledged answers"] += len(facts.answers)
        place = self._write_files(image)
        if self.rng.random() < 0.5 and image:  # shared memory holds no data: its contents must not matter
            (Path(place.name) / f"{STORE}-shm").write_bytes(self.rng.randbytes(32768))
        path = Path(place.name) / STORE
        try:
            bodies, complaints = await read_store(path, facts)
        except HoldfastError as broken:
            bodies, complaints = {}, [f"cannot be read: {broken}"]
        self.violations += [f"{where}: {complaint}" for complaint in complaints]
        self.count["cuts that left no sound store"] += bool(complaints)
        lost = sum(bodies.get(place) != body for place, body in due.items())
        self.count["lost events"] += lost
        gone = [(name, call) for name, call, seq, by in facts.answers if not decides(bodies.get((name, seq)), call, by)]
        self.count["lost answers"] += len(gone)
        if lost or gone:
            self.violations.append(f"{where}: {lost} acknowledged events and the answers {gone} are lost")
        sound = not (complaints or lost or gone)
        if sound:
            try:
                await check_recovery(path, bodies, facts.effects, self.count)
            except (HoldfastError, AssertionError, TimeoutError) as broken:
                self.violations.append(f"{where}: {broken!r}")
                sound = False
        place.cleanup()
        return bodies if sound else None

    def table(self):
        return "\n".join(
            [f"{what:32} {times:9,}" for what, times in self.count.items()]
            + [f"{'violations':32} {len(self.violations):9,}   in {self.seconds:.0f} s"]
        )


def decides(body, call, by):
    event = body and codec.decode_event(body)
    return isinstance(event, CallResolved) and event.call_id == call and event.by.id == by


async def read_store(path, facts):
    """Return every event by (conversation, seq), and the problems that the store has."""
    store, bodies, wrong = SQLiteStore(path, synchronous="OFF"), {}, []  # no power cut follows
    await store.open()
    try:
        found = await store._writer.run(lambda db: db.execute("PRAGMA integrity_check").get)
        if found != "ok":
            wrong.append(found)
        for row in await store.rows():
            name, log = row.conversation, await store.read(row.conversation)
            hashes = await store.hashes(name)
            if hashes != hash_chain(GENESIS, log) or (row.seq, row.hash) != (len(log), [GENESIS, *hashes][-1]):
                wrong.append(f"{name}: the hash chain does not hold")
            for seq, body in enumerate(log, 1):
                bodies[name, seq] = body
                match facts.outcomes.get((name, seq), {}).get(body):
                    case None:
                        wrong.append(f"{name}: event {seq} was never appended")
                    case "nothing":
                        wrong.append(f"{name}: event {seq} is in the log, although its append was reported as failed")
        wrong += [f"artifact {sha} is lost" for sha in facts.artifacts if await store.artifact(sha) is None]
    finally:
        await store.close()
    return bodies, wrong


async def check_recovery(path, bodies, effects, count):
    """Bring everything to rest with a new runtime, and check that each call runs as its recovery declares."""
    before = calls_of(bodies)
    after = Counter()
    agent = make_agent(lambda call: after.update([(call.conversation, call.id)]))
    async with asyncio.timeout(REST_SECONDS), Runtime(agent, store=SQLiteStore(path, synchronous="OFF"), drain=0) as rt:
        names = {name for name, _ in bodies}
        await asyncio.gather(*(settle(rt, name, lambda *fact: None) for name in names))
        logs = {(name, event.seq): codec.encode_event(event) for name in names for event in await rt.history(name)}
    for key, (tool_name, _, results) in calls_of(logs).items():
        assert len(results) == 1, f"{key}: {len(results)} results"
        _, started, returned = before.get(key, (tool_name, False, []))
        assert started or not effects[key], f"{key}: took effect, but its start is not in the log"
        if returned:
            expected, how = 0, "done before the cut"
        elif not started:
            expected, how = 1, "run after the cut"
        elif tool_name == "mail":
            expected, how = 1, "run again"
        else:
            expected, how = 0, "reported as interrupted"
            assert results[0].error is not None, f"{key}: not reported as interrupted"
            assert results[0].error.kind == "interrupted"
        assert after[key] == expected, f"{key}: {how}, but ran {after[key]} times after the cut"
        count[f"calls {how}"] += 1


def calls_of(bodies):
    """Return, by conversation and call: its tool, whether it was started, its results."""
    calls = {}
    for (name, _), body in sorted(bodies.items()):
        match codec.decode_event(body):
            case AssistantSaid(calls=made):
                calls |= {(name, call.id): [call.tool, False, []] for call in made}
            case CallStarted(call_id=call):
                calls[name, call][1] = True
            case CallReturned(call_id=call) as returned:
                calls[name, call][2].append(returned)
    return calls


CONTROLS = {"off": {"synchronous": "OFF"}, "normal": {"synchronous": "NORMAL"}, "early": {"early": True}}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failing", type=float, default=0.0, help="the share of syncs that fail")
    parser.add_argument("--control", choices=CONTROLS, help="a deliberate defect, which the checker must report")
    given = parser.parse_args(argv)
    options = CONTROLS.get(given.control, {})
    with tempfile.TemporaryDirectory() as scratch:
        run = asyncio.run(Power(scratch, cuts=given.cuts, seed=given.seed, failing=given.failing, **options).run())
    print(run.table())
    for violation in run.violations[:5]:
        print(f"\nVIOLATION {violation}")
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
