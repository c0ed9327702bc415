"""Forms of bodies and numbers that clients have: a byte order mark, 4.0 for 4, -1 for no limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.openai.errors import InvalidRequest
from engines.openai.json_bodies import checked
from engines.openai.requests import EmbeddingsRequest, validate_chat, validate_completion
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer, json_answer

MARK = b"\xef\xbb\xbf"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSE, MESSAGE = DIALECTS = (
    ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, "max_tokens"),
)
EACH = pytest.mark.parametrize(
    ("path", "fields", "limit"), DIALECTS, ids=["chat", "text", "response", "message"]
)


def app_of(**settings: Any) -> App:
    return App(RecordingEngine(chat_answer("yo", "length")), **settings)


@EACH
async def test_a_mark_of_byte_order_is_skipped(path: str, fields: Any, limit: str) -> None:
    app = app_of()
    body = MARK + json.dumps({"model": MODEL, **fields}).encode()
    assert (await app.post(path, body)).status == 200
    assert (await app.post(path, MARK + body)).status == 400


@EACH
async def test_an_integer_may_be_written_as_a_fraction(path: str, fields: Any, limit: str) -> None:
    app = app_of()
    asked = {"model": MODEL, **fields, limit: 4.0, "top_k": 3.0, "temperature": 1.0}
    answer = await app.post(path, asked)
    assert answer.status == 200, answer.body
    sent = app.engine.asked[0].body
    limits = [sent[x] for x in ("max_tokens", "max_completion_tokens") if x in sent]
    assert limits == [4] and isinstance(limits[0], int)
    assert isinstance(sent.get("top_k", 3), int)
    wrong = await app.post(path, {**asked, limit: 4.5})
    assert wrong.status == 400 and limit in wrong.json["error"]["message"]


def test_integers_anywhere_in_a_request() -> None:
    raw = {"model": MODEL, "messages": MESSAGES, "n": 2.0, "seed": -7.0, "top_logprobs": 3.0}
    parsed = validate_chat({**raw, "logprobs": True})
    assert (parsed.n, parsed.seed, parsed.top_logprobs) == (2, -7, 3)
    tool = {"name": "f", "parameters": {"properties": {"x": {"default": 1.0}}}}
    shown = {**raw, "logprobs": True, "tools": [{"type": "function", "function": tool}]}
    validate_chat(shown)
    default = shown["tools"][0]["function"]["parameters"]["properties"]["x"]["default"]
    assert isinstance(default, float), "what the model is shown stays as it was written"
    tokens = {"model": MODEL, "prompt": [5.0, 6, 7.0]}
    assert validate_completion(tokens).prompts == [[5, 6, 7]]
    embedded = checked({"model": MODEL, "input": "x", "dimensions": 8.0}, EmbeddingsRequest)
    assert embedded.dimensions == 8


@pytest.mark.parametrize("n", [1.5, 1e300, -1e300, 99.0])
def test_fractions_that_are_no_integer_or_out_of_bounds_are_refused(n: float) -> None:
    with pytest.raises(InvalidRequest, match="n: Expected `int"):
        validate_chat({"model": MODEL, "messages": MESSAGES, "n": n})


def test_there_are_not_too_many_of_them() -> None:
    with pytest.raises(InvalidRequest, match=r"such as 4\.0"):
        validate_completion({"model": MODEL, "prompt": [1.0] * 1000})


@EACH
@pytest.mark.parametrize("no_limit", [-1, -1.0])
async def test_a_limit_of_minus_one_is_none(path, fields, limit, no_limit):
    app = app_of(default_max_tokens=7)
    answer = await app.post(path, {"model": MODEL, **fields, limit: no_limit})
    assert answer.status == 200, answer.body
    sent = app.engine.asked[0].body
    if path == TEXT[0]:
        assert sent["max_tokens"] == 100  # the context: left out it would mean 16
    else:
        assert not {"max_tokens", "max_completion_tokens"} & sent.keys()
    if path == RESPONSE[0]:
        assert answer.json["max_output_tokens"] is None
    if path == MESSAGE[0]:
        assert answer.json["stop_reason"] == "model_context_window_exceeded"
    assert (await app.post(path, {"model": MODEL, **fields, limit: -2})).status == 400


@EACH
async def test_a_seed_of_minus_one_is_none(path: str, fields: Any, limit: str) -> None:
    """It means another one each time to llama.cpp, LM Studio and vLLM."""
    app = app_of()
    for seed in (-1, -1.0, 7):
        assert (await app.post(path, {"model": MODEL, **fields, "seed": seed})).status == 200
    assert [x.body.get("seed") for x in app.engine.asked] == [None, None, 7]


async def test_newer_names_of_the_limit_take_it_too() -> None:
    app = App(RecordingEngine(json_answer({})))
    assert (await app.chat(max_completion_tokens=-1)).status == 200
    assert "max_completion_tokens" not in app.engine.asked[0].body
    raw = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": -1}
    assert validate_chat(raw).answer_tokens is None
    with pytest.raises(InvalidRequest):
        validate_chat({**raw, "min_tokens": -1})
