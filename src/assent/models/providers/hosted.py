"""Tools that the provider runs itself: our names and options, as the provider layer's tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_ai import native_tools as theirs
from pydantic_ai.models import Model

from assent.errors import ModelError
from assent.models.base import ToolOffer

_TOOLS: dict[str, type[theirs.AbstractNativeTool]] = {
    "web_search": theirs.WebSearchTool,
    "code_execution": theirs.CodeExecutionTool,
    "web_fetch": theirs.WebFetchTool,
    "url_context": theirs.WebFetchTool,
    "file_search": theirs.FileSearchTool,
}


def hosted(offers: Iterable[ToolOffer], model: Model, provider: str) -> list[theirs.AbstractNativeTool]:
    supported = model.profile.get("supported_native_tools", frozenset())
    found: list[theirs.AbstractNativeTool] = []
    for offer in offers:
        kind = _TOOLS.get(offer.name)
        if kind is None or kind not in supported:
            known = ", ".join(name for name, tool in _TOOLS.items() if tool in supported) or "none"
            raise ModelError(
                f"{provider}:{model.model_name} has no tool {offer.name!r} of its own; it has: {known}",
                kind="model_not_supported",
            )
        options: dict[str, Any] = offer.metadata.get("provider_options") or {}
        try:
            found.append(kind(**options))
        except TypeError as problem:
            raise ModelError(
                f"provider tool {offer.name!r}: {str(problem).removeprefix(f'{kind.__name__}.__init__() ')}",
                kind="model_not_supported",
            ) from None
    return found
