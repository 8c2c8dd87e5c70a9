"""Who asks, what they may see, and whether the request comes from where it says.

Nothing is open, on loopback neither: other users of the machine and every page in the browser can reach it. What the
kinds of errors mean is told to everybody (``explained``).
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

from assent.core.decisions import Principal
from assent.errors import Invalid, NotAllowed, NotFound
from assent.runtime.runtime import Runtime
from assent.server.problems import HTTPProblem

Auth = Callable[[Request], Principal | str | Awaitable[Principal | str | None] | None]
"""Who asks; None or NotAllowed: nobody whom we know."""
MaySee = Callable[[Principal, str], bool | Awaitable[bool]]
"""May they see this conversation? If not, it does not exist for them."""

HOST = 300
"""Characters of a name and a port."""
ALLOWED = "access-control-allow-origin"
COOKIE_DAYS = 30
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?")
SAFE = ("GET", "HEAD")


class TokenAuth:
    """One secret for one person: in the printed URL at first, then as a cookie that no other site can use.

    Other ports of the same address are no other site: whoever serves there is sent the cookie, and can use it here
    until there is another token. Its value is made from the token and is good for nothing but a cookie.

    Programs send it as ``Authorization: Bearer TOKEN``.

    token:  the secret; a new one is made up if none is given
    by:     who they are, for the log
    """

    def __init__(self, token: str | None = None, by: str | Principal = "user"):
        self.token = token or secrets.token_urlsafe(24)
        self.by = Principal.of(by)
        # Cookies know no ports: servers on one machine must not overwrite each other's.
        self.cookie = f"assent-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"
        self._kept = hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()

    def __call__(self, request: Request) -> Principal | None:
        said = b""
        for name, value in request.scope["headers"]:
            if name == b"authorization":
                said = value
                break
        scheme, _, given = said.partition(b" ")
        if scheme.lower() == b"bearer":
            right = hmac.compare_digest(given.strip(), self.token.encode())
        else:
            right = _same(request.cookies.get(self.cookie, ""), self._kept)
        return self.by if right else None

    def login(self, request: Request) -> dict[str, str] | None:
        """For the page's address with ``?token=``: the headers that give the cookie for it."""
        given = request.query_params.get("token")
        if given is None or not _same(given, self.token):
            return None
        cookie = (
            f"{self.cookie}={self._kept}; Path={request.scope.get('root_path', '')}/; "
            f"Max-Age={COOKIE_DAYS * 86400}; HttpOnly; SameSite=Strict"
        )
        secure = "; Secure" if request.url.scheme == "https" else ""
        return {"set-cookie": cookie + secure}


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


class OpenedBy:
    """A ``may_see``: everybody sees the conversations that they opened, and no others."""

    KEPT = 10_000

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._openers: dict[str, str] = {}

    async def __call__(self, principal: Principal, conversation: str) -> bool:
        opener = self._openers.get(conversation)
        if opener is None:
            try:
                opener = (await self._runtime.history(conversation, limit=1))[0].by.id
            except NotFound:
                return True  # whoever opens it
            while len(self._openers) >= self.KEPT:
                del self._openers[next(iter(self._openers))]
            self._openers[conversation] = opener
        return opener == principal.id


async def identify(auth: Auth, request: Request) -> Principal:
    """Who asks; 401 if nobody can tell."""
    try:
        who = auth(request)
        if not isinstance(who, Principal) and inspect.isawaitable(who):
            who = await who
    except NotAllowed:
        who = None
    if who is None:
        raise HTTPProblem(
            401,
            "not_authenticated",
            "say who you are: open the address that the server printed, or send its token as `Authorization: Bearer`",
            {"www-authenticate": "Bearer"},
        )
    return Principal.of(who)


class Origins:
    """DNS rebinding and cross-site requests: the host must be one of ours, and writes must come from its page."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]):
        self._hosts = {host.lower() for host in hosts}
        self._known = lru_cache(1024)(self._serves)
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        for origin in self._origins:
            if not _ORIGIN.fullmatch(origin):
                raise Invalid(f"an origin is as https://desk.example, not {origin!r}")

    def check(self, method: str, headers: Mapping[str, str], scheme: str = "http") -> None:
        """Refuse a request that was not meant for us, or that another site has made."""
        host = headers.get("host", "").lower()
        if len(host) > HOST or not self._known(host):  # what is longer is not remembered either
            raise HTTPProblem(
                421,
                "permission_denied",
                f"{host[:200]!r} is not served here; name it: assent serve --allow-host, or hosts=[...] of the app",
            )
        if method in SAFE:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            said, own = origin.lower(), f"{scheme}://{host}"
            same = said in self._origins or _without_port(said) == _without_port(own)
        else:
            same = site in (None, "same-origin", "none")
        if not same:
            raise HTTPProblem(
                403,
                "permission_denied",
                "this came from another site; name it: assent serve --allow-origin, or origins=[...] of the app",
            )

    def shared(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that let a page of one of the other origins read the answer; nobody else's."""
        if not self._origins:
            return {}
        origin = headers.get("origin", "")
        if origin.lower() not in self._origins:
            return {"vary": "origin"}
        return {
            ALLOWED: origin,
            "access-control-allow-credentials": "true",
            "access-control-expose-headers": "retry-after",
            "vary": "origin",
        }

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What such a page may do: all that ours can, with whatever headers its sign-in needs."""
        return {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": headers.get("access-control-request-headers", ""),
            "access-control-max-age": "600",
        }

    def _serves(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self._hosts or name in self._hosts:
            return True
        try:
            ip_address(name)  # an address cannot be rebound: only names can
        except ValueError:
            return False
        return True


def _without_port(origin: str) -> str:
    """Return the origin without a port that its scheme has by default."""
    return origin.removesuffix({"http": ":80", "https": ":443"}.get(origin.partition("://")[0], ":"))
