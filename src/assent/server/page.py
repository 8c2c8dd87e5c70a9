"""The page's files: small, known by their contents, and never a script that is not among them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGED = Path(__file__).resolve().parent / "static"
VENDORED = PACKAGED / "vendor"
INDEX = "index.html"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
PACKED = (".css", ".html", ".js", ".json", ".map", ".svg", ".txt", ".webmanifest")
_REMARKS = {
    ".js": re.compile(rb"^ *(//.*|/\*\*.*\*/)$", re.MULTILINE),
    ".css": re.compile(rb" */\*.*?\*/"),
}
"""What only people read in our files: a tenth of what browsers would be sent."""
_INLINE = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


def _allowed(script: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


_GO_ON = b"const at = new URL(location); at.searchParams.delete('token'); location.replace(at)"
LOGIN = b'<!doctype html><meta charset="utf-8"><title>Assent</title><script>%s</script>' % _GO_ON
"""Gives the cookie and goes on to the page. No redirect: after one that began on another site, browsers hold back
the cookie, which is Strict."""
LOGIN_HEADERS = {
    "content-type": TYPES[".html"],
    "content-security-policy": f"default-src 'none'; script-src {_allowed(_GO_ON)}; frame-ancestors 'none'",
}


_LOOK = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:15vh auto;padding:0 1rem}"
    "input,button{font:inherit;padding:.4rem .7rem}"
)
SHEET_HEADERS = {
    "content-type": TYPES[".html"],
    "content-security-policy": f"default-src 'none'; style-src {_allowed(_LOOK.encode())}; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
}


def sheet(heading: str, said: str) -> bytes:
    """A page of a few words that loads nothing; both are HTML. It goes with ``SHEET_HEADERS``."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{heading} - Assent</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_LOOK}</style><main><h1>{heading}</h1>\n{said}</main></html>"
    ).encode()


def stranger(root: str | None, token: bool, tried: bool) -> bytes:
    """For people in a browser whom nobody knows: what to do.

    root:   where the page is; None: here, and what follows the # in the address is kept
    token:  whether a token opens it; ``tried``: one was given, and it did not
    """
    place = "" if root is None else f' action="{html.escape(root)}/"'
    if not token:
        said = "<p>Nobody is signed in here. Sign in where you usually do, or ask whoever runs this server."
    else:
        said = (
            f"<p>{'That is not the right token, or no longer.' if tried else 'This page opens with a token.'} "
            "Open the address that the server printed when it started, or ask whoever runs it.\n"
            f'<form{place}><label>Token <input name="token" type="password" required '
            'autocomplete="off" autofocus></label> <button>Open</button></form>'
        )
    return sheet("Not signed in", said)


class File(NamedTuple):
    type: str
    etag: str
    body: bytes
    packed: bytes | None
    """The same, compressed."""
    inline: tuple[str, ...] = ()
    """The hashes of its import maps: browsers take them from nowhere but the page itself."""


class Files:
    """Files of these directories, the first that has one wins: what a project has made its own comes before ours.

    A page that has none of our elements in it is another one, of a project whose directory happens to have that name.
    """

    def __init__(self, *own: str | os.PathLike[str]):
        self._roots = [Path(root).resolve() for root in (*own, PACKAGED)]
        self._kept: dict[Path, tuple[int, int, File]] = {}

    def find(self, parts: Iterable[str]) -> File | None:
        """The file, or None: also for whatever would lead out of the directories, and for hidden ones."""
        names = list(parts)
        if not names or any(not name or name.startswith(".") or re.search(r"[/\\\0]", name) for name in names):
            return None
        kind = TYPES.get(os.path.splitext(names[-1])[1])
        if kind is None:
            return None
        for root in self._roots:
            path = root.joinpath(*names)
            try:
                if path.is_file() and path.resolve().is_relative_to(root):
                    file = self._read(path, kind)
                    if names != [INDEX] or b"<assent-" in file.body:
                        return file
            except OSError:
                continue
        return None

    def _read(self, path: Path, kind: str) -> File:
        stat = path.stat()
        kept = self._kept.get(path)
        if kept is not None and kept[:2] == (stat.st_mtime_ns, stat.st_size):
            return kept[2]
        body = path.read_bytes()
        if path.suffix in _REMARKS and path.is_relative_to(PACKAGED) and not path.is_relative_to(VENDORED):
            body = _REMARKS[path.suffix].sub(b"", body)
        inline = tuple(map(_allowed, _INLINE.findall(body) if path.suffix == ".html" else []))
        packed = gzip.compress(body, 9, mtime=0) if path.suffix in PACKED else None
        file = File(kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"', body, packed, inline)
        self._kept[path] = stat.st_mtime_ns, stat.st_size, file
        return file


def policy(inline: Iterable[str] = ()) -> str:
    """What the page may load: ours, and nothing else."""
    scripts = " ".join(["'self'", *inline])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
