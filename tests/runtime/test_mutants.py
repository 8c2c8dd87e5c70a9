"""Mutation tests: the scenarios of ``test_state_machine`` must detect each defect that is planted in the real code.

A mutant is a patch of the running code. The first scenario that violates a law is enough. A mutant that violates none
fails here: the laws have a gap.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import worlds
from hypothesis import given
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace
from scenarios import (
    CLASSICS,
    DEPUTISED,
    GRACED_SCENES,
    IMPORTS,
    LABELLED,
    deputised,
    graced,
    hunting,
    importing,
    labelled,
    scenario,
)

from holdfast.core import codec, effects, state, transcript
from holdfast.core.decide import aside, draft, gate, grace, machine, reply, resolution, wait
from holdfast.core.decisions import Answer, Approve, Deny, Expired, Vote, decider_refusal
from holdfast.core.events import ApprovalTakenBack, DeputyEnded, GraceEnded
from holdfast.core.inputs import DeadlinePassed, WindowPassed
from holdfast.errors import Stale
from holdfast.runtime import commit, conversation, decision_rows
from holdfast.runtime.pending_calls import deputies as runtime_deputies
from holdfast.runtime.pending_calls import inbox, resolve, shared_grants
from holdfast.runtime.steps import tool_call
from holdfast.stores.memory import MemoryStore

MUTANTS = {}


def mutant(law):
    """Register a function that returns (object, name, replacement) for each patch; ``law`` matches the violation."""

    def register(build):
        MUTANTS[build.__name__] = build, law
        return build

    return register


@mutant("without an approval or a grant")
def gate_ignored():
    """A tool that needs an approval is treated as one that needs none."""
    freeze = gate.freeze_call

    def open_gate(*args):
        return replace(freeze(*args), gate="auto", grant=None)

    return [(gate, "freeze_call", open_gate)]


@mutant("without an approval or a grant")
def policy_ignored():
    """The approval function requires an approval, and no approver is asked."""
    claim = gate.claim_call

    def without_approval(log, call, input):
        claim(log, call, replace(input, required=False))

    return [(gate, "claim_call", without_approval)]


@mutant("an effect (without a|before its) claim")
def claim_after_effect():
    """The handler runs before the call is claimed."""

    async def run(conv, effect, mine):
        call = conv.find_call(effect.call)
        if call is not None and call.phase == "ready" and conv.epoch is not None:
            early = replace(call, attempt=call.attempt + 1)
            slot = await tool_call._acquire_slot(conv, call)
            try:
                outcome = await tool_call._run_handler(conv, early, slot)
                claimed = await tool_call._claim_call(conv, call, conv.epoch)
                if claimed is not None:
                    report = tool_call.CallFinished(call=effect.call, attempt=claimed.attempt, outcome=outcome)
                    await conv.report(report, mine)
            finally:
                slot.release()
        else:
            await real(conv, effect, mine)

    real = tool_call.run_tool
    return [(tool_call, "run_tool", run), (tool_call, "can_start_at_once", lambda call: False)]


@mutant("and it needs 2 people")
def one_vote_suffices():
    """The first of several approvals lets the call run."""
    add_vote = wait.add_vote

    def enough(log, suspension, by, on_behalf_of):
        add_vote(log, suspension, by, on_behalf_of)
        return True

    return [(wait, "add_vote", enough)]


@mutant("1 more are missing, it says 0|and it needs 2 people")
def votes_outlive_their_plan():
    """A call that is suspended again keeps a vote for its earlier plan."""
    apply_suspension = state._apply_suspension

    def keep(call, event):
        return replace(apply_suspension(call, event), wait=state.Wait(votes=call.wait.votes[:1]))

    return [(state, "_apply_suspension", keep)]


@mutant("the outbox differs from the log")
def decisions_not_announced():
    """Channels are told that a call waits, but not how it was decided."""
    notices_of = commit.notices_of

    def waiting_only(before, events, states):
        return [(seq, kind) for seq, kind in notices_of(before, events, states) if kind != "resolved"]

    return [(commit, "notices_of", waiting_only)]


@mutant("stands in the log 0 times|stands at")
def acknowledged_before_the_commit():
    """Callers get their acknowledgement before the append."""
    commit_items = conversation.Conversation._commit

    async def early(self, items):
        _, held = commit.draft_inputs(self, items)
        commit.release_slots(self, held)
        for item in items:
            if item.refusal is None:
                item.answer(None)
        await commit_items(self, items)

    return [(conversation.Conversation, "_commit", early)]


@mutant("nothing was asked")
def stale_accepted():
    """A call that is already decided can be decided again."""
    waiting = resolution.require_suspension
    asked = {}

    def lenient(log, call_id, *, expired=False):
        try:
            asked[call_id] = waiting(log, call_id, expired=expired)
        except Stale:
            turn = log.state.turn
            call = turn.calls.get(call_id) if turn else None
            if call is None or call.phase == "done" or call_id not in asked or expired:
                raise
        return asked[call_id]

    def record(log, call_id, decision, by, judged=None, on_behalf_of=None):
        suspension = asked[call_id]
        log.add(
            resolution.CallResolved,
            by,
            call_id=call_id,
            kind=suspension.kind,
            decision=decision,
            digest=suspension.digest,
        )

    return [(resolution, "require_suspension", lenient), (resolution, "add_decision", record)]


@mutant("an owner of epoch . wrote in epoch")
def fencing_disabled():
    """The store accepts appends of an owner with an outdated epoch."""
    append = MemoryStore.append

    async def unfenced(self, step):
        found = self._data.conversations.get(step.conversation)
        if step.epoch is not None and found is not None:
            step = replace(step, epoch=found.epoch)
        await append(self, step)

    return [(MemoryStore, "append", unfenced)]


@mutant("a guest appends")
def reports_accepted_without_the_lease():
    """The report of a task is recorded even if another process owns the conversation now."""
    return [(conversation, "reject_stale", lambda items, epoch: items)]


@mutant("one attempt, two effects|a result, and nobody did anything|an effect of epoch 1 after one of 2")
def superseded_owner_keeps_running():
    """An owner that reads the calls of a newer owner treats them as its own."""
    catch_up, lose = conversation.Conversation._catch_up, conversation.Conversation._drop_ownership
    reading = set()

    async def unaware(self):
        reading.add(self)
        try:
            return await catch_up(self)
        finally:
            reading.discard(self)

    def keep(self):
        if self not in reading:
            lose(self)

    return [(conversation.Conversation, "_catch_up", unaware), (conversation.Conversation, "_drop_ownership", keep)]


@mutant("published before it was appended")
def published_before_the_append():
    """Viewers get events before they are appended."""
    commit_items = conversation.Conversation._commit

    async def early(self, items):
        draft, held = commit.draft_inputs(self, items)
        commit.release_slots(self, held)
        for event in draft.events:
            self.services.bus.publish(self.name, event)
        await commit_items(self, items)

    return [(conversation.Conversation, "_commit", early)]


@mutant("must not run again|nobody said that it may run again")
def interrupted_call_rerun():
    """An interrupted call runs again, whatever the recovery of its tool."""
    recover = machine._recover_call

    def again(log, call, recovery, epoch, definition):
        recover(log, call, "redispatch", epoch, definition)

    return [(machine, "_recover_call", again)]


@mutant("it should run again")
def interrupted_call_resumed_without_a_claim():
    """A new owner continues the running calls of the last one without a new claim."""
    return [(machine, "_recover_calls", lambda log, input: None)]


@mutant("its own owner started it again|time does not advance")
def own_calls_recovered():
    """An owner treats its own running calls as interrupted when it handles certain inputs."""
    decide = commit.decide_into

    def every_time(log, input, specs):
        decide(log, input, specs)
        if isinstance(input, DeadlinePassed | machine.CallFinished):
            machine._recover_calls(log, machine.OwnerStarted(epoch=10**6))

    return [(commit, "decide_into", every_time)]


@mutant("the model called")
def unknown_tool_dropped():
    """A call of an unknown tool is dropped."""
    replied = reply.handle_reply

    def only_known(log, input, specs):
        replied(log, replace(input, calls=tuple(c for c in input.calls if c.tool in specs)), specs)

    return [(reply, "handle_reply", only_known)]


@mutant("does not come to rest")
def denial_without_result():
    """A denied call gets no result."""
    conclude = resolution.add_decision_result

    def silent(log, call, resolved):
        if not isinstance(resolved.decision, Deny):
            conclude(log, call, resolved)

    return [(resolution, "add_decision_result", silent)]


@mutant("a run that was never begun|an approval became a result")
def approval_recorded_as_a_result():
    """The approval becomes the result of the call, and the handler does not run."""
    advance = gate.suspend_if_needed

    def closed(log, call, turn):
        if call.approver is not None and call.phase == "ready":
            log.add_result(call, value="approved")
        else:
            advance(log, call, turn)

    return [(gate, "suspend_if_needed", closed)]


@mutant("another plan than was approved")
def plan_not_checked_again():
    """The approved plan is not compared with the new one before the run."""
    claim = gate.claim_call

    def unchecked(log, call, input):
        claim(log, replace(call, bound=None), input)

    return [(gate, "claim_call", unchecked)]


@mutant("ran with other arguments")
def edited_arguments_ignored():
    """An approver edits the arguments, and the model's arguments run."""
    resolved = state._apply_decision

    def unchanged(call, event):
        after = resolved(call, event)
        return replace(after, args=call.args) if isinstance(event.decision, Approve) else after

    return [(state, "_apply_decision", unchanged)]


