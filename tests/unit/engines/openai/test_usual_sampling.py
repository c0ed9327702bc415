"""The sampling of a model's generation_config.json, for what a request leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.openai.requests import validate_chat
from engines.openai.usual_sampling import FILE, UsualSampling

QWEN = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "do_sample": True,
}
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_what_a_request_names_goes_before_what_the_model_asks_for(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({**QWEN, "do_sample": True, "eos_token_id": [1, 2]}))
    usual = UsualSampling.of(tmp_path)
    plain = usual.filled_in(validate_chat(dict(HI)))
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    assert (plain.repetition_penalty, plain.min_p, plain.seed) == (1.05, None, None)
    own = usual.filled_in(validate_chat({**HI, "temperature": 0, "top_k": -1}))
    assert (own.temperature, own.top_p, own.top_k) == (0, 0.8, -1)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"temperature": "hot"}', '{"top_p": 7}', '{"top_k": 1.5}']
)
def test_a_file_that_says_nothing_usable_changes_nothing(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    request = validate_chat(dict(HI))
    assert UsualSampling.of(tmp_path).filled_in(request) is request
