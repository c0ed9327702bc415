"""Arrays in a file without a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engines.calibration.footprint import Scratch
from kvstore.codecs.learning.samples import Samples, element_means
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=40)


@given(st.lists(arrays.arrays(st.sampled_from([np.uint16, np.float32]), SHAPES), max_size=5))
def test_kept_arrays_come_back(several: list[np.ndarray]) -> None:
    with Scratch(None) as scratch:
        kept = [scratch.keep(x) for x in several]
    for array, other in zip(several, kept, strict=True):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(array, other)


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        kept = scratch.keep(np.arange(100_000).reshape(100, 1000).T)
        assert not list(tmp_path.iterdir())
    assert kept[7, 5] == 5007 and not kept.flags.writeable


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kept_rows_teach_the_same(dtype: str) -> None:
    layout = model_layout(dtype)  # type: ignore[arg-type]
    texts = [model_run(layout, 300, seed=seed) for seed in range(2)]
    with Scratch(None) as scratch:
        kept = [scratch.keep_stored(x, layout.dtype) for x in texts]
    plain, stored = (Samples(layout, ropes_of(layout), x) for x in (texts, kept))
    np.testing.assert_array_equal(element_means(plain), element_means(stored))
    back = stored.as_engine_has(kept[0])
    assert back[0][0].dtype == layout.numpy_dtype
