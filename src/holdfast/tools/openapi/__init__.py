"""Tools from an OpenAPI document: every operation becomes a server tool that sends one HTTP request.

document.py  the document: operations, parameters, schemas, references
request.py   a call's arguments become a request
client.py    the request is sent, and the response becomes a result or an error (httpx)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.core.tool import parse_duration
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.adapters import Approval, Approvals, Only, check_approval, name_list, read_approvals
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.openapi.client import Auth, Exchange
from holdfast.tools.openapi.document import Contract, Document, Operation, Unusable, load_document, read_contract
from holdfast.tools.openapi.request import build_request, check_base_url

if TYPE_CHECKING:
    from holdfast.tools.options import Duration

DEFAULT_TIMEOUT = 30.0


class OperationCode:
    """The functions of one tool: its handler and its preview."""

    def __init__(
        self, base_url: str, operation: Operation, contract: Contract, auth: Auth | None, timeout: float | None
    ):
        self._base_url, self._operation, self._contract = base_url, operation, contract
        self._auth, self._timeout = auth, timeout

    async def run(self, args: dict[str, Any], call: Call) -> Any:
        """Send the request and return the response's value."""
        request = build_request(self._base_url, self._operation, self._contract, args)
        return await Exchange(request, call, self._timeout).run(self._auth)

    async def preview(self, args: dict[str, Any], call: Call) -> dict[str, Any]:
        """Return the request that would be sent, without credentials."""
        return build_request(self._base_url, self._operation, self._contract, args).describe()


def tools_from_openapi(
    given: Any,
    *,
    base_url: str | None = None,
    auth: Auth | None = None,
    approval: Approvals = None,
    only: Only = None,
    timeout: Duration | None = DEFAULT_TIMEOUT,
) -> list[Tool]:
    """Return one tool for each operation that ``only`` chooses; refuse the document if one of these cannot work."""
    if auth is not None and not callable(auth):
        raise DeclarationError(
            f"auth must be a function of the principal that returns headers, not {type(auth).__name__}"
        )
    root = load_document(given)
    base, seconds, document = check_base_url(base_url, root), _read_timeout(timeout), Document(root)
    everything = list(document.operations())
    chosen = _select_operations([operation for operation, *_ in everything], only)
    approvals = _approval_rule(approval, [operation.name for operation in chosen])
    made: list[Tool] = []
    problems: list[str] = []
    for operation, found, item in everything:
        if operation not in chosen:
            continue
        try:
            if base_url is None and ("servers" in found or "servers" in item):
                raise Unusable("it has servers of its own: give base_url=, which then holds for every operation")
            contract = read_contract(document, operation, found, item)
        except Unusable as problem:
            problems.append(f"{operation.method} {operation.path}: {problem}")
            continue
        code = OperationCode(base, operation, contract, auth, seconds)
        made.append(_declare(code, operation, contract, approvals(operation), root))
    if problems:
        raise DeclarationError(
            "from_openapi: operations that cannot be tools; leave them out with only=, or change the document: "
            + "; ".join(problems),
            details={"problems": problems},
        )
    return made


def _declare(
    code: OperationCode, operation: Operation, contract: Contract, approval: Approval, root: Mapping[str, Any]
) -> Tool:
    title = f"{operation.method} {operation.path}"
    made = Tool.declare(
        name=operation.name,
        handler=code.run,
        preview=code.preview,
        description="\n\n".join(text for text in (operation.summary, operation.description) if text) or title,
        parameters=contract.schema,
        approval=approval,
        # Also without an approval: whether a request that changes something took effect is not known after a crash.
        recovery="redispatch" if operation.is_safe else "ask",
        metadata={"openapi": {"method": operation.method, "path": operation.path}},
    )
    info = root.get("info")
    name = info.get("title") if isinstance(info, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return made.copy_with(origin=f"{title} of {name or 'an OpenAPI document'}")


def _read_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    try:
        return parse_duration(timeout)
    except Invalid as problem:
        raise DeclarationError(f"from_openapi: timeout: {problem.message}") from None


def _select_operations(operations: list[Operation], only: Only) -> list[Operation]:
    """Return the chosen operations: by tool name or operation id, or by a function of the operation."""
    if only is None:
        return operations
    if callable(only):
        return [operation for operation in operations if only(operation)]
    wanted = set(name_list(only))
    known = {name for operation in operations for name in (operation.name, operation.operation_id)}
    if unknown := sorted(wanted - known):
        names = ", ".join(operation.name for operation in operations)
        raise DeclarationError(f"only: the document has no {', '.join(map(repr, unknown))}; it has {names or 'none'}")
    return [one for one in operations if one.name in wanted or one.operation_id in wanted]


def _approval_rule(approval: Approvals, names: Iterable[str]) -> Callable[[Operation], Approval]:
    """Return the function that gives each operation its approval."""

    def default(operation: Operation) -> Approval:
        return "auto" if operation.is_safe else "required"

    if callable(approval):
        rule = approval
        return lambda operation: _read_ruling(rule(operation), operation, default)
    by_name = read_approvals(approval, names, "the document")
    return lambda operation: by_name.get(operation.name) or default(operation)


def _read_ruling(given: Any, operation: Operation, default: Callable[[Operation], Approval]) -> Approval:
    """Return what an approval function said about an operation: True and False are also understood."""
    if given is None:
        return default(operation)
    if isinstance(given, bool):
        return "required" if given else "auto"
    return check_approval(given, f"approval for {operation.method} {operation.path}")
