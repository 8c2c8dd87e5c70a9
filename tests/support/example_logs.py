"""Generated logs: events in a legal order, with chosen sizes, retentions and counts, without a runtime."""

from hypothesis import strategies as st

from holdfast.core.decisions import Principal
from holdfast.core.events import (
    AssistantSaid,
    Attempt,
    CallMade,
    CallReturned,
    ErrorInfo,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
    Usage,
)
from holdfast.core.tool import Retention

ANN = Principal("ann")
KEPT = {
    "aged": Retention.turns(2),
    "default": Retention(),
    "counted": Retention.last(2),
    "kept": Retention.forever(),
}


class Told:
    """A builder of a log, which adds one event at a time."""

    def __init__(self):
        self.events = []
        self.number = self.made = self.step = 0
        self.waiting = []

    def add(self, fact, **fields):
        event = fact(seq=len(self.events) + 1, at=0.0, by=ANN, v=1, **fields)
        self.events.append(event)
        return event

    def hear(self, text="hi"):
        """Add a message of the user."""
        self.waiting.append(self.add(MessageReceived, text=text, agent="a").seq)

    def begin(self):
        """Start a turn with the oldest waiting message."""
        self.number, self.step = self.number + 1, 0
        self.add(TurnStarted, turn=self.number, message=self.waiting.pop(0), agent="a", steps=20)

    def say(self, text="", *calls, usage=None, context=None):
        """Add a reply and the results of its calls. ``calls``: (tool, the provider's id, result, ok)."""
        self.step += 1
        made = []
        for tool, provider_id, _, _ in calls:
            self.made += 1
            made.append(
                CallMade(
                    id=f"c{self.made}",
                    provider_id=provider_id or f"c{self.made}",
                    tool=tool,
                    args={"n": self.made},
                    expires=1.0,
                    retention=KEPT[tool],
                )
            )
        self.add(
            AssistantSaid,
            turn=self.number,
            step=self.step,
            id=f"m{self.number}-{self.step}",
            text=text,
            calls=tuple(made),
            attempts=(Attempt("m", Usage(input_tokens=usage)),),
            context=context,
        )
        for each, (tool, _, result, ok) in zip(made, calls, strict=True):
            error = None if ok else ErrorInfo("timeout", result)
            value = result if ok else None
            self.add(CallReturned, call_id=each.id, tool=tool, ok=ok, value=value, error=error)
        return [each.id for each in made]

    def end(self):
        """End the turn, and return the sequence number of its end."""
        return self.add(TurnEnded, turn=self.number, reason="completed").seq

    def turn(self, *steps, text="hi", answer="done"):
        """Add a whole turn, and return the ids of its calls. Each step is a list of calls."""
        self.hear(text)
        self.begin()
        ids = [call for step in steps for call in self.say("", *step)]
        self.say(answer)
        self.end()
        return ids


def result(tool, size=40, provider_id=None, ok=True):
    return (tool, provider_id, "x" * size, ok)


sizes = st.sampled_from([0, 10, 400, 4_000])
calls = st.builds(
    result, st.sampled_from(list(KEPT)), sizes, st.sampled_from([None, "p", "q"]), st.sampled_from([True, True, False])
)
steps = st.tuples(st.lists(calls, max_size=3), st.sampled_from([None, 0.1, 0.5, 1.0, 1.6, 3.0, 9.0]), st.booleans())
turns = st.fixed_dictionaries(
    {
        "heard": st.integers(0, 2),
        "size": sizes,
        "steps": st.lists(steps, max_size=3),
        "summary": st.sampled_from([None, None, None, 0, 1, 3]),
    }
)


@st.composite
def logs(draw, most=14):
    """Draw a log of some turns; the last one may be open."""
    told = Told()
    ends = []
    for plan in draw(st.lists(turns, min_size=1, max_size=most)):
        for n in range(plan["heard"] + (not told.waiting)):
            told.hear(f"{n}" + "u" * plan["size"])
        told.begin()
        for made, share, rejected in plan["steps"]:
            context = None if share is None else {"estimate": 1000}
            told.say("thought", *made, usage=None if share is None else int(share * 1000), context=context)
            if rejected:
                told.add(OutputRejected, turn=told.number, message="again", text="no")
        told.say("answer")
        ends.append(told.end())
        if plan["summary"] is not None and plan["summary"] < len(ends):
            upto = ends[-1 - plan["summary"]]
            if all(e.upto < upto for e in told.events if isinstance(e, HistorySummarised)):
                told.add(HistorySummarised, upto=upto, text="s" * 100)
    if draw(st.booleans()):
        if not told.waiting:
            told.hear()
        told.begin()
        for made, _, _ in draw(st.lists(steps, max_size=2)):
            told.say("", *made)
    return told
