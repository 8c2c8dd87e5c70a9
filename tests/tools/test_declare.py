"""Declarations of tools: legal values, refusals and their messages, and how the code is called."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pytest
import tool_samples

from holdfast import Agent, Context, ScriptedModel
from holdfast.core.tool import Ask, Default, Halt, Result, Retention, ToolSpec
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools import Call, Tool, as_tool, provider_tool, tool
from holdfast.tools.options import OPTIONS

if TYPE_CHECKING:
    from holdfast.tools import Call as LintedCall  # noqa: F401

OBJECT = {"type": "object"}
CALL = Call()


def declare(parameters: Any = OBJECT, **options: Any) -> Tool:
    """Declare a sample tool with these options."""

    def sample(args: dict[str, Any]) -> Any:
        """A sample."""
        return args

    return tool(parameters=parameters, **options)(sample)


def refusal(run: Any, *args: Any, **kwargs: Any) -> str:
    """Run a declaration that must be refused, and return the message."""
    with pytest.raises(DeclarationError) as caught:
        run(*args, **kwargs)
    return caught.value.message


# -- the two axes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["server", "human", "client", "provider"])
def test_every_executor_is_legal_without_an_approval(executor: Any) -> None:
    """Tools of every executor without an approval are accepted [B1]."""
    made = declare(executor=executor)
    assert (made.spec.executor, made.spec.gate) == (executor, "auto")
    assert (made.handler is not None) == (executor == "server")


@pytest.mark.parametrize("executor", ["server", "client"])
def test_server_and_client_tools_may_need_an_approval(executor: Any) -> None:
    """Server and client tools with an approval are accepted [B2]."""
    assert declare(executor=executor, approval="required").spec.gate == "required"
    gated = declare(executor=executor, approval=lambda args, call: "required")
    assert gated.spec.gate == "policy"
    assert gated.policy is not None
    assert gated.policy({}, CALL) == "required"


LEGAL_PAIRS = "server + auto, server + required, human + auto, client + auto, client + required, provider + auto"


@pytest.mark.parametrize("approval", ["required", lambda args: "auto"])
@pytest.mark.parametrize(
    ("executor", "reason"),
    [("human", "approving a question is circular"), ("provider", "no point before execution")],
)
def test_illegal_pairs_are_refused_with_the_reason_and_the_legal_ones(
    executor: Any, reason: str, approval: Any
) -> None:
    """Human and provider tools with an approval are refused [B3, B4]."""
    message = refusal(declare, executor=executor, approval=approval)
    assert reason in message
    assert LEGAL_PAIRS in message


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"executor": "robot"}, ["'robot'", "'server', 'human', 'client', 'provider'"]),
        ({"executor": None}, ["None", "'server'"]),
        ({"approval": "maybe"}, ["'maybe'", "'auto', 'required'"]),
        ({"approval": None}, ["None", "'auto'"]),
        ({"approval": True}, ["True", "'auto'"]),
        ({"aproval": "required"}, ["'aproval'", "did you mean 'approval'", "metadata"]),
        ({"result": {}}, ["'result'", "metadata"]),
        ({"name": "no spaces"}, ["'no spaces'", "1 to 64"]),
        ({"name": ""}, ["''", "1 to 64"]),
        ({"name": "x" * 65}, ["1 to 64"]),
        ({"name": "naïve"}, ["1 to 64"]),
        ({"name": 3}, ["3", "1 to 64"]),
        ({"recovery": "retry"}, ["'retry'", "'redispatch', 'fail', 'ask'"]),
        ({"recovery": None}, ["None", "'redispatch'"]),
        ({"recovery": "reconcile"}, ["'reconcile'", "a function"]),
        ({"on_expiry": "explode"}, ["'explode'", "'error', 'deny', 'halt' or Default(value)"]),
        ({"on_expiry": Default({1})}, ["a set"]),
        ({"risk": "extreme"}, ["'extreme'", "'low', 'medium', 'high'"]),
        ({"retention": 3}, ["3", "Retention.turns(n)"]),
        ({"retention": None}, ["None", "Retention.turns(n)"]),
        ({"timeout": "soon"}, ["timeout", "'soon'", '"90s"']),
        ({"timeout": 0}, ["timeout", "0"]),
        ({"result_bytes": 64_001}, ["result_bytes", "1000", "64000"]),
        ({"result_bytes": True}, ["result_bytes", "True"]),
        ({"metadata": {"a": object()}}, ["metadata", "at a"]),
        ({"metadata": [1]}, ["metadata", "[1]"]),
        ({"prompt": 3}, ["prompt", "3"]),
        ({"description": "  "}, ["description"]),
        ({"parameters": {"type": "array"}}, ["object", "array"]),
        ({"parameters": {"type": "objct"}}, ["parameters", "objct"]),
        ({"parameters": "{"}, ["parameters", "not valid JSON"]),
        ({"parameters": '"x"'}, ["parameters"]),
        ({"parameters": 3}, ["parameters", "3"]),
        ({"parameters": {"$ref": "http://127.0.0.1:1/x"}}, ["never fetched", "127.0.0.1"]),
        ({"approval": lambda: 1}, ["approval", "(args) or (args, call)"]),
        ({"recovery": lambda a, b, c: 1}, ["recovery", "(args) or (args, call)"]),
    ],
)
def test_an_illegal_value_is_refused_and_the_legal_ones_are_named(options: dict[str, Any], expected: list[str]) -> None:
    """The message names the value and the legal values; a remote reference is refused [B5, B88]."""
    message = refusal(declare, **options)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("option", ["manual", "streaming", "compact"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes", []])
def test_a_boolean_option_accepts_only_true_and_false(option: str, value: Any) -> None:
    """A switch that is not a boolean is refused [B6]."""
    message = refusal(declare, **{option: value})
    assert option in message
    assert repr(value) in message
    assert getattr(declare(**{option: True}).spec, option) is True


@pytest.mark.parametrize("never", [None, "never", 0, -1, float("inf"), float("nan"), "0s", True])
def test_an_expires_value_that_is_not_a_positive_duration_is_refused(never: Any) -> None:
    """A wait without a deadline is refused [B82]."""
    message = refusal(declare, expires=never)
    assert "is refused" in message
    assert "leave expires out for the runtime's default" in message
    if never in (None, "never", 0, float("inf")):
        assert "a call that never expires blocks its turn permanently" in message
    assert repr(never) in message


def test_expires_is_optional_and_durations_are_parsed() -> None:
    """Without ``expires`` the default of the runtime holds [B82]."""
    assert declare().spec.expires is None
    assert declare(expires="1h").spec.expires == 3600
    assert declare(expires=datetime.timedelta(minutes=2)).spec.expires == 120
    assert declare(timeout="90s").spec.timeout == 90
    assert declare(timeout=None).spec.timeout is None
    assert declare(result_bytes=48_000).spec.result_bytes == 48_000


def test_a_tool_without_a_docstring_and_without_a_description_is_refused() -> None:
    """A tool needs a description [B81]."""

    def bare(a: int) -> None: ...

    assert "no description" in refusal(tool, bare)
    assert tool(bare, description="Something.").spec.description == "Something."

    def only_args(a: int) -> None:
        """
        Args:
            a: a number
        """

    assert "no description" in refusal(tool, only_args)


def test_a_server_tool_without_a_handler_is_legal_only_as_manual() -> None:
    """A server tool without a handler is refused unless it is manual [B5]."""
    message = refusal(Tool.declare, name="t", description="d", parameters=OBJECT)
    assert "needs a handler" in message
    assert "manual=True" in message
    made = Tool.declare(name="t", description="d", parameters=OBJECT, manual=True)
    assert made.handler is None
    assert made.spec.manual
    for executor in ("human", "client", "provider"):
        assert Tool.declare(name="t", description="d", parameters=OBJECT, executor=executor).handler is None


def test_a_decorator_without_a_function_declares_a_tool_without_a_handler() -> None:
    """A server tool without a handler is refused unless it is manual [B5]."""
    without_function = tool(name="t", description="d", parameters=OBJECT)
    assert "needs a handler" in refusal(as_tool, without_function)
    made = as_tool(tool(name="t", description="d", parameters=OBJECT, manual=True))
    assert made.spec.manual
    assert "test_declare" in made.spec.origin


def test_a_declaration_without_a_name_or_a_schema_is_refused() -> None:
    assert "name=" in refusal(tool, lambda a: a)
    assert "give parameters=" in refusal(Tool.declare, name="t", description="d", manual=True)

    def raw(args, call):
        """Raw."""

    assert "give parameters=" in refusal(tool, raw)


def test_a_generator_is_refused_as_a_handler() -> None:
    def stream(a: int):
        """Stream."""
        yield a

    async def astream(a: int):
        """Stream."""
        yield a

    assert "call.progress" in refusal(tool, stream)
    assert "call.progress" in refusal(tool, astream)


def test_an_unbound_method_is_refused_and_a_bound_one_is_accepted() -> None:
    class Shop:
        def close(self, day: int) -> int:
            """Close."""
            return day

    assert "subclass of Tool" in refusal(tool, Shop.close)
    bound = tool(Shop().close).handler
    assert bound is not None
    assert bound({"day": 3}, CALL) == 3


def test_an_instance_of_tool_itself_is_refused() -> None:
    assert "@tool" in refusal(Tool)


# -- schemas ---------------------------------------------------------------------------------------------


def test_a_handwritten_schema_is_kept_byte_for_byte() -> None:
    """A handwritten schema is not recompiled, reordered or extended [B8]."""
    text = '{ "type":"object",\n "properties": {"z": {"type": "string"}, "a": {"minimum": 1e3}} }'
    assert declare(parameters=text).spec.parameters == text
    ordered = {
        "type": "object",
        "properties": {"z": {"type": "string"}, "a": {"type": "integer"}},
        "required": ["z"],
    }
    assert declare(parameters=ordered).spec.parameters == json.dumps(ordered, separators=(",", ":"))


def test_the_schema_is_made_from_the_signature_without_the_call_parameter() -> None:
    """A typed function gives its schema, with descriptions from its docstring [B9]."""

    @tool
    async def refund(order: int, ctx: Call, amount: float = 5.0) -> dict[str, Any]:
        """Give money back.

        To the card that paid.

        Args:
            order: the order's number
        """
        return {}

    assert refund.spec.name == "refund"
    assert refund.spec.description == "Give money back.\n\nTo the card that paid."
    assert refund.spec.parameters == (
        '{"type":"object","properties":{"order":{"type":"integer","description":"the order\'s number"},'
        '"amount":{"type":"number","default":5.0}},"required":["order"],"additionalProperties":false}'
    )
    assert refund.spec.result == '{"type":"object"}'
    assert refund.spec.origin.startswith("test_declare.")


def test_the_call_parameter_is_recognised_in_every_form_of_annotation() -> None:
    """A ``Call`` parameter is not in the schema [B9]."""

    def a(x: int, call: Call) -> None:
        """A."""

    def b(x: int, context: Call | None = None) -> None:
        """B."""

    def c(x: int, call=None) -> None:
        """C."""

    def d(x: int, call: "Call") -> None:  # noqa: UP037
        """D."""

    for fn in (a, b, c, d):
        assert list(json.loads(tool(fn).spec.parameters)["properties"]) == ["x"]


def test_a_call_parameter_with_a_scope_type_is_recognised_like_a_plain_one() -> None:
    """``Call[Database]`` is not an argument of the tool: as a type, as text, in a union and under another name."""

    class Database:
        pass

    def plain(x: int, ctx: Call[Database]) -> str:
        return ctx.id

    def text(x: int, ctx: "Call[Database]") -> str:  # noqa: UP037
        return ctx.id

    def maybe(x: int, ctx: Call[Database] | None = None) -> str:
        return ctx.id if ctx else ""

    def maybe_text(x: int, ctx: "Call[Database] | None" = None) -> str:  # noqa: UP037
        return ctx.id if ctx else ""

    def raw(args: dict[str, Any], ctx: Call[Database]) -> str:
        return ctx.id

    for fn in (plain, text, maybe, maybe_text):
        made = tool(fn, description="Do it.")
        assert list(json.loads(made.spec.parameters)["properties"]) == ["x"]
        assert made.handler({"x": 1}, Call(id="c7", scope=Database())) == "c7"  # type: ignore[misc]
    made = tool(raw, description="Do it.", parameters={"type": "object"})
    assert made.handler({}, Call(id="c7")) == "c7"  # type: ignore[misc]
    policy = tool(plain, description="Do it.", name="gated", approval=lambda args, call: True)
    assert policy.spec.gate == "policy"


def test_a_call_that_was_imported_for_type_checkers_only_still_resolves() -> None:
    source = "def fn(x: int, call: 'Call') -> str:\n    'Doc.'\n    return call.id\n"
    scope: dict[str, Any] = {"__name__": "elsewhere"}
    exec(source, scope)
    made = tool(scope["fn"])
    assert made.handler is not None
    assert made.handler({"x": 1}, Call(id="c7")) == "c7"


def test_the_stub_of_a_human_tool_gives_the_schemas_of_the_question_and_the_answer() -> None:
    @dataclasses.dataclass
    class Choice:
        flight: int

    @tool(executor="human", prompt="Which one?", description="Choose.", on_expiry=Default({"flight": 0}))
    def choose(options: list[str]) -> Choice: ...

    assert choose.handler is None
    assert json.loads(choose.spec.parameters)["properties"]["options"]["items"] == {"type": "string"}
    assert choose.spec.result is not None
    assert json.loads(choose.spec.result)["required"] == ["flight"]


def test_a_default_answer_that_does_not_match_the_result_schema_is_refused() -> None:
    message = refusal(
        Tool.declare,
        name="t",
        description="d",
        parameters=OBJECT,
        executor="human",
        result={"enum": ["yes", "no"]},
        on_expiry=Default("maybe"),
    )
    assert '"yes"' in message


def test_outcomes_are_not_part_of_the_result_schema() -> None:
    def a() -> int | Ask | Halt:
        """A."""
        return 1

    def b() -> Result:
        """B."""
        return Result()

    def c() -> None:
        """C."""

    def d() -> complex:
        """D."""
        return 1j

    assert [tool(fn).spec.result for fn in (a, b, c, d)] == ['{"type":"integer"}', None, None, None]
    assert "return annotation" in refusal(tool, d, executor="human")


def test_postponed_annotations_find_types_that_are_local_to_the_declaration() -> None:
    @dataclasses.dataclass
    class Local:
        n: int

    @tool
    def use(x: Local) -> int:
        """Use it."""
        return x.n

    assert use.handler is not None
    assert use.handler({"x": {"n": 3}}, CALL) == 3

    class Use(Tool):
        """Use it."""

        name = "use"

        def execute(self, x: Local) -> int:
            return x.n

    def elsewhere() -> Tool:  # the instance may be made where the type is not in scope
        return Use()

    made = elsewhere().handler
    assert made is not None
    assert made({"x": {"n": 3}}, CALL) == 3


def test_provider_tools_keep_the_providers_options() -> None:
    """A provider tool is accepted, with its options as plain data [B1]."""
    search = provider_tool("web_search", max_uses=3, domains=["a.com"])
    assert search.spec.executor == "provider"
    assert search.spec.metadata == {"provider_options": {"max_uses": 3, "domains": ["a.com"]}}
    assert search.spec.description
    assert json.loads(search.spec.parameters) == {"type": "object"}
    assert "plain JSON" in refusal(provider_tool, "web_search", hook=print)
    assert "bad tool name" in refusal(provider_tool, "web search")


# -- calling ---------------------------------------------------------------------------------------------


def test_typed_handlers_get_typed_arguments_and_the_call() -> None:
    refund = tool_samples.refund.handler
    assert refund is not None
    assert not refund.threaded
    got = asyncio.run(refund({"order": 1, "day": "2024-01-02"}, CALL))
    assert got == tool_samples.Receipt(1, datetime.date(2024, 1, 2))
    plain = tool_samples.plain.handler
    assert plain is not None
    assert plain.threaded
    assert plain({"text": "a"}, CALL) == "A"


def test_arguments_that_do_not_convert_are_invalid_before_the_handler_is_entered() -> None:
    """The error names the field, and the handler does not run [B17]."""
    refund = tool_samples.refund.handler
    assert refund is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Invalid, match=r"^day: "):
            refund({"order": 1, "day": "someday"}, CALL)


def test_raw_handlers_take_the_arguments_and_optionally_the_call() -> None:
    def one(args):
        return args

    def two(args, call):
        return args, call

    def swapped(call: Call, given):
        return given, call

    def other_names(a, b):
        return a, b

    def variadic(*both):
        return both

    def optional(args, call=None):
        return args, call

    class Callable_:
        async def __call__(self, args, call):
            return args, call

    args = {"a": [1]}

    def run(fn: Any) -> Any:
        handler = Tool.declare(name="t", description="d", parameters=OBJECT, handler=fn).handler
        assert handler is not None
        return handler(args, CALL)

    assert run(one) == args
    for fn in (two, swapped, other_names, variadic, optional, functools.partial(two)):
        assert run(fn) == (args, CALL)
    assert asyncio.run(run(Callable_())) == (args, CALL)
    for wrong in (lambda: 1, lambda a, b, c: 1, lambda args, *, must: 1):
        assert "(args) or (args, call)" in refusal(
            Tool.declare, name="t", description="d", parameters=OBJECT, handler=wrong
        )


def test_a_handler_that_changes_its_arguments_changes_only_its_own_copy() -> None:
    def greedy(args: dict[str, Any]) -> None:
        args["list"].append(1)
        args["new"] = 1

    handler = Tool.declare(name="t", description="d", parameters=OBJECT, handler=greedy).handler
    assert handler is not None
    args: dict[str, Any] = {"list": []}
    handler(args, CALL)
    assert args == {"list": []}


def test_a_decorated_function_can_still_be_called_by_its_tests() -> None:
    assert tool_samples.plain(text="a") == "A"
    got = asyncio.run(tool_samples.refund(1, datetime.date(2024, 1, 2), call=CALL))
    assert got.order == 1
    assert tool_samples.plain.__doc__ == "Shout."


# -- previews --------------------------------------------------------------------------------------------


def test_a_preview_makes_the_tool_planned_and_takes_the_arguments_that_it_names() -> None:
    """The preview is the dry run of a tool [B71]."""
    refund = tool_samples.refund
    assert refund.spec.planned
    assert refund.planner is not None
    assert asyncio.run(refund.planner({"order": 1, "day": "2024-01-02", "amount": 2.5}, CALL)) == "refund 2.5 for 1"
    assert not declare().spec.planned


def test_a_preview_may_take_the_raw_arguments_of_a_typed_tool() -> None:
    @tool
    def act(n: int) -> None:
        """Act."""

    @act.preview
    def _(args: dict[str, Any], call: Call) -> Any:
        return args, call.dry_run

    assert act.planner is not None
    assert act.planner({"n": 1}, Call(dry_run=True)) == ({"n": 1}, True)


@pytest.mark.parametrize("executor", ["human", "provider"])
def test_questions_and_provider_tools_have_no_preview(executor: Any) -> None:
    made = declare(executor=executor)
    assert "only server and client tools" in refusal(made.preview, lambda args: args)


def test_a_preview_that_does_not_fit_the_tool_is_refused() -> None:
    @tool
    def act(n: int, fast: bool = False) -> None:
        """Act."""

    def other(m: int) -> None: ...
    def stricter(fast: bool) -> None: ...

    assert "'m'" in refusal(act.preview, other)
    assert "default" in refusal(act.preview, stricter)
    assert not act.spec.planned


def test_a_manual_and_a_client_tool_may_have_a_preview() -> None:
    given: list[dict[str, Any]] = [{"manual": True}, {"executor": "client"}]
    for options in given:
        made = Tool.declare(name="t", description="d", parameters=OBJECT, preview=lambda args: "plan", **options)
        assert made.spec.planned
        assert made.planner is not None
        assert made.planner({}, CALL) == "plan"


# -- class style -----------------------------------------------------------------------------------------


def same_tool_in_both_styles() -> list[Tool]:
    """Return the same tool in function style and in class style."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    @tool(
        name="act",
        parameters=parameters,
        approval=lambda args, call: "required",
        expires="2h",
        on_expiry="deny",
        recovery="fail",
        risk="medium",
        retention=Retention.forever(),
        compact=True,
    )
    async def act(args: dict[str, Any], call: Call) -> list[Any]:
        """Act on it."""
        return [args, call.id]

    @act.preview
    async def _(args: dict[str, Any], call: Call) -> list[Any]:
        return ["plan", args]

    class Act(Tool):
        """Act on it."""

        name = "act"
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}  # noqa: RUF012
        expires = "2h"
        on_expiry = "deny"
        recovery = "fail"
        risk = "medium"
        retention = Retention.forever()
        compact = True

        def approval(self, args: dict[str, Any], call: Call) -> str:
            return "required"

        async def execute(self, args: dict[str, Any], call: Call) -> list[Any]:
            return [args, call.id]

        async def dry_run(self, args: dict[str, Any], call: Call) -> list[Any]:
            return ["plan", args]

    return [act, as_tool(Act)]