@mutant("the turn ended with|the model made")
def cancel_without_results():
    """A cancelled turn leaves its open calls without results."""
    close = machine._close_turn

    def careless(log, input):
        turn = log.require_turn()
        if turn.cancelling:
            log.add(machine.TurnEnded, turn=turn.number, reason="cancelled")
        else:
            close(log, input)

    return [(machine, "_close_turn", careless)]


@mutant("expired before its deadline")
def deadline_passes_early():
    """Deadlines expire when they are checked, not when they are due."""
    decide, due = commit.decide_into, MemoryStore.list_due

    def early(log, input, specs):
        if isinstance(input, DeadlinePassed):
            machine._resolve_by_system(log, resolution.require_suspension(log, input.call, expired=True), Expired())
        else:
            decide(log, input, specs)

    async def overdue(self, row):
        await self._submit_input(row.conversation, DeadlinePassed(call=row.call))

    async def due_early(self, now, limit=100):
        return await due(self, now + 10**6, limit)

    return [
        (commit, "decide_into", early),
        (inbox.Expiry, "_expire_or_postpone", overdue),
        (MemoryStore, "list_due", due_early),
    ]


@mutant("without an approval or a grant")
def grant_never_ends():
    """A grant that was revoked or has expired still applies."""
    given = {}
    covering = gate.find_grant

    def remembered(now_state, wanted, now, shared=()):
        for grant in now_state.grants:
            given[now_state.conversation, grant.id] = grant
        found = covering(now_state, wanted, now, shared)
        if found is not None:
            return found
        for (_, name), grant in given.items():
            applies = gate.grant_applies(replace(grant, until=None), wanted.args, now)
            if grant.tool == wanted.tool and gate.covers_definition(grant, wanted) and applies:
                return name
        return None

    return [(gate, "find_grant", remembered)]


