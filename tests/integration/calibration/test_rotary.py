"""Rotary embeddings of every class that mlx_lm has, recognised by their output."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from engines.mlx_worker.model.ropes import rope_of
from tests.fields import fields

pytestmark = pytest.mark.mlx

LLAMA3 = fields(
    "rope_type=llama3 factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0",
    "original_max_position_embeddings=8192",
)


def layer_with(rope) -> SimpleNamespace:
    return SimpleNamespace(self_attn=SimpleNamespace(rope=rope))


def frequencies(base: float, dims: int) -> list[float]:
    return [base ** (-2 * i / dims) for i in range(dims // 2)]


def test_halves() -> None:
    rope = rope_of(layer_with(nn.RoPE(64, traditional=False, base=1e4)), 64)
    assert not rope.interleaved
    assert rope.frequencies == pytest.approx(frequencies(1e4, 64), rel=1e-4)


def test_interleaved() -> None:
    rope = rope_of(layer_with(nn.RoPE(64, traditional=True, base=5e5)), 64)
    assert rope.interleaved
    assert rope.frequencies == pytest.approx(frequencies(5e5, 64), rel=1e-3)


def test_a_part_of_the_channels() -> None:
    assert rope_of(layer_with(nn.RoPE(32, traditional=False, base=1e4)), 128).num_channels == 32


def test_linear_scaling() -> None:
    rope = rope_of(layer_with(nn.RoPE(64, traditional=False, base=1e4, scale=0.25)), 64)
    assert rope.frequencies == pytest.approx([x / 4 for x in frequencies(1e4, 64)], rel=1e-3)


def test_llama_3_slows_only_what_is_slow() -> None:
    module = initialize_rope(64, 5e5, False, LLAMA3, 131072)
    rope = rope_of(layer_with(module), 64)
    assert rope is not None
    plain = frequencies(5e5, 64)
    assert rope.frequencies[0] == pytest.approx(plain[0], rel=1e-3)
    assert rope.frequencies[-1] == pytest.approx(plain[-1] / 8, rel=1e-2)


def test_yarn_also_stretches() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    module = initialize_rope(64, 1e4, False, scaling, 16384)
    rope = rope_of(layer_with(module), 64)
    assert rope is not None
    plain = frequencies(1e4, 64)
    assert rope.frequencies[0] == pytest.approx(plain[0], rel=1e-3)
    assert rope.frequencies[-1] == pytest.approx(plain[-1] / 4, rel=1e-2)


def test_a_layer_whose_rotary_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="not to be found"):
        rope_of(layer_with(None), 64)