def test_a_class_style_tool_equals_the_function_style_one_except_for_its_origin() -> None:
    """Both styles have the same spec and behave alike [B11]."""
    function, cls = same_tool_in_both_styles()
    assert cls.copy_with(origin="").spec == function.copy_with(origin="").spec
    for made in (function, cls):
        assert made.handler is not None
        assert made.planner is not None
        assert made.policy is not None
        assert asyncio.run(made.handler({"n": 1}, CALL)) == [{"n": 1}, "call"]
        assert asyncio.run(made.planner({"n": 1}, CALL)) == ["plan", {"n": 1}]
        assert made.policy({"n": 1}, CALL) == "required"
        assert (made.handler.threaded, made.policy.threaded) == (False, True)


def test_a_typed_execute_method_gives_the_same_schema_as_a_function() -> None:
    """Both styles give the same schema [B11]."""

    class Typed(Tool):
        name = "typed"

        def execute(self, n: int, call: Call) -> int:
            """Do it.

            Args:
                n: how often
            """
            return n + call.attempt

    def typed(n: int, call: Call) -> int:
        """Do it.

        Args:
            n: how often
        """
        return n

    made = Typed()
    assert made.copy_with(origin="").spec == tool(typed).copy_with(origin="").spec
    assert made.handler is not None
    assert made.handler({"n": 2}, CALL) == 3


