"""Each route, over a real server on loopback."""

import asyncio
import json
import re
from itertools import chain

import pytest
from support.async_tests import until
from support.web_site import desk, locate, refund_agent, site

from holdfast import Agent, Ask, Call, Principal, Runtime, ScriptedModel, ToolCall, tool
from holdfast.models import FinishPart, TextPart
from holdfast.server import routes
from holdfast.testing import ManualClock

C = "/api/conversations/c"


def approval(entry, **more):
    return {"decision": {"type": "approve", "digest": entry["digest"], **more}}


JSON = {"content-type": "application/json"}
ADA, BO = {"x-who": "ada"}, {"x-who": "bo"}


def principal_from_header(request):
    return request.headers.get("x-who")


async def test_a_conversation_is_opened_sent_a_message_listed_and_read():
    async with site(desk("hello there")) as s:
        assert await s.post("/api/conversations", {"id": "c", "metadata": {"a": 1}}, 201) == {"conversation": "c"}
        made = (await s.post("/api/conversations", status=201))["conversation"]
        assert await s.post(f"{C}/messages", {"text": "hi"}, 202) == {"seq": 2}
        snapshot = await s.idle()
        assert [m["role"] for m in snapshot["messages"]] == ["user", "assistant"]
        assert snapshot["messages"][0]["by"] == "ada"
        listed = await s.get("/api/conversations")
        assert {c["conversation"] for c in listed["conversations"]} == {"c", made}
        assert listed["next"] is None
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["seq"] for e in log] == list(range(1, len(log) + 1))
        assert log[0]["type"] == "ConversationOpened"
        assert log[0]["metadata"] == {"a": 1}


async def test_conversations_and_the_log_are_paged():
    async with site(desk("hello")) as s:
        for name in "abdef":
            await s.post("/api/conversations", {"id": name}, 201)
        first = await s.get("/api/conversations", params={"limit": 3})
        rest = await s.get("/api/conversations", params={"limit": 3, "cursor": first["next"]})
        assert [c["conversation"] for c in first["conversations"] + rest["conversations"]] == list("abdef")
        assert rest["next"] is None
        newest = await s.get("/api/conversations", params={"limit": 2, "order": "newest"})
        older = await s.get("/api/conversations", params={"order": "newest", "cursor": newest["next"]})
        assert [c["conversation"] for c in newest["conversations"] + older["conversations"]] == list("fedba")
        assert (await s.get("/api/conversations", params={"status": "streaming"}))["conversations"] == []
        await s.begin()
        head = (await s.idle())["seq"]
        seqs, after = [], 0
        while after is not None:
            page = await s.get(f"{C}/log", params={"after": after, "limit": 2})
            seqs += [e["seq"] for e in page["events"]]
            after = page["next"]
        assert seqs == list(range(1, head + 1))
        back, before = [], None
        while True:
            page = await s.get(f"{C}/log", params={"last": "true", "limit": 2} | ({"before": before} if before else {}))
            back = [e["seq"] for e in page["events"]] + back
            before = page["next"]
            if before is None:
                break
        assert back == seqs


async def test_the_worker_route_says_whether_a_worker_runs_or_could_run_a_conversation(tmp_path):
    began, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        name = "slow"

        async def stream(self, request):
            began.set()
            await go_on.wait()
            yield TextPart("there")
            yield FinishPart()

    store = f"sqlite:///{tmp_path}/c.db"
    async with Runtime(desk("x"), store=store) as opened:
        await opened.open("c")
    async with site(store=store) as s:  # as with --no-run
        await s.post(f"{C}/messages", {"text": "hi"}, 202)
        unclaimed = {"state": "preparing", "claimed": False, "able": 0}
        assert await s.get(f"{C}/worker") == unclaimed
        async with Runtime(Agent("other", model=Slow()), store=store):
            assert await s.get(f"{C}/worker") == unclaimed
        async with Runtime(Agent("desk", model=Slow()), store=store):
            await began.wait()
            assert await s.get(f"{C}/worker") == {"state": "preparing", "claimed": True, "able": 1}
            go_on.set()
            await s.idle()
        assert await s.get(f"{C}/worker") == {"state": "idle", "claimed": False, "able": 0}
        await s.get("/api/conversations/none/worker", 404)


async def test_a_message_to_a_busy_conversation_is_409_unless_it_is_queued():
    """A message during a turn is refused as busy; with when_busy="queue" it waits [B13]."""
    async with site(refund_agent()) as s:
        await s.begin()
        await s.pending()
        problem = await s.post(f"{C}/messages", {"text": "more"}, 409)
        assert problem["kind"] == "busy"
        await s.post(f"{C}/messages", {"text": "more", "when_busy": "queue"}, 202)
        assert (await s.get(C))["queued"] == 1


async def test_a_message_sent_aside_is_answered_while_the_call_waits():
    """The snapshot shows the question and the answer; an unknown word is refused [B120]."""
    async with site(refund_agent()) as s:
        await s.begin()
        await s.pending()
        sent = await s.post(f"{C}/messages", {"text": "Why?", "when_busy": "aside"}, 202)
        await s.runtime.wait("c")
        shown = await s.get(C)
        assert [message["text"] for message in shown["messages"][-2:]] == ["Why?", "done"]
        assert shown["messages"][-2]["aside"] is True
        assert (shown["state"], shown["asides"], len(shown["pending"])) == ("awaiting_input", 0, 1)
        log = (await s.get(f"{C}/log"))["events"]
        assert (log[-1]["type"], log[-1]["message"]) == ("AsideAnswered", sent["seq"])
        await s.post(f"{C}/messages", {"text": "Why?", "when_busy": "now"}, 422)


async def test_a_page_of_the_log_is_bounded_in_bytes_and_has_at_least_one_event(monkeypatch):
    monkeypatch.setattr(routes, "PAGE_BYTES", 5000)
    async with site(desk("hello")) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        for n in (1000, 3000, 9000, 10, 2000):
            await s.post(f"{C}/messages", {"text": "x" * n, "when_busy": "queue"}, 202)
            head = (await s.idle())["seq"]
        pages, after = [], 0
        while after is not None:
            page = await s.get(f"{C}/log", params={"after": after})
            pages.append([e["seq"] for e in page["events"]])
            after = page["next"]
        assert [*chain(*pages)] == list(range(1, head + 1))
        assert len(pages) > 2
        back, before = [], {}
        while before is not None:
            page = await s.get(f"{C}/log", params={"last": "true"} | before)
            back.insert(0, [e["seq"] for e in page["events"]])
            before = {"before": page["next"]} if page["next"] else None
        assert [*chain(*back)] == list(range(1, head + 1))
        assert len(back) > 2


async def test_a_principal_cannot_open_a_conversation_under_an_id_that_it_may_not_see():
    def may_see(principal, conversation):
        return conversation.startswith(f"{principal.id}-")

    async with site(desk("hello"), auth=principal_from_header, may_see=may_see) as s:
        await s.post("/api/conversations", {"id": "bo-1"}, 404, headers={"x-who": "ada"})
        await s.post("/api/conversations", {"id": "bo-1"}, 201, headers={"x-who": "bo"})
        await s.post("/api/conversations", {"id": "bo-1"}, 404, headers={"x-who": "ada"})
        await s.post("/api/conversations", {"id": "bo-1"}, 409, headers={"x-who": "bo"})


