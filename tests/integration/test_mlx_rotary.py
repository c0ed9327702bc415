"""Rotary embeddings of every class that mlx_lm has, read off by what they do."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from engines.mlx_worker.instrument import MlxInstrument
from engines.mlx_worker.layout import probe
from engines.mlx_worker.rotary import ropes_of
from kvstore.codecs.pieces.rope import Rope
from tests.integration.tiny_models import tiny_model

pytestmark = pytest.mark.mlx

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model_with(rope) -> SimpleNamespace:
    return SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(rope=rope))])


def frequencies(base: float, dims: int) -> list[float]:
    return [base ** (-2 * i / dims) for i in range(dims // 2)]


def test_halves() -> None:
    (rope,) = ropes_of(model_with(nn.RoPE(64, traditional=False, base=1e4)), [64])
    assert rope is not None and not rope.interleaved
    assert rope.frequencies == pytest.approx(frequencies(1e4, 64), rel=1e-4)


def test_interleaved() -> None:
    (rope,) = ropes_of(model_with(nn.RoPE(64, traditional=True, base=5e5)), [64])
    assert rope is not None and rope.interleaved
    assert rope.frequencies == pytest.approx(frequencies(5e5, 64), rel=1e-3)


def test_a_part_of_the_channels() -> None:
    (rope,) = ropes_of(model_with(nn.RoPE(32, traditional=False, base=1e4)), [128])
    assert rope is not None and rope.num_channels == 32


def test_linear_scaling() -> None:
    (rope,) = ropes_of(model_with(nn.RoPE(64, traditional=False, base=1e4, scale=0.25)), [64])
    assert rope is not None
    assert rope.frequencies == pytest.approx([x / 4 for x in frequencies(1e4, 64)], rel=1e-3)


def test_llama_3_slows_only_what_is_slow() -> None:
    module = initialize_rope(64, 5e5, False, LLAMA3, 131072)
    (rope,) = ropes_of(model_with(module), [64])
    assert rope is not None
    plain = frequencies(5e5, 64)
    assert rope.frequencies[0] == pytest.approx(plain[0], rel=1e-3)
    assert rope.frequencies[-1] == pytest.approx(plain[-1] / 8, rel=1e-2)


def test_yarn_also_scales_and_is_refused() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    module = initialize_rope(64, 1e4, False, scaling, 16384)
    with pytest.raises(ValueError, match="not understood"):
        ropes_of(model_with(module), [64])


def test_a_model_whose_rotary_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="not to be found"):
        ropes_of(model_with(None), [64])


def test_keys_of_one_token_are_equal_once_they_are_turned_back() -> None:
    """The first layer's keys depend on the token and its position only."""
    loaded = tiny_model("llama")
    instrument = MlxInstrument(loaded, probe(loaded.model))
    keys = instrument.prefill([17] * 300)[0][0]
    rope = instrument.ropes[0]
    assert rope is not None
    plain = np.stack([_back(keys[:, i], rope, i) for i in range(300)])
    assert np.abs(plain - plain[0]).max() < 1e-3 * np.abs(plain).max()
    assert np.abs(keys - keys[:, :1]).max() > 0.1 * np.abs(keys).max()


def _back(row: np.ndarray, rope: Rope, position: int) -> np.ndarray:
    angles = position * np.array(rope.frequencies)
    first, second = np.split(row, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
