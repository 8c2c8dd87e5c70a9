"""Which command lines can only read: a table of flags for each program that can be used without changing anything.

A program's name says nothing: ``sort -o F`` writes, ``rg --pre P`` and ``find -exec`` run programs. So each table lists
the flags that are known to read only, and every other flag makes the command line one that a person is asked about.
Programs that read their own configuration from the workspace (git), interpreters and pagers have no table.

The tables are for GNU and compatible programs: a command runs on their word only inside the Linux sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["TABLES", "Reading", "find_reading"]


class Reading(msgspec.Struct, frozen=True):
    """What a harmless command line reads."""

    paths: tuple[str, ...] = ()
    """The paths that it names, as written."""
    recursive: bool = False
    """It may also read everything beneath these."""


class Flag(msgspec.Struct, frozen=True):
    """One flag of a program."""

    value: Literal["none", "text", "path", "optional"] = "none"
    """An optional value is always attached: ``--color=never``."""
    recursive: bool = False
    count: int = 1
    """The number of values."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The harmless flags and operands of one program."""

    flags: dict[str, Flag]
    operands: Literal["paths", "text", "pattern", "format", "anything"]
    """pattern: text first, then paths; format: must begin with "+"; anything: flags are not looked at."""
    most: int | None = None
    """The largest number of operands."""
    digits: bool = False
    """``-5`` is a flag."""
    recursive: bool = False
    """It descends into directories without being told to."""
    default: str = ""
    """The path that is read if none is named."""
    instead: frozenset[str] = frozenset()
    """Flags in place of the pattern: with one of these all operands are paths."""
    refused: str = ""
    """A regular expression that the pattern must not contain."""


_SUFFIXES = {
    ":": Flag("text"),
    "@": Flag("path"),
    "?": Flag("optional"),
    "!": Flag(recursive=True),
    "2": Flag("text", count=2),
}


def _read_flags(text: str) -> dict[str, Flag]:
    """Return the flags of a table. A suffix says what follows: ``:`` text, ``@`` a path, ``?`` an optional value,
    ``=2`` two values; ``!`` marks a flag that descends into directories."""
    flags: dict[str, Flag] = {}
    for word in text.split():
        name = word.removesuffix("=2").rstrip(":@?!")
        flags[name] = _SUFFIXES[word[-1]] if name != word else Flag()
    return flags


