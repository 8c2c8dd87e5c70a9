"""``MODULE:AGENT`` to an Agent, and every way in which that can fail in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from assent.errors import AssentError, Invalid
from assent.runtime.agent import Agent

FORM = 'give it as MODULE:AGENT, such as "hello:agent", "package.module:agent" or "path/file.py:agent"'


def load_agent(spec: str) -> Agent:
    """The agent behind ``hello:agent``; modules are looked for in the current directory first."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise Invalid(f"{spec!r} names no agent: {FORM}")
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
        f"{name} cannot be loaded: {type(failure).__name__}: {failure}{place}; ASSENT_DEBUG=1 shows the traceback",
        kind="handler_failed",
    )


def _agents(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Agent))
    return f"its agents: {', '.join(names)}" if names else "it has no agents"


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