def test_instances_keep_their_own_state_and_need_not_call_the_init_of_tool() -> None:
    """A class-style tool may have an ``__init__`` of its own [B11]."""
    first, second = tool_samples.Bank("a"), tool_samples.Bank("b")
    assert first.handler is not None
    assert second.handler is not None
    assert (first.handler({"query": "q"}, CALL), second.handler({"query": "q"}, CALL)) == ("a?q", "b?q")
    assert "put an instance" in refusal(as_tool, tool_samples.Bank)


def test_a_module_function_as_a_class_attribute_is_called_without_self() -> None:
    class Act(Tool):
        """Act."""

        name = "act"
        parameters = OBJECT
        approval = tool_samples.risky

        def execute(self, args: dict[str, Any]) -> None: ...

    policy = Act().policy
    assert policy is not None
    assert policy({"amount": 500}, CALL) == "required"


def test_a_subclass_without_a_name_is_a_base_class_and_not_a_tool() -> None:
    class Base(Tool):
        """Shared."""

        risk = "high"
        parameters = OBJECT

        def execute(self, args: dict[str, Any]) -> str:
            return self.spec.name

    class One(Base):
        name = "one"

    assert One().spec.risk == "high"
    assert One().spec.description == "Shared."
    assert "no name" in refusal(Base)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"name": "a b"}, "bad tool name"),
        ({"aproval": "required"}, "did you mean 'approval'"),
        ({"expires": None}, "permanently"),
        ({"manual": None}, "manual must be True or False"),
        ({"executor": "human", "approval": "required"}, "circular"),
        ({"parameters": {"$ref": "file:///etc/passwd"}}, "never fetched"),
        ({"execute": None}, "needs a handler"),
        ({"execute": 3}, "must be a method"),
        ({"dry_run": 3}, "must be a method"),
        ({"executor": "human", "dry_run": lambda self, args: 1}, "only server and client"),
        ({"preview": lambda self, args: 1}, "`dry_run`"),
        ({"__doc__": None}, "no description"),
    ],
)
def test_mistakes_in_a_class_are_refused_when_the_class_is_made(attributes: dict[str, Any], expected: str) -> None:
    """A class is refused for the same mistakes as a function [B5, B6, B11, B81, B82]."""
    body = {
        "__doc__": "Do it.",
        "name": "act",
        "parameters": OBJECT,
        "execute": lambda self, args: args,
        **attributes,
    }
    with pytest.raises(DeclarationError) as caught:
        type("Act", (Tool,), body)
    assert expected in caught.value.message


