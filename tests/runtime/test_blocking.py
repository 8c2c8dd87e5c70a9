"""The runtime without asyncio: the same methods, blocking, from many threads."""

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast import Agent, Approve, Invalid, NotFound, ScriptedModel, ToolCall, TurnResult, blocking, tool
from holdfast.core.live import TextDelta
from holdfast.errors import StoreError
from holdfast.runtime.pending_calls.clients import Client as AsyncClient
from holdfast.runtime.watch import Watch as AsyncWatch


@tool(approval="required")
def mail(to: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


@tool(executor="client")
def locate(name: str) -> str:
    """Locate a person."""
    raise AssertionError


MAIL = ToolCall("mail", {"to": "ada@example.org"})


def agent_with(*replies, tools=(mail, locate), **options):
    return Agent("desk", model=ScriptedModel([*replies], follow=True), tools=[*tools], **options)


def public_names(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def parameters(function):
    return [
        (each.name, each.kind, each.default, each.annotation)
        for each in inspect.signature(function).parameters.values()
    ]


# --- the same methods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "original", "omitted"),
    [
        (blocking.Runtime, holdfast.Runtime, set()),
        (blocking.Turn, holdfast.Turn, {"stream_from"}),
        (blocking.Client, AsyncClient, set()),
        (blocking.Watch, AsyncWatch, {"close", "is_active"}),
    ],
)
def test_the_blocking_class_has_every_method_of_the_async_class_with_the_same_parameters(own, original, omitted):
    assert public_names(original) - omitted <= public_names(own)
    for name in public_names(original) - omitted:
        method, blocking_method = (inspect.getattr_static(cls, name) for cls in (original, own))
        assert (blocking_method.__doc__ or "").strip(), name
        if not inspect.isfunction(method):
            assert isinstance(blocking_method, property), name
            continue
        assert parameters(blocking_method) == parameters(method), name
        assert not inspect.iscoroutinefunction(blocking_method), name
        if name != "kill":  # it waits for the tasks that the async method returns
            assert blocking_method.__doc__ == method.__doc__, name


@pytest.mark.parametrize("name", ["run", "send", "stream", "resolve"])
def test_the_overloads_are_those_of_the_async_class(name):
    own, original = (typing.get_overloads(getattr(cls, name)) for cls in (blocking.Runtime, holdfast.Runtime))
    assert original
    assert [parameters(each) for each in own] == [parameters(each) for each in original]


def test_the_parameters_in_the_code_of_each_method_are_those_of_its_signature():
    """A method of blocking.py has the signature of the async method; its own parameters must agree with it."""
    for cls, original in ((blocking.Runtime, holdfast.Runtime), (blocking.Turn, holdfast.Turn)):
        for name in public_names(cls):
            method = inspect.getattr_static(cls, name)
            if inspect.isfunction(method) and method.__code__.co_filename == blocking.__file__:
                published = [each[0] for each in parameters(method)]
                code = method.__code__
                written = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
                if not code.co_flags & inspect.CO_VARARGS:
                    assert written == published, f"{original.__name__}.{name}"


def test_the_options_are_those_of_the_async_class():
    options = [each for each in inspect.signature(holdfast.Runtime).parameters.values() if each.name != "agents"]
    assert list(blocking.RuntimeOptions.__annotations__) == [each.name for each in options]
    assert [annotation.__forward_arg__ for annotation in blocking.RuntimeOptions.__annotations__.values()] == [
        each.annotation for each in options
    ]


# --- use -----------------------------------------------------------------------------------------------------


def test_a_gated_call_is_approved_without_asyncio():
    with blocking.Runtime(agent_with(["I will.", MAIL], "Sent.")) as rt:
        waiting = rt.run("Mail Ada")
        [pending] = waiting.pending
        assert rt.pending() == [pending]
        rt.resolve(pending, Approve(), by="boss")
        assert rt.wait(waiting.conversation).text == "Sent."
        assert rt.snapshot(waiting.conversation).messages[-1].text == "Sent."
        assert rt.now() > 0
        assert list(rt.agents) == ["desk"]
        assert rt.is_open
        assert rt.store.location.kind == "memory"
    assert not rt.is_open


def test_a_turn_handle_waits_for_the_result_and_streams_it():
    with blocking.Runtime(agent_with([MAIL], "Sent.", "Bye.")) as rt:
        turn = rt.send("c", "Mail Ada")
        assert (turn.conversation, repr(turn)) == ("c", f"Turn('c', message {turn.seq})")
        [pending] = turn.result().pending
        rt.resolve("c", pending.call, Approve())
        assert turn.final_result().text == "Sent."
        items = list(rt.send("c", "Bye").stream())
        assert isinstance(items[-1], TurnResult)
        assert items[-1].text == "Bye."


def test_a_stream_ends_with_the_result_and_pending_pages_and_changes_are_iterators():
    with blocking.Runtime(agent_with(["Look.", MAIL], "Sent.")) as rt:
        *items, result = rt.stream("Mail Ada", conversation="c")
        assert "".join(item.text for item in items if isinstance(item, TextDelta)) == "Look."
        assert isinstance(result, holdfast.TurnResult)
        assert result.waiting
        assert list(rt.pending_pages()) == [result.pending]
        with rt.pending_changes() as changes:
            assert next(changes).added == result.pending
            rt.resolve(result.pending[0], Approve())
            assert [key[0] for key in next(changes).removed] == ["c"]


def test_a_client_runs_its_tools():
    with blocking.Runtime(agent_with([ToolCall("locate", {"name": "Ada"})], "In Rome.")) as rt:
        rt.open("c")
        with rt.attach_client("c", ["locate"], by="page") as client:
            [pending] = rt.run("Where is Ada?", conversation="c").pending
            assert client.runs("locate")
            assert client.lease(pending.call)
            client.result(pending.call, "Rome")
            assert rt.wait("c").text == "In Rome."
            assert rt.find_client("c", client.id, by="page") is not None
        assert rt.find_client("c", client.id, by="page") is None


def test_many_threads_use_one_runtime_at_once():
    with blocking.Runtime(agent_with(*["Hello."] * 40)) as rt:
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda n: rt.run(f"{n}", conversation=f"c{n}"), range(40)))
        assert {result.conversation for result in results} == {f"c{n}" for n in range(40)}
        assert {result.text for result in results} == {"Hello."}