async def test_an_approval_is_recorded_once_and_a_second_decision_gets_409_with_the_winner():
    """A second decision is stale and names the principal that decided first [B27, B35]."""
    async with site(refund_agent(), auth=principal_from_header) as s:
        await s.post("/api/conversations", {"id": "c"}, 201, headers={"x-who": "ada"})
        await s.post(f"{C}/messages", {"text": "hi"}, 202, headers={"x-who": "ada"})
        s.http.headers["x-who"] = "boss"
        [entry] = await s.pending()
        assert entry["principal"]["id"] == "ada"
        path = f"{C}/calls/{entry['call']}/resolve"
        done = await s.post(path, approval(entry))
        assert done["status"] == "accepted"
        problem = await s.post(path, approval(entry), 409, headers={"x-who": "eve"})
        assert (problem["kind"], problem["details"]["winner"]) == ("stale", "boss")
        assert "boss" in problem["detail"]
        await s.idle()
        problem = await s.post(path, {"decision": {"type": "deny"}}, 409, headers={"x-who": "eve"})
        assert problem["details"]["winner"] == "boss"
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["by"]["id"] for e in log if e["type"] == "CallResolved"] == ["boss"]
        assert log[done["seq"] - 1]["type"] == "CallResolved"


async def test_an_approval_is_taken_back_and_the_call_shows_what_became_of_it():
    """A repeated request gets the same receipt; ``wait`` answers once the call has ended."""

    @tool(approval="required", grace="30s")
    async def pay() -> str:
        """Pay."""
        return "paid"

    clock = ManualClock()
    agent = Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with site(agent, clock=clock, auth=principal_from_header) as s:
        await s.post("/api/conversations", {"id": "c"}, 201, headers=ADA)
        await s.post(f"{C}/messages", {"text": "hi"}, 202, headers=ADA)
        s.http.headers["x-who"] = "ada"
        [entry] = await s.pending()
        call, undo = f"{C}/calls/{entry['call']}", {"decision": {"type": "take_back"}}
        await s.post(f"{call}/resolve", undo, 409)
        done = await s.post(f"{call}/resolve", approval(entry))
        assert done["starts_at"] == clock() + 30
        assert await s.post(f"{call}/resolve", approval(entry)) == done
        [shown] = (await s.get("/api/pending"))["pending"]
        assert (shown["starts_at"], shown["approved_by"]) == (done["starts_at"], "ada")
        assert (await s.get(call))["status"] == "approved"
        taken = await s.post(f"{call}/resolve", undo, headers=BO)
        assert await s.post(f"{call}/resolve", undo, headers=BO) == taken
        assert (await s.get(call))["status"] == "waiting"
        await s.post(f"{call}/resolve", approval(entry))
        clock.advance(30)
        outcome = await s.get(f"{call}?wait=30")
        assert (outcome["status"], outcome["value"], outcome["by"]) == ("done", "paid", "ada")
        await s.get(f"{call}?wait=31", 422)
        await s.get(f"{C}/calls/nope", 404)


async def test_an_approval_with_a_missing_or_wrong_digest_is_refused():
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/resolve"
        assert "digest" in (await s.post(path, {"decision": {"type": "approve"}}, 422))["detail"]
        problem = await s.post(path, {"decision": {"type": "approve", "digest": "0" * 64}}, 409)
        assert problem["details"]["reason"] == "superseded"
        await s.post(path, {"decision": {"type": "answer", "value": 1}}, 422)
        await s.post(path, {"decision": {"type": "expired"}}, 422)
        await s.post(path, {"decision": {"type": "failed", "kind": "no_such_kind", "message": ""}}, 422)
        assert len(await s.pending()) == 1


async def test_the_requester_is_refused_with_403_alone_and_in_a_batch_and_the_attempts_are_logged():
    """The same rule as through every other door [B112]."""

    @tool(approval="required", not_requester=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with site(agent, auth=principal_from_header) as s:
        s.http.headers["x-who"] = "ada"
        await s.begin()
        [entry] = await s.pending()
        path, named = f"{C}/calls/{entry['call']}", {"conversation": "c", "call": entry["call"]}
        for decision in (
            {"type": "approve", "digest": entry["digest"]},
            {"type": "deny"},
            {"type": "extend", "until": "9d"},
        ):
            problem = await s.post(f"{path}/resolve", {"decision": decision}, 403)
            assert "ada requested this call of pay" in problem["detail"]
        batch = await s.post("/api/pending/resolve", {"decisions": [{**named, **approval(entry)}]})
        assert batch["results"][0]["problem"]["status"] == 403
        await s.post(f"{path}/preview", {"args": {}}, 403)
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["by"]["id"] for e in log if e["type"] == "ResolutionRefused"] == ["ada"] * 4
        await s.post(f"{path}/resolve", approval(entry), headers={"x-who": "bo"})
        await s.idle()


async def test_a_decision_about_an_earlier_suspension_gets_409_and_says_what_changed():
    """Alone and in a batch [B107]."""

    @tool
    def ask(call: Call) -> str | Ask:
        """Ask twice."""
        return "asked" if len(call.answers) == 2 else Ask(f"Question {len(call.answers)}", resume=None)

    agent = Agent("desk", model=ScriptedModel([[ToolCall("ask")], "done"]), tools=[ask])
    async with site(agent) as s:
        await s.begin()
        [first] = await s.pending()
        name = f"{first['call']}:{first['seq']}"
        await s.post(f"{C}/calls/{name}/resolve", {"decision": {"type": "answer", "value": "one"}})
        await until(lambda: asked_again(s, first))
        late = {"decision": {"type": "answer", "value": "two"}}
        problem = await s.post(f"{C}/calls/{name}/resolve", late, 409)
        assert (problem["details"]["reason"], problem["details"]["changed"]) == ("superseded", ["prompt"])
        batch = await s.post("/api/pending/resolve", {"decisions": [{"conversation": "c", "call": name, **late}]})
        assert batch["results"][0]["problem"]["details"]["reason"] == "superseded"
        await s.post(f"{C}/calls/{first['call']}/resolve", late)
        await s.idle()


async def asked_again(s, first):
    return [entry for entry in (await s.get("/api/pending"))["pending"] if entry["seq"] != first["seq"]]


async def test_edited_arguments_are_previewed_and_approved_by_the_previews_digest():
    """An approver previews edited arguments, and the edited arguments run [B36, B71]."""
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        call = f"{C}/calls/{entry['call']}"
        edited = {"order": 7, "amount": 2.5}
        shown = await s.post(f"{call}/preview", {"args": edited})
        assert shown["preview"] == {"pays": "2.50 for order 7"}
        same = await s.post(f"{call}/preview", {"args": entry["args"]})
        assert same["digest"] == entry["digest"]
        refused = await s.post(f"{call}/preview", {"args": {"order": 7, "amount": 101}}, 422)
        assert (refused["kind"], refused["detail"]) == ("invalid_args", "more than was paid")
        await s.post(f"{call}/preview", {"args": {"order": "seven"}}, 422)
        await s.post(f"{C}/calls/nope/preview", {"args": {}}, 404)
        body = {"decision": {"type": "approve", "digest": shown["digest"], "args": edited}}
        await s.post(f"{call}/resolve", body)
        snapshot = await s.idle()
        assert '"refunded":2.5' in snapshot["messages"][2]["content"]


