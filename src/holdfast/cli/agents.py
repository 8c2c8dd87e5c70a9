"""Load the agent that ``MODULE:AGENT`` or ``--model`` names, with a one-sentence error for each way to fail."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, cast

from holdfast.core.notice import Channel
from holdfast.core.text.redaction import redact_exception
from holdfast.errors import DeclarationError, HoldfastError, Invalid, ModelError
from holdfast.models.providers import names
from holdfast.runtime.agent import Agent
from holdfast.runtime.pending_calls.outbox import check_channels

SPEC_HINT = 'give it as MODULE:AGENT, such as "hello:agent", "package.module:agent" or "path/file.py:agent"'
SPEC_PATTERN = re.compile(r"[\w./~-]+:[A-Za-z_][\w.]*")
"""A ``MODULE:AGENT``; anything else in its place is a message."""
ASSISTANT = "assistant"
"""The name of the agent for a model alone."""


@dataclass(frozen=True)
class ChosenAgent:
    """The agent of a command."""

    agent: Agent
    words: tuple[str, ...]
    """The words that name it on the command line."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """The metadata of a new conversation, from which later commands learn how to name the agent."""
    channels: tuple[Channel, ...] = ()
    """The list ``channels`` of the agent's module, if it has one."""


def choose_agent(
    spec: str | None, model: str | None = None, instructions: str | None = None, *, runs: bool = True
) -> ChosenAgent:
    """Return the agent of a module, or an agent for a model alone.

    An agent whose model cannot be used is refused, before any event is logged; not with ``runs=False``, where another
    process runs it.
    """
    other = () if model is None else ("--model", model)
    if spec is not None:
        if instructions is not None:
            raise Invalid("--instructions goes with --model alone: an agent of a module has its own")
        chosen = ChosenAgent(load_agent(spec), (spec, *other), {"module": spec}, load_channels(spec))
        if model is not None:
            chosen = replace(
                chosen, agent=_with_model(chosen.agent, model), metadata={**chosen.metadata, "model": model}
            )
    elif model is not None:
        names.parse_model_name(model)  # raises ModelError: the command is wrong, not an agent's declaration
        words = other if instructions is None else (*other, "--instructions", instructions)
        chosen = ChosenAgent(Agent(ASSISTANT, model=model, instructions=instructions or ""), words, {"model": model})
    else:
        raise Invalid("name an agent: MODULE:AGENT, such as hello:agent, or --model, such as --model openai:gpt-5")
    if runs:
        check_models(chosen.agent)
    return chosen


def _with_model(agent: Agent, model: str) -> Agent:
    """Return a copy of the agent that uses this model and no fallbacks."""
    other = copy.copy(agent)
    other.model, other.fallbacks = model, ()
    return other


def check_models(agent: Agent) -> None:
    """Refuse models with a wrong name, a missing package or, except for fallbacks, a missing key. Sends no request."""
    if agent.model is None:
        raise ModelError(f"agent {agent.name!r} has no model: name one with --model", kind="model_not_supported")
    for model in (agent.model, *agent.fallbacks):
        for requirement, fix in missing_requirements(model) if isinstance(model, str) else []:
            match requirement:
                case "key" if model is agent.model:
                    raise ModelError(f"{model} needs a key: {fix}", kind="not_authenticated")
                case "extra":
                    raise ModelError(f"{model} needs a package: {fix}", kind="model_not_supported")
                case "name":
                    raise ModelError(fix, kind="model_not_supported")
                case _:
                    pass


def missing_requirements(model: str) -> list[tuple[str, str]]:
    """Return the missing requirements of a model ("name", "extra" or "key"), each with the fix to type."""
    return [
        (
            requirement,
            f"export {names.parse_model_name(model).requirements.keys[0]}=YOUR_KEY" if requirement == "key" else fix,
        )
        for requirement, met, fix in names.check(model)
        if not met
    ]


def load_agent(spec: str) -> Agent:
    """Return the agent that ``hello:agent`` names; the current directory is searched first."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise Invalid(f"{spec!r} names no agent: {SPEC_HINT}; or name a model with --model")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _load_module(where)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Invalid(f"{where} has no {name!r}; {_agents(module)}", kind="not_found") from None
    if not isinstance(found, Agent):
        raise Invalid(f"{spec} is not an Agent but {_with_article(found)}; {_agents(module)}")
    return cast("Agent", found)


def load_channels(spec: str) -> tuple[Channel, ...]:
    """Return the list ``channels`` of an agent's module; an empty one if it has none."""
    where = spec.rpartition(":")[0]
    found: Any = getattr(_load_module(where), "channels", ())
    if not isinstance(found, list | tuple):
        return ()  # another thing that is called so, such as a submodule
    try:
        return check_channels(cast("list[Channel]", found))
    except DeclarationError as problem:
        raise Invalid(f"{where}: {problem.message}") from None


def _load_module(where: str) -> ModuleType:
    return _import_file(where) if where.endswith(".py") or os.sep in where else _import_module(where)


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise Invalid(f"{name!r} is not a module's name: {SPEC_HINT}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise Invalid(f"no module {name!r} in {os.getcwd()} or on the Python path", kind="not_found") from missing
        raise _load_error(name, missing) from missing
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as failure:  # also SystemExit: a module may call sys.exit
        raise _load_error(name, failure) from failure


def _import_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise Invalid(f"there is no file {path!r}", kind="not_found")
    full = os.path.realpath(path)
    folder, name = os.path.dirname(full), os.path.basename(full).removesuffix(".py")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == full:
        return loaded
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise Invalid(f"{path!r} is not a Python file: {SPEC_HINT}")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        sys.modules[name] = module  # so that pickle and typing find its classes by name
    try:
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as failure:
        if loaded is None:
            sys.modules.pop(name, None)
        raise _load_error(path, failure) from failure
    return module


def _load_error(name: str, failure: BaseException) -> HoldfastError:
    if isinstance(failure, HoldfastError):
        return Invalid(f"{name} cannot be loaded: {failure.message}", kind=failure.kind)
    place = ""
    at = failure.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith("<frozen"):
            place = f" ({os.path.basename(at.tb_frame.f_code.co_filename)}, line {at.tb_lineno})"
        at = at.tb_next
    if isinstance(failure, SyntaxError) and failure.lineno is not None:
        place = ""  # the message of a SyntaxError has the line
    return Invalid(
        f"{name} cannot be loaded: {redact_exception(failure)}{place}; HOLDFAST_DEBUG=1 shows the traceback",
        kind="handler_failed",
    )


def _agents(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Agent))
    return f"its agents: {', '.join(names)}" if names else "it has no agents"


def _with_article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def model_name(model: Any) -> str:
    return model if isinstance(model, str) else str(getattr(model, "name", ""))