def test_a_timeout_ends_the_wait_and_not_the_turn():
    gate = threading.Event()

    @tool
    def slow() -> str:
        """Wait."""
        gate.wait(60)
        return "done"

    with blocking.Runtime(agent_with([ToolCall("slow", {})], "Over.", tools=[slow])) as rt:
        with pytest.raises(TimeoutError, match="goes on"):
            rt.run("go", conversation="c", timeout=0.01)
        assert rt.count_running_calls() == 1
        gate.set()
        assert rt.wait("c").text == "Over."


def test_a_synchronous_handler_may_call_the_runtime():
    @tool
    def ask_other(question: str) -> str:
        """Ask in another conversation."""
        return rt.run(question, conversation="other").text

    script = ScriptedModel(["Inner."], follow=True)
    agents = (
        Agent("inner", model=script),
        agent_with([ToolCall("ask_other", {"question": "?"})], "Outer.", tools=[ask_other]),
    )
    with blocking.Runtime(*agents) as rt:
        rt.open("other", agent="inner")
        assert rt.run("go", conversation="c", agent="desk").text == "Outer."
        assert rt.snapshot("other").messages[-1].text == "Inner."


# --- iterators -----------------------------------------------------------------------------------------------


def test_closing_an_iterator_ends_its_subscription():
    with blocking.Runtime(agent_with("Hello.")) as rt:
        rt.run("hi", conversation="c")
        events = rt.events("c")
        assert [next(events).seq for _ in range(2)] == [1, 2]
        bus = rt._wrapped._engine.bus
        assert bus.has_readers("c")
        with contextlib.closing(events):
            pass
        assert not bus.has_readers("c")
        assert list(events) == []


def test_an_iterator_that_is_garbage_collected_ends_its_subscription():
    with blocking.Runtime(agent_with("Hello.")) as rt:
        rt.run("hi", conversation="c")
        for _ in rt.events("c"):
            break
        gc.collect()
        rt.pending()  # one round trip: the event loop has run the queued close
        assert not rt._wrapped._engine.bus.has_readers("c")


def test_a_second_thread_can_close_an_iterator_that_another_thread_waits_on():
    with blocking.Runtime(agent_with("Hello.")) as rt:
        rt.run("hi", conversation="c")
        events = rt.events("c")
        caught_up = threading.Event()

        def read():
            seen = []
            for event in events:
                seen.append(event)
                if event.seq == last:
                    caught_up.set()
            return seen

        last = rt.snapshot("c").seq
        with ThreadPoolExecutor(1) as thread:
            reader = thread.submit(read)
            assert caught_up.wait(60)
            events.close()
            assert [event.seq for event in reader.result(60)] == list(range(1, last + 1))


def test_an_iterator_raises_the_error_of_the_async_iterator():
    with blocking.Runtime(agent_with("Hello.")) as rt, pytest.raises(NotFound):
        next(rt.events("nowhere"))


# --- misuse --------------------------------------------------------------------------------------------------


def test_calls_before_start_and_after_close_are_refused():
    rt = blocking.Runtime(agent_with("Hello."))
    with pytest.raises(Invalid, match="not open"):
        rt.run("hi")
    rt.close()
    with rt, pytest.raises(Invalid, match="started before"):
        rt.start()
    for verb in (lambda: rt.run("hi"), rt.pending, lambda: next(rt.events("c")), rt.start):
        with pytest.raises(Invalid, match="closed"):
            verb()
    rt.close()
    assert rt.unfinished_states() == []


