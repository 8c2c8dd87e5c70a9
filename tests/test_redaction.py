"""Secrets in exceptions of other code do not reach the log, the model or the log records."""

import ast
import logging
from pathlib import Path

import pytest

import holdfast
from holdfast import Agent, Call, Runtime, ScriptedModel, ToolCall, ToolError, tool
from holdfast.core.events import CallReturned
from holdfast.core.text.redaction import redact_exception, redact_secrets

SOURCE = Path(holdfast.__file__).parent

SHAPES = [
    ("headers={b'Authorization': b'Basic S3CRET'}", "headers={b'Authorization': b'[redacted]'}"),
    ("[(b'authorization', b'Basic S3CRET')]", "[(b'authorization', b'[redacted]')]"),
    ("connect(host='db', password='a S3CRET b')", "connect(host='db', password='[redacted]')"),
    ('{"password": "p\\"S3CRET"}', '{"password": "[redacted]"}'),
    ("mysql://u:p@S3CRET@h", "mysql://u:[redacted]@h"),
    ("postgresql://u:p S3CRET@h/db", "postgresql://u:[redacted]@h/db"),
    ("clientSecret: S3CRET", "clientSecret: [redacted]"),
    ("could not connect to postgres://shop:S3CRET@db.example/shop", "postgres://shop:[redacted]@db.example/shop"),
    ("redis://:S3CRET@cache:6379/0 refused", "redis://:[redacted]@cache:6379/0 refused"),
    ("amqp://u:S3CR/ET@q/x", "amqp://u:[redacted]@q/x"),
    ("postgresql://u:S3CR@ET@db/x", "@db/x"),
    ("Authorization: Bearer S3CRETS3CRETS3CRET", "Authorization: [redacted]"),
    ("{'Authorization': 'Basic S3CRET'}", "{'Authorization': '[redacted]'}"),
    ("sent 'authorization=S3CRET' to it", "authorization=[redacted]"),
    ("bearer S3CRETS3CRETS3CRET was refused", "bearer [redacted] was refused"),
    ("GET /v1?api_key=S3CRET&q=1 failed", "api_key=[redacted]&q=1 failed"),
    ('{"apiKey": "S3CRET"}', '{"apiKey": "[redacted]"}'),
    ("host=db password=S3CRET dbname=shop", "host=db password=[redacted] dbname=shop"),
    ("password: S3CRET", "password: [redacted]"),
    ("access_token=S3CRET", "access_token=[redacted]"),
    ('"client_secret": "S3CRET"', '"client_secret": "[redacted]"'),
    ("?token=S3CRET#x", "?token=[redacted]"),
    ("key sk-proj-S3CRETS3CRETS3CRET is invalid", "key [redacted] is invalid"),
    ("AKIAS3CRETS3CRETS3CR", "[redacted]"),
    ("aws_secret_access_key = S3CRET", "aws_secret_access_key = [redacted]"),
    ("eyJS3CRETS3CRET.eyJS3CRETS3CRET.S3CRET", "[redacted]"),
    ("-----BEGIN RSA PRIVATE KEY-----\nS3CRET\nS3CRET==\n-----END RSA PRIVATE KEY-----", "[redacted]"),
    ("-----BEGIN PRIVATE KEY-----\nS3CRET and it was cut", "[redacted]"),
]


@pytest.mark.parametrize(("text", "expected"), SHAPES, ids=[text[:24] for text, _ in SHAPES])
def test_a_secret_is_redacted_and_the_rest_of_the_text_is_kept(text, expected):
    clean = redact_secrets(text)
    assert "S3CR" not in clean
    assert expected in clean
    assert redact_secrets(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "division by zero",
        "KeyError: 'password'",
        "Unexpected token: } in JSON at position 3",
        "http://127.0.0.1:8080/path refused the connection",
        "GET https://example.org/a:b@c",
        "see mailto://ada@example.org",
        "risk-averse-investments-and-more",
        "a basic understanding of bearer bonds",
        "no such file or directory: '/etc/passwd'",
        "monkey=7 is fine",
    ],
)
def test_text_without_a_secret_is_unchanged(text):
    assert redact_secrets(text) == text


