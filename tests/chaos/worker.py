"""A process that runs the agent, and the server that forks it.

``python worker.py BACKEND`` imports everything once and forks a worker for each line that it reads; a worker is up in
milliseconds, and no thread or loop existed before the fork. A worker opens the store, runs owed work, and
performs requests from a socket, one JSON object a line: the answer is sent when the runtime has made it durable.
Its order has its faults: it dies (or stops) at a named point, its disk fills up, its clock jumps, or it has a
deliberate defect. The module BACKEND (``on_sqlite``, ``on_postgres``) implements them.
"""

import asyncio
import importlib
import json
import logging
import os
import signal
import sys

import deliveries
import msgspec
import shop
from peers import refusal

from holdfast.core.decisions import Decision
from holdfast.errors import HoldfastError


def make_crash_hook(order):
    """Return a hook that dies at a named point, the n-th time: ``point@n``; or stops until SIGCONT: ``point@n!``."""
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
    shop.Process.ledger = os.open(order["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    shop.Process.seed, shop.Process.worker = order["seed"], order["worker"]
    if order["crash"]:
        crash = make_crash_hook(order["crash"])
        shop.Process.crash = staticmethod(crash)
        backend.arm(crash)
    deliveries.hurry()
    # The receiver fails at times, which is logged.
    logging.getLogger("holdfast").addFilter(lambda record: not deliveries.is_about_receiver(record))
    if order["control"]:
        backend.CONTROLS[order["control"]](order)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print_tasks)
    tasks = set()
    async with backend.run_worker(order) as (rt, hello, verbs):
        reader, out = await asyncio.open_unix_connection(order["socket"])
        out.write(json.dumps({"worker": order["worker"], **hello}).encode() + b"\n")
        while line := await reader.readline():
            request = json.loads(line)
            if request["verb"] == "exit":
                break
            task = asyncio.create_task(serve(rt, verbs, request, out))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def print_tasks():
    """Print what every task is doing."""
    for task in asyncio.all_tasks():
        task.print_stack()


async def serve(rt, verbs, request, out):
    try:
        answer = {"outcome": "ok", "seq": await perform(rt, verbs, request)}
    except HoldfastError as failure:
        answer = refusal(failure)
    out.write(json.dumps({"id": request["id"], **answer}).encode() + b"\n")


async def perform(rt, verbs, request):
    """Perform a request; return its sequence number, or the value of the backend's own verb."""
    if request["verb"] in verbs:
        value = verbs[request["verb"]](request)
        return await value if asyncio.iscoroutine(value) else value
    conversation, by = request["conversation"], shop.principal(request["by"], request.get("person"))
    match request["verb"]:
        case "send":
            agent, when_busy = shop.agent_of(conversation), request["when_busy"]
            turn = await rt.send(conversation, request["text"], by=by, agent=agent, when_busy=when_busy)
            return turn.seq
        case "resolve":
            decisions = msgspec.convert(request["decisions"], dict[str, Decision])
            return (await rt.resolve_many(conversation, decisions, by=by)).seq
        case "rename":
            return await rt.rename(conversation, request["text"], by=by)
        case "archive":
            return await rt.archive(conversation, request["archived"], by=by)
        case "cancel":
            return None if await rt.cancel(conversation, by=by) else 0
        case verb:
            raise ValueError(verb)


def serve_forks(backend):
    """Fork a worker for each line of standard input, and print its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
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