@mutant("by another definition than was approved")
def definition_not_compared():
    """The definition of the tool has changed since the approval, and the call runs."""
    return [(gate, "definition_changed", lambda call, definition: False)]


@mutant("by another definition than was approved")
def grant_covers_another_definition():
    """A grant for one definition of a tool applies to another definition."""
    covering = gate.find_grant

    def any_definition(now_state, wanted, now, shared=()):
        return covering(now_state, replace(wanted, fingerprint=""), now, shared)

    return [(gate, "find_grant", any_definition)]


@mutant("without an approval or a grant")
def grant_compares_no_arguments():
    """What was remembered for these arguments covers any."""
    return [(gate, "compared_args", lambda args, names: {})]


@mutant("an edited plan that is not recorded")
def edit_without_a_plan():
    """Arguments that were edited without a preview run without a plan."""
    return [(gate, "needs_plan", lambda call: call.bound is not None)]


@mutant("another plan than the claim is bound to")
def plan_lost_in_a_recovery():
    """An approved run is interrupted, and repeated without the plan that it had."""
    suspended = state._apply_suspension
    return [(state, "_apply_suspension", lambda call, event: replace(suspended(call, event), plan=None))]


def answering(change):
    """Return a patch that changes the call after an answer with which it continues. ``change`` gets the call before,
    the event and the call after."""
    resolved = state._apply_decision

    def apply(call, event):
        after = resolved(call, event)
        return change(call, event, after) if after.continuing and not call.continuing else after

    return [(state, "_apply_decision", apply)]


