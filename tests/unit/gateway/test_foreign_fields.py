"""Fields of other servers are honoured or refused by name, in all dialects."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engines.openai.foreign_fields import FOREIGN_FIELDS, Fate
from engines.openai.foreign_request import Dialect, ignored_fields
from engines.openai.requests import ChatRequest, CompletionRequest
from gateway.anthropic.request import MessagesRequest
from gateway.openai.responses.response import ResponseFields
from tests.unit.gateway.in_process import (
    MODEL,
    WELCOME,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    json_answer,
)

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
OWN = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseFields,
    "/v1/messages": MessagesRequest,
}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
dialects = pytest.mark.parametrize("path", BODIES)


def app_with(engine: str, answer: Any = None) -> App:
    welcome = msgspec.structs.replace(WELCOME, engine=engine)
    return App(RecordingEngine(answer or chat_answer(), welcome=welcome))


async def ask(app: App, path: str, **fields: Any) -> Reply:
    return await app.post(path, {"model": MODEL, **BODIES[path], **fields})


@dialects
@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({"guided_json": OBJECT}, OBJECT),
        ({"guided_json": json.dumps(OBJECT)}, OBJECT),
        ({"guided_json": {"name": "x", "schema": OBJECT}}, OBJECT),
        ({"json_schema": {"name": "x", "schema": OBJECT, "strict": False}}, OBJECT),
        ({"guided_json": OBJECT, "response_format": {"type": "text"}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, None),
        ({"json_schema": OBJECT}, OBJECT),
        ({"format": OBJECT}, OBJECT),
        ({"options": {"format": OBJECT}}, OBJECT),
        ({"output_format": {"type": "json_schema", "schema": OBJECT}}, OBJECT),
        ({"output_config": {"format": {"type": "json_schema", "schema": OBJECT}}}, OBJECT),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": OBJECT}}}, OBJECT),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, OBJECT),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": OBJECT}}}, OBJECT),
        ({"response_format": {"type": "json_schema", "schema": OBJECT}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": OBJECT}}, OBJECT),
        ({"format": "json"}, None),
        ({"guided_json_object": True}, None),
    ],
)
async def test_schemas_under_other_names(path: str, fields: Any, ours: Any) -> None:
    for engine in ("mlx", "vllm"):
        app = app_with(engine)
        reply = await ask(app, path, **fields)
        assert reply.status == 200, reply.body
        (asked,) = app.engine.asked
        form = asked.body["response_format"]
        if ours is None:
            assert form == {"type": "json_object"}
        else:
            assert (form["type"], form["json_schema"]["schema"]) == ("json_schema", ours)
        assert not set(fields) & asked.body.keys() - {"response_format"}


@dialects
@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({"guided_regex": "[0-9]"}, {"structured_outputs": {"regex": "[0-9]"}}),
        ({"regex": "[0-9]"}, {"structured_outputs": {"regex": "[0-9]"}}),
        ({"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}}),
        ({"structured_outputs": {"choice": ["a"]}}, {"structured_outputs": {"choice": ["a"]}}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"options": {"repeat_penalty": 1.1, "num_ctx": 4096}}, {"repetition_penalty": 1.1}),
        ({"options": {"temperature": 0.5, "seed": 3}}, {"temperature": 0.5, "seed": 3}),
        ({"min_tokens": 3, "seed": 4}, {"min_tokens": 3, "seed": 4}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"random_seed": 5}, {"seed": 5}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_other_fields_of_ours_under_any_name(path: str, fields: Any, ours: Any) -> None:
    app = app_with("mlx")
    reply = await ask(app, path, **fields)
    assert reply.status == 200, reply.body
    (asked,) = app.engine.asked
    assert {name: asked.body.get(name) for name in ours} == ours
    assert "options" not in asked.body


@pytest.mark.parametrize("path", [x for x in BODIES if x != "/v1/messages"])
async def test_a_switch_of_thinking_by_any_name(path: str) -> None:
    """Messages have one of their own by the name of DeepSeek's."""
    for value, switch in (("disabled", False), ("enabled", True), ("auto", True)):
        app = app_with("mlx")
        assert (await ask(app, path, thinking={"type": value})).status == 200
        assert app.engine.asked[0].body["chat_template_kwargs"] == {"enable_thinking": switch}
    for wrong in (True, {"type": "hard"}, "disabled"):
        assert (await ask(app_with("mlx"), path, thinking=wrong)).status == 400
    assert (await ask(app_with("mlx"), path, enable_thinking="no")).status == 400


