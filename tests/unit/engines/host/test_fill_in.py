"""Marks of text between two others, as real tokenizers have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engines.host.fill_in import fill_in_of
from engines.wire import FillIn
from tests.tiny_tokenizer import tiny_tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer_with(folder: Path, marks: tuple[str, ...], special: bool) -> PreTrainedTokenizerFast:
    tiny_tokenizer(folder)
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    made.add_tokens([AddedToken(x, special=special) for x in marks])
    return made


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marks", [QWEN, DEEPSEEK])
def test_the_marks_of_a_tokenizer_are_one_token_each(
    tmp_path: Path, marks: tuple[str, ...], special: bool
) -> None:
    tokenizer = tokenizer_with(tmp_path, marks, special)
    found = fill_in_of(tokenizer.get_vocab())
    assert found == FillIn(*marks)
    ids = tokenizer.encode(found.prompt("The capital", "is Paris"), add_special_tokens=False)
    at = [ids.index(tokenizer.convert_tokens_to_ids(x)) for x in marks]
    assert at[0] == 0 and at[2] == len(ids) - 1
    assert tokenizer.decode(ids[1 : at[1]]) == "The capital"
    assert tokenizer.decode(ids[at[1] + 1 : at[2]]) == "is Paris"


def test_marks_that_are_not_all_there_are_none(tmp_path: Path) -> None:
    assert fill_in_of(tiny_tokenizer(tmp_path / "plain").get_vocab()) is None
    assert fill_in_of(tokenizer_with(tmp_path / "two", QWEN[:2], True).get_vocab()) is None
