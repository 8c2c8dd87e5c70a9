"""Notebooks: cards for pending calls, results and snapshots, and the live view of a conversation."""

import asyncio
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from support.async_tests import until
from traitlets.config import Config

from holdfast import Agent, Approve, Invalid, NotFound, Runtime, ScriptedModel, ToolCall, blocking, tool
from holdfast.errors import ModelError

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "notebook" / "quickstart.ipynb"
HOSTILE = '<script>alert("1")</script>&\u202egro\u200b\x1b[2J\ud83d'


@tool(approval="required", risk="high", prompt="Send this to {to}?")
def mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


@mail.preview
def plan(to: str, text: str) -> dict[str, object]:
    return {"recipients": 3, "note": f"<i>{to}</i>"}


def agent_with(*replies, **options):
    return Agent("desk", model=ScriptedModel([*replies], follow=True), tools=[mail], **options)


def mail_call(to="ada@example.org"):
    return ToolCall("mail", {"to": to, "text": "Hi"})


class Reader(HTMLParser):
    """Collects the text that a browser would show, and the names of the elements."""

    def __init__(self, html):
        super().__init__()
        self.text, self.tags, self.attributes = "", set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def read(thing):
    """Parse the card of a pending entry, a result or a snapshot."""
    return Reader(thing._repr_html_())


async def test_a_pending_call_shows_what_would_run_and_how_to_decide():
    async with Runtime(agent_with([mail_call()])) as rt:
        [pending] = (await rt.run("go")).pending
        card = read(pending).text
        for text in ("mail wants approval", "high risk", "Send this to ada@example.org?", "recipients", "3", "Hi"):
            assert text in card
        assert "<i>ada@example.org</i>" in card
        assert "rt.resolve(pending, ...): Approve or Deny" in card
        failed = msgspec.structs.replace(pending, preview=None, preview_error="no such list")
        assert "its preview failed: no such list" in read(failed).text


async def test_a_result_and_a_snapshot_show_the_text_the_state_and_the_pending_calls():
    async with Runtime(agent_with(["I will ask.", mail_call()], "Sent.")) as rt:
        waiting = await rt.run("Mail Ada", conversation="tea", by="ann")
        for card in (read(waiting).text, read(await rt.snapshot("tea")).text):
            assert "I will ask." in card
            assert "mail wants approval" in card
        assert "waiting" in read(waiting).text
        assert "ann Mail Ada" in read(await rt.snapshot("tea")).text
        await rt.resolve(waiting.pending[0], Approve())
        done = read(await rt.wait("tea")).text
        assert "completed" in done
        assert "Sent." in done
        assert "last turn: completed" in read(await rt.snapshot("tea")).text


async def test_a_failed_turn_shows_its_error():
    async with Runtime(agent_with(ModelError("no such model", kind="model_not_supported"))) as rt:
        result = await rt.run("go", conversation="c")
        for card in (read(result).text, read(await rt.snapshot("c")).text):
            assert "model_not_supported: no such model" in card


async def test_cards_escape_everything_and_show_hidden_characters_by_their_code():
    hostile = HOSTILE.encode("utf-8", "ignore").decode()
    async with Runtime(agent_with([hostile, mail_call(hostile)])) as rt:
        result = await rt.run(hostile, by="ann")
        snapshot = await rt.snapshot(result.conversation)
        malformed = msgspec.structs.replace(result, text=HOSTILE, conversation=HOSTILE, reason=HOSTILE)
        named = msgspec.structs.replace(result.pending[0], tool=HOSTILE, reason=HOSTILE, agent=HOSTILE, call=HOSTILE)
        for thing in (result, snapshot, malformed, result.pending[0], named):
            card = read(thing)
            assert card.tags <= {"div", "b", "span", "table", "tr", "td"}
            assert card.attributes <= {"style", "title", "dir"}
            assert '<script>alert("1")</script>&U+202EgroU+200BU+001B[2J' in card.text
            assert not set("\u202e\u200b\x1b\ud83d") & set(thing._repr_html_())
            thing._repr_html_().encode()
        assert "U+D83D" in read(malformed).text


async def test_a_very_long_text_is_cut_with_a_note():
    async with Runtime(agent_with("x" * 10_000)) as rt:
        card = read(await rt.run("go")).text
        assert "6000 more characters" in card
        assert card.count("x") < 5_000


