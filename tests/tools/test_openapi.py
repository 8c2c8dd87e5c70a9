"""Tools from an OpenAPI document: how it is read, what is refused, and how requests are encoded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.schema.validation import validate_value
from holdfast.core.tool import recovery_of
from holdfast.errors import DeclarationError, Invalid, ToolError
from holdfast.tools import Call, Tool, Toolset
from holdfast.tools.openapi.client import find_secrets
from holdfast.tools.openapi.request import encode_key

BASE = "https://api.example.com/v1"


def document(*, version: str = "3.1.0", schemas: Any = None, **paths: Any) -> dict[str, Any]:
    """Return a document with operations by path: ``get_items={...}`` is GET /items."""
    found: dict[str, Any] = {}
    for name, operation in paths.items():
        method, _, path = name.partition("_")
        found.setdefault(f"/{path.replace('__', '/')}", {})[method] = operation
    return {"openapi": version, "paths": found, "components": {"schemas": schemas or {}}}


def one_tool(operation: Any, *, method: str = "get", path: str = "/x", **options: Any) -> Tool:
    root = {**document(**options), "paths": {path: {method: operation}}}
    [tool] = Toolset.from_openapi(root, base_url=BASE)
    return tool


def parameter(name: str = "q", place: str = "query", schema: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "schema": {"type": "string"} if schema is None else schema, **more}


def body(schema: Any, **more: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}, **more}}


def fits(tool: Tool, args: dict[str, Any]) -> bool:
    try:
        validate_value(tool.spec.parameters, args, "args")
    except Invalid:
        return False
    return True


async def preview(tool: Tool, args: dict[str, Any]) -> Any:
    assert tool.planner is not None
    return await tool.planner(args, Call())


def url_of(tool: Tool, args: dict[str, Any]) -> str:
    import asyncio

    return asyncio.run(preview(tool, args))["url"]


def test_names_come_from_operation_ids_and_are_legal_and_unique() -> None:
    root = document(
        get_a={"operationId": "orders.list all"},
        get_b={"operationId": "orders/list all"},
        get_c={},
        post_c__d={"operationId": "n" * 80},
    )
    root["paths"]["/items/{id}"] = {"delete": {}, "parameters": [parameter("id", "path")]}
    tools = Toolset.from_openapi(root, base_url=BASE)
    assert tools.names == ("orders_list_all", "orders_list_all_2", "get_c", "n" * 64, "delete_items_id")


def test_the_description_is_the_summary_and_the_description_or_else_method_and_path() -> None:
    assert one_tool({"summary": "List.", "description": "All of them."}).spec.description == "List.\n\nAll of them."
    assert one_tool({}).spec.description == "GET /x"


def test_get_and_head_are_auto_with_redispatch_and_other_methods_are_gated_with_recovery_ask() -> None:
    methods = ("get", "head", "post", "put", "patch", "delete", "options")
    paths: dict[str, Any] = {f"{method}_x": {} for method in methods}
    tools = Toolset.from_openapi(document(**paths), base_url=BASE)
    rules = {tool.spec.metadata["openapi"]["method"]: (tool.spec.gate, recovery_of(tool.spec)) for tool in tools}
    assert rules.pop("GET") == rules.pop("HEAD") == ("auto", "redispatch")
    assert set(rules.values()) == {("required", "ask")}
    assert len(rules) == 5


def test_approval_is_a_string_a_mapping_or_a_function_of_the_operation() -> None:
    root = document(get_a={"tags": ["private"]}, get_b={}, post_a={}, post_b={})

    def gates(approval: Any) -> list[str]:
        return [tool.spec.gate for tool in Toolset.from_openapi(root, base_url=BASE, approval=approval)]

    assert gates(None) == ["auto", "required", "auto", "required"]
    assert gates("auto") == ["auto"] * 4
    assert gates("required") == ["required"] * 4
    assert gates({"get_a": "required", "post_b": "auto"}) == ["required", "required", "auto", "auto"]
    assert gates(lambda operation: "private" in operation.tags) == ["required", "auto", "auto", "auto"]
    assert gates(lambda operation: None) == gates(None)
    assert gates(lambda operation: lambda args, call: True) == ["policy"] * 4
    for wrong in ({"nope": "auto"}, "never", lambda operation: "never"):
        with pytest.raises(DeclarationError, match="approval"):
            gates(wrong)


def test_a_post_without_an_approval_still_has_recovery_ask() -> None:
    [tool] = Toolset.from_openapi(document(post_a={}), base_url=BASE, approval="auto")
    assert recovery_of(tool.spec) == "ask"


def test_only_chooses_by_name_by_operation_id_or_by_a_function_and_does_not_change_names() -> None:
    root = document(get_a={"operationId": "same"}, get_b={"operationId": "same"}, get_c={"operationId": "c c"})
    assert Toolset.from_openapi(root, base_url=BASE, only=["same_2", "c c"]).names == ("same_2", "c_c")
    assert Toolset.from_openapi(root, base_url=BASE, only=lambda one: one.path == "/b").names == ("same_2",)
    with pytest.raises(DeclarationError, match="no 'other'; it has same, same_2, c_c"):
        Toolset.from_openapi(root, base_url=BASE, only=["other"])
    with pytest.raises(DeclarationError, match="only takes"):
        Toolset.from_openapi(root, base_url=BASE, only="same")


def test_references_in_schemas_parameters_and_bodies_are_resolved_even_recursive_ones() -> None:
    root = document(
        post_x={
            "parameters": [{"$ref": "#/components/parameters/limit"}],
            "requestBody": {"$ref": "#/components/requestBodies/node"},
        },
        schemas={
            "Node": {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Node"}}, "required": ["v"]}
        },
    )
    root["components"]["parameters"] = {"limit": parameter("limit", schema={"type": "integer", "maximum": 5})}
    root["components"]["requestBodies"] = {"node": body({"$ref": "#/components/schemas/Node"})["requestBody"]}
    [tool] = Toolset.from_openapi(root, base_url=BASE)
    assert fits(tool, {"limit": 5, "body": {"v": 1, "next": {"v": 2, "next": {"v": 3}}}})
    assert not fits(tool, {"limit": 6, "body": {"v": 1}})
    assert not fits(tool, {"body": {"v": 1, "next": {"next": {"v": 3}}}})
    assert "components" not in tool.spec.parameters


@pytest.mark.parametrize(
    "ref", ["https://elsewhere.example/schemas.json#/A", "schemas.json", "//elsewhere.example/x", "file:///etc/passwd"]
)
def test_a_reference_out_of_the_document_is_refused_in_every_place(ref: str) -> None:
    for root in (
        document(post_x=body({"$ref": ref})),
        document(post_x=body({"type": "array", "items": {"$ref": ref}})),
        document(get_x={"parameters": [{"$ref": ref}]}),
        document(post_x={"requestBody": {"$ref": ref}}),
        {**document(), "paths": {"/x": {"$ref": ref}}},
    ):
        with pytest.raises(DeclarationError, match="leads out of the document"):
            Toolset.from_openapi(root, base_url=BASE)


def test_a_reference_to_nothing_and_one_to_itself_are_refused() -> None:
    with pytest.raises(DeclarationError, match="points at nothing"):
        one_tool(body({"$ref": "#/components/schemas/None"}), method="post")
    root = document(get_x={"parameters": [{"$ref": "#/components/parameters/a"}]})
    root["components"]["parameters"] = {"a": {"$ref": "#/components/parameters/a"}}
    with pytest.raises(DeclarationError, match="leads to itself"):
        Toolset.from_openapi(root, base_url=BASE)


def test_the_schemas_of_openapi_3_0_become_json_schema() -> None:
    schemas = {"Colour": {"type": "string", "enum": ["red"]}}
    fields = {
        "name": {"type": "string", "nullable": True},
        "colour": {"allOf": [{"$ref": "#/components/schemas/Colour"}], "nullable": True},
        "either": {"type": "string", "enum": ["a"], "nullable": True},
        "above": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "upto": {"type": "number", "maximum": 9, "exclusiveMaximum": False},
        "id": {"type": "integer", "readOnly": True},
    }
    schema = {"type": "object", "properties": fields, "required": ["id", "name"], "additionalProperties": False}
    tool = one_tool(body(schema), method="post", version="3.0.3", schemas=schemas)
    good = {"name": None, "colour": None, "either": None, "above": 0.1, "upto": 9}
    assert fits(tool, {"body": good})
    assert fits(tool, {"body": {**good, "name": "n", "colour": "red", "either": "a"}})
    for wrong in ({"above": 0}, {"upto": 10}, {"colour": "blue"}, {"id": 7}, {"either": "b"}):
        assert not fits(tool, {"body": {**good, **wrong}}), wrong


def test_the_schemas_of_openapi_3_1_are_json_schema_and_nullable_is_ignored() -> None:
    tool = one_tool(body({"type": ["string", "null"], "examples": ["x"]}), method="post")
    assert fits(tool, {"body": None})
    assert not fits(one_tool(body({"type": "string", "nullable": True}), method="post"), {"body": None})
    both = {"$ref": "#/components/schemas/Text", "maxLength": 2}
    tool = one_tool(body(both), method="post", schemas={"Text": {"type": "string", "minLength": 1}})
    assert [fits(tool, {"body": text}) for text in ("", "a", "abc")] == [False, True, False]


def test_parameters_of_the_path_are_shared_and_the_operation_overrides_them() -> None:
    root = document(get_x={"parameters": [parameter("limit", schema={"type": "integer"})]}, post_x={})
    root["paths"]["/x"]["parameters"] = [parameter("limit"), parameter("page")]
    get, post = Toolset.from_openapi(root, base_url=BASE)
    assert fits(get, {"limit": 1, "page": "2"})
    assert not fits(get, {"limit": "1"})
    assert fits(post, {"limit": "1"})


def test_parameters_with_the_same_name_get_different_arguments() -> None:
    operation = {
        "parameters": [parameter("id", "path", required=True), parameter("id"), parameter("body")],
        **body({"type": "integer"}),
    }
    tool = one_tool(operation, method="put", path="/x/{id}")
    args = {"id": "a", "query_id": "b", "body": "c", "request_body": 1}
    assert fits(tool, args)
    assert url_of(tool, args) == f"{BASE}/x/a?id=b&body=c"


def test_headers_of_credentials_or_of_the_protocol_are_not_arguments_of_the_tool() -> None:
    names = ("Authorization", "accept", "Content-Type", "Host", "Cookie", "Idempotency-Key", "X-Trace")
    tool = one_tool({"parameters": [parameter(name, "header") for name in names]})
    assert list(json.loads(tool.spec.parameters)["properties"]) == ["X-Trace"]


LIST, OBJECT = ["a b", "c,d"], {"k": "v&", "n": 1}


@pytest.mark.parametrize(
    ("more", "value", "query"),
    [
        ({}, "a b&c", "q=a%20b%26c"),
        ({}, True, "q=true"),
        ({}, 1.5, "q=1.5"),
        ({}, None, ""),
        ({}, LIST, "q=a%20b&q=c%2Cd"),
        ({"explode": False}, LIST, "q=a%20b,c%2Cd"),
        ({"style": "spaceDelimited", "explode": False}, LIST, "q=a%20b%20c%2Cd"),
        ({"style": "pipeDelimited", "explode": False}, LIST, "q=a%20b%7Cc%2Cd"),
        ({}, OBJECT, "k=v%26&n=1"),
        ({"explode": False}, OBJECT, "q=k,v%26,n,1"),
        ({"style": "deepObject"}, OBJECT, "q[k]=v%26&q[n]=1"),
        ({"schema": ..., "content": {"application/json": {"schema": {}}}}, {"k": 1}, "q=%7B%22k%22%3A1%7D"),
    ],
)  # fmt: skip
def test_a_query_parameter_is_encoded_in_its_style(more: dict[str, Any], value: Any, query: str) -> None:
    one = {**parameter(schema={}), **more}
    if one["schema"] is ...:
        del one["schema"]
    assert url_of(one_tool({"parameters": [one]}), {"q": value}).removeprefix(f"{BASE}/x").removeprefix("?") == query


def test_lists_and_objects_in_a_path_are_joined_by_commas() -> None:
    one = parameter("p", "path", {}, required=True)
    tool = one_tool({"parameters": [one]}, path="/x/{p}/y")
    assert url_of(tool, {"p": ["a/b", "c"]}) == f"{BASE}/x/a%2Fb,c/y"
    assert url_of(tool, {"p": {"k": "v"}}) == f"{BASE}/x/k,v/y"
    exploded = one_tool({"parameters": [{**one, "explode": True}]}, path="/x/{p}/y")
    assert url_of(exploded, {"p": {"k": "v"}}) == f"{BASE}/x/k=v/y"
    with pytest.raises(ToolError, match="segment"):
        url_of(tool, {"p": ["../b", "a"]})


def test_two_values_cannot_make_a_dot_segment_together() -> None:
    both = [parameter("a", "path", required=True), parameter("b", "path", required=True)]
    tool = one_tool({"parameters": both}, path="/x/{a}{b}/y")
    assert url_of(tool, {"a": "..", "b": "z"}) == f"{BASE}/x/..z/y"
    with pytest.raises(ToolError, match="segment"):
        url_of(tool, {"a": ".", "b": "."})


def test_all_unsupported_operations_are_reported_together_and_only_can_exclude_them() -> None:
    root = document(
        get_good={},
        post_upload={"requestBody": {"content": {"multipart/form-data": {}}}},
        get_odd={"parameters": [parameter(style="matrix")]},
        get_servers={"servers": [{"url": "https://other.example.com"}]},
    )
    root["servers"] = [{"url": BASE}]
    root["paths"]["/lost/{id}"] = {"get": {}}
    with pytest.raises(DeclarationError) as caught:
        Toolset.from_openapi(root)
    assert [text.split(":")[0] for text in caught.value.details["problems"]] == [
        "POST /upload",
        "GET /odd",
        "GET /servers",
        "GET /lost/{id}",
    ]
    assert "only=" in caught.value.message
    assert Toolset.from_openapi(root, only=["get_good"]).names == ("get_good",)


def test_the_base_url_is_the_documents_first_server_unless_it_is_given() -> None:
    root = document(get_x={})
    root["servers"] = [{"url": "https://{region}.example.com/v2/", "variables": {"region": {"default": "eu"}}}]
    [tool] = Toolset.from_openapi(root)
    assert url_of(tool, {}) == "https://eu.example.com/v2/x"
    [tool] = Toolset.from_openapi(root, base_url=BASE + "/")
    assert url_of(tool, {}) == f"{BASE}/x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (None, "give base_url="),
        ("/v1", "host"),
        ("ftp://example.com", "http://"),
        ("https://user:secret-word@example.com", "credentials"),
        ("https://example.com/?key=1", "query"),
        ("https://example.com:port", "not a URL"),
        (7, "must be text"),
    ],
)
def test_a_base_url_that_cannot_work_or_has_credentials_is_refused(url: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message) as caught:
        Toolset.from_openapi(document(get_x={}), base_url=url)
    assert "secret-word" not in caught.value.message


def test_the_document_is_a_dict_json_text_or_a_path(tmp_path: Any) -> None:
    root = document(get_x={})
    path = tmp_path / "api.json"
    path.write_text(json.dumps(root))
    for given in (root, json.dumps(root), path, str(path)):
        assert Toolset.from_openapi(given, base_url=BASE).names == ("get_x",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("https://api.example.com/openapi.json", "fetches nothing"),
        ("openapi: 3.1.0\npaths: {}\n", "yaml.safe_load"),
        ("/no/such/file.json", "cannot be read"),
        ({"swagger": "2.0", "paths": {}}, "swagger 2.0"),
        ({"openapi": "4.0.0", "paths": {}}, "4.0.0"),
        ({"openapi": "3.1.0"}, "no paths"),
        ("{}", "openapi None"),
        ("[\n]", "not a JSON object"),
        (7, "takes a dict"),
    ],
)
def test_a_document_that_is_not_openapi_3_is_refused_with_advice(given: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        Toolset.from_openapi(given, base_url=BASE)


def test_a_wrong_auth_or_timeout_is_refused_at_declaration() -> None:
    with pytest.raises(DeclarationError, match="auth must be a function") as caught:
        Toolset.from_openapi(document(get_x={}), base_url=BASE, auth="secret-token")  # pyright: ignore[reportArgumentType]
    assert "secret-token" not in caught.value.message
    with pytest.raises(DeclarationError, match="timeout"):
        Toolset.from_openapi(document(get_x={}), base_url=BASE, timeout="soon")


def test_an_idempotency_key_is_ascii_and_different_keys_stay_different() -> None:
    keys = ["c1/abc", "grüße/abc", "gr%C3%BC%C3%9Fe/abc", "a b/c"]
    encoded = [encode_key(key) for key in keys]
    assert encoded[0] == "c1/abc"
    assert len(set(encoded)) == len(keys)
    assert all(text.isascii() and text.isprintable() for text in encoded)


def test_the_secrets_of_a_call_are_the_header_the_token_and_a_basic_password() -> None:
    found = find_secrets({"Authorization": "Basic YWRhOmh1bnRlcjI=", "X-Key": "key-12345", "Accept-Language": "de"})
    assert set(found) == {"Basic YWRhOmh1bnRlcjI=", "YWRhOmh1bnRlcjI=", "hunter2", "key-12345"}
