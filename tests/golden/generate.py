"""Write the golden logs: ``python tests/golden/generate.py [--force | --shape | --expect] [DIRECTORY]``.

The files are written ONCE, from the scenes in ``scenes.py``: they represent the logs that users have. A log that
exists is not written again, also if the current code would write it differently: the older one must stay readable.

    NAME.jsonl             the log, one encoded event a line, byte for byte as it is stored
    NAME.state.json        the state that the log folds to
    NAME.transcript.json   the messages that people see
    NAME.trace.jsonl       the state of the turn and of the event's call after each event
    heads.json             the last hash of each log's chain: no byte of a log may change
    shape.json             every field of every event and of the structs in it

--shape records the shape again, if fields were only added. --expect writes the states, transcripts and traces again,
for a deliberate change of State or of the messages; the logs themselves stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from scenes import SCENES, Scene
from shapes import incompatible_changes, shape

from holdfast.core import codec
from holdfast.core.effects import owed
from holdfast.core.events import VERSION, AnyEvent
from holdfast.core.state import State, evolve, status_of
from holdfast.core.transcript import Transcript
from holdfast.stores.base import GENESIS, hash_chain

HERE = Path(__file__).parent / f"v{VERSION}"


def pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def trace(events: list[AnyEvent], name: str) -> list[dict[str, Any]]:
    """Return, for each event, the status, the fields of the turn and the event's call after it."""
    found: list[dict[str, Any]] = []
    state = State(conversation=name)
    for event in events:
        state = evolve(state, event)
        turn = state.turn
        line: dict[str, Any] = {"seq": event.seq, "type": event.type, "status": status_of(state)}
        if turn is not None:
            line["turn"] = [turn.number, turn.step, turn.answered, turn.cancelling, turn.halt]
            line["phases"] = " ".join(call.phase for call in turn.calls.values())
            call = turn.calls.get(getattr(event, "call_id", ""))
            if call is not None:
                fields: dict[str, Any] = json.loads(msgspec.json.encode(call))
                del fields["made"]  # in the log already
                line["call"] = {n: v["seq"] if n in ("suspension", "decided") else v for n, v in fields.items()}
        line["owed"] = sorted(type(effect).__name__ for effect in owed(state))
        found.append(line)
    return found


def expectations(name: str, events: list[AnyEvent]) -> dict[str, bytes]:
    """Return the files that are derived from a log, by name."""
    state, transcript = State(conversation=name), Transcript()
    for event in events:
        state = evolve(state, event)
        transcript.apply(event)
    return {
        f"{name}.state.json": pretty(state),
        f"{name}.transcript.json": pretty(transcript.visible_messages()),
        f"{name}.trace.jsonl": b"".join(msgspec.json.encode(line) + b"\n" for line in trace(events, name)),
    }


def files(name: str) -> dict[str, bytes]:
    """Return the files of a scene, by name."""
    scene = Scene(name)
    SCENES[name](scene)
    log = b"".join(codec.encode_event(event) + b"\n" for event in scene.events)
    return {f"{name}.jsonl": log, **expectations(name, scene.events)}


def logs(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.jsonl") if "." not in path.stem)


def main(words: list[str]) -> int:
    options = {word for word in words if word.startswith("--")}
    if options - {"--force", "--shape", "--expect"}:
        print(__doc__)
        return 2
    target = Path(next((word for word in words if not word.startswith("--")), HERE))
    target.mkdir(parents=True, exist_ok=True)
    if "--expect" in options:
        for log in logs(target):
            events = [codec.decode_event(body) for body in log.read_bytes().splitlines()]
            for name, body in expectations(log.stem, events).items():
                (target / name).write_bytes(body)
        print("expectations written from the existing logs: every difference must be deliberate")
        return 0
    if "--shape" in options:
        pinned = target / "shape.json"
        wrong = (
            incompatible_changes(json.loads(pinned.read_bytes()), json.loads(pretty(shape())))
            if pinned.exists()
            else []
        )
        if wrong and "--force" not in options:
            print("refused: more than an addition, so it needs a new VERSION and an upcaster:", *wrong, sep="\n  ")
            return 1
        pinned.write_bytes(pretty(shape()))
        print("shape.json written: the new field must also occur in a golden log, or the tests fail")
        return 0
    wanted: dict[str, bytes] = {"shape.json": pretty(shape())}
    for name in SCENES:
        wanted |= files(name)
    existing = [name for name in wanted if (target / name).exists()]
    if "--force" not in options:
        wanted = {name: body for name, body in wanted.items() if name not in existing}
        if not wanted:
            print(
                "refused: golden logs are written once, and these exist. Add a scene for another. --force overwrites."
            )
            return 1
    for name, body in wanted.items():
        (target / name).write_bytes(body)
    record = target / "heads.json"
    heads: dict[str, str] = json.loads(record.read_bytes()) if record.exists() else {}
    written = {name: body for name, body in wanted.items() if name.removesuffix(".jsonl") in SCENES}
    heads |= {name: hash_chain(GENESIS, body.splitlines())[-1].hex() for name, body in written.items()}
    record.write_bytes(pretty(heads))
    print(f"{len(wanted)} files written" + (f", {len(existing)} not changed" if "--force" not in options else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
