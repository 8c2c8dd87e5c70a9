"""Power cuts: what a disk may hold after one, and whether everything that was acknowledged is in it.

    python tests/chaos/power.py --cuts 2000 --seed 7

After a power cut a disk holds what was synced and, of what was written since, anything: some writes and not others,
whole or torn at the borders of sectors, in any order. A live machine never shows that, because its page cache has it
all. So the runtime works on a ``Disk``, a layer under SQLite that keeps a trace of every write, truncation, sync,
creation and deletion, and in the same trace what clients were told and what tools did. A ``Platter`` replays the trace
up to a moment and says what might be left. That is opened by a fresh store, and then by a fresh runtime, which goes on.

What is relied on is what SQLite relies on: a sync that returned holds; a write leaves the bytes beside it alone; and a
directory is synced with the first sync of a journal or -wal file that was opened to be created. A sync that *failed*
leaves what it was to sync for ever in doubt: a later sync that succeeds says nothing about it.
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
PATIENCE = 60.0
"""Seconds in which everything must come to rest."""
CHECKPOINT = 25
"""Pages in the -wal file after which it is copied: few, so that cuts meet copies and a -wal file that begins anew."""

# --- the disk ------------------------------------------------------------------------------------------


class Disk(apsw.VFS):
    """SQLite's file layer, as the default of this process, with a trace of all that reaches the file system.

    ``failing``: asked at every sync; True makes it fail as a broken disk does.
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
        began = len(self.trace)
        super().xDelete(name, sync)
        self.inodes.pop(os.path.basename(name), None)
        self.trace.append(("link", os.path.basename(name), None))
        if sync:
            self.trace.append(("sync directory", began + 1))


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
        began = len(self.disk.trace)
        if self.disk.failing():
            self.disk.trace.append(("sync failed", self.inode, began))
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
        super().xSync(flags)
        self.disk.trace.append(("sync", self.inode, began))
        if self.new:
            self.new = False
            self.disk.trace.append(("sync directory", began))


