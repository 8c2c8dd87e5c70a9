"""A process that runs the agent, and the server that forks it.

``python worker.py`` imports everything once and forks a worker for each line that it reads; a worker is up in
milliseconds, and no thread or loop existed before the fork. A worker opens the store, runs what is owed, and
does what its client asks for over a socket, one JSON object a line: the answer is sent when the runtime says that
it is durable. ``ASSENT_CHAOS_CRASH=point@n`` in its environment kills it at the n-th time that it comes by.
Its disk may be one that fills, its clock one that jumps (``faults``), and it may run some conversations only.
"""

import asyncio
import json
import os
import signal
import sys
import time

import apsw
import msgspec
import shop
from faults import Clock, Disk
from peers import refusal

from assent import Runtime
from assent.core import machine
from assent.core.decisions import Accepted, Decision
from assent.errors import AssentError, Stale
from assent.stores import writer
from assent.stores.jobs import reply
from assent.stores.sqlite import SQLiteStore


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(order):
    """Die at a named point, the n-th time."""
    point, _, times = order.partition("@")
    left = int(times or 1)

    def crash(name):
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                die()

    writer.crash = crash
    shop.Place.crash = staticmethod(crash)


def hurry(_):
    """The negative control: replies when everything is checked and written, and then commits."""
    attempt, crash = writer.Writer._attempt, writer.crash
    now = []

    def remember(self, group):
        now[:] = group
        return attempt(self, group)

    def too_early(point):
        if point == "append:before_commit":
            reply(now)
            time.sleep(0.003)  # the answer is out before the disk has it
        if crash:
            crash(point)

    writer.Writer._attempt = remember
    writer.crash = too_early


def rerun(_):
    """Another negative control: whatever was interrupted runs again, also what must not."""
    recover = machine._recover
    machine._recover = lambda log, call, recovery, epoch: recover(log, call, "redispatch", epoch)


def winners(_):
    """Another: whoever comes second is told that they decided it."""
    submit = Runtime.submit

    async def polite(self, *args, **given):
        try:
            return await submit(self, *args, **given)
        except Stale as stale:
            if stale.reason != "resolved":
                raise
            return Accepted(0)

    Runtime.submit = polite


def greedy(order):
    """Another: a process that is to run some conversations runs them all."""
    order["only"] = None


def early(_):
    """Another: a clock is an hour ahead, deadlines pass by it, and nobody has seen it jump."""
    Clock.jump = lambda self, offset: setattr(self, "offset", 3600.0)


def blind(_):
    """Another: a commit that met a full disk is taken for one that did not."""
    attempt = writer.Writer._attempt

    def hopeful(self, group):
        fault, settled = attempt(self, group)
        return (None, True) if isinstance(fault, apsw.FullError) else (fault, settled)

    writer.Writer._attempt = hopeful


CONTROLS = {"ack": hurry, "rerun": rerun, "winners": winners, "greedy": greedy, "early": early, "blind": blind}


async def work(order):
    shop.Place.ledger = os.open(order["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    shop.Place.seed, shop.Place.worker = order["seed"], order["worker"]
    if os.environ.get("ASSENT_CHAOS_CRASH"):
        arm(os.environ["ASSENT_CHAOS_CRASH"])
    if order["control"]:
        CONTROLS[order["control"]](order)
    tasks = set()
    disk = Disk() if order["full"] else None
    clock = None
    if order["jumps"] is not None:
        clock = Clock(order["worker"], order["clocks"])
        tasks.add(asyncio.create_task(clock.jumps(order["jumps"])))
    store = SQLiteStore(order["store"])
    async with Runtime(shop.agent(), store=store, only=order["only"], clock=clock) as rt:
        reader, out = await asyncio.open_unix_connection(order["socket"])
        out.write(json.dumps({"worker": order["worker"]}).encode() + b"\n")
        while line := await reader.readline():
            asked = json.loads(line)
            if asked["verb"] == "leave":
                break
            task = asyncio.create_task(serve(rt, disk, asked, out))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def serve(rt, disk, asked, out):
    try:
        answer = {"outcome": "ok", "seq": await perform(rt, disk, asked)}
    except AssentError as failure:
        answer = refusal(failure)
    out.write(json.dumps({"id": asked["id"], **answer}).encode() + b"\n")


async def perform(rt, disk, asked):
    """Where it stands in the log; of a disk that is healed, how many writes it has refused."""
    if asked["verb"] == "room":
        disk.room = asked["bytes"]
        return disk.refused
    conversation, by = asked["conversation"], asked["by"]
    match asked["verb"]:
        case "send":
            turn = await rt.send(conversation, asked["text"], by=by, agent="shop", when_busy=asked["when_busy"])
            return turn.seq
        case "resolve":
            decisions = msgspec.convert(asked["decisions"], dict[str, Decision])
            return (await rt.submit(conversation, decisions, by=by)).seq
        case "cancel":
            return None if await rt.cancel(conversation, by=by) else 0
        case verb:
            raise ValueError(verb)


def serve_forks():
    """One line in, one process out: its id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(0)
                os.environ["ASSENT_CHAOS_CRASH"] = order["crash"] or ""
                asyncio.run(work(order))
            except BaseException as problem:
                print(f"worker {order['worker']}: {problem!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    serve_forks()
