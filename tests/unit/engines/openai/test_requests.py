from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.openai.requests import (
    ChatRequest,
    InvalidRequest,
    parse_json,
    read_chat,
    validate_chat,
    validate_completion,
)

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"name": "x"}


def chat(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **fields}


WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (2.1, -0.1, "hot", float("nan")),
    "top_p": (0, float("inf")),
    "n": (0, 10**9, True),
    "max_tokens": (-2, 1.5),
    "logit_bias": ({"a": 1}, {"9" * 5000: 1}, {str(i): 1 for i in range(1025)}),
    "stop": ("", ["x"] * 17, "x" * 100_000),
    "messages": ("hi", [], HELLO["messages"] * 100_000),
    "model": ("", 5),
    "structured_outputs": (5, {}, {"json": None}, {"choice": []}, {"chioce": ["a"]}),
}
ALONE: list[dict[str, Any]] = [
    *({"top_k": -2}, {"min_p": 1.5}, {"presence_penalty": 3}, {"repetition_penalty": 0}),
    *({"max_completion_tokens": 10**12}, {"top_logprobs": 5}, {"seed": 2**63}),
    *({"stream": "yes"}, {"tools": [TOOL, TOOL]}, {"tool_choice": "required"}),
    *({"functions": [{"name": "x"}]}, {"modalities": ["text", "audio"]}),
    {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
]
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"stop": ["x" * 513]}, "stop[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": OTHER}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    *((fields, *fields) for fields in ALONE),
    *(({field: x}, field) for field, values in WRONG.items() for x in values),
]


@pytest.mark.parametrize(("fields", "param"), MISFITS)
def test_refuses_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        validate_chat(chat(**fields))
    assert refusal.value.param == param
    assert refusal.value.status == 400
    assert refusal.value.message.startswith(f"{param}: ")


def test_a_field_that_is_missing_is_said_to_be_required() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        validate_chat(chat(messages=[{"content": "x"}]))
    assert refusal.value.message == "messages[0].role: it is required"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_refuses_parts_that_are_not_text(kind: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "http://x"}}]
    with pytest.raises(InvalidRequest, match="text only") as refusal:
        validate_chat(chat(messages=[{"role": "user", "content": content}]))
    assert refusal.value.param == "messages[0].content[1].type"


def test_nulls_mean_defaults_and_unknown_fields_are_ignored() -> None:
    names = ["temperature", "top_p", "max_tokens", "n", "stop", "seed", "tools", "tool_choice"]
    nulls = dict.fromkeys(names)
    request = validate_chat(chat(**nulls, store=True, user="u", prediction={"type": "content"}))
    assert request.num_choices == 1
    assert request.stops == []
    assert request.answer_tokens is None


def test_older_and_looser_forms_mean_what_they_say() -> None:
    assert validate_chat(chat(max_tokens=5, max_completion_tokens=7)).answer_tokens == 7
    assert validate_chat(chat(max_tokens=0)).answer_tokens == 0
    assert validate_chat(chat(logit_bias={"foo": 0, "7": -100})).bias == {7: -100.0}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = validate_chat(chat(messages=[{"role": "user", "content": parts}]))
    assert request.messages[0].text == "ab"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), *((x, x) for x in (["a", "b"], [[1], [2, 3]]))],
)
def test_four_kinds_of_prompt(prompt: Any, prompts: Any) -> None:
    assert validate_completion({"model": "m", "prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *({"prompt": x} for x in ([], ["a", 1], [[-1]], [2**31])),
        {"prompt": ["a"] * 65, "n": 2},
        *({"prompt": "a", **x} for x in ({"suffix": "b"}, {"best_of": 2}, {"logprobs": 6})),
    ],
)
def test_refuses_completions(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        validate_completion({"model": "m", **fields})


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'{"x":' * 100_000, b"[" * 1_000_000),
        *(b'{"model": "m", "temperature": NaN}', b'{"n": 1e999}'),
        *(b'{"model": "\xff"}', b'{"model": "\\ud800"}'),
    ],
)
def test_refuses_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_chat(body)
    with pytest.raises(InvalidRequest):
        validate_chat(parse_json(body))


def test_what_was_checked_is_read_as_it_was_and_not_checked_again() -> None:
    asked = chat(tools=[{"function": {"name": "f", "parameters": {"type": "object"}}}], seed=7)
    assert read_chat(json.dumps(asked).encode()) == validate_chat(asked)
    wrong = chat(tool_choice="required")
    with pytest.raises(InvalidRequest, match="tool_choice needs tools"):
        validate_chat(wrong)
    assert read_chat(json.dumps(wrong).encode()).tools is None  # the gateway has refused it


_text = st.text("a0é ", max_size=5)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.__struct_fields__)), _json))
def test_any_json_is_either_a_request_or_refused(fields: dict[str, Any]) -> None:
    for body in (fields, chat(**fields)):
        try:
            request = validate_chat(body)
        except InvalidRequest as error:
            json.dumps(error.body())
        else:
            assert 1 <= request.num_choices <= 16
