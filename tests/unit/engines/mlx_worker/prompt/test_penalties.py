from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engines.mlx_worker.prompt.request_planner import make_processors
from engines.openai.requests import validate_chat

pytestmark = pytest.mark.mlx

PROMPT = [0, 1]


def penalised(generated: list[int], **fields: Any) -> list[float]:
    messages = [{"role": "user", "content": "x"}]
    request = validate_chat({"model": "m", "messages": messages, **fields})
    logits = mx.array([[2.0, 2.0, 2.0, -2.0]])
    for processor in make_processors(request, len(PROMPT)):
        logits = processor(mx.array(PROMPT + generated), logits)
    return np.array(logits)[0].tolist()


def test_nothing_asked_nothing_done() -> None:
    messages = [{"role": "user", "content": "x"}]
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0}
    request = validate_chat({"model": "m", "messages": messages, "logit_bias": {}, **neutral})
    assert make_processors(request, 2) == []


def test_presence_counts_the_answer_once_and_never_the_prompt() -> None:
    assert penalised([], presence_penalty=1) == [2, 2, 2, -2]
    assert penalised([2, 2, 3], presence_penalty=1) == [2, 2, 1, -3]


def test_frequency_counts_every_time() -> None:
    assert penalised([], frequency_penalty=0.5) == [2, 2, 2, -2]
    assert penalised([2, 2, 3], frequency_penalty=0.5) == [2, 2, 1, -2.5]


def test_negative_penalties_encourage() -> None:
    assert penalised([2], presence_penalty=-1) == [2, 2, 3, -2]


def test_repetition_counts_the_prompt_too() -> None:
    assert penalised([3], repetition_penalty=2) == [1, 1, 2, -4]


def test_bias_is_added() -> None:
    assert penalised([], logit_bias={"1": -100, "3": 5}) == [2, -98, 2, 3]


def test_all_of_them_together() -> None:
    together = penalised([2], logit_bias={"0": 1}, presence_penalty=1, frequency_penalty=0.5)
    assert together == [3, 2, 0.5, -2]
