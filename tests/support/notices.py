"""A channel that records, an agent that asks, and notices to send."""

# Tools that a person answers have a return type and no body.
# pyright: reportReturnType=false

from __future__ import annotations

from holdfast import Agent, ScriptedModel, ToolCall, tool
from holdfast.core.notice import NOTICE_KINDS, Notice, NoticeKind
from holdfast.stores.base import LogStore, OutboxRow


@tool(approval="required", risk="high", prompt="Give {amount} EUR of order {order} back?")
async def refund(order: int, amount: float) -> dict:
    """Give money back."""
    return {"refunded": amount}


@refund.preview
async def _(order: int, amount: float) -> dict:
    return {"pays": f"{amount:.2f} EUR for order {order}"}


@tool(executor="human", prompt="Which colour?")
def choose(note: str = "") -> str:
    """Ask which colour."""


@tool(executor="client")
def locate() -> str:
    """Where the page is."""


def refund_agent(*more: ToolCall, name: str = "desk", **args: object) -> Agent:
    """Return an agent that asks for a refund in each conversation, and then says "done"."""
    call = ToolCall("refund", {"order": 7, "amount": 5.0, **args})
    return Agent(name, model=ScriptedModel([[call, *more], "done"], follow=True), tools=[refund, choose, locate])


def question_agent(**args: object) -> Agent:
    """Return an agent that asks which colour."""
    model = ScriptedModel([[ToolCall("choose", args)], "done"], follow=True)
    return Agent("desk", model=model, tools=[choose])


async def rows_with_errors(store: LogStore, count: int) -> list[OutboxRow]:
    """Return the outbox if it has this many rows and each has failed at least once, else an empty list."""
    rows = await store.outbox()
    return rows if len(rows) == count and all(row.error for row in rows) else []


class Recorder:
    """A channel that records what it is sent. ``fails`` has exceptions to raise first, oldest first."""

    def __init__(self, name: str = "recorder", kinds: tuple[NoticeKind, ...] = NOTICE_KINDS, route=None):
        self.name, self.kinds, self.route = name, kinds, route
        self.sent: list[Notice] = []
        self.tried: list[Notice] = []
        self.fails: list[Exception] = []

    async def send(self, notice: Notice) -> None:
        self.tried.append(notice)
        if self.fails:
            raise self.fails.pop(0)
        self.sent.append(notice)

    @property
    def kinds_sent(self) -> list[str]:
        return [notice.kind for notice in self.sent]


class BatchRecorder(Recorder):
    """The same, with digests."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.digests: list[list[Notice]] = []

    async def send_many(self, notices: list[Notice]) -> None:
        self.digests.append(notices)
        for notice in notices:
            await self.send(notice)


class ChoosyRecorder(BatchRecorder):
    """A channel that delivers a digest in part: ``refuses`` has the error of each conversation that it refuses."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.refuses: dict[str, Exception] = {}

    async def send_many(self, notices: list[Notice]) -> dict[str, Exception]:
        self.digests.append(notices)
        self.sent += [notice for notice in notices if notice.conversation not in self.refuses]
        return {n.id: self.refuses[n.conversation] for n in notices if n.conversation in self.refuses}