@mutant("other answers or another state")
def continuation_forgets_its_answers():
    """A call that asks twice continues with the last answer only."""
    return answering(lambda call, event, after: replace(after, answers=after.answers[-1:]))


@mutant("other answers or another state")
def continuation_loses_its_state():
    """A call continues without what its handler passed to itself."""
    return answering(lambda call, event, after: replace(after, state=None))


@mutant("other answers or another state")
def checkpoint_that_is_lost():
    """A handler's next run does not get the state that the run before passed on with ``Continue``."""
    started = state._apply_start
    return [(state, "_apply_start", lambda call, event: replace(started(call, event), state=call.state))]


@mutant("the usage is")
def model_requests_that_do_not_count():
    """What a handler asks the model does not count toward the limits of the turn."""
    return [(state, "count_attempts", lambda turn, attempts: turn)]


@mutant("without the request that it answers")
def model_requests_that_are_not_logged():
    """The log has a handler's checkpoint, and not the request to the model that it made before."""
    go_on = gate.continue_call

    def forget(log, call, passed, *, attempts=(), **run):
        go_on(log, call, passed, **run)

    return [(gate, "continue_call", forget)]


@mutant("the denial was to be passed on")
def denial_ends_a_call_that_continues():
    """A denied question ends its call, although its handler was to run again."""

    def only_answers(asked, decision):
        return isinstance(decision, Answer)

    return [(state, "_lets_continue", only_answers)]


@mutant("a result of a call that was to continue")
def answer_recorded_as_the_result():
    """The answer becomes the result, and the handler does not continue."""
    return answering(lambda call, event, after: replace(after, decided=event))


@mutant("other answers or another state")
def repeated_continuation_starts_afresh():
    """An interrupted continuation is repeated as if nothing had been asked."""
    started = state._apply_start

    def afresh(call, event):
        after = started(call, event)
        return after if call.continuing or not call.attempt else replace(after, answers=(), state=None)

    return [(state, "_apply_start", afresh)]


@mutant("must not run again|ran more often than once")
def continuation_runs_twice():
    """A continuation that was interrupted counts as one that has not started."""
    recover = machine._recover_call

    def again(log, call, recovery, epoch, definition):
        recover(log, call, "redispatch" if call.answers else recovery, epoch, definition)

    return [(machine, "_recover_call", again)]


@mutant("was not interrupted: it had asked")
def continuation_taken_for_an_interrupted_run():
    """A call whose permission lapsed while it asked is asked about as an interrupted one."""
    ask = gate._request_approval

    def confused(log, call, input, reason):
        ask(log, replace(call, continuing=False), input, reason)

    return [(gate, "_request_approval", confused)]


@mutant("without an approval or a grant|by another definition than was approved")
def continuation_ignores_a_lapsed_permission():
    """A call continues although its grant was revoked or its definition changed."""
    lapsed = gate.permission_lapsed

    def lenient(now_state, call, *more):
        return not call.continuing and lapsed(now_state, call, *more)

    return [(gate, "permission_lapsed", lenient)]