def _table(
    flags: str = "",
    operands: Literal["paths", "text", "pattern", "format", "anything"] = "paths",
    *,
    most: int | None = None,
    digits: bool = False,
    recursive: bool = False,
    default: str = "",
    instead: str = "",
    refused: str = "",
) -> Table:
    return Table(
        flags=_read_flags(flags),
        operands=operands,
        most=most,
        digits=digits,
        recursive=recursive,
        default=default,
        instead=_names(instead),
        refused=refused,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CHECKSUM = "-b -t -z --binary --text --tag --zero"

TABLES: dict[str, Table] = {
    "basename": _table("-a -s: -z --multiple --suffix: --zero", "text"),
    "cat": _table("-A -b -e -E -n -s -t -T -u -v --show-all --number --number-nonblank --squeeze-blank --show-ends"),
    "cmp": _table("-b -i: -l -n: -s --print-bytes --ignore-initial: --verbose --bytes: --quiet --silent", most=4),
    "comm": _table("-1 -2 -3 -z --check-order --nocheck-order --output-delimiter: --total --zero-terminated", most=2),
    "cut": _table(
        "-b: -c: -d: -f: -n -s -z --bytes: --characters: --delimiter: --fields: --only-delimited --complement "
        "--output-delimiter: --zero-terminated"
    ),
    # A bare operand sets the clock.
    "date": _table(
        "-u -R -I? -d: -r@ --utc --universal --rfc-email --iso-8601? --rfc-3339: --date: --reference@", "format"
    ),
    "df": _table("-a -h -H -i -k -l -P -T -t: -x: --all --human-readable --si --inodes --local --portability "
                 "--print-type --type: --exclude-type: --total --output?"),
    # No -l: it runs pr. Two directories are compared file by file also without -r.
    "diff": _table(
        "-a -b -B -c -C: -d -e -E -i -n -N -p -q -r -s -t -T -u -U: -w -W: -x: -y -Z --text --brief --recursive "
        "--new-file --unified? --context? --side-by-side --width: --ignore-case --ignore-all-space "
        "--ignore-space-change --ignore-blank-lines --report-identical-files --exclude: --color? --minimal "
        "--show-c-function --label: --suppress-common-lines --strip-trailing-cr",
        most=2, recursive=True,
    ),
    "dirname": _table("-z --zero", "text"),
    "du": _table(
        "-0 -a -b -c -d: -h -k -l -m -s -S -x --all --apparent-size --bytes --total --max-depth: --human-readable "
        "--si --summarize --one-file-system --exclude: --separate-dirs --inodes --threshold:",
        recursive=True, default=".",
    ),
    "echo": _table(operands="anything"),
    "false": _table(operands="anything"),
    # No -z: it runs decompressors. No -C: it writes a database.
    "file": _table("-0 -b -h -i -k -L -N -r --brief --mime --mime-type --mime-encoding --dereference --no-dereference"),
    # No -P: its expressions can take for ever.
    "grep": _table(
        "-E -F -G -e: -f@ -i -w -x -s -v -m: -b -n -H -h -o -q -a -I -r! -R! -L -l -c -T -Z -z -B: -A: -C: -U "
        "--extended-regexp --fixed-strings --basic-regexp --regexp: --file@ --ignore-case --no-ignore-case "
        "--word-regexp --line-regexp --no-messages --invert-match --max-count: --byte-offset --line-number "
        "--with-filename --no-filename --only-matching --quiet --silent --text --recursive! --dereference-recursive! "
        "--include: --exclude: --exclude-from@ --exclude-dir: --files-without-match --files-with-matches --count "
        "--initial-tab --null --null-data --before-context: --after-context: --context: --color? --colour? "
        "--group-separator: --no-group-separator --binary-files: --label:",
        "pattern", digits=True, instead="-e -f --regexp --file",
    ),
    "head": _table("-c: -n: -q -v -z --bytes: --lines: --quiet --silent --verbose --zero-terminated", digits=True),
    # No -f and no import: a program can name further files.
    "jq": _table(
        "-a -c -C -e -j -M -n -r -R -s -S --arg=2 --argjson=2 --ascii-output --color-output --compact-output "
        "--exit-status --indent: --join-output --monochrome-output --null-input --raw-input --raw-output --seq "
        "--slurp --sort-keys --stream --tab --unbuffered",
        "pattern", refused=r"\b(?:import|include|modulemeta)\b",
    ),
    "ls": _table(
        "-1 -a -A -b -B -c -C -d -f -F -g -G -h -H -i -I: -k -l -L -m -n -N -o -p -q -Q -r -R! -s -S -t -T: -u -U -v "
        "-w: -x -X -Z --all --almost-all --author --block-size: --classify? --color? --directory --file-type "
        "--format: --full-time --group-directories-first --hide: --human-readable --si --ignore: --inode "
        "--indicator-style: --literal --no-group --numeric-uid-gid --quote-name --quoting-style: --recursive! "
        "--reverse --size --sort: --time: --time-style: --width: --zero",
        default=".",
    ),
    "md5sum": _table(_CHECKSUM),
    "nl": _table("-b: -d: -f: -h: -i: -l: -n: -p -s: -v: -w: --body-numbering: --number-format: --number-width: "
                 "--number-separator: --starting-line-number: --line-increment: --no-renumber"),
    "od": _table("-A: -a -b -c -d -i -j: -l -N: -o -s -S: -t: -v -w? -x --address-radix: --skip-bytes: --read-bytes: "
                 "--format: --output-duplicates --width? --endian: --strings?"),
    "printf": _table(operands="anything"),
    "pwd": _table("-L -P --logical --physical", most=0),
    "readlink": _table("-e -f -m -n -q -s -v -z --canonicalize --canonicalize-existing --canonicalize-missing "
                       "--no-newline --quiet --silent --verbose --zero"),
    "realpath": _table("-e -L -m -P -q -s -z --canonicalize-existing --canonicalize-missing --logical --physical "
                       "--quiet --relative-to@ --relative-base@ --strip --no-symlinks --zero"),
    # No --pre, --hostname-bin, -z (they run programs), -P, -f, --ignore-file.
    "rg": _table(
        "-A: -a -B: -b -C: -c -E: -e: -F -g: -H -I -i -j: -l -L -m: -M: -N -n -o -p -q -r: -S -s -T: -t: -U -u -v -w "
        "-x -. --after-context: --before-context: --context: --count --count-matches --case-sensitive --color: "
        "--column --crlf --debug --encoding: --files --files-with-matches --files-without-match --fixed-strings "
        "--follow --glob: --glob-case-insensitive --heading --no-heading --hidden --no-hidden --iglob: --ignore-case "
        "--invert-match --json --line-number --no-line-number --line-regexp --max-columns: --max-count: --max-depth: "
        "--max-filesize: --multiline --multiline-dotall --no-config --no-filename --no-ignore --no-ignore-global "
        "--no-ignore-parent --no-ignore-vcs --no-messages --no-mmap --no-require-git --null --one-file-system "
        "--only-matching --passthru --pretty --quiet --regexp: --replace: --smart-case --sort: --sortr: --stats "
        "--text --threads: --trim --type: --type-not: --type-list --unrestricted --vimgrep --with-filename "
        "--word-regexp",
        "pattern", recursive=True, default=".", instead="-e --regexp --files --type-list",
    ),
    "sha256sum": _table(_CHECKSUM),
    # No -o (writes), --compress-program (runs), --files0-from, -T.
    "sort": _table(
        "-b -c -C -d -f -g -h -i -k: -m -M -n -r -R -s -t: -u -V -z --check? --dictionary-order --field-separator: "
        "--general-numeric-sort --human-numeric-sort --ignore-case --ignore-leading-blanks --ignore-nonprinting "
        "--key: --merge --month-sort --numeric-sort --random-sort --reverse --sort: --stable --unique --version-sort "
        "--zero-terminated"
    ),
    "stat": _table("-c: -f -L -t --dereference --file-system --format: --printf: --terse"),
    # No -f: it never ends.
    "tail": _table("-c: -n: -q -v -z --bytes: --lines: --quiet --silent --verbose --zero-terminated", digits=True),
    "tr": _table("-c -C -d -s -t --complement --delete --squeeze-repeats --truncate-set1", "text", most=2),
    # No -o and -R: they write.
    "tree": _table(
        "-a -c -C -d -D -f -F -g -h -i -I: -J -L: -n -p -P: -q -Q -r -s -t -u -U -v -X --charset: --dirsfirst --du "
        "--filelimit: --gitignore --inodes --matchdirs --noreport --prune --si --sort: --timefmt:",
        recursive=True, default=".",
    ),
    "true": _table(operands="anything"),
    # A second operand is the file that it writes.
    "uniq": _table("-c -d -D -i -u -z -f: -s: -w: --count --repeated --all-repeated? --ignore-case --unique "
                   "--zero-terminated --skip-fields: --skip-chars: --check-chars: --group?", most=1),
    "wc": _table("-c -l -L -m -w --bytes --chars --lines --max-line-length --words --total:"),
    "which": _table("-a", "text"),
}  # fmt: skip
"""The programs with a table; ``find`` has its own grammar and is read by ``_find``."""

_FIND_PLAIN = _names(
    "-a -and -o -or -not -daystart -depth -empty -executable -false -follow -ignore_readdir_race -mount -nogroup "
    "-noignore_readdir_race -noleaf -nouser -nowarn -print -print0 -prune -readable -true -warn -writable -xdev"
)
_FIND_TEXT = _names(
    "-amin -atime -cmin -ctime -fstype -gid -group -ilname -iname -inum -ipath -iregex -iwholename -links -lname "
    "-maxdepth -mindepth -mmin -mtime -name -path -perm -regex -regextype -size -type -uid -used -user -wholename "
    "-xtype"
)
_FIND_PATH = _names("-anewer -cnewer -newer -samefile")
_FIND_NEWER = re.compile(r"-newer[aBcm]([aBcmt])")


class _Refusal(Exception):
    """Why a command line is not known to be harmless."""


def find_reading(words: Sequence[str]) -> Reading | str:
    """Return what a command line reads, or why it is not known to be harmless. Does not look for the executable."""
    name, *rest = words
    try:
        if name == "find":
            return _find(rest)
        if name not in TABLES:
            return f"{name!r:.60} has no table of harmless flags"
        return _read_words(name, TABLES[name], rest)
    except _Refusal as refusal:
        return str(refusal)


def _read_words(name: str, table: Table, rest: Sequence[str]) -> Reading:
    if table.operands == "anything":
        return Reading()
    used: set[str] = set()
    paths: list[str] = []
    operands: list[str] = []
    waiting = list(rest)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            operands += waiting
            break
        if word == "-" or not word.startswith("-"):
            operands.append(word)
        elif not (table.digits and re.fullmatch(r"-[0-9]+", word)):
            for flag, values in _read_flag(name, table, word, waiting):
                used.add(flag)
                paths += values
    paths += _read_operands(name, table, used, operands)
    return Reading(
        tuple(path for path in paths or [table.default] if path not in ("", "-")),
        table.recursive or any(table.flags[flag].recursive for flag in used),
    )


def _read_flag(name: str, table: Table, word: str, waiting: list[str]) -> list[tuple[str, list[str]]]:
    """Return the flags in a word, each with the paths among its values; take separate values from ``waiting``."""
    if word.startswith("--"):
        flag, equals, attached = word.partition("=")
        return [_read_value(name, table, flag, attached if equals else None, waiting)]
    found: list[tuple[str, list[str]]] = []
    letters = word[1:]
    while letters:
        flag, letters = f"-{letters[0]}", letters[1:]
        takes = flag in table.flags and table.flags[flag].value != "none"
        attached = letters if takes and letters else None
        found.append(_read_value(name, table, flag, attached, waiting))
        if takes:
            break
    return found


def _read_value(name: str, table: Table, flag: str, attached: str | None, waiting: list[str]) -> tuple[str, list[str]]:
    known = table.flags.get(flag)
    if known is None:
        raise _Refusal(f"{name} {flag:.60} is not known to be harmless")
    if known.value == "none" and attached is not None:
        raise _Refusal(f"{name} {flag} takes no value")
    if known.value in ("none", "optional"):
        return flag, []
    values = [] if attached is None else [attached]
    while len(values) < known.count:
        if not waiting:
            raise _Refusal(f"{name} {flag} lacks its value")
        values.append(waiting.pop(0))
    return flag, values if known.value == "path" else []


def _read_operands(name: str, table: Table, used: set[str], operands: list[str]) -> list[str]:
    """Return the operands that are paths."""
    if table.most is not None and len(operands) > table.most:
        raise _Refusal(f"{name} with more than {table.most} operands is not known to be harmless")
    match table.operands:
        case "paths":
            return operands
        case "text" | "anything":
            return []
        case "format":
            if any(not operand.startswith("+") for operand in operands):
                raise _Refusal(f"{name} with an operand other than +FORMAT may set the clock")
            return []
        case "pattern":
            if used & table.instead:
                return operands
            if operands and table.refused and re.search(table.refused, operands[0]):
                raise _Refusal(f"this program for {name} may read other files")
            return operands[1:]


def _find(rest: Sequence[str]) -> Reading:
    words = list(rest)
    while words and words[0] in ("-H", "-L", "-P"):
        words.pop(0)
    paths: list[str] = []
    while words and not words[0].startswith("-") and words[0] not in ("(", ")", "!", ","):
        paths.append(words.pop(0))
    paths = paths or ["."]
    while words:
        word = words.pop(0)
        if word in _FIND_PLAIN or word in ("(", ")", "!", ","):
            continue
        newer = _FIND_NEWER.fullmatch(word)
        if word not in _FIND_TEXT and word not in _FIND_PATH and not newer:
            raise _Refusal(f"find {word:.60} is not known to be harmless")
        if not words:
            raise _Refusal(f"find {word} lacks its value")
        value = words.pop(0)
        if word in _FIND_PATH or (newer and newer[1] != "t"):
            paths.append(value)
    return Reading(tuple(paths), recursive=True)
