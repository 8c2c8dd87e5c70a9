"""Who asks, what they may see, and whether the request comes from where it says.

Nothing is open, on loopback neither: other users of the machine and every page in the browser can reach it.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlencode, urlsplit

from starlette.requests import Request

from assent.core.decisions import Principal
from assent.errors import NotAllowed, NotFound
from assent.runtime.runtime import Runtime
from assent.server.problems import HTTPProblem

Auth = Callable[[Request], Principal | str | Awaitable[Principal | str | None] | None]
"""Who asks; None or NotAllowed: nobody whom we know."""
MaySee = Callable[[Principal, str], bool | Awaitable[bool]]
"""May they see this conversation? If not, it does not exist for them."""

COOKIE_DAYS = 30
SAFE = ("GET", "HEAD")


class TokenAuth:
    """One secret for one person: in the printed URL at first, then in a cookie that no other site can use.

    Programs send it as ``Authorization: Bearer TOKEN``.

    token:  the secret; a new one is made up if none is given
    by:     who they are, for the log
    """

    def __init__(self, token: str | None = None, by: str | Principal = "user"):
        self.token = token or secrets.token_urlsafe(24)
        self.by = Principal.of(by)
        # Cookies know no ports: servers on one machine must not overwrite each other's.
        self.cookie = f"assent-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def __call__(self, request: Request) -> Principal | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.cookies.get(self.cookie, "")
        return self.by if self._right(given.strip()) else None

    def login(self, request: Request) -> dict[str, str] | None:
        """For the page's address with ``?token=``: the headers of the redirect that swaps it for the cookie."""
        given = request.query_params.get("token")
        if given is None or not self._right(given):
            return None
        rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
        cookie = (
            f"{self.cookie}={self.token}; Path={request.scope.get('root_path', '')}/; "
            f"Max-Age={COOKIE_DAYS * 86400}; HttpOnly; SameSite=Strict"
        )
        secure = "; Secure" if request.url.scheme == "https" else ""
        return {"location": f"./?{rest}" if rest else "./", "set-cookie": cookie + secure}

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


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
                return False
            while len(self._openers) >= self.KEPT:
                del self._openers[next(iter(self._openers))]
            self._openers[conversation] = opener
        return opener == principal.id


async def identify(auth: Auth, request: Request) -> Principal:
    """Who asks; 401 if nobody can tell."""
    try:
        who = auth(request)
        if inspect.isawaitable(who):
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
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def check(self, request: Request) -> None:
        """Refuse a request that was not meant for us, or that another site has made."""
        headers = request.headers
        host = headers.get("host", "").lower()
        if not self._known(host):
            raise HTTPProblem(
                421, "permission_denied", f"{host[:200]!r} is not served here; name it in hosts=[...] of the app"
            )
        if request.method in SAFE:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None:
            same = urlsplit_host(origin) == host or origin.lower() in self._origins
        else:
            same = site in (None, "same-origin", "none")
        if not same:
            raise HTTPProblem(403, "permission_denied", "this came from another site; name it in origins=[...]")

    def _known(self, host: str) -> bool:
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


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin.lower()).netloc
    except ValueError:
        return ""
