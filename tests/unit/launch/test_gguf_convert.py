from __future__ import annotations

import json

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch.model.gguf import convert, weight_name
from tests.unit.launch.tiny_gguf import (
    TOKENS,
    byte_letters,
    weights,
    write_gguf,
)

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# Characters whose kind no edition of Unicode has changed.
OLD_CHARACTERS = st.characters(max_codepoint=0x2FF)
TRICKY = " ab1²½Ⅷ٣東🌈é's\n\t."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    convert(write_gguf(root / "tiny.gguf"), root)
    return root


def test_the_config_is_that_of_the_authors(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["vocab_size"] == len(TOKENS)


def test_weights_come_back_in_the_usual_row_order(folder):
    read = read_bfloat16(folder / "model.safetensors")
    original = weights()
    assert len(read) == len(original)
    for name, weight in original.items():
        found = read[weight_name(name)]
        assert found.shape == weight.shape
        # Q8_0 keeps 8 bits of a block's largest value, bfloat16 8 bits of each.
        assert np.abs(found - weight).max() < 0.01 * np.abs(weight).max(), name


def read_bfloat16(path):
    """By the library that everybody reads it with, and the header's own words."""
    from safetensors import deserialize

    arrays = {}
    for name, entry in deserialize(path.read_bytes()):
        assert entry["dtype"] == "BF16"
        bits = np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16
        arrays[name] = bits.view(np.float32).reshape(entry["shape"])
    return arrays


@given(st.text(OLD_CHARACTERS) | st.text(TRICKY))
def test_text_is_cut_as_llama_cpp_cuts_it(tokenizer, text):
    """There "smollm" means: digits first, one by one, then GPT-2's expression."""
    cut = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    parts = [x for part in regex.split(r"(\p{N})", text) for x in GPT2.findall(part)]
    letters = byte_letters()
    assert cut == ["".join(letters[x] for x in part.encode()) for part in parts]


@given(st.text())
def test_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_digits_stand_alone_and_special_tokens_whole(tokenizer):
    assert tokenizer.encode("12").tokens == ["1", "2"]  # although "12" is in the vocabulary
    assert tokenizer.encode("   5").tokens == ["ĠĠ", "Ġ", "5"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([1, 2]) == ""
