"""The files of the page, and the pages that are generated: sign-in and the explanations of errors."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from holdfast import errors
from holdfast.errors import KINDS
from holdfast.server.limits import BoundedResponse
from holdfast.server.problems import HTTPProblem, error_page_path

PACKAGED_DIR = Path(__file__).resolve().parent / "static"
VENDORED_DIR = PACKAGED_DIR / "vendor"
INDEX = "index.html"
WORKER = "worker.js"
"""The page's service worker. It is below ``static/`` and may control the page, one level up."""
CONTENT_TYPES = {
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
COMPRESSED_SUFFIXES = (".css", ".html", ".js", ".json", ".map", ".svg", ".txt", ".webmanifest")
_COMMENTS = {
    ".js": re.compile(rb"^ *(//.*|/\*\*.*\*/)$", re.MULTILINE),
    ".css": re.compile(rb" */\*.*?\*/"),
}
"""Comments are removed from our own files: they are a tenth of the bytes."""
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


def _csp_hash(script: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


# --- files ---


class PageFile(NamedTuple):
    type: str
    etag: str
    body: bytes
    compressed: bytes | None
    import_maps: tuple[str, ...] = ()
    """CSP hashes of its import maps, which browsers accept only inline."""


class PageFiles:
    """Serves the files of the given directories, then the packaged ones.

    An ``index.html`` without any of our elements is skipped: the project uses the directory for another page.
    """

    def __init__(self, *own: str | os.PathLike[str]):
        self._roots = [Path(root).resolve() for root in (*own, PACKAGED_DIR)]
        self._cache: dict[Path, tuple[int, int, PageFile]] = {}

    def response(self, segments: list[str], headers: Mapping[str, str]) -> Response:
        """Return the file at this path; 404 if there is none, 304 if the client has it already."""
        file = self.find([INDEX] if segments == [""] else segments[1:])
        if file is None:
            raise HTTPProblem(404, "not_found", f"this server has no {'/' + '/'.join(segments)!r}"[:300])
        own_headers = {
            "content-type": file.type,
            "etag": file.etag,
            "cache-control": "no-cache",
            "vary": "accept-encoding",
            "content-security-policy": content_policy(file.import_maps),
        }
        if segments[-1] == WORKER:
            own_headers["service-worker-allowed"] = "../"
        if file.etag in headers.get("if-none-match", ""):
            return BoundedResponse(status_code=304, headers=own_headers)
        if file.compressed is not None and "gzip" in headers.get("accept-encoding", ""):
            return BoundedResponse(file.compressed, headers={**own_headers, "content-encoding": "gzip"})
        return BoundedResponse(file.body, headers=own_headers)

    def find(self, parts: Iterable[str]) -> PageFile | None:
        """Return the file, or None; also None for hidden files and for paths that leave the directories."""
        names = list(parts)
        if not names or any(not name or name.startswith(".") or re.search(r"[/\\\0]", name) for name in names):
            return None
        content_type = CONTENT_TYPES.get(os.path.splitext(names[-1])[1])
        if content_type is None:
            return None
        for root in self._roots:
            path = root.joinpath(*names)
            try:
                if path.is_file() and path.resolve().is_relative_to(root):
                    file = self._read(path, content_type)
                    if names != [INDEX] or b"<holdfast-" in file.body:
                        return file
            except OSError:
                continue
        return None

    def _read(self, path: Path, content_type: str) -> PageFile:
        stat = path.stat()
        cached = self._cache.get(path)
        if cached is not None and cached[:2] == (stat.st_mtime_ns, stat.st_size):
            return cached[2]
        body = path.read_bytes()
        if path.suffix in _COMMENTS and path.is_relative_to(PACKAGED_DIR) and not path.is_relative_to(VENDORED_DIR):
            body = _COMMENTS[path.suffix].sub(b"", body)
        import_maps = tuple(map(_csp_hash, _IMPORT_MAP.findall(body) if path.suffix == ".html" else []))
        compressed = gzip.compress(body, 9, mtime=0) if path.suffix in COMPRESSED_SUFFIXES else None
        file = PageFile(content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"', body, compressed, import_maps)
        self._cache[path] = stat.st_mtime_ns, stat.st_size, file
        return file


def content_policy(import_maps: Iterable[str] = ()) -> str:
    """Return the Content-Security-Policy of the page: files of this server, and these inline import maps."""
    scripts = " ".join(["'self'", *import_maps])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# --- sign-in ---

_REDIRECT_SCRIPT = b"const at = new URL(location); at.searchParams.delete('token'); location.replace(at)"
LOGIN = b'<!doctype html><meta charset="utf-8"><title>Holdfast</title><script>%s</script>' % _REDIRECT_SCRIPT
"""Sent with the cookie; leads on to the page. An HTTP redirect would not do: after one that began on another site,
browsers withhold a SameSite=Strict cookie."""
LOGIN_HEADERS = {
    "content-type": CONTENT_TYPES[".html"],
    "content-security-policy": f"default-src 'none'; script-src {_csp_hash(_REDIRECT_SCRIPT)}; frame-ancestors 'none'",
}
_SHEET_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:15vh auto;padding:0 1rem}"
    "input,button{font:inherit;padding:.4rem .7rem}"
)
SHEET_HEADERS = {
    "content-type": CONTENT_TYPES[".html"],
    "content-security-policy": f"default-src 'none'; style-src {_csp_hash(_SHEET_STYLE.encode())}; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
}


def render_sheet(heading: str, content: str) -> bytes:
    """Return a page of text that loads nothing; both arguments are HTML. Send it with ``SHEET_HEADERS``."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{heading} - Holdfast</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_SHEET_STYLE}</style><main><h1>{heading}</h1>\n{content}</main></html>"
    ).encode()


def render_sign_in(root: str | None, token: bool, tried: bool) -> bytes:
    """Return the page for a browser that is not signed in.

    root:   the path of the page; None at the page itself, so that the fragment of its address is kept
    token:  whether a token signs in; ``tried``: the request had one, and it was wrong
    """
    action = "" if root is None else f' action="{html.escape(root)}/"'
    if not token:
        content = "<p>You are not signed in. Sign in where you usually do, or ask the operator of this server."
    else:
        content = (
            f"<p>{'The token is wrong or no longer valid.' if tried else 'This page needs a token.'} "
            "Open the address that the server printed at its start, or ask its operator.\n"
            f'<form{action}><label>Token <input name="token" type="password" required '
            'autocomplete="off" autofocus></label> <button>Open</button></form>'
        )
    return render_sheet("Not signed in", content)


# --- explanations of errors: the ``type`` of a problem document links to them ---


class ErrorNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The explanation of a kind of error, in Markdown."""

    when: str
    do: str


@cache
def error_notes() -> dict[str, ErrorNote]:
    """Return the explanations by kind."""
    return msgspec.toml.decode(Path(errors.__file__).with_suffix(".toml").read_bytes(), type=dict[str, ErrorNote])


def render_error_page(scope: Mapping[str, Any], segments: list[str]) -> bytes:
    """Return the page about a kind, or the list of kinds; ``segments`` are those of the path below ``/errors``."""
    match segments:
        case [] | [""]:
            rows = [f'<li><a href="{error_page_path(scope, kind)}">{kind}</a>: {text}' for kind, text in KINDS.items()]
            return render_sheet("Errors", "\n".join(["<ul>", *rows, "</ul>"]))
        case [kind] | [kind, ""] if kind in KINDS:
            note, meaning = error_notes()[kind], KINDS[kind]
            lines = [
                f"<p>{meaning[0].upper()}{meaning[1:]}.",
                f"<h2>When it happens</h2>\n<p>{_to_html(note.when)}",
                f"<h2>What to do</h2>\n<p>{_to_html(note.do)}",
                f'<p><a href="{error_page_path(scope)}">All kinds of errors</a>\n',
            ]
            return render_sheet(kind, "\n".join(lines))
        case _:
            raise HTTPProblem(404, "not_found", f"there is no kind of error {'/'.join(segments).rstrip('/')[:200]!r}")


def _to_html(text: str) -> str:
    """Return the text with its code as HTML; links lead to the documentation, which is not served here."""
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html.escape(text, quote=False))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", plain)
