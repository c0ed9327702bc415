from __future__ import annotations

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kv_budget import HOT_CODECS
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import RowKind, RowPacker
from engines.mlx_worker.cache.packed_model import agrees, choose_packer
from kvstore.codecs import floats
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_codec import packed_codec
from kvstore.codecs.rows.packed_layout import PackedLayout
from tests.pairs import in_pairs
from tests.unit.kvstore.codecs.rows.test_golden import GOLDEN, NUM_TOKENS, digest, frozen_run

pytestmark = pytest.mark.mlx

DIMS = (16, 80, 128)
STORED = ["bfloat16", "float16"]
WAYS = {
    "fused": MlxRowPacker,
    "plain": lambda kind: MlxRowPacker(kind, butterflies="plain"),
    "host": HostRowPacker,
}
HASHES = [x for x in GOLDEN if x[0] in HOT_CODECS and x[1] in (16, 64, 256)]
FROZEN = [(way, *x) for way, x in zip(itertools.cycle(WAYS), HASHES, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "stored", "num_bits", "dim"), in_pairs(WAYS, STORED, (3, 4), DIMS))
def test_bytes_are_the_definitions(way, stored, num_bits, dim):
    assert agrees(WAYS[way](RowKind(num_bits, dim, stored)))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name", "dim"), FROZEN)
def test_a_payload_of_rows_packed_here_has_the_frozen_hash(way, name, dim):
    rows = WAYS[way](RowKind(HOT_CODECS[name], dim, "bfloat16"))
    (pair,), plain = frozen_run(dim)
    layout = PackedLayout(dtype=plain.dtype, layers=plain.layers, num_bits=rows.kind.num_bits)
    run = layout.empty(NUM_TOKENS)
    for source, target in zip(pair, run[0], strict=True):
        target[...] = source
        codes, scales = rows.pack(mx.array(source[:, 4:]).view(mx.bfloat16))
        target.codes[:, 4:], target.scales[:, 4:] = np.array(codes), np.array(scales)
    payload = packed_codec(codec_by_name(name), layout).encode(run, layout, 0)
    assert digest(payload) == GOLDEN[name, dim][0]


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


@pytest.mark.parametrize("way", WAYS)
def test_any_leading_axes(way):
    rows: RowPacker = WAYS[way](RowKind(3, 64, "bfloat16"))
    flat = mx.random.normal((24, 64)).astype(mx.bfloat16)
    codes, scales = rows.pack(flat.reshape(2, 3, 4, 64))
    assert codes.shape == (2, 3, 4, 24)
    assert scales.shape == (2, 3, 4)
    unpacked = rows.unpack(codes, scales)
    flat_unpacked = rows.unpack(*rows.pack(flat))
    assert mx.array_equal(unpacked.reshape(24, 64), flat_unpacked)


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