def test_a_class_without_execute_is_legal_only_as_a_manual_or_a_human_tool() -> None:
    """A class-style server tool without ``execute`` is refused unless it is manual [B5, B11]."""
    body = {"__doc__": "Do it.", "name": "act", "parameters": OBJECT}
    assert "needs a handler" in refusal(type, "Act", (Tool,), dict(body))
    assert type("Act", (Tool,), {**body, "manual": True})().handler is None
    assert type("Act", (Tool,), {**body, "executor": "human"})().handler is None


def test_the_prompt_of_a_human_tool_is_its_description_if_it_has_no_docstring() -> None:
    """Every other tool without a description is refused [B81]."""

    @tool(executor="human", prompt="Which flight?")
    def choose_flight(options: list[str]) -> str: ...

    assert choose_flight.spec.description == "Which flight?"
    with pytest.raises(DeclarationError, match="no description"):

        @tool(executor="client", prompt="Where?")
        def locate() -> str: ...


@pytest.mark.parametrize(
    ("prompt", "field"), [("Refund {odrer}?", "odrer"), ("Refund {order} for {order} and {0}?", "0")]
)
def test_a_prompt_with_an_unknown_field_is_refused_with_the_known_fields(prompt: str, field: str) -> None:
    with pytest.raises(
        DeclarationError, match=rf"refund.*\{{{field}\}} is no argument.*\{{order\}}, \{{amount\}}"
    ) as bad:

        @tool(approval="required", prompt=prompt)
        def refund(order: int, amount: float = 1.0) -> None:
            """Give the money back."""

    assert bad.value.kind == "invalid_args"
    with pytest.raises(DeclarationError, match="the fields are none"):
        Tool.declare(name="ping", description="Ping.", executor="client", prompt="{n}?", parameters={"type": "object"})