@pytest.mark.parametrize("path", [x for x in BODIES if x != "/v1/responses"])
async def test_openrouters_object_of_reasoning(path: str) -> None:
    for value, ours in (
        ({"enabled": False}, {"reasoning_effort": "none"}),
        ({"effort": "low", "summary": "auto"}, {"reasoning_effort": "low"}),
        ({"enabled": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"exclude": False}, {}),
    ):
        app = app_with("mlx")
        assert (await ask(app, path, reasoning=value)).status == 200
        body = app.engine.asked[0].body
        names = {"reasoning_effort", "chat_template_kwargs"} & body.keys()
        assert {x: body[x] for x in names} == ours
    for value in ({"max_tokens": 100}, {"effort": "low", "exclude": True}):
        reply = await ask(app_with("vllm"), path, reasoning=value)
        assert reply.status == 400 and reply.json["error"]["message"].startswith("reasoning: ")


async def test_a_limit_under_another_name() -> None:
    """A text completion without one would end after 16 tokens."""
    none = {"/v1/chat/completions": None, "/v1/completions": WELCOME.max_context}
    for path, no_limit in none.items():
        for theirs in ("n_predict", "num_predict"):
            app = app_with("mlx")
            for value in (7, -1, -2):
                await ask(app, path, **{theirs: value})
            await ask(app, path, **{theirs: -1, "max_tokens": 5})
            found = [asked.body.get("max_tokens") for asked in app.engine.asked]
            assert found == [7, no_limit, no_limit, 5]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
async def test_a_limit_under_the_name_of_another_dialect(name: str) -> None:
    """It is no less a limit; an answer of any length came back."""
    limits = ("max_tokens", "max_completion_tokens")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        app = app_with("mlx")
        for fields in ({name: 7}, {name: -1}, {name: 7, "max_output_tokens": 5}):
            reply = await ask(app, path, **fields)
            assert reply.status == 200 and "x-thermocline-ignored" not in reply.headers
        found = [[x.body[y] for y in limits if y in x.body] for x in app.engine.asked]
        own = path == "/v1/responses" or name == "max_output_tokens"
        assert found[::2] == [[7], [5 if own else 7]]
        assert found[1] == ([WELCOME.max_context] if path == "/v1/completions" else [])  # no limit
    app = app_with("mlx")
    await ask(app, "/v1/messages", **{name: 7, "max_tokens": 5})
    assert [app.engine.asked[0].body.get(x) for x in limits] == [5, None]


@dialects
async def test_what_only_vllm_can_do(path: str) -> None:
    own = OWN[path].__struct_fields__
    shows = "completions" in path
    values: dict[str, Any] = {
        field.name: "abc" for field in FOREIGN_FIELDS if field.fate is Fate.ON_VLLM
    }
    values |= {x.name: 7 for x in FOREIGN_FIELDS if x.fate is Fate.SHOWN_ON_VLLM}
    grammars = {"guided_grammar", "grammar", "ebnf"}
    for name, value in values.items():
        if name in own:
            continue
        refused = await ask(app_with("mlx"), path, **{name: value})
        assert refused.status == 400, name
        assert name in refused.json["error"]["message"]
        app = app_with("vllm")
        reply = await ask(app, path, **{name: value})
        if value == 7 and not shows:
            assert (reply.status, name in reply.json["error"]["message"]) == (400, True)
            continue
        assert reply.status == 200, reply.body
        body = app.engine.asked[0].body
        assert (body["structured_outputs"]["grammar"] if name in grammars else body[name]) == value


@dialects
async def test_what_no_engine_here_can_do_is_refused_by_name(path: str) -> None:
    app = app_with("vllm")
    own = OWN[path].__struct_fields__
    for field in FOREIGN_FIELDS:
        if field.fate is Fate.REFUSED and field.name not in own:
            beside = dict.fromkeys(field.beside[-1:], 0.5)
            reply = await ask(app, path, **{field.name: [7]}, **beside)
            assert reply.status == 400, field.name
            error = reply.json["error"]
            assert error["message"].startswith(f"{field.name}: ")
            assert error.get("param", field.name) == field.name  # Anthropic's shape has none
    assert app.engine.asked == []


@dialects
async def test_hints_and_values_that_ask_for_nothing_are_taken(path: str) -> None:
    own = set(OWN[path].__struct_fields__)
    fields: dict[str, Any] = {"repeat_last_n": 64}
    for field in FOREIGN_FIELDS:
        if field.name in own:
            continue
        if field.fate is Fate.HINT:
            fields[field.name] = "x"
        elif field.neutral:
            fields[field.name] = field.neutral[0]
    fields["session_id"] = "mine"
    app = app_with("mlx")
    reply = await ask(app, path, **fields, options={"num_ctx": 1, "num_thread": 2})
    assert reply.status == 200, reply.body
    assert reply.headers["x-thermocline-session"] == "mine"
    assert not (fields.keys() - own) & app.engine.asked[0].body.keys()


