"""Model strings, extras and keys: checks that need no request to a provider."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.model_requests import ask

from holdfast.errors import ModelError, install_command
from holdfast.models.providers import PROVIDERS, ProviderModel, check, names
from holdfast.urls import open_model

VARIABLES = {v for provider in PROVIDERS.values() for v in (*provider.keys, provider.url)}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("anthropic:claude-x", ("anthropic", "claude-x", None)),
        ("openai-chat:llama3@http://127.0.0.1:11434/v1", ("openai-chat", "llama3", "http://127.0.0.1:11434/v1")),
        ("groq:openai/gpt-oss-120b", ("groq", "openai/gpt-oss-120b", None)),
        ("openai:ft:gpt-4o:me@https://proxy/v1", ("openai", "ft:gpt-4o:me", "https://proxy/v1")),
        ("openai-chat:model@2024", ("openai-chat", "model@2024", None)),
    ],
)
def test_a_model_string_is_parsed_into_provider_model_and_server(name, parts):
    parsed = names.parse_model_name(name)
    assert (parsed.provider, parsed.model, parsed.url) == parts


@pytest.mark.parametrize("name", ["claude", "mistral:x", ":x", "", "anthropic:", "openai:@http://x"])
def test_an_unknown_model_string_is_refused_with_the_known_providers(name):
    with pytest.raises(ModelError) as problem:
        open_model(name)
    assert problem.value.kind == "model_not_supported"
    assert "anthropic" in problem.value.message or "names no model" in problem.value.message


def test_a_base_url_without_a_scheme_is_refused():
    with pytest.raises(ModelError, match="http://"):
        ProviderModel("openai:x", base_url="localhost:80")
    assert ProviderModel("openai:x", base_url="http://localhost:80").provider == "openai"


def test_a_missing_extra_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "groq", None)  # as if it were not installed
    monkeypatch.setattr(names, "find_spec", lambda module: None if module == "groq" else object())
    with pytest.raises(ModelError) as problem:
        open_model("groq:x")
    assert problem.value.kind == "model_not_supported"
    assert "pip install 'holdfast[groq]'" in problem.value.message
    assert ("extra", False, "pip install 'holdfast[groq]' (in a clone: pip install '.[groq]')") in check("groq:x")
    open_model("anthropic:x")


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_missing_key_is_reported_with_its_variable(provider):
    with pytest.raises(ModelError) as problem:
        await ask(open_model(f"{provider}:x"))
    assert problem.value.kind == "not_authenticated"
    assert PROVIDERS[provider].keys[0] in problem.value.message


def test_check_reports_the_name_the_extra_and_the_key_of_a_model(monkeypatch):
    assert check("anthropic:x") == [
        ("name", True, ""),
        ("extra", True, install_command("anthropic")),
        ("key", False, "set ANTHROPIC_API_KEY"),
    ]
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    assert all(ok for _, ok, _ in check("anthropic:x"))
    assert all(ok for _, ok, _ in check("openai-chat:llama@http://127.0.0.1:1/v1"))  # a local server needs no key
    [(what, ok, fix)] = check("nobody:x")
    assert (what, ok) == ("name", False)
    assert "nobody:x" in fix


def test_the_extra_of_every_provider_is_defined_in_pyproject():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for provider in PROVIDERS.values():
        assert any(f"pydantic-ai-slim[{provider.extra}]" in need for need in extras[provider.extra])


def test_creating_a_model_imports_no_sdk():
    code = (
        "import sys; from holdfast import Agent; from holdfast.models.providers import ProviderModel, check\n"
        "check('openai:x'); ProviderModel('anthropic:x'); ProviderModel('google:x', key='k')\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"openai", "anthropic", "groq", "pydantic", "pydantic_ai", "httpx", "httpx2", "genai_prices"}


@pytest.mark.parametrize("name", ["openai-chat:x@127.0.0.1:11434", "openai-chat:x@localhost:1/v1", "openai:x@a.b/v1"])
def test_a_model_string_with_a_server_address_without_a_scheme_is_refused(name):
    with pytest.raises(ModelError, match="a full URL"):
        names.parse_model_name(name)


def test_a_model_name_may_contain_an_at_sign():
    assert names.parse_model_name("openai-chat:claude@20240620").model == "claude@20240620"