@pytest.mark.parametrize(
    "piece",
    ["a", "://", "://a:", "://a:b@", "eyJ", "-----BEGIN PRIVATE KEY-----", "-", "authorization", "authorization: ",
     "password", "password=", "Bearer ", "sk-", "_token", " ", "\n", "x:", "AIza", "@"],
)  # fmt: skip
def test_a_long_text_of_unfinished_secrets_is_redacted_in_linear_time(piece):
    """A quadratic pattern would take hours here."""
    text = piece * (500_000 // len(piece))
    assert len(redact_secrets(text)) <= 3 * len(text)


def test_an_exception_whose_message_cannot_be_read_still_becomes_text():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert redact_exception(Odd()) == "Odd: its message could not be read"
    assert redact_exception(ValueError("\ud800")) == "ValueError: ?"
    assert redact_exception(ValueError()) == "ValueError"


def run(main):
    import asyncio

    return asyncio.run(asyncio.wait_for(main, 30))


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_the_exception_of_a_handler_reaches_the_log_and_the_model_without_its_secrets(kind, caplog):
    """The log record with the traceback is redacted too [B15]."""

    def fail():
        raise ConnectionError("no route to postgres://shop:S3CRET@db/shop")

    @tool(name="work")
    async def awaited(call: Call) -> str:
        """Work."""
        return fail()

    @tool(name="work")
    def threaded(call: Call) -> str:
        """Work."""
        return fail()

    @tool
    async def deliberate() -> str:
        """Fail on purpose."""
        raise ToolError("not_found", "the author's own words: password=hunter2")

    model = ScriptedModel([[ToolCall("work"), ToolCall("deliberate")], "done"])

    async def main():
        async with Runtime(Agent("a", model=model, tools=[awaited if kind == "async" else threaded, deliberate])) as rt:
            await (await rt.send("c", "go")).final_result()
            return await rt.history("c")

    with caplog.at_level(logging.WARNING, "holdfast"):
        log = run(main())
    errors = {event.tool: event.error for event in log if isinstance(event, CallReturned)}
    failed, raised = errors["work"], errors["deliberate"]
    assert failed.message == "ConnectionError: no route to postgres://shop:[redacted]@db/shop"
    assert raised.message == "the author's own words: password=hunter2"
    assert "S3CRET" not in repr(model.requests)
    assert "no route to" in caplog.text
    assert "Traceback" in caplog.text
    assert "S3CRET" not in caplog.text
    assert any(record.exc_info for record in caplog.records), "logging handlers still get the exception"


def test_the_exception_of_a_model_reaches_the_log_without_its_secrets():
    class Broken:
        name = "broken"

        async def stream(self, request):
            raise ConnectionError("no route to https://u:S3CRET@models.example")
            yield

    async def main():
        async with Runtime(Agent("a", model=Broken())) as rt:
            return await (await rt.send("c", "go")).final_result()

    ended = run(main())
    assert "https://u:[redacted]@models.example" in ended.error.message


# --- every handler in the source ---

BROAD = {"Exception", "BaseException"}
SAFE = {"redact_exception", "describe_exception", "redact_secrets"}


def _names(kind):
    return {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)} if kind is not None else BROAD


def _find_unsafe_lines(handler):
    """Return the lines of this handler that turn its exception into text without one of the safe functions."""
    found = []

    def walk(node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SAFE:
            return
        if isinstance(node, ast.FormattedValue) and _is(node.value):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            found.extend(node.lineno for each in node.args if _is(each))
        for child in ast.iter_child_nodes(node):
            walk(child)

    def _is(node):
        return isinstance(node, ast.Name) and node.id == handler.name

    for statement in handler.body:
        walk(statement)
    return found


def test_a_broadly_caught_exception_becomes_text_only_through_the_redaction_functions():
    """``except Exception as x`` also catches exceptions of other code, whose text may have secrets."""
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "redaction.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.name and _names(node.type) & BROAD:
                wrong += [f"{path.relative_to(SOURCE)}:{line}" for line in _find_unsafe_lines(node)]
    assert not wrong, wrong