@mutant("the pending index differs from the fold")
def second_suspension_not_indexed():
    """The pending entry of a call that is suspended a second time is not indexed."""
    append = MemoryStore.append

    async def forgetful(self, step):
        found = self._data.conversations.get(step.conversation)
        opened = [entry for entry in step.opened if not found or entry.call not in str(found.events)[:4000]]
        await append(self, replace(step, opened=opened))

    return [(MemoryStore, "append", forgetful)]


@mutant("the model made|a model call with")
def model_called_with_a_call_open():
    """The model is called before the last result is there."""
    owed = effects.owed

    def impatient(now):
        turn = now.turn
        if turn and turn.calls and not (turn.cancelling or turn.answered or turn.halt or turn.asides):
            phases = [call.phase for call in turn.calls.values()]
            if phases.count("done") >= 1 and turn.step < turn.steps:
                return frozenset([effects.CallModel(turn.number, turn.step + 1)])
        return owed(now)

    return [(module, "owed", impatient) for module in (effects, machine, reply, conversation)]


@mutant("TurnEnded without an answer to asides")
def aside_lost_at_the_end():
    """A turn that is cancelled or halted forgets the asides that have no answer."""
    return [(aside, "end_asides", lambda log, turn, input: None)]


@mutant("AssistantSaid without an answer to asides|answers aside")
def aside_not_awaited():
    """The next step of the turn does not wait for the answers of asides."""
    owed = effects.owed

    def hasty(now):
        turn = now.turn
        return owed(replace(now, turn=replace(turn, asides=())) if turn and _is_step_done(turn) else now)

    return [(module, "owed", hasty) for module in (effects, machine, reply, aside, conversation)]


def _is_step_done(turn):
    return all(call.phase == "done" for call in turn.calls.values())


@mutant("no call waits")
def aside_taken_while_the_turn_works():
    """An aside is taken whatever the turn does."""
    return [(aside, "status_of", lambda now: "awaiting_input")]


@mutant("the model made")
def aside_without_stubs():
    """The request of an aside leaves out the calls that have no result."""
    messages = transcript.Transcript.messages_for_aside

    def without_stubs(self, message, stub):
        return [each for each in messages(self, message, stub) if not (hasattr(each, "tool") and each.seq == 0)]

    return [(transcript.Transcript, "messages_for_aside", without_stubs)]


@mutant("does not come to rest")
def dead_owner_never_replaced():
    """No process takes over the conversations of a dead one."""

    async def owing(self, agents, limit=100):
        return []

    return [(MemoryStore, "list_owing", owing)]


IMPORT_MUTANTS = {}


def import_mutant(law):
    """Register a mutant that only imports can detect."""

    def register(build):
        IMPORT_MUTANTS[build.__name__] = build, law
        return build

    return register


@import_mutant("began on the word of a file|an effect without a claim")
def imported_approvals_trusted():
    """Approvals, gates and clients of an imported log are trusted."""
    return [(state, "_reset_imported_call", lambda call: call)]


@import_mutant("began on the word of a file")
def imported_calls_recovered_without_approval():
    """Running calls of an imported log are recovered without asking an approver."""
    asked_again = state._reset_imported_call
    return [(state, "_reset_imported_call", lambda call: replace(asked_again(call), imported=False))]


@import_mutant("began on the word of a file")
def imported_answer_trusted():
    """A call of an imported log continues after an answer without an approval."""
    return [(state, "_reset_imported_continuation", lambda call: call)]


@import_mutant("without trust")
def untrusted_import_left_open():
    """A conversation that was imported without trust continues."""
    imported = state._apply_import
    return [(state, "_apply_import", lambda now, event: replace(imported(now, event), closed=False))]


DEPUTY_MUTANTS = {}


def deputy_mutant(law):
    """Register a mutant that only the scenarios with deputies can detect."""

    def register(build):
        DEPUTY_MUTANTS[build.__name__] = build, law
        return build

    return register


@deputy_mutant("and was not its deputy")
def lapsed_deputy_decides():
    """A deputy decides after its period."""

    async def for_ever(self):
        return list((await runtime_deputies.read_state(self._store, runtime_deputies.DEPUTIES)).delegations)

    return [(runtime_deputies.Deputies, "in_force", for_ever)]


