from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import RowKind
from engines.mlx_worker.cache.packed_model import agrees, choose_packer
from kvstore.codecs import floats
from tests.pairs import in_pairs

pytestmark = pytest.mark.mlx

DIMS = (16, 80, 128)
STORED = ["bfloat16", "float16"]
WAYS = {
    "fused": MlxRowPacker,
    "plain": lambda kind: MlxRowPacker(kind, butterflies="plain"),
    "host": HostRowPacker,
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "stored", "num_bits", "dim"), in_pairs(WAYS, STORED, (3, 4), DIMS))
def test_bytes_are_the_definitions(way, stored, num_bits, dim):
    assert agrees(WAYS[way](RowKind(num_bits, dim, stored)))


@given(st.data())
def test_any_bit_patterns_give_the_definitions_bytes(data):
    kind = RowKind(data.draw(st.sampled_from([3, 4])), 64, data.draw(st.sampled_from(STORED)))
    words = st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64)
    stored = np.array(data.draw(st.lists(words, min_size=1, max_size=4)), np.uint16)
    codes, scales = kind.format.pack(floats.widen(stored, kind.stored))
    packed = MlxRowPacker(kind).pack(mx.array(stored).view(kind.dtype))
    got_codes, got_scales = (np.array(x) for x in packed)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_codes[scales != 0], codes[scales != 0])


def test_the_chosen_rows_are_proven_and_never_copied():
    rows = choose_packer(RowKind(3, 64, "bfloat16"))
    assert agrees(rows)
    assert copy.deepcopy(rows) is rows
    if mx.default_device().type == mx.DeviceType.cpu:
        assert isinstance(rows, HostRowPacker)


class Swapped(MlxRowPacker):
    """Correct, but for the order of two planes, as in a wrong kernel."""

    def pack(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        codes, scales = super().pack(rows)
        half = codes.shape[-1] // 3
        parts = (codes[..., half : 2 * half], codes[..., :half], codes[..., 2 * half :])
        return mx.concatenate(parts, axis=-1), scales


class Fused(MlxRowPacker):
    """Correct, but for one rounding, as from a fast-math compiler."""

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        return super().unpack(codes, scales) * 1.01


@pytest.mark.parametrize("wrong", [Swapped, Fused])
def test_wrong_bytes_are_noticed(wrong):
    assert not agrees(wrong(RowKind(3, 64, "bfloat16")))
