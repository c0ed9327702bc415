"""Planning is done piece by piece, in turns of requests; too long a prompt is not tokenized."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from engines.mlx_worker.embeddings import PIECE_CHARS, pieces, tokens_of
from engines.mlx_worker.generation import ModelFacts
from engines.mlx_worker.model.loading import UsualSampling, Vocabulary
from engines.mlx_worker.prompt.chat_template import PromptWriter
from engines.mlx_worker.prompt.request_planner import Planning, RequestPlanner
from engines.mlx_worker.prompt.sampling import make_processors
from engines.openai.requests import (
    MAX_EMBEDDED_TOKENS,
    MAX_INPUTS,
    ChatRequest,
    InvalidRequest,
    validate_chat,
    validate_completion,
    validate_embeddings,
)
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.mlx


class Counting:
    """A real tokenizer; counts the characters that it was given to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num_chars += len(text)
        return list(self._tokenizer.encode(text, **options))


def vocabulary(folder: Path) -> tuple[Vocabulary, Counting]:
    counting: Any = Counting(tiny_tokenizer(folder))
    made = Vocabulary(counting, len(counting))
    counting.num_chars = 0
    return made, counting


def facts(max_context: int) -> ModelFacts:
    return ModelFacts("toy", max_context, vocab_size=400, hibernation=True)


def asking(inputs: list[Any]) -> Any:
    return validate_embeddings({"model": "toy", "input": inputs})


async def test_far_too_many_inputs_are_refused_after_the_piece_that_exceeds_the_bound(tmp_path):
    known, counting = vocabulary(tmp_path)
    planning = Planning(lambda: None)
    asked = asking(["x y z " * 200] * MAX_INPUTS)  # 2.5 million characters
    with pytest.raises(InvalidRequest, match=f"more than {MAX_EMBEDDED_TOKENS} tokens in all"):
        await tokens_of(asked, planning, known, facts(100_000))
    assert 0 < counting.num_chars <= 6 * MAX_EMBEDDED_TOKENS
    planning.close()


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    known, counting = vocabulary(tmp_path)
    planning = Planning(lambda: None)
    asked = asking(["fine", "z" * known.max_token_chars * 100])
    with pytest.raises(InvalidRequest, match="at least 100 tokens"):
        await tokens_of(asked, planning, known, facts(100))
    assert counting.num_chars == 0
    planning.close()