@deputy_mutant("and was not its deputy")
def ended_deputy_decides():
    """The end of a delegation is logged, and the delegation stays."""
    evolve = state.evolve

    def keep(now, event):
        after = evolve(now, event)
        return replace(after, delegations=now.delegations) if isinstance(event, DeputyEnded) else after

    return [(module, "evolve", keep) for module in (draft, shared_grants)]


@deputy_mutant("and was not its deputy")
def end_in_another_process_not_seen():
    """A process that has read the deputies once does not see that another process ended one."""
    in_force = runtime_deputies.Deputies.in_force

    async def cached(self):
        if not self._cached[1]:
            return await in_force(self)
        return [one for one in self._cached[1] if self._now() < one.until]

    return [(runtime_deputies.Deputies, "in_force", cached)]


@deputy_mutant("and was not its deputy")
def deputy_of_a_deputy_decides():
    """A deputy's deputy stands in for the first principal."""

    async def chains(self, deputy):
        found, open_ids = {}, [deputy]
        for one in open_ids:
            for delegation in await self.in_force():
                if delegation.deputy == one and delegation.principal.id not in (deputy, *found):
                    found[delegation.principal.id] = delegation.principal
                    open_ids.append(delegation.principal.id)
        return list(found.values())

    return [(runtime_deputies.Deputies, "represented_by", chains)]


def judging(judge):
    """Return patches that replace the check of the tool's declaration."""
    return [(module, "decider_refusal", judge) for module in (resolution, resolve)]


@deputy_mutant("requested it, and decides through")
def requester_decides_for_another():
    """The requester decides as the deputy of a principal who may decide."""
    return judging(lambda entry, by, for_whom=None: decider_refusal(entry, for_whom or by))


@deputy_mutant("requested it, and decides through")
def requester_is_represented():
    """The requester's deputy decides."""

    def lenient(entry, by, for_whom=None):
        open_entry = replace(entry, not_requester=False)
        return decider_refusal(entry if by.id == entry.principal.id else open_entry, by, for_whom)

    return judging(lenient)


@deputy_mutant("own grant")
def grant_covers_its_giver():
    """A requester's call runs under a grant that the requester gave."""
    find_grant = gate.find_grant

    def lenient(state, wanted, now, shared=()):
        return find_grant(state, replace(wanted, not_requester=False), now, shared)

    return [(gate, "find_grant", lenient)]


@deputy_mutant("own grant")
def grant_covers_the_principal_of_its_giver():
    """A requester's call runs under a grant that the requester's deputy gave."""
    return [(state.Grant, "givers", property(lambda self: {self.by.id}))]


@deputy_mutant("has none of the roles")
def deputy_needs_no_roles():
    """A deputy may decide whatever the one represented may decide."""

    def lenient(entry, by, for_whom=None):
        deputy = for_whom is not None and for_whom.id != by.id
        return decider_refusal(replace(entry, approver_roles=()) if deputy else entry, by, for_whom)

    return judging(lenient)


@deputy_mutant("has none of the roles")
def represented_principal_not_logged():
    """A deputy's decision is logged as its own."""
    add_decision = resolution.add_decision

    def alone(log, call_id, decision, by, judged=None, on_behalf_of=None):
        add_decision(log, call_id, decision, by, judged)

    return [(resolution, "add_decision", alone)]


@deputy_mutant("votes a second time")
def deputy_adds_a_vote():
    """A deputy and the one represented count as two people."""
    people = property(lambda self: {self.by.id})
    return [(Vote, "people", people)]


@deputy_mutant("votes a second time")
def deputy_of_two_votes_twice():
    """A deputy of two people votes for each of them."""
    add_vote = wait.add_vote

    def without_the_deputy(log, suspension, by, on_behalf_of):
        call = log.require_turn().calls[suspension.call_id]
        renamed = tuple(
            replace(vote, by=vote.on_behalf_of, on_behalf_of=None) if vote.on_behalf_of else vote
            for vote in call.wait.votes
        )
        turn = log.state.turn
        calls = {**turn.calls, suspension.call_id: replace(call, wait=replace(call.wait, votes=renamed))}
        log.state = replace(log.state, turn=replace(turn, calls=calls))
        return add_vote(log, suspension, by, on_behalf_of)

    return [(wait, "add_vote", without_the_deputy)]