def test_a_call_in_the_runtimes_own_thread_is_refused():
    @tool
    async def nested() -> str:
        """Call the runtime."""
        return rt.run("hi", conversation="other").text

    with blocking.Runtime(agent_with([ToolCall("nested", {})], "Over.", tools=[nested])) as rt:
        result = rt.run("go", conversation="c")
        assert result.text == "Over."
        [returned] = [message for message in rt.snapshot("c").messages if message.text.find("wait for itself") > 0]
        assert not returned.ok


def test_a_store_that_cannot_be_opened_is_an_error_and_leaves_no_thread(tmp_path):
    (tmp_path / "file").write_text("")
    rt = blocking.Runtime(agent_with("Hello."), store=f"sqlite:///{tmp_path}/file/x.db")
    before = threading.active_count()
    with pytest.raises(holdfast.HoldfastError):
        rt.start()
    assert threading.active_count() <= before


def test_closing_wakes_the_threads_that_wait():
    with blocking.Runtime(agent_with([MAIL], "Sent.")) as rt:
        turn = rt.send("c", "Mail Ada")
        turn.result()
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(turn.final_result), threads.submit(list, rt.events("c"))]
            bus = rt._wrapped._engine.bus
            while len(bus._readers.get("c", ())) < 2:
                rt.pending()
            rt.close()
            for wait in waits:
                with pytest.raises((StoreError, Invalid), match="closed"):  # while it waits, or at its next item
                    wait.result(60)


def test_kill_ends_the_runtime_like_a_crash(tmp_path):
    store = f"sqlite:///{tmp_path}/a.db"
    rt = blocking.Runtime(agent_with([MAIL], "Sent."), store=store)
    rt.start()
    rt.run("Mail Ada", conversation="c")
    rt.store.kill()
    rt.kill()
    with blocking.Runtime(agent_with([MAIL], "Sent."), store=store) as again:
        [pending] = again.pending()
        again.resolve(pending, Approve())
        assert again.wait("c").text == "Sent."


async def test_a_blocking_runtime_works_in_a_thread_that_runs_an_event_loop():
    with blocking.Runtime(agent_with("Hello.")) as rt:
        assert rt.run("hi").text == "Hello."
    await asyncio.sleep(0)


# --- processes -----------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, threading, time
    from holdfast import Agent, Approve, ScriptedModel, ToolCall, blocking, tool

    started, gate = threading.Event(), threading.Event()

    @tool
    def slow() -> str:
        "Wait."
        started.set()
        gate.wait(60)
        return "done"

    agent = Agent("desk", model=ScriptedModel([[ToolCall("slow", {})], "Over."], follow=True), tools=[slow])
    rt = blocking.Runtime(agent, store=sys.argv[1])
"""


@contextlib.contextmanager
def start_program(tmp_path, body):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(body))
    command = [sys.executable, str(file), f"sqlite:///{tmp_path}/a.db"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        try:
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # a failed test leaves no process running


def test_a_program_that_never_closes_the_runtime_exits_and_keeps_the_result_of_its_tool(tmp_path):
    with start_program(
        tmp_path,
        """
        rt.start()
        rt.send("c", "go")
        started.wait(60)
        import atexit
        atexit.register(gate.set)  # runs before the handler that closes the runtime, which then waits for the tool
        """,
    ) as program:
        out, err = program.communicate(timeout=120)
    assert (program.returncode, out, err) == (0, "", "")
    with blocking.Runtime(agent_with("Over."), store=f"sqlite:///{tmp_path}/a.db") as rt:
        assert [event.value for event in rt.history("c") if type(event).__name__ == "CallReturned"] == ["done"]
        assert len(rt.owners()) == 1  # the program has released its ownership


def test_ctrl_c_ends_the_wait_and_not_the_turn(tmp_path):
    with start_program(
        tmp_path,
        """
        with rt:
            threading.Thread(target=lambda: (started.wait(60), print("waits", flush=True))).start()
            try:
                rt.run("go", conversation="c")
            except KeyboardInterrupt:
                print("interrupted", rt.count_running_calls(), flush=True)
            while rt._wrapped._engine.bus.topics():  # until the wait has ended
                rt.pending()
            gate.set()
            print(rt.wait("c").text)
        """,
    ) as program:
        assert program.stdout.readline() == "waits\n"
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=120)
    assert (program.returncode, out, err) == (0, "interrupted 1\nOver.\n", "")


def test_a_forked_child_cannot_use_the_runtime_and_the_parent_still_can(tmp_path):
    with start_program(
        tmp_path,
        """
        from holdfast import Invalid
        unopened = blocking.Runtime(agent)
        rt.start()
        gate.set()
        child = os.fork()
        if not child:
            for verb in (rt.pending, lambda: next(rt.events("c")), unopened.start):
                try:
                    verb()
                except Invalid as refused:
                    print("after the fork" in str(refused), rt.is_open, flush=True)
            rt.close()
            sys.exit()  # runs the exit handlers
        os.waitpid(child, 0)
        print(rt.run("go").text)
        """,
    ) as program:
        out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, "True False\n" * 3 + "Over.\n"), err