async def test_a_server_without_the_agent_previews_only_tools_that_have_no_preview_function(tmp_path):
    store = f"sqlite:///{tmp_path}/t.db"
    turns = ["x", ToolCall("greet", {"name": "bo"}), ToolCall("refund", {"order": 1, "amount": 1.0})]
    async with site(desk(turns, "done"), store=store) as s:
        await s.begin()
        await s.pending(2)
    async with site(store=store) as s:
        entries = {entry["tool"]: entry for entry in await s.pending(2)}
        shown = await s.post(f"{C}/calls/{entries['greet']['call']}/preview", {"args": {"name": "cy"}})
        assert shown["preview"] == {"tool": "greet", "args": {"name": "cy"}}
        body = {"decision": {"type": "approve", "digest": shown["digest"], "args": {"name": "cy"}}}
        await s.post(f"{C}/calls/{entries['greet']['call']}/resolve", body)
        call = entries["refund"]["call"]
        problem = await s.post(f"{C}/calls/{call}/preview", {"args": {"order": 1, "amount": 2}}, 422)
        assert problem["kind"] == "resource_missing"


async def test_an_answer_that_violates_its_schema_is_refused_and_the_call_stays_pending():
    """An answer that violates its schema is refused, and a later answer is accepted [B34]."""
    async with site(desk(["?", ToolCall("choose", {"colours": ["red"]})], "nice")) as s:
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/resolve"
        problem = await s.post(path, {"decision": {"type": "answer", "value": 5}}, 422)
        assert problem["kind"] == "invalid_args"
        await s.post(path, {"decision": {"type": "answer", "value": "red"}})
        await s.idle()


async def test_a_decision_about_an_expired_call_is_410():
    """A decision after the deadline is stale (expired) [B31]."""
    clock = ManualClock()
    async with site(refund_agent(), clock=clock) as s:
        await s.begin()
        [entry] = await s.pending()
        clock.advance(8 * 86400)
        await s.idle()
        problem = await s.post(f"{C}/calls/{entry['call']}/resolve", approval(entry), 410)
        assert problem["details"]["reason"] == "expired"


async def test_a_principal_that_may_not_resolve_gets_403_and_the_attempt_is_logged():
    """A resolver without the right is refused, and the call stays pending [B33]."""
    async with site(refund_agent(), may_resolve=lambda principal, pending, decision: principal.id == "boss") as s:
        await s.begin()
        [entry] = await s.pending()
        problem = await s.post(f"{C}/calls/{entry['call']}/resolve", approval(entry), 403)
        assert problem["kind"] == "permission_denied"
        assert len(await s.pending()) == 1
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["by"]["id"] for e in log if e["type"] == "ResolutionRefused"] == ["ada"]


async def test_a_batch_is_validated_as_a_whole_and_then_each_decision_has_its_own_result():
    async with site(refund_agent()) as s:
        for name in ("a", "b", "c"):
            await s.begin(name)
        entries = {entry["conversation"]: entry for entry in await s.pending(3)}
        items = [{"conversation": n, "call": e["call"], **approval(e)} for n, e in sorted(entries.items())]
        broken = [*items[:2], {**items[2], "decision": {"type": "approve"}}]
        problem = await s.post("/api/pending/resolve", {"decisions": broken}, 422)
        assert "decisions[2]" in problem["detail"]
        assert "digest" in problem["detail"]
        problem = await s.post("/api/pending/resolve", {"decisions": [items[0], items[0]]}, 422)
        assert "decisions[1] decides the same call as decisions[0]" in problem["detail"]
        await s.post("/api/pending/resolve", {"decisions": []}, 422)
        assert len(await s.pending(3)) == 3
        late = items[1]
        await s.post(f"/api/conversations/b/calls/{late['call']}/resolve", {"decision": {"type": "deny"}})
        results = (await s.post("/api/pending/resolve", {"decisions": items}))["results"]
        assert [r.get("status") for r in results] == ["accepted", None, "accepted"]
        assert (results[1]["problem"]["status"], results[1]["problem"]["details"]["winner"]) == (409, "ada")


async def test_decisions_of_a_batch_about_different_conversations_share_commits(tmp_path):
    path = f"sqlite:///{tmp_path}/desk.db"
    async with site(refund_agent(), store=path) as s:
        for n in range(40):
            await s.begin(f"c{n}")
        await s.pending(40)
    async with site(store=path) as s:  # no agent here: only the decisions commit
        items = [{"conversation": e["conversation"], "call": e["call"], **approval(e)} for e in await s.pending(40)]
        before = s.runtime.store.commits
        results = (await s.post("/api/pending/resolve", {"decisions": items}))["results"]
        assert [(r["conversation"], r["call"]) for r in results] == [(e["conversation"], e["call"]) for e in items]
        assert {r["status"] for r in results} == {"accepted"}
        assert s.runtime.store.commits - before < 10


async def test_decisions_of_a_batch_about_one_conversation_are_applied_in_order():
    calls = [ToolCall("refund", {"order": n, "amount": 5.0}) for n in (1, 2, 3)]
    async with site(desk(calls, "done")) as s:
        await s.begin()
        entries = {entry["args"]["order"]: entry for entry in await s.pending(3)}
        stop = {"decision": {"type": "deny", "reason": "enough", "stop": True}}
        items = [approval(entries[1]), stop, approval(entries[3])]
        batch = [
            {"conversation": "c", "call": entries[n]["call"], **item} for n, item in zip((1, 2, 3), items, strict=True)
        ]
        results = (await s.post("/api/pending/resolve", {"decisions": batch}))["results"]
        assert [r.get("status") for r in results] == ["accepted", "accepted", None]
        assert results[2]["problem"]["status"] == 409


async def test_a_turn_is_cancelled_once():
    """Cancel closes a waiting turn; cancel of an idle conversation does nothing [B60, B61]."""
    async with site(refund_agent()) as s:
        await s.begin()
        await s.pending()
        assert await s.post(f"{C}/cancel", {"reason": "asked twice"}) == {"cancelled": True}
        await s.idle()
        assert await s.post(f"{C}/cancel") == {"cancelled": False}


async def test_grants_are_listed_and_revoked():
    """A remembered approval is listed with its scope, and can be revoked [B37]."""
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        await s.post(f"{C}/calls/{entry['call']}/resolve", approval(entry, remember="tool", duration="1h"))
        await s.idle()
        [grant] = (await s.get("/api/grants", params={"conversation": "c"}))["grants"]
        assert (grant["tool"], grant["remember"], grant["by"]["id"]) == ("refund", "tool", "ada")
        await s.delete(f"/api/grants/c/{grant['id']}")
        assert (await s.get("/api/grants", params={"conversation": "c"}))["grants"] == []
        await s.delete(f"/api/grants/c/{grant['id']}", 404)
        await s.get("/api/grants", 422, params={"of": "c"})


