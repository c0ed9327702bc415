from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvstore.codecs.literature.rabitq import Clusters
from kvstore.codecs.literature.stages.levels import SignHadamard
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import KEY, Scope, stack_shapes
from kvstore.codecs.stages.gain import HalfGain, NoGain
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayer, KVLayout, Rope
from tests.unit.kvstore.codecs.samples import layout_of, run_of, shape_of, uneven

LAYOUT = KVLayout("bfloat16", (KVLayer(2, 32, 16), KVLayer(3, 16, 16), KVLayer(2, 32, 16)))


def there_and_back(transform, stack, first_token=0):
    mapped, note = transform.forward(stack.copy(), first_token)
    assert len(note) == transform.note_nbytes(stack.shape[1])
    reader = Reader(memoryview(note))
    kept = transform.read(reader, stack.shape[1])
    reader.expect_end()
    return transform.backward(mapped, first_token, kept)


@pytest.mark.parametrize(
    ("scope", "widths"),
    [
        (Scope("head"), [32, 16]),
        (Scope("side"), [64, 32, 48]),
        (Scope("layer"), [96, 96]),
        (Scope("group", 2), [192, 96]),
        (Scope("group", 9), [288]),
    ],
)
def test_scopes_deal_every_element_out_once(scope, widths):
    shapes = stack_shapes(scope, LAYOUT)
    assert [shape.width for shape in shapes] == widths
    elements = np.concatenate([shape.elements.reshape(-1) for shape in shapes])
    assert sorted(elements) == list(range(LAYOUT.elements_per_token))
    for shape in shapes:
        assert shape.gain_groups[0].start == 0 and shape.gain_groups[-1].stop == shape.width


@pytest.mark.parametrize("scope", [Scope("head"), Scope("side"), Scope("layer"), Scope("group", 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gathered_rows_can_be_scattered(scope, dtype):
    layout = KVLayout(dtype, LAYOUT.layers)
    run, out = run_of(layout, 9), layout.empty(9)
    for shape in stack_shapes(scope, layout):
        shape.scatter(shape.gather(run, 2, dtype), out, 2, dtype)
    for (k, v), (k2, v2) in zip(run, out, strict=True):
        assert np.array_equal(k[:, 2:], k2[:, 2:]) and np.array_equal(v[:, 2:], v2[:, 2:])


@pytest.mark.parametrize("side", [UNSET, "values"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_frequencies", [8, 3])
def test_keys_turned_back_do_not_depend_on_their_position(interleaved, num_frequencies, side):
    rope = Rope(tuple(0.3**k for k in range(num_frequencies)), interleaved, side)
    layout = layout_of(16)
    (shape,) = stack_shapes(Scope("layer"), layout)
    turn = UnRope(shape, (rope,))
    still = np.broadcast_to(uneven((1, 1, shape.width)), (1, 50, shape.width)).copy()
    turned = turn.backward(still.copy(), 70, None)
    moved = np.abs(turned - still).max(axis=(0, 1)) > 1e-4
    own = np.array([(vector.side == KEY) == (side is UNSET) for vector in shape.units[0]])
    channels = np.arange(16) < rope.num_channels
    assert np.array_equal(moved, (own[:, None] & channels).reshape(-1))
    assert np.allclose(turn.forward(turned, 70)[0], still, atol=1e-4)


def test_turning_is_the_same_as_in_models():
    rope, shape = Rope((0.5, 0.25)), shape_of(16, 1)
    stack = np.zeros((2, 1, 16), np.float32)
    stack[:, 0, 0] = 1
    key, value = UnRope(shape, (rope,)).backward(stack, 3, None)
    assert key[0, [0, 2]] == pytest.approx([np.cos(1.5), np.sin(1.5)])
    assert value[0, 0] == 1


@pytest.mark.parametrize("clusters", [1, 3, 64])
def test_transforms_come_back(clusters):
    stack, shape = uneven((4, 30, 32)), shape_of(32)
    for transform in (SignHadamard(shape), Clusters(shape, clusters)):
        assert np.allclose(there_and_back(transform, stack), stack, atol=1e-3)


def test_a_damaged_centroid_is_a_finite_one():
    clusters = Clusters(shape_of(32), 2)
    note = np.full(clusters.note_nbytes(5) // 2, np.nan, "<f2").tobytes()
    centroids, _ = clusters.read(Reader(memoryview(note)), 5)
    assert np.isfinite(centroids).all()


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.integers(1, 140), st.integers(0, 99))
def test_planes_of_any_bits_come_back(bits, num_tokens, seed):
    widths = np.array([bits, bits[::-1]])
    coder = BitPlanes(widths)
    limits = (1 << widths)[:, None]
    draws = np.random.default_rng(seed).random((2, num_tokens, len(bits)))
    codes = (draws * limits).astype(np.uint8)
    packed = coder.write(codes)
    assert len(packed) == coder.nbytes(num_tokens) == widths.sum() * -(-num_tokens // 8)
    assert np.array_equal(coder.read(Reader(memoryview(packed)), num_tokens), codes)


def test_the_lowest_token_is_the_lowest_bit_of_a_plane():
    codes = np.zeros((1, 9, 2), np.uint8)
    codes[0, 0, 1], codes[0, 8, 1] = 0b10, 0b01
    assert BitPlanes(np.array([[1, 2]])).write(codes) == bytes([0, 0, 0, 1, 1, 0])


def test_gains_beyond_fp16_are_refused_and_damaged_ones_noticed():
    shape = shape_of(16)
    gain = HalfGain(shape)
    stack = np.ones((4, 3, 16), np.float32)
    stack[1, 2], stack[2, 0], stack[3, 1] = 1e6, 1e-7, 0
    gains, kept = gain.measure(stack)
    assert np.argwhere(kept).tolist() == [[1, 2, 0], [2, 0, 0]]
    assert gains[3, 1] == 0
    with pytest.raises(Corrupt):
        gain.read(Reader(memoryview(np.full(12, np.inf, "<f2").tobytes())), 3)


def test_without_a_gain_only_values_that_are_no_number_are_kept():
    gain = NoGain(shape_of(16))
    stack = np.ones((4, 3, 16), np.float32)
    stack[1, 2, 5] = -np.inf
    gains, kept = gain.measure(stack)
    assert np.argwhere(kept).tolist() == [[1, 2, 0]] and (gains == 1).all()
    assert gain.write(gains) == b"" and gain.read(Reader(memoryview(b"")), 3).shape == (4, 3, 1)