class Platter:
    """What is on the disk for certain, and what may have got there since."""

    def __init__(self, files, dice):
        self.dice = dice
        self.solid = {name: bytearray(data) for name, data in files.items()}  # by inode
        self.loose = {name: [] for name in files}  # by inode: (when, offset, data, doubtful)
        self.names = {name: name for name in files}
        self.links = []  # (when, name, inode), not synced yet

    def turn(self, when, entry):
        match entry:
            case "link", name, inode:
                self.links.append((when, name, inode))
                if inode is not None:
                    self.solid[inode], self.loose[inode] = bytearray(), []
            case "write", inode, offset, data:
                self.loose[inode].append((when, offset, data, False))
            case "sync", inode, began:
                for _, offset, data, doubtful in (op for op in self.loose[inode] if op[0] < began):
                    if doubtful:
                        self._perhaps(self.solid[inode], offset, data, junk=False)
                    else:
                        put(self.solid[inode], offset, data)
                self.loose[inode] = [op for op in self.loose[inode] if op[0] >= began]
            case "sync failed", inode, began:
                self.loose[inode] = [(*op[:3], op[3] or op[0] < began) for op in self.loose[inode]]
            case "sync directory", began:
                for _, name, inode in (link for link in self.links if link[0] < began):
                    self.names[name] = inode
                self.links = [link for link in self.links if link[0] >= began]

    def cut(self):
        """The files that a power cut might leave now."""
        names = self.names | {name: inode for _, name, inode in self.links if self.dice.random() < 0.5}
        return {name: self._left(inode) for name, inode in names.items() if inode is not None}

    def _left(self, inode):
        data, loose = bytearray(self.solid[inode]), self.loose[inode]
        match self.dice.choice(["nothing", "everything", "first", "some", "some", "some"]):
            case "nothing":
                loose = []
            case "everything" | "first" as how:
                for _, offset, new, _ in loose if how == "everything" else loose[: self.dice.randint(0, len(loose))]:
                    put(data, offset, new)
            case _:
                for _, offset, new, doubtful in loose:
                    self._perhaps(data, offset, new, junk=not doubtful)
        return bytes(data)

    def _perhaps(self, data, offset, new, *, junk):
        fate = self.dice.random()
        if fate < 0.4:
            put(data, offset, new)
        elif fate > 0.7 and new is not None:
            end = offset + len(new)
            while offset < end:
                border = min(end, (offset // SECTOR + 1) * SECTOR)
                part, new = new[: border - offset], new[border - offset :]
                match self.dice.choice(["old", "new", "junk" if junk else "old"]):
                    case "new":
                        put(data, offset, part)
                    case "junk":
                        put(data, offset, self.dice.randbytes(len(part)))
                offset = border


def put(data, offset, new):
    """A write, or with None a truncation, into the bytes of a file."""
    if new is None:
        del data[offset:]
    data.extend(bytes(max(0, offset - len(data))))
    if new is not None:
        data[offset : offset + len(new)] = new


# --- what runs on it -----------------------------------------------------------------------------------


class Noting(SQLiteStore):
    """A store that notes what it was asked to append, and what it said to that."""

    def __init__(self, disk, path, *, early=False, **options):
        super().__init__(path, **options)
        self._disk, self._early = disk, early

    async def append(self, append):
        name, artifacts = append.conversation, [sha for sha, _ in append.artifacts]
        places = [((name, append.expected + n), body) for n, body in enumerate(append.events, 1)]
        self._disk.note("append", "asked", places, [])
        if self._early:  # the negative control: says so before it has done it
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


def till(effect):
    """An agent with two gated tools: one that must not run again, one that may."""

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


async def settle(rt, name, noted):
    """Approve whatever waits until the conversation is at rest; a failing disk is asked again."""
    while True:
        row = await rt.store.row(name)
        if row is None or (row.status == "idle" and not row.owes):
            return
        for entry in await rt.pending(name):
            by = f"boss of {entry.call}"
            try:
                accepted = await rt.resolve(name, entry.call, Approve(digest=entry.digest), by=by)
            except (Refused, StoreError):
                continue  # who lost a reply looks again
            noted("answer", name, entry.call, accepted.seq, by)
        await asyncio.sleep(0.001)


@contextmanager
def recorded(names):
    disk = Disk(names)
    frames, writer.CHECKPOINT_FRAMES = writer.CHECKPOINT_FRAMES, CHECKPOINT
    try:
        yield disk
    finally:
        writer.CHECKPOINT_FRAMES = frames
        disk.unregister()


async def live(directory, dice, *, synchronous="FULL", early=False, failing=0.0):
    """One life of a runtime: people write to some conversations and approve what they see; the trace of it."""
    with recorded(os.listdir(directory)) as disk:
        agent = till(lambda call: disk.note("effect", call.conversation, call.id))
        store = Noting(disk, directory / STORE, synchronous=synchronous, early=early)
        async with asyncio.timeout(PATIENCE), Runtime(agent, store=store, drain=0) as rt:
            disk.failing = lambda: dice.random() < failing

            async def converse(name):
                await asyncio.sleep(dice.random() / 20)
                words = dice.randbytes(dice.choice([5, 50, 9000])).hex()
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


# --- what must be there --------------------------------------------------------------------------------


class Facts:
    """What clients and tools know at the moment of the cut."""

    def __init__(self, bodies=None, effects=()):
        self.said = {place: {body: "acknowledged"} for place, body in (bodies or {}).items()}
        self.artifacts, self.answers, self.effects = [], [], Counter(effects)

    def hear(self, fact):
        match fact:
            case "append", outcome, places, artifacts:
                for place, body in places:
                    told = self.said.setdefault(place, {})
                    if told.get(body) != "acknowledged":
                        told[body] = outcome
                self.artifacts += artifacts
            case "answer", *answer:
                self.answers.append(answer)
            case "effect", conversation, call:
                self.effects[conversation, call] += 1


def images(files, facts, trace, moments, dice):
    """What cuts at these moments might leave, each when the facts are as they were then."""
    platter, done = Platter(files, dice), 0
    for moment in moments:
        for at in range(done, moment):
            platter.turn(at, trace[at])
            if trace[at][0] == "note":
                facts.hear(trace[at][1:])
        done = moment
        yield moment, platter.cut()


class Power:
    """A run: lives that end in a power cut, each beginning with what a cut has left of the one before."""

    def __init__(self, directory, *, cuts, seed=1, lives=3, cuts_a_life=50, **options):
        self.directory, self.cuts, self.lives, self.cuts_a_life = Path(directory), cuts, lives, cuts_a_life
        self.options, self.dice = options, random.Random(seed)
        self.count, self.violations = Counter(), []

    async def run(self):
        started = time.monotonic()
        while self.count["cuts"] < self.cuts:
            files, facts = {}, Facts()
            for _ in range(self.lives):
                place = self._laid_out(files)
                trace = await live(Path(place.name), self.dice, **self.options)
                place.cleanup()
                self.count["failed syncs"] += sum(entry[0] == "sync failed" for entry in trace)
                left = await self._cut(files, facts, trace)
                if left is None:
                    break
                files, facts = left
        self.seconds = time.monotonic() - started
        return self

    async def _cut(self, files, facts, trace):
        """Cut this life at many moments; one of them, if all was well, is where the next life begins."""
        delicate = [at + 1 for at, entry in enumerate(trace) if entry[0].startswith(("sync", "note"))]
        delicate += [at for at, entry in enumerate(trace) if entry[0].startswith("sync")]
        half = self.cuts_a_life // 2
        moments = sorted(self.dice.choices(range(len(trace) + 1), k=half) + self.dice.choices(delicate, k=half))
        next_life, left = self.dice.randrange(len(moments)), None
        moments = moments[: self.cuts - self.count["cuts"]]
        for number, (moment, image) in enumerate(images(files, facts, trace, moments, self.dice)):
            bodies = await self._examine(image, facts, f"cut {self.count['cuts']}, at {moment} of {len(trace)}")
            if number == next_life and bodies is not None:
                left = image, Facts(bodies, facts.effects)
        return left

    def _laid_out(self, files):
        place = tempfile.TemporaryDirectory(dir=self.directory)
        for name, data in files.items():
            (Path(place.name) / name).write_bytes(data)
        return place

    async def _examine(self, image, facts, where):
        """Open what is left: the log, if everything that must be there is there; what is not is counted."""
        self.count["cuts"] += 1
        due = {place: body for place, said in facts.said.items() for body in said if said[body] == "acknowledged"}
        self.count["acknowledged events"] += len(due)
        self.count["acknowledged answers"] += len(facts.answers)
        place = self._laid_out(image)
        if self.dice.random() < 0.5 and image:  # shared memory is no data: whatever is left of it must not matter
            (Path(place.name) / f"{STORE}-shm").write_bytes(self.dice.randbytes(32768))
        path = Path(place.name) / STORE
        try:
            bodies, complaints = await read(path, facts)
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
                await go_on(path, bodies, facts.effects, self.count)
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


async def read(path, facts):
    """Every log in the store, by place, and what is wrong with what a store can be asked about itself."""
    store, bodies, wrong = SQLiteStore(path, synchronous="OFF"), {}, []  # the power stays on now
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
                match facts.said.get((name, seq), {}).get(body):
                    case None:
                        wrong.append(f"{name}: nobody ever wrote event {seq}")
                    case "nothing":
                        wrong.append(f"{name}: event {seq} is there, and it was said that nothing was recorded")
        wrong += [f"artifact {sha} is lost" for sha in facts.artifacts if await store.artifact(sha) is None]
    finally:
        await store.close()
    return bodies, wrong


async def go_on(path, bodies, effects, count):
    """A fresh runtime brings everything to its end, and each call runs as its recovery says."""
    before = calls_of(bodies)
    after = Counter()
    agent = till(lambda call: after.update([(call.conversation, call.id)]))
    async with asyncio.timeout(PATIENCE), Runtime(agent, store=SQLiteStore(path, synchronous="OFF"), drain=0) as rt:
        names = {name for name, _ in bodies}
        await asyncio.gather(*(settle(rt, name, lambda *fact: None) for name in names))
        logs = {(name, event.seq): codec.encode_event(event) for name in names for event in await rt.history(name)}
    for key, (tool_name, _, results) in calls_of(logs).items():
        assert len(results) == 1, f"{key}: {len(results)} results"
        _, started, returned = before.get(key, (tool_name, False, []))
        assert started or not effects[key], f"{key}: took effect, and its start is not in the log"
        if returned:
            expected, how = 0, "done before the cut"
        elif not started:
            expected, how = 1, "run after the cut"
        elif tool_name == "mail":
            expected, how = 1, "run again"
        else:
            expected, how = 0, "reported as interrupted"
            assert results[0].error is not None, f"{key}: not known to be interrupted"
            assert results[0].error.kind == "interrupted"
        assert after[key] == expected, f"{key}: {how}, and ran {after[key]} times after the cut"
        count[f"calls {how}"] += 1


def calls_of(bodies):
    """By conversation and call: its tool, whether it was started, its results."""
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
    parser.add_argument("--control", choices=CONTROLS, help="break it on purpose: the checker must see it")
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
