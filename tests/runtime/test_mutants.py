"""Tests of the test: the real code with one thing wrong. The property of ``test_state_machine`` must see each.

A mutant is a patch of the running code. The first scenario that breaks a law is enough; one that nobody notices
fails here, and says that the laws have a hole.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import worlds
from hypothesis import given
from msgspec.structs import replace
from scenarios import CLASSICS, IMPORTS, hunting, importing, scenario

from holdfast.core import effects, state
from holdfast.core.decide import gate, machine, reply, resolution
from holdfast.core.decisions import Approve, Deny, Expired
from holdfast.core.inputs import DeadlinePassed
from holdfast.errors import Stale
from holdfast.runtime import commit, conversation, inbox, tool_call
from holdfast.stores.memory import MemoryStore

MUTANTS = {}


def mutant(law):
    """A function that gives (where, name, what instead) for each patch, and the law that it breaks."""

    def keep(build):
        MUTANTS[build.__name__] = build, law
        return build

    return keep


@mutant("without an approval or a grant")
def gate_ignored():
    """A tool that needs an approval is taken for one that needs none."""
    freeze = gate.freeze_call

    def open_gate(*args):
        return replace(freeze(*args), gate="auto", grant=None)

    return [(gate, "freeze_call", open_gate)]


@mutant("without an approval or a grant")
def policy_ignored():
    """The approval function says that somebody must be asked, and nobody is."""
    claim = gate.claim_call

    def anyway(log, call, input):
        claim(log, call, replace(input, required=False))

    return [(gate, "claim_call", anyway)]


@mutant("an effect (without a|before its) claim")
def claim_after_effect():
    """The tool runs, and then it is claimed."""

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


@mutant("stands in the log 0 times|stands at")
def acknowledged_before_the_commit():
    """Whoever asks is told that it is recorded, and then it is recorded."""
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
    """A call that was decided may be decided again."""
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

    def record(log, call_id, decision, by, judged=None):
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
def fence_off():
    """The store takes an owner's word, whoever owns the conversation now."""
    append = MemoryStore.append

    async def unfenced(self, step):
        found = self._data.conversations.get(step.conversation)
        if step.epoch is not None and found is not None:
            step = replace(step, epoch=found.epoch)
        await append(self, step)

    return [(MemoryStore, "append", unfenced)]


@mutant("a guest appends")
def reports_count_without_the_lease():
    """What a task reports is recorded, whoever runs the conversation now."""
    return [(conversation, "reject_stale", lambda items, epoch: items)]


@mutant("one attempt, two effects|a result, and nobody did anything|an effect of epoch 1 after one of 2")
def superseded_owner_runs_on():
    """An owner that reads of a newer one's calls takes them for its own."""
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
    """Viewers are told of what is about to be recorded."""
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
    """Whatever the tool says, what was interrupted runs again."""
    recover = machine._recover_call

    def again(log, call, recovery, epoch, definition):
        recover(log, call, "redispatch", epoch, definition)

    return [(machine, "_recover_call", again)]


@mutant("it should run again")
def interrupted_call_resumed_without_a_claim():
    """A new owner goes on with what an older one began, as if it had begun it itself."""
    return [(machine, "_recover_calls", lambda log, input: None)]


@mutant("its own owner started it again|time stands still")
def woken_by_itself():
    """An owner takes its own running calls for interrupted ones, whenever it decides anything."""
    decide = commit.decide_into

    def every_time(log, input, specs):
        decide(log, input, specs)
        if isinstance(input, DeadlinePassed | machine.CallFinished):
            machine._recover_calls(log, machine.OwnerStarted(epoch=10**6))

    return [(commit, "decide_into", every_time)]


@mutant("the model called")
def unknown_tool_dropped():
    """A call of a tool that does not exist is left out."""
    replied = reply.handle_reply

    def only_known(log, input, specs):
        replied(log, replace(input, calls=tuple(c for c in input.calls if c.tool in specs)), specs)

    return [(reply, "handle_reply", only_known)]


@mutant("never comes to rest")
def denial_without_result():
    """A denied call gets no result."""
    conclude = resolution.add_decision_result

    def silent(log, call, resolved):
        if not isinstance(resolved.decision, Deny):
            conclude(log, call, resolved)

    return [(resolution, "add_decision_result", silent)]


@mutant("a run that was never begun|an approval became a result")
def approval_taken_for_a_result():
    """An approved call is closed with the approval instead of being run."""
    advance = gate.suspend_if_needed

    def closed(log, call, turn):
        if call.approver is not None and call.phase == "ready":
            log.add_result(call, value="approved")
        else:
            advance(log, call, turn)

    return [(gate, "suspend_if_needed", closed)]


@mutant("another plan than was approved")
def plan_not_checked_again():
    """The approved plan may have changed: it runs all the same."""
    claim = gate.claim_call

    def unchecked(log, call, input):
        claim(log, replace(call, bound=None), input)

    return [(gate, "claim_call", unchecked)]


@mutant("ran with other arguments")
def edited_arguments_ignored():
    """A person changed the arguments; the model's run."""
    resolved = state._apply_decision

    def unchanged(call, event):
        after = resolved(call, event)
        return replace(after, args=call.args) if isinstance(event.decision, Approve) else after

    return [(state, "_apply_decision", unchanged)]


