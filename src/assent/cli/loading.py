"""``MODULE:AGENT`` or a model's name to an Agent, and every way in which that can fail in one sentence."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from assent.core.redaction import foreign_text
from assent.errors import AssentError, Invalid, ModelError
from assent.models.providers import names
from assent.runtime.agent import Agent

FORM = 'give it as MODULE:AGENT, such as "hello:agent", "package.module:agent" or "path/file.py:agent"'

SPEC = re.compile(r"[\w./~-]+:[A-Za-z_][\w.]*")
"""What is taken for one where it could be a message, too."""
ASSISTANT = "assistant"
"""The agent that a model alone becomes."""


@dataclass(frozen=True)
class Chosen:
    """An agent that is to run here."""

    agent: Agent
    words: tuple[str, ...]
    """How it was named on the command line, and how it can be named again."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a new conversation says of it, for whoever has to go on."""


def choose(spec: str | None, model: str | None = None, instructions: str | None = None, *, runs: bool = True) -> Chosen:
    """The agent of a module, or a model alone; refused where it could not say a word: nothing is logged then.

    With ``runs=False`` it need not say one here.
    """
    other = () if model is None else ("--model", model)
    if spec is not None:
        if instructions is not None:
            raise Invalid("--instructions goes with --model alone: an agent of a module has its own")
        chosen = Chosen(load_agent(spec), (spec, *other), {"module": spec})
        if model is not None:
            chosen = Chosen(_with_model(chosen.agent, model), chosen.words, {**chosen.metadata, "model": model})
    elif model is not None:
        names.parse(model)  # a ModelError here: the command is at fault, not a declaration
        words = other if instructions is None else (*other, "--instructions", instructions)
        chosen = Chosen(Agent(ASSISTANT, model=model, instructions=instructions or ""), words, {"model": model})
    else:
        raise Invalid("say who answers: MODULE:AGENT, such as hello:agent, or --model, such as --model openai:gpt-5")
    if runs:
        check_models(chosen.agent)
    return chosen


def _with_model(agent: Agent, model: str) -> Agent:
    """It asks this model and no other."""
    other = copy.copy(agent)
    other.model, other.fallbacks = model, ()
    return other


def check_models(agent: Agent) -> None:
    """What can be told without asking anybody: names, packages, keys. A fallback may go without its key."""
    if agent.model is None:
        raise ModelError(f"agent {agent.name!r} has no model: name one with --model", kind="model_not_supported")
    for model in (agent.model, *agent.fallbacks):
        for what, fix in lacking(model) if isinstance(model, str) else []:
            match what:
                case "key" if model is agent.model:
                    raise ModelError(f"{model} needs a key: {fix}", kind="not_authenticated")
                case "extra":
                    raise ModelError(f"{model} needs a package: {fix}", kind="model_not_supported")
                case "name":
                    raise ModelError(fix, kind="model_not_supported")
                case _:
                    pass


def lacking(model: str) -> list[tuple[str, str]]:
    """What keeps a model from being asked: name, extra or key, and what to type about it."""
    return [
        (what, f"export {names.parse(model).needs.keys[0]}=YOUR_KEY" if what == "key" else fix)
        for what, so, fix in names.check(model)
        if not so
    ]


def load_agent(spec: str) -> Agent:
    """The agent behind ``hello:agent``; modules are looked for in the current directory first."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise Invalid(f"{spec!r} names no agent: {FORM}; or name a model with --model")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _file(where) if where.endswith(".py") or os.sep in where else _module(where)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Invalid(f"{where} has no {name!r}; {_agents(module)}", kind="not_found") from None
    if not isinstance(found, Agent):
        raise Invalid(f"{spec} is not an Agent but {_a(found)}; {_agents(module)}")
    return found


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise Invalid(f"{name!r} is not a module's name: {FORM}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise Invalid(f"no module {name!r} in {os.getcwd()} or on the Python path", kind="not_found") from missing
        raise _broken(name, missing) from missing
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as failure:  # a module may do anything, also exit
        raise _broken(name, failure) from failure


def _file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise Invalid(f"there is no file {path!r}", kind="not_found")
    full = os.path.realpath(path)
    folder, name = os.path.dirname(full), os.path.basename(full).removesuffix(".py")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == full:
        return loaded
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise Invalid(f"{path!r} is not a Python file: {FORM}")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        sys.modules[name] = module  # so that its own classes and handlers are found by name
    try:
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as failure:
        if loaded is None:
            sys.modules.pop(name, None)
        raise _broken(path, failure) from failure
    return module


def _broken(name: str, failure: BaseException) -> AssentError:
    if isinstance(failure, AssentError):
        return Invalid(f"{name} cannot be loaded: {failure.message}", kind=failure.kind)
    place = ""
    at = failure.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith("<frozen"):
            place = f" ({os.path.basename(at.tb_frame.f_code.co_filename)}, line {at.tb_lineno})"
        at = at.tb_next
    if isinstance(failure, SyntaxError) and failure.lineno is not None:
        place = ""  # its own text says where
    return Invalid(
        f"{name} cannot be loaded: {foreign_text(failure)}{place}; ASSENT_DEBUG=1 shows the traceback",
        kind="handler_failed",
    )


def _agents(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Agent))
    return f"its agents: {', '.join(names)}" if names else "it has no agents"


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
