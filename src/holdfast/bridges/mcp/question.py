"""A server's questions as one question to a person, and the answer in the shape that the server expects.

A round has one or more inputs. Forms and links go to a person, all of a round together. The list of roots is answered
from the declaration. A request to the agent's model (sampling) is made if the declaration allows it; then a person is
asked first, unless it says "auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from holdfast.bridges.mcp.connection import clean_text
from holdfast.bridges.mcp.model_requests import Sample, Sampling, read_sample
from holdfast.core.schema.validation import compile_schema
from holdfast.core.tool import Ask
from holdfast.errors import Invalid, ToolError
from holdfast.tools.call import Call

MAX_INPUTS, MAX_KEY = 16, 200
MAX_MESSAGE = 4_000
MAX_FORM = 32 * 1024
"""Bytes of the schema of one form."""
DONE = "done"
"""The answer to a link: the person has opened it and is finished there."""
ALLOW = "allow"
"""The answer to a request to the agent's model: it may be made."""

Inputs = Mapping[str, Mapping[str, Any]]
"""The input requests of a round, by key, as the server sent them."""


class Round:
    """The inputs of one round, checked."""

    def __init__(
        self,
        server: str,
        inputs: Any,
        roots: Sequence[Mapping[str, str]] = (),
        sampling: Sampling | None = None,
        asked: Sampling | None = None,
        note: str = "",
    ):
        """Check the inputs.

        sampling:  whether the server can use the agent's model
        note:      what a person is told before the question
        asked:     the value of ``sampling`` with which the question to the person was made, if it was made before
        """
        if not isinstance(inputs, dict) or len(cast("dict[str, Any]", inputs)) > MAX_INPUTS:
            raise _bad_round(server, f"it asks for more than {MAX_INPUTS} inputs at once, or for none that can be read")
        self._server, self._note = server, note
        self._forms: dict[str, dict[str, Any]] = {}
        self._links: dict[str, dict[str, Any]] = {}
        self._ready: dict[str, Any] = {}
        self._samples: dict[str, Sample] = {}
        self._sampling = sampling
        self._shows_samples = (asked or sampling) == "ask"
        for key, request in cast("dict[str, Any]", inputs).items():
            if not key.isprintable() or clean_text(key, MAX_KEY) != key:
                raise _bad_round(server, f"the key of an input is no text of at most {MAX_KEY} visible characters")
            self._read(key, request, roots)

    def _read(self, key: str, given: Any, roots: Sequence[Mapping[str, str]]) -> None:
        request = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        method, params = request.get("method"), request.get("params")
        params = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
        if method == "elicitation/create":
            if params.get("mode", "form") == "url":
                self._links[key] = _check_link(self._server, params)
            else:
                self._forms[key] = _check_form(self._server, params)
        elif method == "roots/list" and roots:
            self._ready[key] = {"roots": [dict(root) for root in roots]}
        elif method == "sampling/createMessage":
            if self._sampling is None:
                words = f"{self._server} wants to use this agent's model (sampling); that is not allowed here"
                raise ToolError("permission_denied", f'{words}: MCP(..., sampling="ask")', {"server": self._server})
            self._samples[key] = read_sample(self._server, params)
        else:
            raise _bad_round(self._server, f"it asks for {clean_text(str(method), 80)!r}, which was not offered to it")

    @property
    def needs_person(self) -> bool:
        """Whether a person has to answer. If not, and no model either, ``answer`` has all responses."""
        return bool(self._forms or self._links or self._shown_samples)

    @property
    def needs_model(self) -> bool:
        """Whether the agent's model has to answer, too: see ``sample``."""
        return bool(self._samples)

    @property
    def count_samples(self) -> int:
        return len(self._samples)

    @property
    def _shown_samples(self) -> Mapping[str, Sample]:
        return self._samples if self._shows_samples else {}

    def ask(self, resume: Any, call: Call) -> Ask:
        """Return the question to a person. A denial is passed on to the server.

        call:  it keeps the images that the person is shown
        """
        asked = self._ask(resume, call)
        asked.question = f"{self._note}\n{asked.question}" if self._note else asked.question
        return asked

    def _ask(self, resume: Any, call: Call) -> Ask:
        schema: dict[str, Any] = {}
        samples = self._shown_samples
        count = len(self._forms) + len(self._links) + len(samples)
        if count == 1:
            if self._forms:
                ((_, form),) = self._forms.items()
                return Ask(self._describe_form(form), answer=form["schema"], resume=resume, on_deny="continue")
            if samples:
                ((_, sample),) = samples.items()
                words = f"{sample.describe(call)}\nAnswer {ALLOW!r} to send it."
                return Ask(words, choices=[ALLOW], resume=resume, on_deny="continue")
            ((_, link),) = self._links.items()
            return Ask(self._describe_link(link), choices=[DONE], resume=resume, on_deny="continue")
        lines = [f"{self._server} asks {count} questions:"]
        for key, form in self._forms.items():
            schema[key] = form["schema"]
            lines.append(f"- {key}: {form['message']}")
        for key, link in self._links.items():
            schema[key] = {"type": "string", "enum": [DONE]}
            lines.append(f"- {key}: {link['message']} Open {link['url']} and answer {DONE!r} afterwards.")
        for n, (key, sample) in enumerate(samples.items(), 1):
            schema[key] = {"type": "string", "enum": [ALLOW]}
            lines.append(f"- {key}: {sample.describe(call, f'model-request-{n}')} Answer {ALLOW!r} to send it.")
        answer = {"type": "object", "properties": schema, "required": list(schema), "additionalProperties": False}
        return Ask("\n".join(lines), answer=answer, resume=resume, on_deny="continue")

    def _describe_form(self, form: Mapping[str, Any]) -> str:
        return f"{self._server} asks: {form['message']}"

    def _describe_link(self, link: Mapping[str, Any]) -> str:
        words = f"{self._server} asks you to open a page: {link['message']}"
        return f"{words}\n{link['url']}\nAnswer {DONE!r} when you are finished there."

    async def sample(self, call: Call) -> dict[str, Any]:
        """Ask the agent's model; return its responses by key. Raise ToolError if it is refused or fails."""
        return {key: await sample.ask_model(call) for key, sample in self._samples.items()}

    def answer(self, value: Any, *, declined: bool = False, sampled: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the responses for the server, by key. A declined request to the model has none: ToolError.

        value:     the person's answer; None if no person was asked
        declined:  the person declined the question: all of it
        sampled:   the responses of the model
        """
        responses = {**self._ready, **(sampled or {})}
        declined = declined and self.needs_person
        if self._samples and declined:
            raise ToolError(
                "denied", f"{self._server} may not use this agent's model for this call", {"server": self._server}
            )
        single = len(self._forms) + len(self._links) + len(self._shown_samples) == 1
        for key in (*self._forms, *self._links):
            if declined:
                responses[key] = {"action": "decline"}
            elif key in self._links:
                responses[key] = {"action": "accept"}
            else:
                content = value if single else value[key]
                responses[key] = {"action": "accept", "content": fill_defaults(self._forms[key]["schema"], content)}
        return responses


def fill_defaults(schema: Mapping[str, Any], content: Any) -> Any:
    """Return the content of a form with the schema's defaults for fields that were left out."""
    properties = schema.get("properties")
    if not isinstance(content, dict) or not isinstance(properties, dict):
        return cast("Any", content)
    given = cast("dict[str, Any]", content)
    defaults: dict[str, Any] = {}
    for name, declared in cast("dict[str, Any]", properties).items():
        if isinstance(declared, dict) and "default" in declared and name not in given:
            defaults[name] = cast("dict[str, Any]", declared)["default"]
    return {**given, **defaults}


def _check_form(server: str, params: Mapping[str, Any]) -> dict[str, Any]:
    schema = params.get("requestedSchema")
    if not isinstance(schema, dict) or len(msgspec.json.encode(schema)) > MAX_FORM:
        raise _bad_round(server, f"the schema of its form is missing or has more than {MAX_FORM} bytes")
    form = cast("dict[str, Any]", schema)
    try:
        compile_schema(form)
    except Invalid as problem:
        raise _bad_round(server, f"the schema of its form cannot be used: {clean_text(problem.message, 300)}") from None
    return {"message": _message(params), "schema": form}


def _check_link(server: str, params: Mapping[str, Any]) -> dict[str, Any]:
    url = str(params.get("url", ""))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or len(url) > 2_000 or not url.isprintable():
        raise _bad_round(server, f"it wants a person to open {clean_text(url, 200)!r}, which is no web address")
    return {"message": _message(params), "url": url}


def _message(params: Mapping[str, Any]) -> str:
    return clean_text(str(params.get("message") or ""), MAX_MESSAGE) or "(no message)"


def _bad_round(server: str, why: str) -> ToolError:
    return ToolError(
        "invalid_response", f"{server} asked something that cannot be passed on: {why}", {"server": server}
    )