def test_a_prompt_may_name_any_argument_that_the_schema_allows() -> None:
    @tool(approval="required", prompt="Refund {order}, {amount} EUR? {} { order } {'a': 1}")
    def refund(order: int, amount: float = 1.0) -> None:
        """Give the money back."""

    assert refund.spec.prompt is not None
    schemas = ({"type": "object", "additionalProperties": True}, {"$ref": "#/$defs/a", "$defs": {"a": {}}})
    for schema in schemas:
        Tool.declare(name="ping", description="Ping.", executor="client", prompt="{n}?", parameters=schema)


def test_a_pattern_with_look_around_is_refused_in_every_schema() -> None:
    """Patterns must match in linear time: otherwise an answer could block the process for minutes."""
    secret = Annotated[str, msgspec.Meta(pattern="^(?=.*[0-9]).*$")]

    def stub() -> Any: ...
    def take(text: Any) -> None: ...

    stub.__annotations__["return"] = take.__annotations__["text"] = secret

    by_hand = {"type": "object", "patternProperties": {"(?!x)": {}}}
    for run in (
        lambda: tool(stub, executor="human", prompt="Which?"),
        lambda: tool(take, description="Take it."),
        lambda: declare(parameters=by_hand, manual=True),
        lambda: Tool.declare(name="t", description="d", parameters=OBJECT, manual=True, result={"pattern": "(?=x)"}),
        lambda: Agent("a", model=None, output=secret),
    ):
        assert "look-around" in refusal(run)