async def test_a_grant_beyond_the_conversation_is_offered_given_listed_and_revoked():
    """The caller is told which scopes may be chosen; the list of the whole store has CONVERSATION/ID [B115]."""
    async with site(refund_agent(), may_grant=lambda by, pending, decision: True) as s:
        await s.begin()
        [entry] = await s.pending()
        call = f"{C}/calls/{entry['call']}"
        every = ["conversation", "user", "everyone"]
        assert await s.get(f"{call}/scopes") == {"args": every, "tool": every}
        await s.post(f"{call}/resolve", approval(entry, remember="tool", duration="1h", scope="everyone"))
        await s.idle()
        [grant] = (await s.get("/api/grants"))["grants"]
        assert grant["id"].startswith("c/g")
        assert (grant["scope"], grant["remember"]) == ("everyone", "tool")
        await s.delete(f"/api/grants/c/{grant['id'].removeprefix('c/')}")
        assert (await s.get("/api/grants"))["grants"] == []
        await s.get(f"{call}/scopes", 404)


async def test_a_caller_who_does_not_see_everything_may_not_have_an_approval_remembered_everywhere():
    """may_see without may_grant: a grant would reach conversations that the caller may not see [B115]."""
    async with site(refund_agent(), may_see=lambda by, conversation: conversation == "c") as s:
        await s.begin()
        [entry] = await s.pending()
        call = f"{C}/calls/{entry['call']}"
        assert await s.get(f"{call}/scopes") == {"args": ["conversation"], "tool": ["conversation"]}
        for scope in ("user", "everyone"):
            problem = await s.post(f"{call}/resolve", approval(entry, remember="args", scope=scope), 403)
            assert "may_grant" in problem["detail"]
        await s.post(f"{call}/resolve", approval(entry, remember="args", duration="1h"))


async def test_a_deputy_is_named_listed_and_ended():
    """The caller names its own deputy; the log of deputies is not a conversation over HTTP [B126]."""
    async with site(refund_agent()) as s:
        named = await s.post("/api/deputies", {"to": "bob", "duration": "1h"}, 201)
        assert (named["principal"]["id"], named["deputy"]) == ("ada", "bob")
        assert (await s.get("/api/deputies"))["delegations"] == [named]
        for wrong in ({"to": "bob"}, {"to": "bob", "until": 1.0}, {"to": "ada", "duration": "1h"}, {"duration": "1h"}):
            await s.post("/api/deputies", wrong, 422)
        await s.get("/api/conversations/holdfast:deputies", 404)
        assert (await s.get("/api/conversations"))["conversations"] == []
        await s.delete(f"/api/deputies/{named['id']}")
        await s.delete(f"/api/deputies/{named['id']}", 404)
        assert (await s.get("/api/deputies"))["delegations"] == []


def locating_agent():
    """Return an agent that calls the client tool ``locate``."""
    return Agent("pages", model=ScriptedModel([["look", ToolCall("locate", {})], "there"], follow=True), tools=[locate])


async def test_a_client_announces_itself_leases_a_call_reports_progress_and_returns_the_result():
    """The client that holds the lease runs the call; its valid output is the result [B41, B44, B83]."""
    async with site(locating_agent()) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        one = await s.post(f"{C}/clients", {"tools": ["locate"]})
        assert one["heartbeat"] == 30
        two = await s.post(f"{C}/clients", {"client": "tab-2"})
        assert two["client"] == "tab-2"
        async with s.events(f"{C}/events") as reader:
            await s.post(f"{C}/messages", {"text": "where?"}, 202)
            [entry] = await s.pending()
            call = f"{C}/calls/{entry['call']}"
            assert await s.post(f"{call}/lease", one | {"heartbeat": 1}, 422)
            assert await s.post(f"{call}/lease", {"client": one["client"]}) == {"leased": True}
            assert await s.post(f"{call}/lease", {"client": "tab-2"}) == {"leased": False}
            await s.post(f"{call}/lease", {"client": "nobody"}, 404)
            await s.post(f"{call}/progress", {"client": one["client"], "payload": {"part": 1}}, 204)
            assert (await reader.until("tool_progress"))[-1][2]["payload"] == {"part": 1}
            await s.post(f"{C}/clients/tab-2/heartbeat", {}, 204)
            await s.delete(f"{C}/clients/{one['client']}")
            assert await s.post(f"{call}/lease", {"client": "tab-2"}) == {"leased": True}
            await s.post(f"{call}/resolve", {"decision": {"type": "client_result", "value": 5}}, 422)
            await s.post(f"{call}/resolve", {"decision": {"type": "client_result", "value": "here"}})
            await s.post(f"{call}/resolve", {"decision": {"type": "client_result", "value": "there"}}, 409)
            await s.post(f"{call}/progress", {"client": "tab-2", "payload": 2}, 204)
            returned = (await reader.until("CallReturned"))[-1][2]
            assert (returned["value"], returned["source"]) == ("here", "client")
        await s.post(f"{C}/clients/nobody/heartbeat", {}, 404)


async def test_a_client_call_without_a_live_client_fails_as_detached():
    """Without a live client the call fails after the grace period, and the turn continues [B43]."""
    clock = ManualClock()
    async with site(locating_agent(), clock=clock) as s:
        await s.begin()
        await s.pending()
        clock.advance(6)
        snapshot = await s.idle()
        assert '"kind":"detached"' in snapshot["messages"][2]["content"]


async def test_a_conversation_id_may_contain_slashes_percent_signs_and_non_ascii_letters():
    async with site(desk("hello")) as s:
        name = "team/née ✓%2F"
        await s.post("/api/conversations", {"id": name}, 201)
        from urllib.parse import quote

        path = f"/api/conversations/{quote(name, safe='')}"
        await s.post(f"{path}/messages", {"text": "hi"}, 202)
        assert (await s.get(path))["conversation"] == name


async def test_unknown_resources_are_404_a_duplicate_id_is_409_and_invalid_requests_are_422():
    """A decision about an unknown call or conversation is refused with a typed error [B28]."""
    async with site(desk("hello")) as s:
        for path in (C, f"{C}/log", f"{C}/events", "/api/pending?conversation=c", "/api/grants?conversation=c"):
            assert (await s.get(path, 404))["kind"] == "not_found"
        await s.post(f"{C}/messages", {"text": "hi"}, 404)
        await s.post(f"{C}/cancel", {}, 404)
        await s.post(f"{C}/clients", {}, 404)
        assert (await s.post(f"{C}/calls/x/resolve", {"decision": {"type": "deny"}}, 404))["kind"] == "not_found"
        await s.delete("/api/grants/c/g1", 404)
        await s.get("/api/nothing", 404)
        await s.get("/nothing", 404)
        await s.get("/static/../app.py", 404)
        await s.get("/static/%2e%2e/app.py", 404)
        await s.post("/api/conversations", {"id": "c"}, 201)
        taken = await s.post("/api/conversations", {"id": "c"}, 409)
        assert (taken["kind"], "exists" in taken["detail"]) == ("conflict", True)
        for body in (
            {"id": ""},
            {"id": "x" * 300},
            {"id": "a\nb"},
            {"agent": "nobody"},
            {"what": 1},
            [],
            "x",
            {"id": 5},
        ):
            await s.post("/api/conversations", body, 422)
        for query in ("after=-1", "after=x", "limit=0", "limit=501", "after=1&after=2", "what=1", f"after={2**70}"):
            await s.get(f"{C}/log?{query}", 422)
        await s.get(f"{C}/events", 422, headers={"last-event-id": "x"})
        assert (await s.post(f"{C}/messages", {"text": " "}, 422))["kind"] == "no_prompt"
        answer = await s.http.put(C)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


