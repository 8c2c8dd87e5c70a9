"""A process that runs the agent, and the server that forks it.

``python worker.py BACKEND`` imports everything once and forks a worker for each line that it reads; a worker is up in
milliseconds, and no thread or loop existed before the fork. A worker opens the store, runs what is owed, and
does what its client asks for over a socket, one JSON object a line: the answer is sent when the runtime says that
it is durable. What is wrong with it stands in its order: it dies (or stands still) at a named point, its disk fills
up, its clock jumps, or it is broken on purpose. The module BACKEND (``on_sqlite``, ``on_postgres``) knows how.
"""

import asyncio
import importlib
import json
import os
import signal
import sys

import msgspec
import shop
from peers import refusal

from holdfast.core.decisions import Decision
from holdfast.errors import HoldfastError


def armed(order):
    """Die at a named point, the n-th time: ``point@n``; or stand still, until somebody wakes us: ``point@n!``."""
    point, _, times = order.rstrip("!").partition("@")
    left, sign = int(times or 1), signal.SIGSTOP if order.endswith("!") else signal.SIGKILL

    def crash(name):
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), sign)

    return crash


async def work(backend, order):
    shop.Place.ledger = os.open(order["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    shop.Place.seed, shop.Place.worker = order["seed"], order["worker"]
    if order["crash"]:
        crash = armed(order["crash"])
        shop.Place.crash = staticmethod(crash)
        backend.arm(crash)
    if order["control"]:
        backend.CONTROLS[order["control"]](order)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, explain)
    tasks = set()
    async with backend.at_work(order) as (rt, hello, verbs):
        reader, out = await asyncio.open_unix_connection(order["socket"])
        out.write(json.dumps({"worker": order["worker"], **hello}).encode() + b"\n")
        while line := await reader.readline():
            asked = json.loads(line)
            if asked["verb"] == "leave":
                break
            task = asyncio.create_task(serve(rt, verbs, asked, out))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def explain():
    """Somebody wonders what we are doing."""
    for task in asyncio.all_tasks():
        task.print_stack()


async def serve(rt, verbs, asked, out):
    try:
        answer = {"outcome": "ok", "seq": await perform(rt, verbs, asked)}
    except HoldfastError as failure:
        answer = refusal(failure)
    out.write(json.dumps({"id": asked["id"], **answer}).encode() + b"\n")


async def perform(rt, verbs, asked):
    """Where it stands in the log, or what the backend's own verb says."""
    if asked["verb"] in verbs:
        told = verbs[asked["verb"]](asked)
        return await told if asyncio.iscoroutine(told) else told
    conversation, by = asked["conversation"], asked["by"]
    match asked["verb"]:
        case "send":
            turn = await rt.send(conversation, asked["text"], by=by, agent="shop", when_busy=asked["when_busy"])
            return turn.seq
        case "resolve":
            decisions = msgspec.convert(asked["decisions"], dict[str, Decision])
            return (await rt.resolve_many(conversation, decisions, by=by)).seq
        case "cancel":
            return None if await rt.cancel(conversation, by=by) else 0
        case verb:
            raise ValueError(verb)


def serve_forks(backend):
    """One line in, one process out: its id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(0)
                asyncio.run(work(backend, order))
            except BaseException as problem:
                print(f"worker {order['worker']}: {problem!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    serve_forks(importlib.import_module(sys.argv[1]))
