from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.rows.row_format import from_planes, from_stream, to_planes, to_stream


@pytest.mark.parametrize("num_bits", [3, 4])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_planes_come_back(num_bits, dim):
    codes = np.random.default_rng(0).integers(0, 1 << num_bits, (5, dim)).astype(np.uint8)
    packed = to_planes(codes, num_bits)
    assert packed.shape == (5, num_bits * dim // 8)
    assert np.array_equal(from_planes(packed, num_bits), codes)


def test_the_lowest_element_is_the_lowest_bit_of_its_plane():
    codes = np.zeros((1, 16), np.uint8)
    codes[0, 0], codes[0, 9] = 0b001, 0b110
    assert to_planes(codes, 3).tolist() == [[1, 0, 0, 2, 0, 2]]


def test_stream_comes_back():
    codes = np.random.default_rng(0).integers(0, 8, (5, 64)).astype(np.uint8)
    packed = to_stream(codes)
    assert packed.shape == (5, 24)
    assert np.array_equal(from_stream(packed), codes)


def test_eight_codes_are_a_little_endian_number():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 0]], np.uint8)
    number = sum(int(code) << 3 * i for i, code in enumerate(codes[0]))
    assert to_stream(codes).tobytes() == number.to_bytes(3, "little")