class Custom:
    """No JSON form."""


@dataclasses.dataclass
class Wrapping:
    inner: Custom


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Custom, "the parameter 'thing' has the type Custom, and there is no JSON Schema for it."),
        (Wrapping, "the parameter 'thing' has the type Wrapping, and there is no JSON Schema for it, because it"),
        (complex, "the parameter 'thing' has the type complex"),
        (int | Custom, "the parameter 'thing' has the type int | "),
        (dict[float, int], "a dict with float keys"),
    ],
)
def test_an_unsupported_type_is_refused_with_the_parameter_and_the_supported_types(
    annotation: Any, expected: str
) -> None:
    def use(count: int, thing: Any) -> str:
        """Use it."""
        return ""

    use.__annotations__["thing"] = annotation
    message = refusal(tool, use)
    assert "use(): " in message
    assert expected in message
    assert "dataclasses" in message or "use str keys" in message
    for foreign in ("schema_hook", "dec_hook", "enc_hook", "Meta(", "arbitrary_types_allowed"):
        assert foreign not in message


CITY = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}}


def by_field(city):
    """Would get the whole dict as `city`."""


def by_fields(city, day):
    """Would get the Call as `day`."""


def by_type(given: str) -> None:
    """Would get a dict instead of text."""


@pytest.mark.parametrize("fn", [by_field, by_fields, by_type])
def test_a_function_that_takes_single_fields_is_refused_for_a_handwritten_schema(fn: Any) -> None:
    for run in (
        lambda: Tool.declare(name="t", description="d", parameters=CITY, handler=fn),
        lambda: Tool.declare(name="t", description="d", parameters=CITY, handler=lambda args: 1, approval=fn),
        lambda: Tool.declare(name="t", description="d", parameters=CITY, handler=lambda args: 1, preview=fn),
    ):
        message = refusal(run)
        assert "all the arguments as one dict" in message
        assert "(args: dict[str, Any])" in message