@mutant("the turn ended with|the model made")
def cancel_without_pairs():
    """A cancelled turn leaves its open calls without a result."""
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
    """Deadlines pass when somebody looks."""
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
    """A grant that was revoked or has lapsed still opens the gate."""
    given = {}
    covering = gate.find_grant

    def remembered(now_state, tool, args, now, fingerprint):
        for grant in now_state.grants:
            given[now_state.conversation, grant.id] = grant
        found = covering(now_state, tool, args, now, fingerprint)
        if found is not None:
            return found
        for (_, name), grant in given.items():
            same = gate.same_definition(grant.fingerprint, fingerprint)
            if grant.tool == tool and same and gate.grant_applies(replace(grant, until=None), args, now):
                return name
        return None

    return [(gate, "find_grant", remembered)]


@mutant("by another definition than was approved")
def definition_not_compared():
    """The tool that was approved is another one by now: it runs all the same."""
    return [(gate, "definition_changed", lambda call, definition: False)]


@mutant("by another definition than was approved")
def grant_covers_another_definition():
    """What was remembered of one definition of a tool opens the gate for another."""
    covering = gate.find_grant

    def any_definition(now_state, tool, args, now, fingerprint):
        return covering(now_state, tool, args, now, "")

    return [(gate, "find_grant", any_definition)]


@mutant("an edited plan that is not recorded")
def plan_of_an_edit_not_made():
    """The arguments were edited by somebody who saw no plan of them, and none is made before they run."""
    return [(gate, "needs_plan", lambda call: call.bound is not None)]


@mutant("the inbox is not what the fold says")
def inbox_forgets():
    """The pending entry of a call that is suspended a second time is not indexed."""
    append = MemoryStore.append

    async def forgetful(self, step):
        found = self._data.conversations.get(step.conversation)
        opened = [entry for entry in step.opened if not found or entry.call not in str(found.events)[:4000]]
        await append(self, replace(step, opened=opened))

    return [(MemoryStore, "append", forgetful)]


@mutant("the model made|a model call with")
def model_called_with_a_call_open():
    """The next model call does not wait for the last result."""
    owed = effects.owed

    def impatient(now):
        turn = now.turn
        if turn and turn.calls and not (turn.cancelling or turn.answered or turn.halt):
            phases = [call.phase for call in turn.calls.values()]
            if phases.count("done") >= 1 and turn.step < turn.steps:
                return frozenset([effects.CallModel(turn.number, turn.step + 1)])
        return owed(now)

    return [(module, "owed", impatient) for module in (effects, machine, reply, conversation)]


@mutant("never comes to rest")
def dead_owner_never_replaced():
    """What a dead process left is nobody's business."""

    async def owing(self, agents, limit=100):
        return []

    return [(MemoryStore, "list_owing", owing)]


IMPORT_MUTANTS = {}


def import_mutant(law):
    """The same, for what only an import brings to light."""

    def keep(build):
        IMPORT_MUTANTS[build.__name__] = build, law
        return build

    return keep


@import_mutant("began on the word of a file|an effect without a claim")
def approvals_of_a_file_hold():
    """What an imported log says of approvals, gates and clients counts here."""
    return [(state, "_reset_imported_call", lambda call: call)]


@import_mutant("began on the word of a file")
def recoveries_of_a_file_hold():
    """What an imported log says was running is recovered as the tool says, and nobody is asked."""
    asked_again = state._reset_imported_call
    return [(state, "_reset_imported_call", lambda call: replace(asked_again(call), imported=False))]


@import_mutant("without trust")
def nothing_is_closed():
    """A log that was imported without trust goes on."""
    imported = state._apply_import
    return [(state, "_apply_import", lambda now, event: replace(imported(now, event), closed=False))]


def hunt(examples, build=list, classics=CLASSICS, plots=scenario):
    """Live through classic and many other plots, each with a mutant that remembers nothing of the last."""

    def lived(plot):
        with ExitStack() as patches:
            for where, what, instead in build():
                patches.enter_context(mock.patch.object(where, what, instead))
            worlds.lived(plot)

    for plot in classics:
        lived(plot)
    hunting(examples)(given(plots)(lived))()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_scenarios_detect_every_mutant(name):
    build, law = MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        hunt(1500, build)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


@pytest.mark.parametrize("name", IMPORT_MUTANTS)
def test_the_import_scenarios_detect_every_import_mutant(name):
    build, law = IMPORT_MUTANTS[name]
    with pytest.raises(AssertionError, match=law) as caught:
        hunt(300, build, IMPORTS, importing)
    print(f"{name}: {str(caught.value).splitlines()[0][:150]}")


def test_the_scenarios_violate_no_law_without_a_mutant():
    hunt(200)


def test_every_name_that_a_mutant_patches_exists():
    """A mutant of a function that was renamed would prove nothing."""
    for build, _ in [*MUTANTS.values(), *IMPORT_MUTANTS.values()]:
        for where, what, _ in build():
            assert hasattr(where, what), f"{build.__name__}: {where} has no {what}"
