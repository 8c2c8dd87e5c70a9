"""Authentication, visibility of conversations, and checks of the Host and Origin headers.

Without a token or cookie only the error pages are served, even on localhost: other users of the machine and every page
in the browser can reach it.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request

from holdfast.core.decisions import Principal
from holdfast.errors import Invalid, NotAllowed, NotFound
from holdfast.runtime.runtime import Runtime
from holdfast.server.problems import HTTPProblem

Auth = Callable[[Request], Principal | str | Awaitable[Principal | str | None] | None]
"""Returns the principal of a request; None or NotAllowed refuses it."""
MaySee = Callable[[Principal, str], bool | Awaitable[bool]]
"""Returns whether a principal may see a conversation. To a principal that may not, it does not exist."""

MAX_HOST_CHARS = 300
"""Longest accepted Host header."""
ALLOW_ORIGIN = "access-control-allow-origin"
COOKIE_DAYS = 30
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?")
SAFE_METHODS = ("GET", "HEAD")


class TokenAuth:
    """Authenticates one principal by a secret token: first in the printed URL, then by a SameSite cookie.

    Programs send ``Authorization: Bearer TOKEN``. The cookie's value is derived from the token and valid only as a
    cookie. Browsers do not separate cookies by port: a server on another port of the same address receives the
    cookie, and could use it here until the token changes.

    token:  the secret; random if omitted
    by:     the principal, as the log records it
    """

    def __init__(self, token: str | None = None, by: str | Principal = "user"):
        self.token = token or secrets.token_urlsafe(24)
        self.by = Principal.of(by)
        # Cookies are shared between ports: servers on one machine must not overwrite each other's.
        self.cookie = f"holdfast-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"
        self._cookie_value = hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()

    def __call__(self, request: Request) -> Principal | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            valid = hmac.compare_digest(token.strip().encode("latin-1"), self.token.encode())
        else:
            valid = _secrets_match(request.cookies.get(self.cookie, ""), self._cookie_value)
        return self.by if valid else None

    def login(self, request: Request) -> dict[str, str] | None:
        """Return the headers that set the cookie if the query has the right ``token``; else None."""
        given = request.query_params.get("token")
        if given is None or not _secrets_match(given, self.token):
            return None
        cookie = (
            f"{self.cookie}={self._cookie_value}; Path={request.scope.get('root_path', '')}/; "
            f"Max-Age={COOKIE_DAYS * 86400}; HttpOnly; SameSite=Strict"
        )
        secure = "; Secure" if request.url.scheme == "https" else ""
        return {"set-cookie": cookie + secure}


def _secrets_match(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


class OpenedBy:
    """A ``may_see`` that lets principals see the conversations that they opened, and no other ones."""

    MAX_OPENERS = 10_000

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._openers: dict[str, str] = {}

    async def __call__(self, principal: Principal, conversation: str) -> bool:
        opener = self._openers.get(conversation)
        if opener is None:
            try:
                opener = (await self._runtime.history(conversation, limit=1))[0].by.id
            except NotFound:
                return True  # anyone may open it
            while len(self._openers) >= self.MAX_OPENERS:
                del self._openers[next(iter(self._openers))]
            self._openers[conversation] = opener
        return opener == principal.id


async def identify(auth: Auth, request: Request) -> Principal:
    """Return the principal of a request; raise 401 if there is none."""
    try:
        principal = auth(request)
        if not isinstance(principal, Principal) and inspect.isawaitable(principal):
            principal = await principal
    except NotAllowed:
        principal = None
    if principal is None:
        raise HTTPProblem(
            401,
            "not_authenticated",
            "sign in: open the address that the server printed, or send its token as `Authorization: Bearer TOKEN`",
            {"www-authenticate": "Bearer"},
        )
    return Principal.of(principal)


class Origins:
    """Prevents DNS rebinding and cross-site writes: checks the Host of every request and the Origin of writes."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]):
        self._hosts = {host.lower() for host in hosts}
        self._known = lru_cache(1024)(self._is_served)
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        for origin in self._origins:
            if not _ORIGIN.fullmatch(origin):
                raise Invalid(f"an origin looks like https://desk.example, not {origin!r}")

    def check_request(self, method: str, headers: Mapping[str, str], scheme: str = "http") -> None:
        """Raise 421 for a host that is not served here, and 403 for a write from another site."""
        host = headers.get("host", "").lower()
        if len(host) > MAX_HOST_CHARS or not self._known(host):  # a longer one does not fill the cache either
            raise HTTPProblem(
                421,
                "permission_denied",
                f"the host {host[:200]!r} is not allowed: use holdfast serve --allow-host, or app(hosts=[...])",
            )
        if method in SAFE_METHODS:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            given, own = origin.lower(), f"{scheme}://{host}"
            same = given in self._origins or _strip_default_port(given) == _strip_default_port(own)
        else:
            same = site in (None, "same-origin", "none")
        if not same:
            raise HTTPProblem(
                403,
                "permission_denied",
                "the request comes from another site: use holdfast serve --allow-origin, or app(origins=[...])",
            )

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that let a page of an allowed origin read the response."""
        if not self._origins:
            return {}
        origin = headers.get("origin", "")
        if origin.lower() not in self._origins:
            return {"vary": "origin"}
        return {
            ALLOW_ORIGIN: origin,
            "access-control-allow-credentials": "true",
            "access-control-expose-headers": "retry-after",
            "vary": "origin",
        }

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of the response to a preflight: every method of the API, and every header."""
        return {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": headers.get("access-control-request-headers", ""),
            "access-control-max-age": "600",
        }

    def _is_served(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self._hosts or name in self._hosts:
            return True
        try:
            ip_address(name)  # DNS rebinding needs a name
        except ValueError:
            return False
        return True


def _strip_default_port(origin: str) -> str:
    """Return the origin without a port that its scheme has by default."""
    return origin.removesuffix({"http": ":80", "https": ":443"}.get(origin.partition("://")[0], ":"))