@dialects
async def test_two_constraints_for_one_answer_are_refused(path: str) -> None:
    app = app_with("vllm")
    for fields in (
        {"guided_json": OBJECT, "guided_regex": "a"},
        {"json_schema": OBJECT, "grammar": "root ::= [a]"},
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
    ):
        reply = await ask(app, path, **fields)
        assert reply.status == 400
        other, name = fields
        message = reply.json["error"]["message"]
        assert message.startswith(f"{name}: ") and message.endswith(other)
    assert app.engine.asked == []


async def test_an_engines_refusal_has_the_clients_own_name() -> None:
    message = "response_format: no (really) (parameter=response_format, value=(1, 2))"  # as vLLM's
    said = {"message": message, "param": "response_format"}
    app = app_with("mlx", json_answer({"error": {**said, "type": "x", "code": None}}, 400))
    reply = await ask(app, "/v1/chat/completions", guided_json=OBJECT)
    assert (reply.error["message"], reply.error["param"]) == (
        "guided_json: no (really)",
        "guided_json",
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"json_schema": [1]}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": "{"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": 5}}, "response_format"),
        ({"options": {"format": {"$ref": "#"}}}, "format"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"made_up": 2}}, "options.made_up"),
        ({"options": 7}, "options"),
        ({"output_config": "low"}, "output_config"),
        ({"repeat_penalty": -3}, "repeat_penalty"),
        ({"n_predict": "many"}, "n_predict"),
        ({"messages": [*HI, {"role": "assistant", "content": "A", "prefix": True}]}, "messages[1]"),
        ({"messages": [{**HI[0], "images": ["aGk="]}]}, "messages[0].images"),
    ],
)
async def test_errors_have_the_clients_own_name(fields: Any, name: str) -> None:
    reply = await ask(app_with("vllm"), "/v1/chat/completions", **fields)
    assert reply.status == 400
    assert reply.error["param"].startswith(name) and reply.error["message"].startswith(name)


UNHELD = {**OBJECT, "propertyNames": {"pattern": "a"}, "not": {"type": "null"}}
SCHEMED = {"type": "json_schema", "name": "n", "schema": UNHELD}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"guided_json": UNHELD}),
        ("/v1/responses", {"text": {"format": SCHEMED}}),
        ("/v1/messages", {"output_config": {"format": SCHEMED}}),
        ("/v1/messages", {"output_format": SCHEMED}),
        ("/v1/completions", {"json_schema": UNHELD}),
    ],
)
async def test_keywords_that_are_left_out_are_named_in_a_header(path: str, fields: Any) -> None:
    app = app_with("vllm")
    reply = await ask(app, path, **fields)
    assert reply.status == 200, reply.body
    assert reply.headers["x-thermocline-left-out"] == "not, propertyNames"
    assert app.engine.asked[0].body["response_format"]["json_schema"]["schema"] == OBJECT
    assert "x-thermocline-left-out" not in (await ask(app, path)).headers


@dialects
async def test_strict_and_name_may_stand_beside_a_schema(path: str) -> None:
    """A strict schema is refused where it has a keyword that is not held."""
    named = {"name": "n", "strict": True}
    forms: list[dict[str, Any]] = [
        {**named, "schema": OBJECT},
        {**named, "strict": "true", "schema": OBJECT},
        {**named, "json_schema": {"schema": OBJECT}},
        {"json_schema": {**named, "schema": OBJECT}},
        {"json_schema": {**named, **OBJECT}},
    ]
    app = app_with("mlx")
    for form in forms:
        reply = await ask(app, path, response_format={"type": "json_schema", **form})
        assert reply.status == 200, reply.body
        found = app.engine.asked.pop().body["response_format"]["json_schema"]
        assert found == {**named, "schema": OBJECT}
    form = {"type": "json_schema", **named, "schema": UNHELD}
    assert (await ask(app, path, response_format=form)).status == 400


async def test_tools_stay_in_the_prompt_as_they_were_sent() -> None:
    function = {"name": "f", "parameters": UNHELD}
    tool = {"type": "function", "function": function}
    app, chat = app_with("mlx"), "/v1/chat/completions"
    forced = await ask(app, chat, tools=[tool], tool_choice="required")
    free = await ask(app, chat, tools=[tool])
    assert forced.headers["x-thermocline-left-out"] == "not, propertyNames"
    assert "x-thermocline-left-out" not in free.headers
    assert [asked.body["tools"] for asked in app.engine.asked] == [[tool], [tool]]


