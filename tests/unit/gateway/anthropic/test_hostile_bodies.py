"""Every body is translated or refused; nothing else comes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.openai.errors import InvalidRequest
from engines.openai.requests import parse_json, validate_chat
from gateway.anthropic.routes import chat_of
from gateway.anthropic.translation import translated

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["text", "tool_use", "tool_result", "thinking", "image", "document", "search_result"]
    + ["mid_conv_system", "redacted_thinking", "server_tool_use", "nothing", None, 3, []]
)
SOURCES = st.fixed_dictionaries({"type": st.sampled_from(["text", "content", "url"])}) | JSON


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    block = {"type": draw(KINDS)}
    names = ["text", "thinking", "id", "name", "tool_use_id", "title", "is_error", "cache_control"]
    for name in draw(st.lists(st.sampled_from(names), unique=True)):
        block[name] = draw(st.text(max_size=3) | JSON)
    for name in draw(st.lists(st.sampled_from(["content", "input", "source"]), unique=True)):
        inner = st.lists(st.fixed_dictionaries({"type": KINDS, "text": st.text(max_size=3)}))
        block[name] = draw(SOURCES | inner)
    return block


TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=5) | st.lists(blocks(), max_size=4),
    }
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "max_tokens": st.sampled_from([0, 1, 50]),
        "messages": st.lists(TURNS | JSON, min_size=1, max_size=4),
    },
    optional={
        "system": st.text(max_size=5) | st.lists(blocks(), max_size=3) | JSON,
        "tools": st.lists(st.dictionaries(st.sampled_from(["name", "input_schema"]), JSON)) | JSON,
        "tool_choice": JSON,
        "thinking": JSON,
        "output_config": JSON,
        "cache_control": JSON,
        "diagnostics": JSON,
    },
)


@given(BODIES)
def test_a_body_is_a_chat_or_refused(body: dict[str, Any]) -> None:
    try:
        made = translated(body, True).raw
        validate_chat(made)
    except InvalidRequest as refusal:
        assert refusal.status == 400 and refusal.message


@given(st.binary(max_size=60) | st.just(b'{"model":"m","messages":[{"role":"user"}]}'))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        chat_of(parse_json(body), True)
