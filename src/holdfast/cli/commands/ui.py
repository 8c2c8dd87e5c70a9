"""``holdfast ui``: override files of the page. Files in ``./ui`` are served in place of the packaged ones."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

import holdfast
from holdfast.cli.options import example
from holdfast.cli.output import print_text
from holdfast.cli.render.text import escape_control_characters
from holdfast.errors import Invalid, NotFound

PACKAGED = Path(holdfast.__file__).parent / "server" / "static"
OWN_DIRECTORY = Path("ui")


@click.command(epilog=example("holdfast ui", "holdfast ui eject approval", "holdfast ui diff"))
@click.argument("words", nargs=-1, metavar="[eject CARD | diff [CARD]]")
def ui(words: tuple[str, ...]) -> int:
    """Override a card of the page, or compare your files with ours.

    `eject` copies the file of one card, or style.css, to ./ui, which `holdfast serve` searches first. `diff` compares
    your files with the packaged ones, for instance after an upgrade. Without either: list the cards.
    """
    match words:
        case ():
            return _list_cards()
        case ("eject", card):
            return _eject(card)
        case ("diff",):
            return _print_diffs(
                [path.relative_to(OWN_DIRECTORY) for path in sorted(OWN_DIRECTORY.rglob("*")) if path.is_file()]
            )
        case ("diff", card):
            return _print_diffs([_card_path(card)])
        case _:
            raise Invalid("give nothing, eject CARD, or diff [CARD]")


def _cards() -> dict[str, Path]:
    """Return the files that can be overridden: elements, the style sheet, and their modules."""
    found = [path.relative_to(PACKAGED) for path in PACKAGED.rglob("*") if path.suffix in (".js", ".css", ".html")]
    ours = [path for path in found if path.parts[0] != "vendor"]
    return {path.stem if path.parts[0] == "elements" else path.name: path for path in ours}


def _card_path(card: str) -> Path:
    cards = _cards()
    if card not in cards:
        raise NotFound(f"there is no card {card!r}; there are: {', '.join(sorted(cards))}")
    return cards[card]


def _list_cards() -> int:
    for card, path in sorted(_cards().items(), key=lambda pair: pair[1]):
        own = "  yours" if (OWN_DIRECTORY / path).is_file() else ""
        print_text(f"{card:<12} {path}{own}")
    return 0


def _eject(card: str) -> int:
    path = _card_path(card)
    target = OWN_DIRECTORY / path
    if target.exists():
        raise Invalid(f"{target} is yours already; see: holdfast ui diff {card}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((PACKAGED / path).read_bytes())
    print_text(f"{target} is yours now: `holdfast serve` in this directory shows it instead of ours")
    return 0


def _print_diffs(paths: list[Path]) -> int:
    own = [path for path in paths if (OWN_DIRECTORY / path).is_file()]
    if not own:
        print_text("nothing of the page is yours here; see: holdfast ui eject CARD")
    for path in own:
        ours = PACKAGED / path
        before = ours.read_text().splitlines() if ours.is_file() else []
        after = (OWN_DIRECTORY / path).read_text(errors="replace").splitlines()
        lines = list(difflib.unified_diff(before, after, f"packaged/{path}", str(OWN_DIRECTORY / path), lineterm=""))
        for line in lines or [f"{OWN_DIRECTORY / path} is the same as ours"]:
            print_text(escape_control_characters(line))
    return 0
