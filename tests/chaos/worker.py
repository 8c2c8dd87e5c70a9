"""A process that runs the agent, and the server that forks it.

``python worker.py`` imports everything once and forks a worker for each line that it reads; a worker is up in
milliseconds, and no thread or loop existed before the fork. A worker opens the store, runs what is owed, and
does what its client asks for over a socket, one JSON object a line: the answer is sent when the runtime says that
it is durable. ``ASSENT_CHAOS_CRASH=point@n`` in its environment kills it at the n-th time that it comes by.
"""

import asyncio
import json
import os
import signal
import sys
import time

import msgspec
import shop

from assent import Runtime
from assent.core import machine
from assent.core.decisions import Decision
from assent.errors import AssentError, Refused
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


def hurry():
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


def rerun():
    """Another negative control: whatever was interrupted runs again, also what must not."""
    recover = machine._recover
    machine._recover = lambda log, call, recovery, epoch: recover(log, call, "redispatch", epoch)


CONTROLS = {"ack": hurry, "rerun": rerun}


async def work(order):
    shop.Place.ledger = os.open(order["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    shop.Place.seed = order["seed"]
    if os.environ.get("ASSENT_CHAOS_CRASH"):
        arm(os.environ["ASSENT_CHAOS_CRASH"])
    if order["control"]:
        CONTROLS[order["control"]]()
    async with Runtime(shop.agent(), store=SQLiteStore(order["store"])) as rt:
        reader, out = await asyncio.open_unix_connection(order["socket"])
        out.write(json.dumps({"worker": order["worker"]}).encode() + b"\n")
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(serve(rt, json.loads(line), out))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def serve(rt, asked, out):
    try:
        answer = {"outcome": "ok", "seq": await perform(rt, asked)}
    except Refused as refusal:
        answer = {"outcome": "refused", "said": repr(refusal)}
    except AssentError as failure:
        answer = {"outcome": "unknown", "said": repr(failure)}
    out.write(json.dumps({"id": asked["id"], **answer}).encode() + b"\n")


async def perform(rt, asked):
    """Where it stands in the log."""
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
