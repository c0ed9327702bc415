"""The converted model where it is used: transformers' tokenizer and mlx_lm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.calibration.corpus import held_out_texts
from engines.config import CalibrationOrder
from launch.calibrate.program import USUAL_CONTEXTS
from launch.errors import LaunchError
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model
from launch.model.gguf import convert
from tests.unit.launch.tiny_gguf import CONTEXT, TEMPLATE, TOKENS, write_gguf

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_gguf(folder / "tiny.gguf"), folder)
    return folder


@pytest.fixture(scope="module")
def sample() -> Path:
    try:
        return sample_model(default_cache_dir(os.environ))
    except LaunchError as error:
        pytest.skip(str(error))


def test_the_tokenizer_keeps_its_own_pre_tokenizer(tiny):
    """``GPT2Tokenizer`` would give "ĠĠ", "Ġ5" here."""
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tiny)
    assert loaded.convert_ids_to_tokens(loaded("   5")["input_ids"]) == ["ĠĠ", "Ġ", "5"]
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (2, 1, 2)
    assert loaded.chat_template == TEMPLATE
    assert loaded.model_max_length == CONTEXT


def test_mlx_lm_loads_the_folder(tiny):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm import load

    model, _, config = load(str(tiny), return_config=True)
    logits = model(mx.array([[1, 5, 9, 2]]))
    assert logits.shape == (1, 4, len(TOKENS))
    assert bool(mx.isfinite(logits).all())
    assert config["model_type"] == "llama"


TRICKY = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "in 1984, 3.14": [254, 216, 33, 41, 40, 36, 28, 216, 35, 30, 33, 36],
    "naïve café": [3546, 46494, 37366],
    "def f(x):\n\treturn  x**2   # ok\n": [
        *(1604, 275, 24, 104, 727, 198, 197, 5406, 216, 1792, 828, 34, 256, 907, 10907, 198),
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
}


@pytest.mark.model
def test_the_real_tokenizer_gives_known_tokens(sample):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sample)
    assert {text: tokenizer(text)["input_ids"] for text in TRICKY} == TRICKY
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_every_held_out_text_fills_the_usual_contexts(sample):
    """Or a codec would be judged there by fewer kinds of text than we say."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sample)
    order = CalibrationOrder(presets=(), contexts=())
    needed = max(int(x) for x in USUAL_CONTEXTS.split(",")) + order.num_scored
    short = {x.name for x in held_out_texts() if len(tokenizer.tokenize(x.content)) < needed}
    assert not short
