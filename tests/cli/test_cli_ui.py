"""``assent ui``: a card of the page becomes the project's own, and is served before ours."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import assent
from assent.cli.main import cli

PACKAGED = Path(assent.__file__).parent / "server" / "static"


@pytest.fixture
def ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(cli, ["ui", *words])

    return run


def test_an_ejected_card_is_a_copy_that_the_server_finds_first(ui, tmp_path: Path):
    from assent.server.page import Files

    assert "approval" in ui().output
    ui("eject", "approval")
    own = tmp_path / "ui" / "elements" / "approval.js"
    assert own.read_bytes() == (PACKAGED / "elements" / "approval.js").read_bytes()
    own.write_text("// mine\n")
    found = Files(tmp_path / "ui").find(["elements", "approval.js"])
    assert found is not None
    assert found.body == b"// mine\n"


def test_a_card_is_not_ejected_over_what_is_there(ui, tmp_path: Path):
    ui("eject", "style.css")
    (tmp_path / "ui" / "style.css").write_text("mine")
    again = ui("eject", "style.css")
    assert again.exception is not None
    assert "yours already" in str(again.exception)
    assert (tmp_path / "ui" / "style.css").read_text() == "mine"


def test_diff_shows_what_was_changed_and_nothing_else(ui, tmp_path: Path):
    assert "nothing of the page is yours" in ui("diff").output
    ui("eject", "style.css")
    assert "is the same as ours" in ui("diff").output
    own = tmp_path / "ui" / "style.css"
    own.write_text(own.read_text().replace("--radius: 12px;", "--radius: 2px;"))
    lines = ui("diff", "style.css").output.splitlines()[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert changed == ["-  --radius: 12px;", "+  --radius: 2px;"]


def test_an_unknown_card_is_refused_with_those_that_there_are(ui):
    refused = ui("eject", "nothing")
    assert "there are: " in str(refused.exception)
    assert "inbox" in str(refused.exception)