async def test_me_names_the_principal_with_its_roles_and_the_agents_and_health_is_ok():
    async with site(desk("hello"), auth=lambda request: Principal("ada", roles=("desk",))) as s:
        me = {"principal": "ada", "roles": ["desk"], "deputy_of": [], "agents": ["desk"]}
        assert await s.get("/api/me") == me
        assert await s.get("/api/health") == {"status": "ok"}


async def test_a_decision_about_a_hidden_conversation_gets_the_same_404_as_an_unknown_one():
    async with site(refund_agent(), may_see=lambda principal, conversation: conversation != "hers") as s:
        await s.runtime.send("hers", "hi", by="ada")
        deny = {"decision": {"type": "deny"}}
        responses = {}
        for name in ("hers", "none"):
            batch = {"decisions": [{"conversation": name, "call": "k", **deny}]}
            responses[name] = [
                await s.post(f"/api/conversations/{name}/calls/k/resolve", deny, 404),
                await s.post("/api/pending/resolve", batch),
            ]
        assert json.dumps(responses["hers"]).replace("hers", "none") == json.dumps(responses["none"])


async def test_the_list_of_conversations_skips_any_number_of_hidden_ones():
    async with site(desk("x"), may_see=lambda principal, conversation: conversation.startswith("b")) as s:
        for i in range(600):
            await s.runtime.open(f"a-{i:03}-secret")
        for name in ("b1", "b2", "c"):
            await s.runtime.open(name)
        pages, cursor = [], {}
        while True:
            page = await s.get("/api/conversations", params={"limit": 1, **cursor})
            pages.append(([c["conversation"] for c in page["conversations"]], page["next"]))
            if page["next"] is None:
                break
            cursor = {"cursor": page["next"]}
        assert pages == [(["b1"], "b1"), (["b2"], "b2"), ([], None)]


async def test_a_principal_that_may_not_resolve_gets_no_preview():
    agent = refund_agent()
    async with site(agent, auth=principal_from_header, may_resolve=lambda p, *_: p.id == "boss") as s:
        s.http.headers["x-who"] = "bo"
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/preview"
        before = (await s.get(C))["seq"]
        args = {"args": {"order": 8, "amount": 9.0}}
        assert "bo may not" in (await s.post(path, args, 403))["detail"]
        assert (await s.get(C))["seq"] == before
        s.http.headers["x-who"] = "boss"
        assert (await s.post(path, args))["preview"] == {"pays": "9.00 for order 8"}


def up_to_50(principal, pending, decision):
    """Every principal may decide about amounts up to 50; only the boss about more."""
    return principal.id == "boss" or pending.args["amount"] <= 50


async def test_may_resolve_judges_the_edited_arguments_in_previews_decisions_and_batches():
    """An edit is judged as the call that would run [B36, B33]."""
    async with site(refund_agent(), auth=principal_from_header, may_resolve=up_to_50) as s:
        s.http.headers["x-who"] = "bo"
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}"
        large, small = {**entry["args"], "amount": 99.0}, {**entry["args"], "amount": 1.0}
        await s.post(f"{path}/preview", {"args": large}, 403)
        assert (await s.post(f"{path}/preview", {"args": small}))["preview"] == {"pays": "1.00 for order 7"}
        edit = {"type": "approve", "digest": entry["digest"], "args": large}
        await s.post(f"{path}/resolve", {"decision": edit}, 403)
        batch = {"decisions": [{"conversation": "c", "call": entry["call"], "decision": edit}]}
        [result] = (await s.post("/api/pending/resolve", batch))["results"]
        assert result["problem"]["status"] == 403
        await s.post(f"{path}/resolve", {"decision": {**edit, "args": small}})
        assert '"refunded":1.0' in (await s.idle())["messages"][2]["content"]


async def test_remembering_an_approval_cancelling_and_interrupting_need_their_rights():
    """A principal without the right is refused, and each attempt is logged [B37, B33]."""

    def may_deny(principal, pending, decision):
        return principal.id == "boss" or decision.__class__.__name__ != "Deny"

    async with site(refund_agent(), auth=principal_from_header, may_resolve=may_deny) as s:
        s.http.headers["x-who"] = "bo"
        await s.begin()
        [entry] = await s.pending()
        decision = {"type": "approve", "digest": entry["digest"], "remember": "tool", "duration": "1h"}
        problem = await s.post(f"{C}/calls/{entry['call']}/resolve", {"decision": decision}, 403)
        assert "may_grant" in problem["detail"]
        await s.post(f"{C}/cancel", {}, 403)
        await s.post(f"{C}/messages", {"text": "stop", "when_busy": "interrupt"}, 403)
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["decision"] for e in log if e["type"] == "ResolutionRefused"] == ["Approve", "Cancel", "Interrupt"]
        await s.post(f"{C}/cancel", {}, headers={"x-who": "boss"})
        await s.idle()


async def test_only_the_first_ten_refused_attempts_of_a_principal_at_a_call_are_logged():
    async with site(refund_agent(), auth=principal_from_header, may_resolve=lambda p, *_: p.id == "boss") as s:
        s.http.headers["x-who"] = "bo"
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/resolve"
        problems = await asyncio.gather(*(s.post(path, approval(entry), 403) for _ in range(30)))
        assert sum("the attempt was logged" in problem["detail"] for problem in problems) == 10
        await s.post(path, approval(entry), 403, headers={"x-who": "cy"})
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["by"]["id"] for e in log if e["type"] == "ResolutionRefused"] == [*["bo"] * 10, "cy"]
        await s.post(path, approval(entry), headers={"x-who": "boss"})


async def test_an_exception_for_one_decision_of_a_batch_does_not_affect_the_others():
    down = False

    def may_see(principal, conversation):
        if down and conversation == "b":
            raise RuntimeError("the directory is down")
        return True

    async with site(refund_agent(), may_see=may_see) as s:
        for name in "abc":
            await s.runtime.send(name, "hi")
        entries = sorted(await s.pending(3), key=lambda e: e["conversation"])
        down = True
        decisions = [{"conversation": e["conversation"], "call": e["call"], **approval(e)} for e in entries]
        results = (await s.post("/api/pending/resolve", {"decisions": decisions}))["results"]
        assert [r.get("status") for r in results] == ["accepted", None, "accepted"]
        assert (results[1]["problem"]["status"], results[1]["problem"]["kind"]) == (500, "handler_failed")
        down = False
        assert [e["conversation"] for e in await s.pending()] == ["b"]


