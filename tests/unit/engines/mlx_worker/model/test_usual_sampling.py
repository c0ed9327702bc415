"""The sampling of a model's generation_config.json, for what a request leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.mlx_worker.model.loading import MOST_SAMPLING_BYTES, SAMPLING_FILE, UsualSampling
from engines.openai.requests import validate_chat

pytestmark = pytest.mark.mlx

QWEN = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "do_sample": True,
}
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_what_a_request_names_goes_before_what_the_model_asks_for(tmp_path: Path) -> None:
    (tmp_path / SAMPLING_FILE).write_text(
        json.dumps({**QWEN, "do_sample": True, "eos_token_id": [1, 2]})
    )
    usual = UsualSampling.of(tmp_path)
    plain = usual.filled_in(validate_chat(dict(HI)))
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    assert (plain.repetition_penalty, plain.min_p, plain.seed) == (1.05, None, None)
    own = usual.filled_in(validate_chat({**HI, "temperature": 0, "top_k": -1}))
    assert (own.temperature, own.top_p, own.top_k) == (0, 0.8, -1)


@pytest.mark.parametrize(
    "odd",
    [
        '"temperature": "hot"',
        '"temperature": NaN',
        '"temperature": true',
        '"min_p": 7',
        '"repetition_penalty": 1e400',
        '"max_length": Infinity',
        f'"max_length": 1{"0" * 400}',
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_one_odd_value_takes_no_other_with_it(tmp_path: Path, odd: str, mark: str) -> None:
    content = f'{mark}{{{odd}, "top_p": 0.8, "top_k": 20.0}}'
    (tmp_path / SAMPLING_FILE).write_text(content, encoding="utf-8")
    usual = UsualSampling.of(tmp_path)
    assert usual == UsualSampling(top_p=0.8, top_k=20) and type(usual.top_k) is int


def test_a_file_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / SAMPLING_FILE).write_text('{"top_k": 20}' + " " * MOST_SAMPLING_BYTES)
    assert UsualSampling.of(tmp_path) == UsualSampling()
    (tmp_path / SAMPLING_FILE).write_text('{"top_k": 20}' + " " * (MOST_SAMPLING_BYTES - 13))
    assert UsualSampling.of(tmp_path) == UsualSampling(top_k=20)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"temperature": "hot"}', '{"top_p": 7}', '{"top_k": 1.5}']
)
def test_a_file_that_says_nothing_usable_changes_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / SAMPLING_FILE).write_text(content)
    request = validate_chat(dict(HI))
    assert UsualSampling.of(tmp_path).filled_in(request) is request