LABEL_MUTANTS = {}


def label_mutant(law):
    """Register a mutant that only the scenarios with titles, archives and searches can detect."""

    def register(build):
        LABEL_MUTANTS[build.__name__] = build, law
        return build

    return register


@label_mutant("the row's title or archive differs|snapshot and tail differ")
def a_message_leaves_the_conversation_archived():
    """A conversation stays archived although it gets a message."""
    apply = state.evolve

    def keep(before, event):
        after = apply(before, event)
        return replace(after, archived=before.archived) if event.type == "MessageReceived" else after

    return [(draft, "evolve", keep)]


@label_mutant("the row's title or archive differs|snapshot and tail differ")
def rename_not_folded():
    """A new title is logged and not folded into the state."""
    apply = state.evolve

    def ignore(before, event):
        after = apply(before, event)
        return replace(after, title=before.title) if event.type == "ConversationRenamed" else after

    return [(draft, "evolve", ignore)]


@label_mutant("the pending index differs from the fold|a pending entry has another title")
def pending_entries_keep_the_old_title():
    """A rename does not rewrite the pending entries."""
    build_append = commit.build_append

    def only_new(before, written, **options):
        step = build_append(before, written, **options)
        known = commit.waiting_calls(before)
        now = commit.waiting_calls(written.state)
        return replace(step, opened=[row for row in step.opened if known.get(row.call) is not now.get(row.call)])

    return [(conversation, "build_append", only_new)]


@mutant("the history differs from the log")
def decisions_unmarked():
    """An append of a decision does not mark its conversation as unindexed."""
    return [(commit, "kind_of", lambda event: None)]


@mutant("a decision is about no call")
def decisions_without_their_call():
    """A decision is indexed without the suspension that it is about."""
    return [(decision_rows, "target_of", lambda event: None)]


@label_mutant("a search finds other messages")
def texts_not_marked():
    """An append of a message does not mark its conversation as unindexed."""
    return [(commit, "has_text", lambda event: False)]


GRACE_MUTANTS = {}


def grace_mutant(law):
    """Register a mutant that only the scenarios with grace windows can detect."""

    def register(build):
        GRACE_MUTANTS[build.__name__] = build, law
        return build

    return register


@grace_mutant("and .* is right")
def approved_call_runs_at_once():
    """An approval has no window."""
    return [(grace, "window_end", lambda log, suspension: None)]


@grace_mutant("before its window has passed")
def window_ends_early():
    """A window ends when its entry is looked at, not when its time has come."""
    due, end_window = MemoryStore.list_due, grace.end_window

    async def due_early(self, now, limit=100):
        return await due(self, now + 1000, limit)

    async def overdue(self, row):
        await self._submit_input(row.conversation, WindowPassed(call=row.call))

    def early(log, call_id):
        now, log.now = log.now, log.now + 1000
        marked = len(log.events)
        try:
            end_window(log, call_id)
        finally:
            log.now = now
        log.events[marked:] = [replace(event, at=now) for event in log.events[marked:]]
        log.bodies[marked:] = [codec.encode_event(event) for event in log.events[marked:]]

    return [
        (MemoryStore, "list_due", due_early),
        (inbox.Expiry, "_expire_or_postpone", overdue),
        (grace, "end_window", early),
    ]


@grace_mutant("without an approval or a grant|started while it is suspended")
def taken_back_and_run():
    """An approval is taken back, and the call runs."""
    apply = state._apply_window_event

    def run(now, event):
        if not isinstance(event, ApprovalTakenBack):
            return apply(now, event)
        window = now.turn.calls[event.call_id].window
        ended = GraceEnded(
            seq=event.seq, at=event.at, by=event.by, v=1, call_id=event.call_id, approval=window.seq, approver=window.by
        )
        return apply(now, ended)

    return [(state, "_apply_window_event", run)]