async def test_a_client_that_has_left_cannot_lease_and_only_the_lease_holder_reports_progress():
    """With two tabs, one holds the lease and runs the call [B44]."""
    async with site(locating_agent()) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        for tab in ("one", "two"):
            await s.post(f"{C}/clients", {"client": tab})
        await s.post(f"{C}/messages", {"text": "where?"}, 202)
        [entry] = await s.pending()
        call = f"{C}/calls/{entry['call']}"
        assert await s.post(f"{call}/lease", {"client": "one"}) == {"leased": True}
        await s.post(f"{call}/progress", {"client": "one", "payload": 1}, 204)
        await s.post(f"{call}/progress", {"client": "two", "payload": 2}, 204)
        assert (await s.get(C))["in_flight"][0]["progress"] == 1
        await s.delete(f"{C}/clients/one")
        await s.post(f"{call}/lease", {"client": "one"}, 404)
        await s.post(f"{call}/progress", {"client": "one", "payload": 3}, 404)
        await s.post(f"{C}/clients/one/heartbeat", {}, 404)
        assert await s.post(f"{call}/lease", {"client": "two"}) == {"leased": True}
        await s.post(f"{C}/clients", {"client": "one"})  # it may announce itself again
        assert await s.post(f"{call}/lease", {"client": "one"}) == {"leased": False}


async def test_the_claims_of_a_principal_are_logged_but_never_sent_to_a_viewer():
    secret = {"claims": {"access_token": "a-secret"}}

    def auth(request):
        return Principal("ada", ("boss",), secret["claims"]) if "x-ada" in request.headers else "bo"

    async with site(refund_agent(), auth=auth) as s:
        ada = {"x-ada": "1"}
        await s.post("/api/conversations", {"id": "c", "metadata": secret}, 201, headers=ada)
        async with s.events("/api/pending/events") as inbox, s.events(f"{C}/events") as live:
            received = [await inbox.next(), await live.next()]
            await s.post(f"{C}/messages", {"text": "hi"}, 202, headers=ada)
            received += [await inbox.next(), *await live.until("CallSuspended")]
            [entry] = await s.pending()
            received += [await s.get(C), await s.get(f"{C}/log"), entry]
            remember = {
                "decision": {"type": "approve", "digest": entry["digest"], "remember": "tool", "duration": "1h"}
            }
            await s.post(f"{C}/calls/{entry['call']}/resolve", remember, headers=ada)
            received += [*await live.until("TurnEnded"), await s.get("/api/grants?conversation=c")]
        async with s.events(f"{C}/events") as again:
            received += await again.until("TurnEnded")
        # The metadata that the caller chose stays: in the first event, live, in the log, and in a second stream.
        assert json.dumps(received).count("a-secret") == json.dumps(received).count(json.dumps(secret)) == 3
        assert (await s.pending(0), entry["principal"]) == ([], {"id": "ada", "roles": ["boss"]})
        assert (await s.runtime.history("c"))[0].by.claims == secret["claims"]  # the log has them


async def test_the_claims_of_people_who_vote_or_are_represented_are_never_sent_to_a_viewer():
    def auth(request):
        name = request.headers.get("x-who", "eve")
        return Principal(name, ("finance",) if name in ("ada", "bo") else (), {"access_token": "a-secret"})

    @tool(approval="required", approvers=3, approver_roles=("finance",))
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent("desk", model=ScriptedModel([[ToolCall("pay", {})], "done"]), tools=[pay])
    async with site(agent, auth=auth) as s:
        await s.post("/api/deputies", {"to": "carl", "duration": "1d"}, 201, headers={"x-who": "ada"})
        await s.begin("c")
        [entry] = await s.pending()
        async with s.events("/api/pending/events") as inbox, s.events(f"{C}/events") as live:
            received = [await inbox.next()]
            for who in ("carl", "bo"):
                approve = {"decision": {"type": "approve", "digest": entry["digest"]}}
                await s.post(f"{C}/calls/{entry['call']}/resolve", approve, headers={"x-who": who})
                received += [await inbox.next(), *await live.until("VoteCast")]
            [entry] = await s.pending()
            received += [entry, await s.get(C), await s.get(f"{C}/log"), await s.get("/api/deputies")]
            received += [await s.get("/api/me", headers={"x-who": "carl"})]
        assert [(vote["by"]["id"], vote["on_behalf_of"]) for vote in entry["votes"]] == [
            ("carl", {"id": "ada", "roles": ["finance"]}),
            ("bo", None),
        ]
        assert received[-1]["deputy_of"] == [{"id": "ada", "roles": ["finance"]}]
        assert "a-secret" not in json.dumps(received)


async def test_a_conversation_of_another_principal_looks_like_one_that_does_not_exist():
    from holdfast.server import OpenedBy

    agent = refund_agent()
    holder = {}

    async def may_see(principal, conversation):
        return await holder["rule"](principal, conversation)

    async with site(agent, auth=principal_from_header, may_see=may_see) as s:
        holder["rule"] = OpenedBy(s.runtime)
        s.http.headers["x-who"] = "ada"
        await s.begin("hers")
        [entry] = await s.pending()
        async with s.events("/api/pending/events") as hers:
            assert len((await hers.next())[2]["pending"]) == 1
            s.http.headers["x-who"] = "eve"
            call = f"/calls/{entry['call']}"
            answers = {}
            for name in ("hers", "none"):
                p = f"/api/conversations/{name}"
                answers[name] = [
                    await s.get(p, 404),
                    await s.get(f"{p}/log", 404),
                    await s.get(f"{p}/events", 404),
                    await s.post(f"{p}/messages", {"text": "hi"}, 404),
                    await s.post(f"{p}/cancel", {}, 404),
                    await s.post(f"{p}/clients", {}, 404),
                    await s.post(f"{p}{call}/preview", {"args": {}}, 404),
                    await s.post(f"{p}{call}/resolve", approval(entry), 404),
                    await s.get(f"/api/grants?conversation={name}", 404),
                    await s.get(f"/api/pending?conversation={name}", 404),
                ]
            as_none = [{**a, "detail": a["detail"].replace("hers", "none")} for a in answers["hers"]]
            assert as_none == answers["none"]
            assert (await s.get("/api/pending"))["pending"] == []
            assert (await s.get("/api/conversations"))["conversations"] == []
            async with s.events("/api/pending/events") as eves:
                assert (await eves.next())[2] == {"pending": []}
                await s.begin("eves")
                assert (await eves.next())[2]["conversation"] == "eves"
            s.http.headers["x-who"] = "ada"
            await s.post(f"/api/conversations/hers{call}/resolve", approval(entry))
            assert (await hers.next()) == ("removed", None, {"conversation": "hers", "call": entry["call"]})


