"""``assent ui``: make a file of the page your own. What stands in ``./ui`` is served before the packaged one."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

import assent
from assent.cli.group import cli, example
from assent.cli.output import say
from assent.cli.text import shown
from assent.errors import Invalid, NotFound

PACKAGED = Path(assent.__file__).parent / "server" / "static"
OWN = Path("ui")


@cli.command(epilog=example("assent ui", "assent ui eject approval", "assent ui diff"))
@click.argument("words", nargs=-1, metavar="[eject CARD | diff [CARD]]")
def ui(words: tuple[str, ...]) -> int:
    """Make a card of the page your own, and see how it differs from ours.

    `eject` copies the file of one card, or style.css, to ./ui, which `assent serve` looks at first. `diff` compares
    what is there with what is packaged, as after an upgrade. Without either: the cards that there are.
    """
    match words:
        case ():
            return _listed()
        case ("eject", card):
            return _eject(card)
        case ("diff",):
            return _diff([path.relative_to(OWN) for path in sorted(OWN.rglob("*")) if path.is_file()])
        case ("diff", card):
            return _diff([_file(card)])
        case _:
            raise Invalid("give nothing, eject CARD, or diff [CARD]")


def _cards() -> dict[str, Path]:
    """What can be made one's own: each element, the style sheet, and the modules under them."""
    found = [path.relative_to(PACKAGED) for path in PACKAGED.rglob("*") if path.suffix in (".js", ".css", ".html")]
    ours = [path for path in found if path.parts[0] != "vendor"]
    return {path.stem if path.parts[0] == "elements" else path.name: path for path in ours}


def _file(card: str) -> Path:
    cards = _cards()
    if card not in cards:
        raise NotFound(f"there is no card {card!r}; there are: {', '.join(sorted(cards))}")
    return cards[card]


def _listed() -> int:
    for card, path in sorted(_cards().items(), key=lambda pair: pair[1]):
        own = "  yours" if (OWN / path).is_file() else ""
        say(f"{card:<12} {path}{own}")
    return 0


def _eject(card: str) -> int:
    path = _file(card)
    target = OWN / path
    if target.exists():
        raise Invalid(f"{target} is yours already; see: assent ui diff {card}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((PACKAGED / path).read_bytes())
    say(f"{target} is yours now: `assent serve` in this directory shows it instead of ours")
    return 0


def _diff(paths: list[Path]) -> int:
    own = [path for path in paths if (OWN / path).is_file()]
    if not own:
        say("nothing of the page is yours here; see: assent ui eject CARD")
    for path in own:
        ours = PACKAGED / path
        before = ours.read_text().splitlines() if ours.is_file() else []
        after = (OWN / path).read_text(errors="replace").splitlines()
        lines = list(difflib.unified_diff(before, after, f"packaged/{path}", str(OWN / path), lineterm=""))
        for line in lines or [f"{OWN / path} is the same as ours"]:
            say(shown(line))
    return 0
