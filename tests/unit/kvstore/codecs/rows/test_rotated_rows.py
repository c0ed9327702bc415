from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs import floats
from kvstore.codecs.rows.rotated_rows import RotatedRows
from tests.unit.kvstore.codecs.samples import uneven


def bf16(values):
    return floats.narrow(np.asarray(values, np.float32), "float32")


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


def test_scales_are_recognised():
    rows = RotatedRows(3)
    _, scales = rows.pack(bf16(uneven((100, 64))))
    assert rows.are_scales(scales)
    for bad in (0x8000, 0x0001, 0x7C00, 0xFFFF):
        assert not rows.are_scales(np.r_[scales, np.uint16(bad)])
