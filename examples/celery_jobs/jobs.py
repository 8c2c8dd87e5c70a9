"""Celery jobs with an agent that asks before it refunds money: `celery -A jobs worker`.

The broker and the results are files in a folder, so that the example needs no server; set CELERY_BROKER and
CELERY_RESULTS to use your own.
"""

import os
from pathlib import Path

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown

from holdfast import Agent, Approve, Deny, ScriptedModel, ToolCall, blocking, tool


@tool(approval="required", prompt="Refund order {order}?")
def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded order {order}"


script = [[ToolCall("refund", {"order": 42})], "Order 42 is refunded."]
agent = Agent("desk", model=ScriptedModel(script, follow=True), tools=[refund])

folder = Path(os.environ.get("CELERY_FOLDER", "celery-files")).absolute()
(folder / "results").mkdir(parents=True, exist_ok=True)

app = Celery(
    "jobs",
    broker=os.environ.get("CELERY_BROKER", "filesystem://"),
    backend=os.environ.get("CELERY_RESULTS", f"file://{folder}/results"),
)
if "CELERY_BROKER" not in os.environ:
    app.conf.broker_transport_options = {
        "data_folder_in": f"{folder}/messages",
        "data_folder_out": f"{folder}/messages",
        "control_folder": f"{folder}/control",
    }
    for name in ("messages", "control"):
        (folder / name).mkdir(exist_ok=True)
app.conf.worker_proc_alive_timeout = 60  # seconds that a new process may take to open the store

runtime: blocking.Runtime


@worker_process_init.connect
def open_runtime(**_: object) -> None:
    """Create the runtime in each process of the pool: after the fork, not before."""
    global runtime
    runtime = blocking.Runtime(agent, store=os.environ.get("HOLDFAST_STORE", "sqlite:///holdfast.db"))
    runtime.start()


@worker_process_shutdown.connect
def close_runtime(**_: object) -> None:
    """Let running tools finish, and close the store."""
    runtime.close()


@app.task
def ask(text: str, by: str) -> dict[str, object]:
    """Send a message; return the reply, and the calls that wait for a decision."""
    result = runtime.run(text, by=by)
    return {
        "conversation": result.conversation,
        "text": result.text,
        "pending": [{"call": each.call, "prompt": each.prompt, "digest": each.digest} for each in result.pending],
    }


@app.task
def decide(conversation: str, call: str, digest: str | None, by: str) -> str:
    """Approve what the digest stands for, or deny it without one; wait for the turn and return the reply."""
    runtime.resolve(conversation, call, Approve(digest=digest) if digest else Deny(), by=by)
    return runtime.wait(conversation).text