def test_a_function_that_takes_the_dict_may_use_any_parameter_name() -> None:
    def plain(given): ...
    def typed(given: dict[str, Any], call: Call) -> None: ...
    def mapping(given: Mapping[str, Any]) -> None: ...
    def anything(given: Any) -> None: ...

    for fn in (plain, typed, mapping, anything):
        Tool.declare(name="t", description="d", parameters=CITY, handler=fn)
    named_args = {"type": "object", "properties": {"args": {"type": "array"}}}
    Tool.declare(name="t", description="d", parameters=named_args, handler=lambda args: 1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("openia:gpt-5", 'did you mean "openai:gpt-5"'),
        ("anthropic", 'did you mean "anthropic:MODEL"'),
        ("hello", "anthropic, openai, openai-chat, google"),
        ("openai:", "names no model"),
    ],
)
def test_a_string_that_names_no_model_is_refused_when_the_agent_is_made(model: str, expected: str) -> None:
    for run in (
        lambda: Agent("a", model=model),
        lambda: Agent("a", model=None, fallbacks=[model]),
        lambda: Agent("a", model=None, context=Context(summary=model)),
    ):
        message = refusal(run)
        assert expected in message
        assert message.startswith("agent 'a': ")


def test_a_script_that_is_not_a_list_is_refused() -> None:
    assert 'ScriptedModel(["hello"])' in refusal(ScriptedModel, "hello")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_a_class_attribute_of_tool_and_documented_on_the_decorator(option: str) -> None:
    """An option that is only in ``Options`` fails here."""
    assert option in Tool.__annotations__
    assert tool.__doc__ is not None
    assert option in tool.__doc__


@pytest.mark.parametrize("remember", [("comand",), (), "command", None, [1], ("command", "command")])
def test_names_to_remember_that_are_no_arguments_are_refused(remember: Any) -> None:
    """A grant that compares an argument which does not exist would cover every call."""
    with pytest.raises(DeclarationError, match="remember"):

        @tool(approval="required", remember=remember)
        def bash(command: str, cwd: str = ".") -> None:
            """Run."""


def test_the_arguments_that_a_grant_compares_are_data_of_the_tool() -> None:
    @tool(approval="required", remember=["command", "cwd"])
    def bash(command: str, cwd: str = ".", note: str = "") -> None:
        """Run."""

    assert bash.spec.remember == ("command", "cwd")
    assert msgspec.json.decode(msgspec.json.encode(bash.spec), type=ToolSpec).remember == ("command", "cwd")