async def test_files_of_the_page_are_compressed_have_an_etag_and_stay_within_their_directory(tmp_path):
    (tmp_path / "own.js").write_text("export const a = 1;\n" * 50)
    (tmp_path / "index.html").write_text('<script type="importmap">{"imports": {}}</script>')
    (tmp_path / ".secret.js").write_text("no")
    (tmp_path.parent / "outside.js").write_text("no")
    (tmp_path / "link.js").symlink_to(tmp_path.parent / "outside.js")
    async with site(desk("x"), ui=tmp_path) as s:
        file = await s.http.get("/static/own.js")
        assert file.headers["content-type"] == "text/javascript; charset=utf-8"
        assert file.headers["content-encoding"] == "gzip"
        assert file.text.startswith("export const a")
        again = await s.http.get("/static/own.js", headers={"if-none-match": file.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = await s.http.get("/static/own.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        index = await s.http.get("/")
        policy = index.headers["content-security-policy"]
        assert "script-src 'self' 'sha256-" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        head = await s.http.head("/static/own.js")
        assert (head.status_code, head.content) == (200, b"")
        for path in ("/static/.secret.js", "/static/link.js", "/static/", "/static/own.py", "/static/%2Fetc%2Fpasswd"):
            await s.get(path, 404)


async def test_the_packaged_page_is_served():
    async with site(desk("x")) as s:
        index = await s.http.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert "<script" in index.text


async def test_twenty_conversations_are_started_and_approved_concurrently():
    async with site(refund_agent()) as s:
        names = [f"c{i}" for i in range(20)]
        await asyncio.gather(*(s.begin(name) for name in names))
        entries = await s.pending(20)
        results = await asyncio.gather(
            *(s.post(f"/api/conversations/{e['conversation']}/calls/{e['call']}/resolve", approval(e)) for e in entries)
        )
        assert {r["status"] for r in results} == {"accepted"}


async def test_a_misspelt_field_or_type_in_a_decision_is_422_and_decides_nothing():
    """A misspelt name must not make the server ignore an edit or a reason."""
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        digest, call = entry["digest"], entry["call"]
        unknown = "Object contains unknown field"
        words = "one of approve, deny, answer, client_result, submit, failed"
        for decision, message_part in (
            ({"type": "approve", "digest": digest, "arguments": {"amount": 1}}, f"{unknown} `arguments`"),
            ({"type": "deny", "reson": "no"}, f"{unknown} `reson`"),
            ({"type": "deny", "reson": "no"}, "approve: args, digest, remember, duration, scope; deny: reason, stop;"),
            ({"type": "aprove", "digest": digest}, words),
            ({"type": "approve", "digest": digest, "remember": "ever"}, "one of args, tool"),
        ):
            item = {"conversation": "c", "call": call, "decision": decision}
            for path, body in (
                (f"/api/conversations/c/calls/{call}/resolve", {"decision": decision}),
                ("/api/pending/resolve", {"decisions": [item]}),
            ):
                answer = await s.http.post(path, json=body)
                assert answer.status_code == 422
                assert message_part in answer.json()["detail"]
        assert await s.pending() == [entry]
        answer = await s.http.get("/api/conversations?status=foo")
        assert "one of awaiting_input, executing_tools, idle" in answer.json()["detail"]
        message = b'{"text": "half \\ud800"}'
        answer = await s.http.post("/api/conversations/c/messages", content=message, headers=JSON)
        assert "half of a surrogate pair" in answer.json()["detail"]
        answer = await s.http.post("/api/conversations/c/messages", content=b'{"text": "half', headers=JSON)
        assert "it ends too early" in answer.json()["detail"]
        answer = await s.http.post("/api/conversations/c/messages", json={"txt": "half"})
        assert "known: text, when_busy, mode, agent" in answer.json()["detail"]


async def test_the_same_decision_sent_again_by_the_same_principal_gets_the_first_response():
    """A client may retry a decision; nothing is decided twice, and another decision is stale [B27]."""
    async with site(refund_agent(), auth=principal_from_header) as s:
        s.http.headers["x-who"] = "ada"
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/resolve"
        first = await s.post(path, approval(entry))
        for _ in range(2):  # during the turn, and after its end
            assert await s.post(path, approval(entry)) == first
            item = {"conversation": "c", "call": entry["call"], **approval(entry)}
            [again] = (await s.post("/api/pending/resolve", {"decisions": [item]}))["results"]
            assert again == {"conversation": "c", "call": entry["call"], **first}
            for other in ({"decision": {"type": "deny"}}, approval(entry, remember="tool")):
                problem = await s.post(path, other, 409)
                assert (problem["kind"], problem["details"]["winner"]) == ("stale", "ada")
            assert (await s.post(path, approval(entry), 409, headers=BO))["details"]["winner"] == "ada"
            await s.idle()
        log = (await s.get(f"{C}/log"))["events"]
        assert [e["seq"] for e in log if e["type"] == "CallResolved"] == [first["seq"]]


async def test_a_json_body_with_a_duplicate_key_is_refused():
    """A person could read one of the two values and the server use the other."""
    async with site(refund_agent()) as s:
        await s.begin()
        [entry] = await s.pending()
        bodies = {
            "/api/conversations": '{"id": "x", "id": "y"}',
            f"{C}/calls/{entry['call']}/preview": '{"args": {"order": 7, "amount": 5, "amount": 99}}',
            f"{C}/calls/{entry['call']}/resolve": '{"decision": {"type": "deny", "reason": "a", "reason": "b"}}',
        }
        for path, body in bodies.items():
            answer = await s.http.post(path, content=body, headers=JSON)
            assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_args")
            assert "twice" in answer.json()["detail"]
        assert (await s.pending())[0] == entry


async def test_a_nul_character_anywhere_in_a_body_is_refused():
    async with site(desk(["?", ToolCall("choose", {"colours": []})], "ok")) as s:
        await s.begin()
        [entry] = await s.pending()
        path = f"{C}/calls/{entry['call']}/resolve"
        for where, body in (
            ("/api/conversations", {"metadata": {"a": "x\0"}}),
            (f"{C}/cancel", {"reason": "\0"}),
            (path, {"decision": {"type": "answer", "value": {"a\0": 1}}}),
        ):
            assert "NUL" in (await s.post(where, body, 422))["detail"]
        await s.post(path, {"decision": {"type": "answer", "value": "a backslash and u0000: \\u0000"}})


async def test_generated_ids_have_128_bits():
    async with site(desk("x")) as s:
        ids = [(await s.post("/api/conversations", {}, 201))["conversation"] for _ in range(5)]
        ids += [(await s.post(f"/api/conversations/{ids[0]}/clients", {}))["client"] for _ in range(5)]
        assert len(set(ids)) == 10
        for each in ids:
            assert re.fullmatch("[a-z2-7]{26}", each)


async def test_a_client_belongs_to_the_principal_that_announced_it():
    """Another principal gets 404 for it, and can have a different client with the same id."""
    async with site(desk(["where", ToolCall("locate", {})], "ok"), auth=principal_from_header) as s:
        s.http.headers["x-who"] = "ada"
        await s.begin()
        [entry] = await s.pending()
        await s.post(f"{C}/clients", {"client": "tab"})
        call = f"{C}/calls/{entry['call']}"
        unknown = await s.post(f"{C}/clients/never/heartbeat", {}, 404, headers=BO)
        problem = await s.post(f"{C}/clients/tab/heartbeat", {}, 404, headers=BO)
        assert problem["detail"] == unknown["detail"].replace("never", "tab")
        assert (await s.http.delete(f"{C}/clients/tab", headers=BO)).status_code == 404
        await s.post(f"{call}/lease", {"client": "tab"}, 404, headers=BO)
        await s.post(f"{call}/progress", {"client": "tab", "payload": 1}, 404, headers=BO)
        assert await s.post(f"{call}/lease", {"client": "tab"}) == {"leased": True}
        await s.post(f"{C}/clients", {"client": "tab"}, headers=BO)
        assert await s.post(f"{call}/lease", {"client": "tab"}, headers=BO) == {"leased": False}
        await s.http.delete(f"{C}/clients/tab", headers=BO)
        await s.post(f"{C}/clients/tab/heartbeat", {}, 204)  # ada's client still exists


async def test_a_principal_has_a_bounded_number_of_clients_in_a_conversation(monkeypatch):
    monkeypatch.setattr(routes, "MAX_CLIENTS", 2)
    monkeypatch.setattr(routes, "MAX_CLIENTS_LATELY", 4)
    async with site(desk("x"), auth=principal_from_header) as s:
        s.http.headers["x-who"] = "ada"
        await s.post("/api/conversations", {"id": "c"}, 201)
        for name in ("one", "two", "two"):
            await s.post(f"{C}/clients", {"client": name})
        answer = await s.http.post(f"{C}/clients", json={"client": "three"})
        assert (answer.status_code, answer.json()["kind"]) == (429, "backpressure")
        assert int(answer.headers["retry-after"]) > 0
        await s.post(f"{C}/clients", {"client": "three"}, headers=BO)
        await s.delete(f"{C}/clients/two")
        for name in ("three", "four"):
            await s.post(f"{C}/clients", {"client": name})
            await s.delete(f"{C}/clients/{name}")
        problem = await s.post(f"{C}/clients", {"client": "five"}, 429)  # clients that left count for a while
        assert "use the id of one of them" in problem["detail"]
        await s.post(f"{C}/clients", {"client": "two"})


async def test_a_cursor_does_not_reveal_whether_a_hidden_conversation_exists():
    async with site(desk("x"), auth=principal_from_header, may_see=lambda who, name: name.startswith(who.id)) as s:
        for name in ("ada-1", "bo-1", "ada-2", "ada-3"):
            await s.runtime.open(name)
        for order, status in (("newest", None), ("newest", "idle"), ("id", None)):
            asked = {"order": order, **({"status": status} if status else {})}
            hidden, unknown = [
                await s.get("/api/conversations", params={**asked, "cursor": cursor}, headers=ADA)
                for cursor in ("bo-1", "bo-0")
            ]
            assert hidden == unknown
        first = await s.get("/api/conversations", params={"order": "newest", "limit": 1}, headers=ADA)
        rest = await s.get("/api/conversations", params={"order": "newest", "cursor": first["next"]}, headers=ADA)
        found = [row["conversation"] for row in first["conversations"] + rest["conversations"]]
        assert found == ["ada-3", "ada-2", "ada-1"]


async def test_an_artifact_is_downloaded_by_those_who_may_read_its_conversation():
    """It is never shown as a page of this site, whatever the tool says that it is."""
    page = b"<script>alert(1)</script>"

    @tool
    async def draw(call: Call) -> str:
        """Draw."""
        return call.keep(page, "text/html", 'a "page" ☃.html').sha256

    agent = Agent("desk", model=ScriptedModel([[ToolCall("draw", {})], "done"], follow=True), tools=[draw])
    async with site(agent, auth=lambda r: r.headers.get("x-who"), may_see=lambda who, name: who == "ann") as s:
        ann = {"headers": {"x-who": "ann"}}
        for name in ("c", "other"):
            await s.post("/api/conversations", {"id": name}, 201, **ann)
        await s.post(f"{C}/messages", {"text": "hi"}, 202, **ann)
        await s.runtime.wait("c")
        (returned,) = [event for event in await s.runtime.history("c") if event.type == "CallReturned"]
        path = f"{C}/artifacts/{returned.value}"
        found = await s.http.get(path, headers=ann["headers"])
        assert (found.status_code, found.content) == (200, page)
        assert found.headers["content-type"] == "text/html"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-security-policy"].startswith("sandbox;")
        assert found.headers["content-disposition"] == "attachment; filename*=UTF-8''a%20%22page%22%20%E2%98%83.html"
        await s.get(path.replace("/c/", "/other/"), 404, **ann)
        await s.get(path[:-1] + "0" * 2, 404, **ann)
        await s.get(path, 404, headers={"x-who": "bob"})
        await s.get(path, 401)


@pytest.mark.parametrize(
    ("media_type", "shown"),
    [
        ("image/png", "inline"),
        ("image/jpeg", "inline"),
        ("image/gif", "inline"),
        ("image/webp", "inline"),
        ("image/svg+xml", "attachment"),
        ("image/png; charset=utf-7", "attachment"),
        ("text/html", "attachment"),
        ("application/pdf", "attachment"),
    ],
)
def test_only_images_in_which_nothing_runs_are_shown_by_a_browser(media_type, shown):
    """An SVG has scripts; everything is sandboxed, if a browser opens it after all."""
    headers = routes.Download(b"", media_type, "a\r\nb").headers
    assert headers["content-disposition"] == f"{shown}; filename*=UTF-8''a%0D%0Ab"
    assert headers["content-security-policy"].startswith("sandbox; default-src 'none'")


def test_a_media_type_of_an_imported_log_cannot_add_a_header():
    wrong = routes.Download(b"", "text/plain\r\nset-cookie: a=b", "x")
    assert wrong.headers["content-type"] == "application/octet-stream"


async def test_a_late_answer_does_not_get_the_receipt_of_an_earlier_question():
    """The same answer to another question of the call is no repetition of it [B107]."""

    @tool
    async def plan(call: Call) -> object:
        """Ask twice."""
        if len(call.answers) < 2:
            return Ask(f"Question {len(call.answers)}?", choices=["yes", "no"], resume=None)
        return list(call.answers)

    desk = Agent("desk", model=ScriptedModel([[ToolCall("plan")], "done"], follow=True), tools=[plan])
    async with site(desk, auth=lambda request: request.headers.get("x-who")) as s:
        s.http.headers["x-who"] = "ada"
        await s.begin()
        (first,) = await s.pending(1)
        yes, no = ({"decision": {"type": "answer", "value": value}} for value in ("yes", "no"))
        path = f"/api/conversations/c/calls/{first['call']}"
        accepted = await s.http.post(f"{path}:{first['seq']}/resolve", json=yes)
        assert accepted.status_code == 200

        async def second_question():
            return [entry for entry in await s.pending() if entry["seq"] != first["seq"]]

        await until(second_question)
        (second,) = await second_question()
        bob = await s.http.post(f"{path}:{second['seq']}/resolve", json=no, headers={"x-who": "bob"})
        assert bob.status_code == 200
        late = await s.http.post(f"{path}:{second['seq']}/resolve", json=yes)
        assert late.status_code == 409
        assert "bob" in late.text
        again = await s.http.post(f"{path}:{first['seq']}/resolve", json=yes)
        assert (again.status_code, again.json()) == (200, accepted.json())
