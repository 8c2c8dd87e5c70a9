"""``holdfast ui``: override files of the page."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import holdfast
from holdfast.cli.app import cli

PACKAGED = Path(holdfast.__file__).parent / "server" / "static"


@pytest.fixture
def ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(cli, ["ui", *words])

    return run


def test_an_ejected_card_is_a_copy_that_the_server_prefers(ui, tmp_path: Path):
    from holdfast.server.static_files import PageFiles

    assert "approval" in ui().output
    ui("eject", "approval")
    own = tmp_path / "ui" / "elements" / "approval.js"
    assert own.read_bytes() == (PACKAGED / "elements" / "approval.js").read_bytes()
    own.write_text("// mine\n")
    found = PageFiles(tmp_path / "ui").find(["elements", "approval.js"])
    assert found is not None
    assert found.body == b"// mine\n"


def test_eject_does_not_overwrite_an_existing_file(ui, tmp_path: Path):
    ui("eject", "style.css")
    (tmp_path / "ui" / "style.css").write_text("mine")
    again = ui("eject", "style.css")
    assert again.exception is not None
    assert "yours already" in str(again.exception)
    assert (tmp_path / "ui" / "style.css").read_text() == "mine"


def test_ui_diff_shows_only_changed_lines(ui, tmp_path: Path):
    assert "nothing of the page is yours" in ui("diff").output
    ui("eject", "style.css")
    assert "is the same as ours" in ui("diff").output
    own = tmp_path / "ui" / "style.css"
    own.write_text(own.read_text().replace("--radius: 12px;", "--radius: 2px;"))
    lines = ui("diff", "style.css").output.splitlines()[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert changed == ["-  --radius: 12px;", "+  --radius: 2px;"]


def test_an_unknown_card_is_refused_with_the_list_of_cards(ui):
    assert_refused = ui("eject", "nothing")
    assert "there are: " in str(assert_refused.exception)
    assert "inbox" in str(assert_refused.exception)