@grace_mutant("ended a second time|its own owner started it again")
def window_that_ends_twice():
    """Two processes see that a window has passed, and each lets the call run."""
    apply, end_window = state._apply_window_event, grace.end_window
    ended = {}

    def again(log, call_id):
        try:
            window = grace.require_window(log, call_id)[2]
            ended[log.state.conversation, call_id] = window
            end_window(log, call_id)
        except Stale:
            window = ended.get((log.state.conversation, call_id))
            if window is None:
                raise
            log.add(GraceEnded, call_id=call_id, approval=window.seq, approver=window.by)

    def release(now, event):
        call = now.turn.calls.get(event.call_id) if now.turn else None
        if call is None or call.window is not None or not isinstance(event, GraceEnded):
            return apply(now, event)
        calls = {**now.turn.calls, event.call_id: replace(call, phase="ready")}
        return replace(now, seq=event.seq, turn=replace(now.turn, calls=calls))

    return [(grace, "end_window", again), (state, "_apply_window_event", release)]


@grace_mutant("inside the grace window")
def grant_begins_with_the_approval():
    """An approval that is remembered gives its grant at once."""
    add_decision = resolution.add_decision

    def eager(log, call_id, decision, by, judged=None, on_behalf_of=None):
        call = log.require_turn().calls[call_id]
        add_decision(log, call_id, decision, by, judged, on_behalf_of)
        if isinstance(decision, Approve) and log.require_turn().calls[call_id].window is not None:
            gate.record_grant(log, call, decision, by, on_behalf_of)

    return [(resolution, "add_decision", eager)]


@grace_mutant("more are missing|does not come to an end")
def vote_not_withdrawn():
    """An approval of two people is taken back, and both votes still count."""
    return [(grace, "_withdrawn_vote", lambda votes, by: None)]


def play_scenarios(examples, build=list, classics=CLASSICS, plots: SearchStrategy[Any] = scenario):
    """Play the classic and many generated scenarios, each with new patches of the mutant."""

    def play(plot):
        with ExitStack() as patches:
            for target, attribute, replacement in build():
                patches.enter_context(mock.patch.object(target, attribute, replacement))
            worlds.play_scenario(plot)

    for plot in classics:
        play(plot)
    hunting(examples)(given(plots)(play))()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_scenarios_detect_every_mutant(name):
    build, law = MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        play_scenarios(1500, build)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


@pytest.mark.parametrize("name", IMPORT_MUTANTS)
def test_the_import_scenarios_detect_every_import_mutant(name):
    build, law = IMPORT_MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        play_scenarios(300, build, IMPORTS, importing)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


@pytest.mark.parametrize("name", DEPUTY_MUTANTS)
def test_the_deputy_scenarios_detect_every_deputy_mutant(name):
    """Each law of deputies can fail [B126]."""
    build, law = DEPUTY_MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        play_scenarios(600, build, DEPUTISED, deputised)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


@pytest.mark.parametrize("name", LABEL_MUTANTS)
def test_the_scenarios_with_titles_detect_every_mutant_of_them(name):
    build, law = LABEL_MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        play_scenarios(300, build, LABELLED, labelled)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


@pytest.mark.parametrize("name", GRACE_MUTANTS)
def test_the_scenarios_with_grace_windows_detect_every_mutant_of_them(name):
    """Each law of grace windows can fail: before its time, though taken back, twice."""
    build, law = GRACE_MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        play_scenarios(300, build, GRACED_SCENES, graced)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


def test_the_scenarios_violate_no_law_without_a_mutant():
    play_scenarios(200)


def test_every_name_that_a_mutant_patches_exists():
    """A mutant of a function that was renamed would prove nothing."""
    for build, _ in [
        *MUTANTS.values(),
        *IMPORT_MUTANTS.values(),
        *DEPUTY_MUTANTS.values(),
        *LABEL_MUTANTS.values(),
        *GRACE_MUTANTS.values(),
    ]:
        for target, attribute, _ in build():
            assert hasattr(target, attribute), f"{build.__name__}: {target} has no {attribute}"