# --- the live view -------------------------------------------------------------------------------------------


class Recorder:
    """Takes the place of the notebook: records what IPython displays, as (id, is update, data)."""

    def __init__(self, shell):
        self.displays = []
        publisher = shell.display_pub
        publisher.publish = lambda data, metadata=None, *, transient=None, update=False, **_: self.displays.append(
            (transient["display_id"], update, data)
        )

    @property
    def latest(self):
        return Reader(self.displays[-1][2]["text/html"]).text


@pytest.fixture
def notebook(tmp_path):
    settings = Config(HistoryManager={"enabled": False})
    shell = InteractiveShell.instance(config=settings, ipython_dir=str(tmp_path))
    yield Recorder(shell)
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


async def test_watch_shows_the_conversation_and_updates_the_same_view(notebook):
    async with Runtime(agent_with(["I will ask.", mail_call()], "Sent.")) as rt:
        await rt.open("c")
        view = rt.watch("c")
        [pending] = (await rt.run("Mail Ada", conversation="c")).pending
        await view
        assert "mail wants approval" in notebook.latest
        await rt.resolve(pending, Approve())
        await until(lambda: "last turn: completed" in notebook.latest)
        assert "Sent." in notebook.latest
        assert len({display[0] for display in notebook.displays}) == 1
        assert [display[1] for display in notebook.displays] == [False] + [True] * (len(notebook.displays) - 1)
        assert "pending> 'Sent.'" in notebook.displays[-1][2]["text/plain"]


async def test_a_view_that_is_stopped_stays_as_it_is(notebook):
    async with Runtime(agent_with("Hello.")) as rt:
        await rt.open("c")
        view = rt.watch("c")
        await until(lambda: "idle" in notebook.latest)
        view.stop()
        await until(lambda: not view.is_active)
        before = len(notebook.displays)
        await rt.run("hi", conversation="c")
        await view  # returns without drawing
        assert len(notebook.displays) == before


async def test_closing_the_runtime_ends_its_views(notebook):
    async with Runtime(agent_with("Hello.")) as rt:
        await rt.open("c")
        view = rt.watch("c")
        await view
    assert not view.is_active
    assert not [task for task in asyncio.all_tasks() if "watch" in task.get_name()]
    with pytest.raises(Invalid, match="not open"):
        rt.watch("c")


async def test_a_view_of_a_conversation_that_does_not_exist_shows_the_error(notebook):
    async with Runtime(agent_with("Hello.")) as rt:
        view = rt.watch("nowhere")
        await until(lambda: "no conversation 'nowhere'" in notebook.latest)
        with pytest.raises(NotFound):
            await view


def test_watch_works_without_asyncio(notebook):
    with blocking.Runtime(agent_with("Hello.")) as rt:
        rt.open("c")
        view = rt.watch("c")
        rt.run("hi", conversation="c")
        view.wait()
        assert "Hello." in notebook.latest
        view.stop()


async def test_outside_of_a_notebook_watch_says_what_to_use_instead():
    async with Runtime(agent_with("Hello.")) as rt:
        await rt.open("c")
        with pytest.raises(Invalid, match="holdfast tail"):
            rt.watch("c")


def test_without_ipython_watch_says_how_to_install_it():
    program = """if True:
        import asyncio, sys
        sys.modules["IPython"] = None
        from holdfast import Invalid, Runtime
        async def main():
            async with Runtime() as rt:
                try:
                    rt.watch("c")
                except Invalid as refused:
                    print(refused.kind, "holdfast[notebook]" in str(refused))
        asyncio.run(main())
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "resource_missing True\n", ran.stderr


def test_importing_holdfast_does_not_import_the_cards_or_ipython():
    lazy = ("IPython", "holdfast.core.text.html_card")
    program = f"import sys, holdfast; print([n for n in {lazy!r} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


def test_the_example_notebook_runs(tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    cards = [Reader(output.data["text/html"]).text for output in outputs if "text/html" in output.get("data", {})]
    assert len(cards) == 4
    assert "waiting" in cards[0]
    assert "I have told Ada." in cards[1]
    assert "I have told Ada." in cards[2]  # the live view, updated by a later cell
    assert "Send this mail to ada@example.org?" in cards[3]
    assert [output.text for output in outputs if output.output_type == "stream"] == ["I have told Ada.\n"]
