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
YARN = fields("rope_type=yarn factor=4.0 original_max_position_embeddings=4096")


def layer_with(rope) -> SimpleNamespace:
    return SimpleNamespace(self_attn=SimpleNamespace(rope=rope))


def frequencies(base: float, dims: int) -> list[float]:
    return [base ** (-2 * i / dims) for i in range(dims // 2)]


@pytest.mark.parametrize(
    ("base", "interleaved", "scale"), [(1e4, False, 1.0), (5e5, True, 1.0), (1e4, False, 0.25)]
)
def test_plain_ropes(base, interleaved, scale) -> None:
    rope = rope_of(layer_with(nn.RoPE(64, traditional=interleaved, base=base, scale=scale)), 64)
    assert rope.interleaved == interleaved
    assert rope.frequencies == pytest.approx([x * scale for x in frequencies(base, 64)], rel=1e-3)


def test_a_part_of_the_channels() -> None:
    assert rope_of(layer_with(nn.RoPE(32, traditional=False, base=1e4)), 128).num_channels == 32


@pytest.mark.parametrize(("base", "scaling", "slower"), [(5e5, LLAMA3, 8), (1e4, YARN, 4)])
def test_only_what_is_slow_is_slowed(base, scaling, slower) -> None:
    rope = rope_of(layer_with(initialize_rope(64, base, False, scaling, 131072)), 64)
    plain = frequencies(base, 64)
    assert rope.frequencies[0] == pytest.approx(plain[0], rel=1e-3)
    assert rope.frequencies[-1] == pytest.approx(plain[-1] / slower, rel=1e-2)


def test_a_layer_whose_rotary_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="is not found"):
        rope_of(layer_with(None), 64)