async def test_a_strict_tool_is_refused_if_its_schema_cannot_be_held() -> None:
    function = {"name": "f", "parameters": UNHELD}
    chat, strict = "/v1/chat/completions", {"type": "function", "strict": True}
    refused = [
        (chat, {"type": "function", "function": {**function, "strict": True}}),
        (chat, {**strict, "function": function}),  # as Responses have it
        ("/v1/responses", {**strict, **function}),
    ]
    for path, tool in refused:
        error = (await ask(app_with("mlx"), path, tools=[tool])).error
        inner = ".function" if path == chat else ""
        assert error["param"] == f"tools[0]{inner}.parameters"
        assert "is not permitted" in error["message"]
    app = app_with("mlx")
    await ask(app, chat, tools=[{**strict, "function": {"name": "f", "parameters": OBJECT}}])
    (sent,) = app.engine.asked[0].body["tools"]
    assert sent["function"]["strict"] is True and "strict" not in sent


# ---- fields that this server does not know

MISSPELT = (
    ("temprature", "temperature"),
    ("temperatur", "temperature"),
    ("Temperature", "temperature"),
    ("topP", "top_p"),
    ("presence_penality", "presence_penalty"),
    ("respones_format", "response_format"),
    ("stopSequences", "stop_sequences"),
    ("guidedJson", "guided_json"),
)


@dialects
@pytest.mark.parametrize(("wrong", "meant"), MISSPELT)
async def test_a_misspelt_field_that_changes_the_answer_is_refused(path, wrong, meant):
    app = app_with("mlx")
    reply = await ask(app, path, **{wrong: 0.5})
    assert reply.status == 400
    assert f"did you mean {meant}?" in reply.json["error"]["message"]
    assert not app.engine.asked


async def test_beside_the_right_field_or_with_nothing_in_it_a_misspelt_one_is_ignored() -> None:
    app = app_with("mlx")
    path = "/v1/chat/completions"
    both = await ask(app, path, temperature=0.5, temprature=0.7, maxTokens=5, max_tokens=9)
    assert both.status == 200
    assert both.headers["x-thermocline-ignored"] == "temprature, maxTokens"
    assert "x-thermocline-ignored" not in (await ask(app, path, temprature=None)).headers
    for value in ("", [], {}):
        empty = await ask(app, path, temprature=value)
        assert empty.headers["x-thermocline-ignored"] == "temprature"


@dialects
async def test_what_nobody_knows_is_ignored_and_named(path: str) -> None:
    app = app_with("mlx")
    fields = {"chat_id": "1", "trace": {}, "naïve\r\nx: y": 1, "filter_ids": [], "n_" * 40: 2}
    reply = await ask(app, path, **fields)
    assert reply.status == 200, reply.body
    named = f"chat_id, trace, na?ve??x??y, filter_ids, {'n_' * 20}"
    assert reply.headers["x-thermocline-ignored"] == named
    many = await ask(app, path, **{f"field-{i}": 1 for i in range(100)})
    assert many.status == 200
    assert len(many.headers["x-thermocline-ignored"].split(", ")) == 16


@dialects
async def test_no_field_of_the_list_is_taken_for_a_misspelt_one(path: str) -> None:
    """Nor is one that other clients send besides."""
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    known |= {*MessagesRequest.__struct_fields__, *ResponseFields.__struct_fields__}
    theirs = known | {x.name for x in FOREIGN_FIELDS} | OF_CLIENTS
    dialect = Dialect(OWN[path].__struct_fields__)
    for name in theirs:
        assert ignored_fields({name: 1}, dialect) in ([], [name]), name


# Open WebUI, LibreChat, LangChain, LiteLLM, aider, text-generation-webui, KoboldCpp, SillyTavern.
OF_CLIENTS = {
    *("chat_id", "background_tasks", "features", "variables", "model_item", "filter_ids", "files"),
    *("tool_ids", "session", "streaming", "modelLabel", "promptPrefix", "endpoint", "iconURL"),
    *("temperature_last", "max_length", "max_context_length", "rep_pen"),
    *("repetition_penalty_range", "guidance_scale", "negative_prompt", "mode", "character"),
    *("custom_token_bans", "auto_max_new_tokens", "ban_eos_token", "prompt_lookup_num_tokens"),
    *("num_retries", "extra_headers", "drop_params", "caching", "fallbacks", "tags", "api_base"),
    *("max_retries", "request_timeout", "use_responses_api", "disabled_params", "top_a", "tfs"),
    *("presencePenaltyEnabled", "thinking", "enable_thinking", "usage", "provider", "transforms"),
    *("min_completion_tokens", "temperature_2", "temperature2", "min_tool_calls"),
    *("models", "route", "plugins", "safe_prompt", "random_seed", "preset", "logit_bias_exp"),
}
