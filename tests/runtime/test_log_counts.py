"""The counts of all logs: equal to a fold of the logs, on every store, after a restart and in several processes."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import pg
from support.runtimes import Clock

import holdfast.runtime.metrics as module
from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.blocking import Runtime as BlockingRuntime
from holdfast.core import codec
from holdfast.core.log_counts import (
    DECISION_BUCKETS,
    LOG_FAMILIES,
    MAX_NAMES,
    OTHER,
    UNKNOWN,
    Histogram,
    LogCounts,
    Samples,
    bound_names,
)
from holdfast.errors import StoreError
from holdfast.runtime.metrics import LogFollower
from holdfast.stores.memory import MemoryStore
from holdfast.testing.store_contract.harness import make_append
from holdfast.urls import open_store

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "v1").glob("*.jsonl"))
LOGS = {path.stem: path.read_bytes().splitlines() for path in GOLDEN if not path.stem.endswith(".trace")}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make_store(request, tmp_path):
    """A function that returns one more owner of the same store."""
    if request.param == "memory":
        first = MemoryStore()
        return first.sibling
    url = f"sqlite:///{tmp_path}/log.db" if request.param == "sqlite" else pg.fresh()
    return lambda: open_store(url)


def count_plainly(logs):
    """Count the events of these logs (id -> lines) in another way: each log as a whole, as plain JSON."""
    counts = defaultdict(Counter)
    for lines in logs.values():
        events = [json.loads(line) for line in lines]
        tools, agents, suspended, asked = {}, {}, {}, {}
        for event in events:
            for made in event.get("calls", ()) if event["type"] == "AssistantSaid" else ():
                unknown = made.get("refused", {}).get("kind") == "unknown_tool"
                tools[made["id"]] = UNKNOWN if unknown else made["tool"]
            if event["type"] == "TurnStarted":
                agents[event["turn"]] = event["agent"]
        for event in events:
            kind = event["type"]
            counts["holdfast_events_total"][()] += 1
            tool_name = tools.get(event.get("call_id"))
            if kind == "TurnEnded":
                reason = "halted" if event.get("halted") else event["reason"]
                counts["holdfast_turns_ended_total"][agents[event["turn"]], reason] += 1
            elif kind == "CallSuspended":
                suspended[event["call_id"]] = asked[event["call_id"]] = event
                counts["holdfast_suspensions_total"][tool_name, event["kind"]] += 1
            elif kind == "CallResolved":
                outcome = event["decision"]["type"]
                counts["holdfast_decisions_total"][tool_name, event["kind"], outcome] += 1
                counts["seconds"][tool_name, outcome] += event["at"] - suspended.pop(event["call_id"])["at"]
            elif kind == "ApprovalTakenBack":
                suspended[event["call_id"]] = asked[event["call_id"]]
                counts["holdfast_approvals_taken_back_total"][tool_name,] += 1
            elif kind in ("CallReturned", "CallStarted"):
                suspended.pop(event["call_id"], None)
                if kind == "CallReturned":
                    outcome = "ok" if event["ok"] else event["error"]["kind"]
                    counts["holdfast_calls_total"][tool_name, outcome] += 1
                else:
                    counts["holdfast_call_runs_total"][tool_name,] += 1
            for attempt in event.get("attempts", ()):
                outcome = attempt["error"]["kind"] if "error" in attempt else "ok"
                counts["holdfast_model_requests_total"][attempt["model"], outcome] += 1
                for type_ in ("input", "output"):
                    if tokens := attempt.get("usage", {}).get(f"{type_}_tokens"):
                        counts["holdfast_tokens_total"][attempt["model"], type_] += tokens
        for event in suspended.values():
            counts["waiting"][event["tool"], event["kind"]] += 1
    return {name: dict(found) for name, found in counts.items()}


def totals(samples):
    """Return the samples in the form of ``count_plainly``; only those that it counts, without zeros."""
    found = {each.family.name: each.values for each in samples}
    waiting = Counter()
    for (name, kind, _), value in found.pop("holdfast_waiting_calls", {}).items():
        waiting[name, kind] += value
    seconds = {key: value.sum for key, value in found.pop("holdfast_decision_seconds", {}).items()}
    counted = {
        "holdfast_events_total",
        "holdfast_turns_ended_total",
        "holdfast_suspensions_total",
        "holdfast_decisions_total",
        "holdfast_approvals_taken_back_total",
        "holdfast_calls_total",
        "holdfast_call_runs_total",
        "holdfast_model_requests_total",
    }
    kept = {name: values for name, values in found.items() if name in counted and values}
    tokens = {
        key: value for key, value in found.get("holdfast_tokens_total", {}).items() if key[1] in ("input", "output")
    }
    kept |= {"holdfast_tokens_total": {key: value for key, value in tokens.items() if value}} if tokens else {}
    kept |= {"waiting": dict(waiting)} if waiting else {}
    return kept | ({"seconds": pytest.approx(seconds)} if seconds else {})


async def follow(follower):
    """Count all new events."""
    while await follower.read_batch():
        pass
    return follower.counts.samples(0.0)


@pytest.mark.parametrize("seed", range(3))
async def test_the_counts_equal_a_fold_of_all_logs_whenever_they_are_read_and_by_whichever_process(make_store, seed):
    """Metrics count what the log says, in a process that follows it and in one that has just started [B123]."""
    chance = random.Random(seed)
    writer, reader = make_store(), make_store()
    await writer.open()
    await reader.open()
    try:
        follower, written = LogFollower(reader), {name: [] for name in LOGS}
        left = {name: list(lines) for name, lines in LOGS.items()}
        while left:
            for name in chance.sample(sorted(left), min(len(left), 9)):
                lines = left[name]
                chunk = [lines.pop(0) for _ in range(chance.randint(1, len(lines)))]
                at = json.loads(chunk[-1])["at"]
                await writer.append(make_append(name, len(written[name]), *chunk, at=at))
                written[name] += chunk
                if not lines:
                    del left[name]
            if chance.random() < 0.7:
                assert totals(await follow(follower)) == count_plainly(written)
        wanted = count_plainly(LOGS)
        assert totals(await follow(follower)) == wanted
        assert totals(await follow(LogFollower(reader))) == wanted, "after a restart"
        assert totals(await follow(LogFollower(writer))) == wanted, "in another process"
        assert wanted["holdfast_events_total"][()] == sum(map(len, LOGS.values()))
    finally:
        await writer.close()
        await reader.close()


async def test_no_event_is_missed_if_the_clocks_of_the_processes_differ_by_a_day():
    """The sum of the sequence numbers shows that the query for recent changes was not enough [B123]."""
    store = MemoryStore()
    await store.open()
    follower = LogFollower(store)
    lines = LOGS["approval"]
    await store.append(make_append("c", 0, *lines[:3], at=store.now()))
    await follow(follower)
    await store.append(make_append("c", 3, *lines[3:], at=store.now() - 86400))
    assert totals(await follow(follower)) == count_plainly({"c": lines})
    await store.close()


async def test_a_scrape_reads_only_what_is_new_and_repeats_the_last_answer_for_some_seconds(monkeypatch):
    """The cost of a scrape depends on the new events, not on the length of the logs [B123]."""
    store = MemoryStore()
    async with Runtime(store=store) as rt:
        for number in range(40):
            await store.append(make_append(f"c{number}", 0, *LOGS["approval"], at=store.now()))
        reads, asked = [], []
        read, heads = store.read, store.list_heads

        async def counted_read(name, *args, **options):
            reads.append(name)
            return await read(name, *args, **options)

        async def counted_heads(since=None):
            asked.append(since)
            return await heads(since)

        monkeypatch.setattr(store, "read", counted_read)
        monkeypatch.setattr(store, "list_heads", counted_heads)
        first = await rt.metrics()
        assert len(reads) == 40
        assert await rt.metrics() is first
        looks = len(asked)
        monkeypatch.setattr(module, "CACHE_SECONDS", 0.0)
        del reads[:]
        await store.append(make_append("new", 0, *LOGS["approval"], at=store.now()))
        assert totals(await rt.metrics())["holdfast_events_total"] == {(): 41 * len(LOGS["approval"])}
        assert reads == ["new"]
        assert len(asked) > looks
        assert all(asked[looks:]), "only recent changes are asked for"


async def test_counts_of_the_log_are_left_out_until_all_logs_are_counted(monkeypatch):
    """A counter never falls below what it was before a restart: it is absent until it is right [B123]."""
    monkeypatch.setattr(module, "CATCH_UP_SECONDS", 0.0)
    monkeypatch.setattr(module, "CACHE_SECONDS", 0.0)
    store = MemoryStore()
    async with Runtime(store=store) as rt:
        for number in range(100):
            await store.append(make_append(f"c{number}", 0, *LOGS["approval"], at=store.now()))
        first = {each.family.name: each.values for each in await rt.metrics()}
        assert "holdfast_events_total" not in first
        assert first["holdfast_uncounted_conversations"] == {(): 100 - module.PARALLEL_READS}

        async def is_complete():
            found = {each.family.name: each.values for each in await rt.metrics()}
            return found.get("holdfast_events_total") == {(): 100 * len(LOGS["approval"])}

        while not await is_complete():  # the background task counts the rest
            pass


async def test_a_damaged_log_is_left_out_and_counted_as_unreadable():
    """One damaged conversation does not end the metrics of the others."""
    store = MemoryStore()
    async with Runtime(store=store) as rt:
        await store.append(make_append("good", 0, *LOGS["approval"], at=1.0))
        await store.append(make_append("bad", 0, b"{", at=1.0))
        found = {each.family.name: each.values for each in await rt.metrics()}
        assert found["holdfast_unreadable_conversations"] == {(): 1}
        assert found["holdfast_events_total"] == {(): len(LOGS["approval"])}


async def test_a_store_that_cannot_be_read_for_a_while_makes_no_event_count_twice_or_never(monkeypatch):
    """A failed read is repeated; what was counted beside it stays counted [B123]."""
    store = MemoryStore()
    await store.open()
    for number in range(40):
        await store.append(make_append(f"c{number}", 0, *LOGS["approval"], at=1.0))
    follower, read, failed = LogFollower(store), store.read, []

    async def failing_read(name, *args, **options):
        if name not in failed and name.endswith("7"):
            failed.append(name)
            raise StoreError("the disk does not answer", kind="log_read_failed")
        return await read(name, *args, **options)

    monkeypatch.setattr(store, "read", failing_read)
    while True:
        try:
            found = await follow(follower)
            break
        except StoreError:
            pass
    assert sorted(failed) == ["c17", "c27", "c37", "c7"]
    assert totals(found) == count_plainly({f"c{number}": LOGS["approval"] for number in range(40)})
    await store.close()


@tool(approval="required")
async def refund(order: int) -> str:
    """Give money back."""
    return "done"


def make_desk():
    return Agent(
        "desk", model=ScriptedModel([[ToolCall("refund", {"order": 1})], "Done."], follow=True), tools=[refund]
    )


async def test_a_waiting_call_is_counted_with_its_age_and_a_decision_with_the_time_that_it_took():
    """Waiting calls by tool, kind and age; then the decision by tool and outcome [B123]."""
    clock = Clock()
    async with Runtime(make_desk(), store="memory:", clock=clock) as rt:
        result = await rt.run("Money!", conversation="ada", by="ada")
        clock.now += 2 * 3600
        found = {each.family.name: each.values for each in await rt.metrics()}
        assert found["holdfast_waiting_calls"] == {("refund", "approval", "1h_to_1d"): 1}
        assert found["holdfast_oldest_waiting_call_seconds"] == {("refund", "approval"): 7200.0}
        assert found["holdfast_open_turns"] == {("desk",): 1}
        await rt.resolve(result.pending[0], Approve(), by="boss")
        await rt.wait("ada")
        rt._engine.metrics._cached = None
        found = {each.family.name: each.values for each in await rt.metrics()}
        assert found["holdfast_waiting_calls"] == {}
        taken = found["holdfast_decision_seconds"]["refund", "approve"]
        assert (taken.count, taken.sum) == (1, 7200.0)
        assert taken.counts[DECISION_BUCKETS.index(4 * 3600)] == 1
        assert found["holdfast_turns_ended_total"] == {("desk", "completed"): 1}
        appends = found["holdfast_store_append_seconds"]
        assert appends["ok",].count >= 5


def test_a_run_that_repeats_one_of_a_killed_process_is_a_retry_and_a_continuation_is_none():
    """Retries of tools are runs in a later lease epoch of a call whose run has no outcome [B123]."""
    for name, lines in LOGS.items():
        counts = LogCounts()
        for line in lines:
            counts.add(name, codec.decode_event(line))
        found: dict[str, Any] = {each.family.name: each.values for each in counts.samples(0.0)}
        events = [json.loads(line) for line in lines]
        epochs, repeated = {}, Counter()
        for event in events:
            if event["type"] == "CallSuspended" and not event.get("recovery"):
                epochs.pop(event["call_id"], None)
            if event["type"] == "CallStarted":
                if epochs.get(event["call_id"], event["epoch"]) != event["epoch"]:
                    repeated[event["call_id"]] += 1
                epochs[event["call_id"]] = event["epoch"]
        assert sum(found["holdfast_call_retries_total"].values()) == sum(repeated.values()), name


def test_very_many_tools_are_named_up_to_a_limit_and_the_rest_are_added_up():
    """The number of series is bounded whatever an imported log holds."""
    values: dict[Any, Any] = {(f"tool{number:04}", "ok"): 1.0 for number in range(2 * MAX_NAMES)}
    found = bound_names(Samples(LOG_FAMILIES["holdfast_calls_total"], values)).values
    assert len(found) == MAX_NAMES
    assert found[OTHER, "ok"] == MAX_NAMES + 1
    histograms: dict[Any, Any] = {(f"tool{number:04}", "ok"): Histogram((1.0,)) for number in range(2 * MAX_NAMES)}
    for each in histograms.values():
        each.observe(0.5)
    summed: Any = bound_names(Samples(LOG_FAMILIES["holdfast_decision_seconds"], histograms)).values
    assert summed[OTHER, "ok"].count == MAX_NAMES + 1


PROGRAM = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from runtime.test_log_counts import make_desk
from holdfast import Runtime

async def main():
    async with Runtime(make_desk(), store=sys.argv[1]) as rt:
        for number in range(3):
            await rt.run("Money!", conversation=f"c{{number}}", by="ada")
        print("waiting", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_after_kill_9_the_next_process_has_the_counts_of_the_killed_one(tmp_path):
    """Nothing that was counted depends on a process [B123]."""
    url = f"sqlite:///{tmp_path}/log.db"
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM.format(tests=tests), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"waiting\n"
        finally:
            os.kill(program.pid, signal.SIGKILL)
    with BlockingRuntime(make_desk(), store=url) as rt:
        found: dict[str, Any] = {each.family.name: each.values for each in rt.metrics()}
        assert found["holdfast_suspensions_total"] == {("refund", "approval"): 3}
        assert found["holdfast_turns_started_total"] == {("desk",): 3}
        assert sum(found["holdfast_waiting_calls"].values()) == 3
        assert "ok" not in found["holdfast_store_append_seconds"], "this is about the present process"