@pytest.mark.parametrize("size", [1, PIECE_CHARS])
async def test_another_request_waits_for_one_piece_only(tmp_path: Path, size: int) -> None:
    known, counting = vocabulary(tmp_path)
    planning = Planning(lambda: None)
    inputs = ["a b c d " * (PIECE_CHARS // 10)] * 5
    first = asyncio.create_task(tokens_of(asking(inputs), planning, known, facts(1 << 20)))
    while not counting.num_chars:
        await asyncio.sleep(0)
    at = await planning.do(lambda: counting.num_chars, size)
    assert at <= 2 * len(inputs[0])
    assert len(await first) == 5
    planning.close()


async def test_a_text_at_which_the_tokenizer_panics_is_refused_and_the_thread_goes_on() -> None:
    raw = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    raw.normalizer = normalizers.NFC()
    blanks = AddedToken(" ", special=True, normalized=True, lstrip=True)
    raw.add_special_tokens([blanks, AddedToken("[t]", normalized=True, rstrip=True)])
    planning = Planning(lambda: None)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot read this text"):
            await planning.do(lambda: raw.encode("[t]  [t]").ids, 9)
    assert await planning.do(lambda: raw.encode("a").ids, 1) == [0]
    planning.close()


async def test_work_whose_caller_left_is_not_begun() -> None:
    planning = Planning(lambda: None)
    going_on, done = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def block() -> None:
        asyncio.run_coroutine_threadsafe(going_on.wait(), loop).result()

    first = asyncio.create_task(planning.do(block, PIECE_CHARS))
    second = asyncio.create_task(planning.do(lambda: done.append("second"), PIECE_CHARS))
    await asyncio.sleep(0)
    second.cancel()
    going_on.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    await planning.do(lambda: done.append("third"), PIECE_CHARS)
    assert done == ["third"]
    planning.close()


def test_pieces_are_whole_inputs_of_bounded_length() -> None:
    inputs: list[Any] = ["a" * 40_000, "b" * 40_000, "c" * 200_000, [1] * 10, "d"]
    cut = list(pieces(inputs))
    assert [x for piece in cut for x in piece] == inputs
    assert all(len(piece) == 1 or sum(map(len, piece)) <= PIECE_CHARS for piece in cut)


def test_a_long_prompt_is_counted_only_as_far_as_the_context_reaches(tmp_path: Path) -> None:
    known, counting = vocabulary(tmp_path)
    writer = PromptWriter(known, 50_000)
    text = "x y z " * 100_000  # at least one token for two characters
    with pytest.raises(InvalidRequest, match="at least"):
        writer.text(text)
    assert counting.num_chars <= 150_000


def test_a_prompt_that_fits_is_tokenized_once(tmp_path: Path) -> None:
    known, counting = vocabulary(tmp_path)
    text = "x y z " * 10_000
    writer = PromptWriter(known, 100_000)
    before = counting.num_chars  # of the trial of its cuts
    ids = writer.text(text)
    assert counting.num_chars - before == len(text)
    assert list(ids) == list(counting.encode(text))


PROMPT = [0, 1]


ALL_OF_THEM = {"logit_bias": {"0": 1}, "presence_penalty": 1, "frequency_penalty": 0.5}
PENALTIES: list[tuple[list[int], dict[str, Any], list[float]]] = [
    ([], {"presence_penalty": 1}, [2, 2, 2, -2]),  # it never counts the prompt
    ([2, 2, 3], {"presence_penalty": 1}, [2, 2, 1, -3]),  # and the answer's tokens once
    ([2], {"presence_penalty": -1}, [2, 2, 3, -2]),
    ([], {"frequency_penalty": 0.5}, [2, 2, 2, -2]),
    ([2, 2, 3], {"frequency_penalty": 0.5}, [2, 2, 1, -2.5]),  # it counts them every time
    ([3], {"repetition_penalty": 2}, [1, 1, 2, -4]),  # it counts the prompt, too
    ([], {"logit_bias": {"1": -100, "3": 5}}, [2, -98, 2, 3]),
    ([2], ALL_OF_THEM, [3, 2, 0.5, -2]),
]


def chat(**fields: Any) -> ChatRequest:
    return validate_chat({"model": "toy", "messages": [{"role": "user", "content": "a"}], **fields})


@pytest.mark.parametrize(("generated", "fields", "expected"), PENALTIES)
def test_penalties_and_bias(generated: list[int], fields: Any, expected: list[float]) -> None:
    logits = mx.array([[2.0, 2.0, 2.0, -2.0]])
    for processor in make_processors(chat(**fields), len(PROMPT)):
        logits = processor(mx.array(PROMPT + generated), logits)
    assert np.array(logits)[0].tolist() == expected


def test_nothing_asked_nothing_done() -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0}
    assert make_processors(chat(logit_bias={}, **neutral), 2) == []


def test_a_chat_that_names_no_sampling_gets_the_models_own(tmp_path: Path) -> None:
    known, _ = vocabulary(tmp_path)
    greedy = ModelFacts("toy", 500, 400, True, usual_sampling=UsualSampling(temperature=0.0))
    planner = RequestPlanner(known, greedy)

    def draws(**fields: Any) -> bool:
        (generation,) = planner.chat(chat(**fields), None).generations
        return generation.sampling[0].sampler is not None

    assert not draws()
    assert draws(temperature=0.5)
    assert not draws(temperature=0.5, top_k=1)
    text = planner.text(validate_completion({"model": "toy", "prompt": "a"}), None)
    assert text.generations[0].sampling[0].sampler is None
