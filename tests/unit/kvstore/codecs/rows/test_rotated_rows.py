from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs import floats
from kvstore.codecs.rows.rotated_rows import SMALLEST, RotatedRows
from kvstore.codecs.rows.row_format import PlainRows
from tests.unit.kvstore.codecs.samples import cosine, uneven

DIMS = [32, 64, 80, 96, 128, 256]


def restored(rows, values):
    packed, scales = rows.pack(values)
    return rows.unpack(packed, scales, values.shape[1])


def bf16(values):
    return floats.narrow(np.asarray(values, np.float32), "float32")


@pytest.mark.parametrize("dim", DIMS)
def test_uneven_channels_need_the_rotation(dim):
    values = bf16(uneven((2000, dim)))
    methods = (PlainRows(), RotatedRows(3), RotatedRows(4))
    plain, three, four = (cosine(values, restored(rows, values)) for rows in methods)
    assert three > 0.983
    assert four > 0.995
    assert 1 - plain > 2 * (1 - three)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_bits", [3, 4])
def test_length_is_kept(dim, num_bits):
    values = bf16(uneven((500, dim)))
    lengths = [np.linalg.norm(x, axis=1) for x in (values, restored(RotatedRows(num_bits), values))]
    # The scale has eleven bits.
    assert np.allclose(*lengths, rtol=2.0**-11)


def test_bytes_per_row():
    assert [RotatedRows(3).packed_nbytes(dim) + 2 for dim in (64, 128, 256)] == [26, 50, 98]
    assert [RotatedRows(4).packed_nbytes(dim) + 2 for dim in (64, 128, 256)] == [34, 66, 130]


@pytest.mark.parametrize("num_bits", [3, 4])
def test_packing_again_changes_next_to_nothing(num_bits):
    """Chunks are never packed again, but an engine may lose one and compute on restored rows."""
    rows, values = RotatedRows(num_bits), bf16(uneven((2000, 64)))
    packed, scales = rows.pack(values)
    packed_again, scales_again = rows.pack(bf16(rows.unpack(packed, scales, 64)))
    assert (packed == packed_again).all(axis=1).mean() > 0.999
    # bf16 has eight bits where a scale has eleven.
    assert np.abs(scales.astype(int) - scales_again.astype(int)).max() <= 2**3


@pytest.mark.parametrize(
    ("first", "others"),
    [
        *((x, x) for x in (0.0, -0.0, 1e-40, 1e-6, 1e5, 3e38)),
        (np.inf, 1),
        (np.nan, 1),
        (-np.nan, 0),
    ],
)
def test_rows_that_cannot_be_packed_have_scale_zero(first, others):
    values = np.stack([np.r_[first, np.full(63, others)], np.ones(64)]).astype(np.float32)
    _, scales = RotatedRows(3).pack(values)
    assert scales[0] == 0
    assert scales[1] != 0


def test_values_that_are_too_small_count_as_zero():
    values = uneven((200, 64))
    with_small = values.copy()
    with_small[:, ::3] = 0
    expected = RotatedRows(3).pack(with_small)
    for small in (1e-40, -1e-45, SMALLEST / 2, -0.0):
        with_small[:, ::3] = small
        for a, b in zip(RotatedRows(3).pack(with_small), expected, strict=True):
            assert np.array_equal(a, b)


def test_scales_are_recognised():
    rows = RotatedRows(3)
    _, scales = rows.pack(bf16(uneven((100, 64))))
    assert rows.are_scales(scales)
    for bad in (0x8000, 0x0001, 0x7C00, 0xFFFF):
        assert not rows.are_scales(np.r_[scales, np.uint16(bad)])
