"""``GET /metrics``: the metrics of the runtime in Prometheus' text format, and who may read them.

Metrics are about all conversations: names of tools and how often they wait, fail and cost. So a principal that may not
see every conversation may not read them, and Prometheus has a token of its own, which is good for nothing else.
"""

from __future__ import annotations

import hmac
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator

from starlette.requests import Request
from starlette.responses import Response

from holdfast.core.decisions import Principal
from holdfast.core.log_counts import Histogram, Samples
from holdfast.errors import Invalid
from holdfast.runtime.runtime import Runtime
from holdfast.server.auth import Auth, identify
from holdfast.server.limits import BoundedResponse
from holdfast.server.problems import HTTPProblem, unavailable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MIN_TOKEN_CHARS = 16

MayReadMetrics = Callable[[Principal], bool | Awaitable[bool]]
"""Returns whether a principal may read the metrics of all conversations."""


def check_metrics_token(token: str) -> str:
    """Return the token, if it is long enough and can be sent in a header."""
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise Invalid(f"a token for the metrics has {MIN_TOKEN_CHARS} or more printable ASCII characters, no spaces")
    return token


class MetricsEndpoint:
    """Serves the metrics.

    token:     what Prometheus sends as a bearer token; None: only principals read the metrics
    may_read:  which principals may read them
    """

    def __init__(self, runtime: Runtime, auth: Auth, token: str | None, may_read: MayReadMetrics):
        self._runtime, self._auth, self._token, self._may_read = runtime, auth, token, may_read

    async def respond(self, request: Request) -> Response:
        await self._check_access(request)
        if not self._runtime.is_open:
            raise unavailable("the server is starting or stopping")
        text = render_metrics(await self._runtime.metrics())
        return BoundedResponse(text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _check_access(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = None if self._token is None or scheme.lower() != "bearer" else self._token.encode()
        if token is not None and hmac.compare_digest(given.strip().encode("latin-1"), token):
            return
        verdict = self._may_read(await identify(self._auth, request))
        if not (await verdict if inspect.isawaitable(verdict) else verdict):
            detail = (
                "metrics are about all conversations: use the token of the metrics, or let app(may_read_metrics=...) "
                "allow this principal"
            )
            raise HTTPProblem(403, "permission_denied", detail)


def render_metrics(found: Iterable[Samples]) -> str:
    """Return metrics in Prometheus' text format."""
    return "".join(f"{line}\n" for samples in found for line in _render_family(samples))


def _render_family(samples: Samples) -> Iterator[str]:
    family = samples.family
    yield f"# HELP {family.name} {_escape(family.help, quotes=False)}"
    yield f"# TYPE {family.name} {family.kind}"
    for values, value in sorted(samples.values.items()):
        labels = list(zip(family.labels, values, strict=True))
        if isinstance(value, Histogram):
            total = 0
            for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
                total += count
                yield _render_sample(f"{family.name}_bucket", [*labels, ("le", _format(bound))], total)
            yield _render_sample(f"{family.name}_sum", labels, value.sum)
            yield _render_sample(f"{family.name}_count", labels, value.count)
        else:
            yield _render_sample(family.name, labels, value)


def _render_sample(name: str, labels: list[tuple[str, str]], value: float) -> str:
    text = ",".join(f'{label}="{_escape(content)}"' for label, content in labels)
    return f"{name}{{{text}}} {_format(value)}" if labels else f"{name} {_format(value)}"


def _format(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
