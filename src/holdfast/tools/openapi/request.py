"""Build the HTTP request of an operation from a call's arguments.

The model chooses the arguments, so they must not be able to change the request: path values are percent-encoded and
cannot contain ``..`` segments, and header values cannot contain line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import msgspec

from holdfast.errors import DeclarationError, ToolError
from holdfast.tools.openapi.document import Contract, Operation, Parameter

HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_SEPARATORS = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C"}
"""How the values of a list are joined in one query parameter, by style."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request without credentials: what an approver is shown."""

    method: str
    url: str
    headers: dict[str, str]
    """The headers that the arguments gave."""
    body: Any = msgspec.UNSET
    content_type: str = "application/json"

    @property
    def content(self) -> bytes | None:
        """The body as it is sent; None without a body."""
        return None if self.body is msgspec.UNSET else msgspec.json.encode(self.body)

    def describe(self) -> dict[str, Any]:
        """Return the preview: method, URL, headers and body."""
        preview: dict[str, Any] = {"method": self.method, "url": self.url}
        if self.headers:
            preview["headers"] = self.headers
        if self.body is not msgspec.UNSET:
            preview["body"] = self.body
        return preview


def check_base_url(given: Any, document: Mapping[str, Any]) -> str:
    """Return the base URL without a slash at its end: the given one, or else the document's first server."""
    url = given if given is not None else _first_server(document)
    if not isinstance(url, str):
        raise DeclarationError(f"base_url must be text such as 'https://api.example.com', not {url!r:.80}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as problem:
        raise DeclarationError(f"base_url is not a URL: {problem}") from None
    if parts.username is not None or parts.password is not None:
        raise DeclarationError("base_url must not contain credentials: return them as headers from auth=")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = "" if given is not None else "; the document's servers name no host: give base_url="
        raise DeclarationError(f"base_url must start with http:// or https:// and a host, not {url!r:.200}{hint}")
    if parts.query or parts.fragment or re.search(r"[\s\\?#]", url):
        raise DeclarationError(f"base_url must have no query, fragment or space: {url!r:.200}")
    return url.rstrip("/")


def _first_server(document: Mapping[str, Any]) -> str:
    servers: Any = document.get("servers")
    if not isinstance(servers, list) or not servers:
        raise DeclarationError("the document names no servers: give base_url=")
    server = cast("list[dict[str, Any]]", servers)[0]
    url = str(server.get("url", ""))
    variables: dict[str, Any] = server.get("variables") or {}
    for name, variable in variables.items():
        url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    return url


def build_request(base_url: str, operation: Operation, contract: Contract, args: Mapping[str, Any]) -> Request:
    """Return the request for these arguments; raise ToolError (``invalid_args``) for a value that cannot be sent."""
    path, query, cookies = operation.path, list[str](), list[str]()
    headers: dict[str, str] = {}
    for parameter in contract.parameters:
        value = args.get(parameter.argument)
        if value is None and parameter.location != "path":
            continue  # an optional parameter that is null is left out
        match parameter.location:
            case "path":
                path = path.replace(f"{{{parameter.name}}}", _path_value(parameter, value))
            case "query":
                query += _query_pairs(parameter, value)
            case "header":
                headers[parameter.name] = _header_value(parameter, value)
            case "cookie":
                cookies += (pair.replace("&", "; ") for pair in _query_pairs(parameter, value))
    _refuse_dot_segments(path, contract)
    if cookies:
        headers["Cookie"] = "; ".join(cookies)
    return Request(
        method=operation.method,
        url=base_url + path + (f"?{'&'.join(query)}" if query else ""),
        headers=headers,
        body=args[contract.body] if contract.body is not None and contract.body in args else msgspec.UNSET,
        content_type=contract.content_type,
    )


def encode_key(key: str) -> str:
    """Return an idempotency key as a header value: printable ASCII, and different for different keys."""
    return quote(key, safe="/:@+=,")


def _refuse_dot_segments(path: str, contract: Contract) -> None:
    """Refuse path values that lead to another path: servers and proxies resolve ``..``, some after decoding %2F."""
    if any(part in (".", "..") for part in re.split(r"[/\\]", unquote(path))):
        names = ", ".join(parameter.argument for parameter in contract.parameters if parameter.location == "path")
        problem = f"{names}: must not make a `.` or `..` segment of the path"
        raise ToolError("invalid_args", problem, {"problems": [problem]})


def _path_value(parameter: Parameter, value: Any) -> str:
    text = _join(parameter, value)
    if not text:
        raise _refuse(parameter, "must not be empty")
    return text


def _query_pairs(parameter: Parameter, value: Any) -> list[str]:
    """Return the ``name=value`` pairs of a query or cookie parameter, percent-encoded."""
    name = quote(parameter.name, safe="")
    if not parameter.as_json and isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if parameter.style == "deepObject":
            return [f"{name}[{quote(key, safe='')}]={_encode(one)}" for key, one in fields.items()]
        if parameter.explode:
            return [f"{quote(key, safe='')}={_encode(one)}" for key, one in fields.items()]
    if not parameter.as_json and isinstance(value, list):
        items = cast("list[Any]", value)
        if parameter.explode:
            return [f"{name}={_encode(one)}" for one in items]
        return [f"{name}={_SEPARATORS.get(parameter.style, ',').join(map(_encode, items))}"]
    return [f"{name}={_join(parameter, value)}"]


def _header_value(parameter: Parameter, value: Any) -> str:
    text = _plain_text(parameter, value)
    if not HEADER_VALUE.fullmatch(text):
        raise _refuse(parameter, "must be printable ASCII text in one line: it is sent as a header")
    return text.strip()


def _join(parameter: Parameter, value: Any) -> str:
    """Return a value in the style "simple", percent-encoded: lists and objects joined by commas."""
    return ",".join(pair[0] if pair[1] is None else f"{pair[0]}={pair[1]}" for pair in _parts(parameter, value, True))


def _plain_text(parameter: Parameter, value: Any) -> str:
    """Return the same text before it is percent-encoded."""
    return ",".join(pair[0] if pair[1] is None else f"{pair[0]}={pair[1]}" for pair in _parts(parameter, value, False))


def _parts(parameter: Parameter, value: Any, encoded: bool) -> Iterator[tuple[str, str | None]]:
    write = _encode if encoded else _text_of
    if parameter.as_json:
        text = msgspec.json.encode(value).decode()
        yield (quote(text, safe="") if encoded else text), None
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield write(one), None
    elif isinstance(value, dict):
        for key, one in cast("dict[str, Any]", value).items():
            if parameter.explode:
                yield write(key), write(one)
            else:
                yield write(key), None
                yield write(one), None
    else:
        yield write(value), None


def _encode(value: Any) -> str:
    return quote(_text_of(value), safe="")


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _refuse(parameter: Parameter, why: str) -> ToolError:
    problem = f"{parameter.argument}: {why}"
    return ToolError("invalid_args", problem, {"problems": [problem]})
