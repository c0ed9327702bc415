"""Kernels against the definition in numpy: every byte, every dtype, awkward rows and strides."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvstore.codecs.backend import agree, best_kernel
from kvstore.codecs.floats import narrow
from kvstore.codecs.payload import plan_payload
from kvstore.codecs.plain_rows import PlainRows
from kvstore.codecs.reference import ReferenceKernel
from kvstore.codecs.rotated_rows import RotatedRows
from tests.unit.kvstore.codecs.samples import layout_of, uneven

pytest.importorskip("numba", reason="without numba there are no kernels")

SHAPES = [
    *((3, dim, "bfloat16") for dim in (16, 64, 80, 128, 256)),
    *((3, dim, "float32") for dim in (32, 64)),
    (3, 64, "float16"),
    (4, 64, "bfloat16"),
]
# Compiling takes seconds each where numba's cache is empty.
RARE_SHAPES = [
    *((3, dim, "bfloat16") for dim in (32, 96, 112, 160, 192, 224)),
    *((3, dim, "float32") for dim in (16, 80, 128, 256)),
    *((4, dim, "float32") for dim in (64, 128)),
    *((4, dim, "float16") for dim in (16, 96, 128, 256)),
]


def awkward(dim, dtype, num_tokens=150):
    """(4, num_tokens, dim): a head of ordinary rows, the others of all that can go wrong."""
    values = uneven((4, num_tokens, dim), seed=dim)
    values[1, ::3] *= 1e-5  # scales on both sides of what fp16 can hold
    values[1, 1::3] *= 3e4
    values[2, ::5] = 0
    values[2, 1::5, ::2] = -0.0
    values[2, 2::5, ::3] *= np.float32(1e-42)
    values[2, 3::5, 3] = 1e-45
    values[3, ::5, 3] = np.inf
    values[3, 1::5, dim - 1] = np.nan
    values[3, 2::5] *= np.float32(3e36)
    values[3, 3::5, 5] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        if dtype == "float16":
            return values.astype(np.float16)
        return values if dtype == "float32" else narrow(values, dtype)


def pack_with(kernel, source, plan):
    payload = np.zeros(plan.nbytes, np.uint8)
    kernel.pack(source, payload, plan.slots[0])
    # The packed bytes of a row without a scale mean nothing; ``RowCodec`` clears them.
    slot = plan.slots[0]
    slot.packed(payload)[slot.scales(payload) == 0] = 0
    return payload


def assert_same(num_bits, dim, dtype, source):
    rows, layout = RotatedRows(num_bits), layout_of(dim, dtype, num_heads=source.shape[0])
    kernel, reference = best_kernel(rows, dim, dtype), ReferenceKernel(rows, dtype)
    assert not isinstance(kernel, ReferenceKernel)
    plan = plan_payload(rows, layout, source.shape[1], 1000)
    payload = pack_with(kernel, source, plan)
    assert np.array_equal(payload, pack_with(reference, source, plan))
    outs = [np.zeros(source.shape, source.dtype) for _ in range(2)]
    for each, out in zip((kernel, reference), outs, strict=True):
        each.unpack(payload, plan.slots[0], out)
    assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.parametrize(("num_bits", "dim", "dtype"), SHAPES)
def test_same_bytes_as_numpy(num_bits, dim, dtype):
    assert_same(num_bits, dim, dtype, awkward(dim, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("num_bits", "dim", "dtype"), RARE_SHAPES)
def test_same_bytes_as_numpy_for_rare_shapes(num_bits, dim, dtype):
    assert_same(num_bits, dim, dtype, awkward(dim, dtype))


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 63, 64, 65, 129])
def test_any_number_of_rows(num_tokens):
    assert_same(3, 64, "float32", awkward(64, "float32", num_tokens))


def strided(values, how):
    if how == "window of a longer cache":
        room = np.zeros((values.shape[0], 400, values.shape[2]), values.dtype)
        room[:, 90 : 90 + values.shape[1]] = values
        return room[:, 90 : 90 + values.shape[1]]
    if how == "token by token":
        return np.ascontiguousarray(values.transpose(1, 0, 2)).transpose(1, 0, 2)
    if how == "backwards":
        return np.ascontiguousarray(values[::-1, ::-1])[::-1, ::-1]
    shifted = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    shifted[:] = values
    return shifted


@pytest.mark.parametrize(
    "how", ["window of a longer cache", "token by token", "backwards", "odd address"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_strides(how, dtype):
    source = strided(awkward(64, dtype), how)
    source.setflags(write=False)
    assert_same(3, 64, dtype, source)
    rows, layout = RotatedRows(3), layout_of(64, dtype, num_heads=4)
    kernel, plan = best_kernel(rows, 64, dtype), plan_payload(rows, layout, 150, 1000)
    payload = pack_with(kernel, source, plan)
    plain = np.empty(source.shape, source.dtype)
    out = strided(np.zeros(source.shape, source.dtype), how)
    kernel.unpack(payload, plan.slots[0], plain)
    kernel.unpack(payload, plan.slots[0], out)
    assert np.array_equal(plain.view(np.uint8), np.ascontiguousarray(out).view(np.uint8))


def test_scattered_values_are_refused():
    kernel = best_kernel(RotatedRows(3), 64, "float32")
    plan = plan_payload(RotatedRows(3), layout_of(64, "float32"), 8, 1000)
    payload, scattered = np.zeros(plan.nbytes, np.uint8), np.zeros((2, 8, 128), np.float32)
    with pytest.raises(ValueError, match="side by side"):
        kernel.pack(scattered[:, :, ::2], payload, plan.slots[0])
    with pytest.raises(ValueError, match="side by side"):
        kernel.unpack(payload, plan.slots[0], scattered[:, :, ::2])


def test_random_scales_and_planes_unpack_alike():
    rows, layout = RotatedRows(3), layout_of(64, "float16")
    plan = plan_payload(rows, layout, 500, 1000)
    payload = np.random.default_rng(0).integers(0, 256, plan.nbytes, np.uint8)
    outs = [layout.empty(500)[0][0] for _ in range(2)]
    best_kernel(rows, 64, "float16").unpack(payload, plan.slots[0], outs[0])
    with np.errstate(all="ignore"):
        ReferenceKernel(rows, "float16").unpack(payload, plan.slots[0], outs[1])
    sound = np.isfinite(outs[1])
    assert np.array_equal(outs[0][sound], outs[1][sound])


def test_threads_that_flush_denormals_get_the_same_bytes():
    """Libraries built with -ffast-math switch that on for every thread started after them."""
    flushing = pytest.importorskip("tests.unit.kvstore.codecs.flushing", exc_type=ImportError)
    source, results = awkward(64, "float32"), []
    rows = RotatedRows(3)
    plan = plan_payload(rows, layout_of(64, "float32", num_heads=4), 150, 1000)
    kernels = best_kernel(rows, 64, "float32"), ReferenceKernel(rows, "float32")

    def pack_all():
        flushing.set_flushing()
        assert np.float32(1e-40) * np.float32(1) == 0
        results.extend(pack_with(kernel, source, plan) for kernel in kernels)

    thread = threading.Thread(target=pack_all)
    thread.start()
    thread.join()
    assert np.array_equal(results[0], pack_with(kernels[0], source, plan))
    assert np.array_equal(results[1], results[0])


def test_a_kernel_that_is_wrong_is_found_out():
    class OffByOne(ReferenceKernel):
        def unpack(self, payload, slot, out):
            super().unpack(payload, slot, out)
            out[-1, -1, -1] += 1

    rows = RotatedRows(3)
    good, bad = ReferenceKernel(rows, "float32"), OffByOne(rows, "float32")
    assert agree(good, good, rows, 64, "float32")
    assert not agree(bad, good, rows, 64, "float32")


def test_dimensions_and_formats_without_a_kernel_use_numpy():
    for rows, dim in ((RotatedRows(3), 104), (PlainRows(), 64)):
        assert isinstance(best_kernel(rows, dim, "bfloat16"), ReferenceKernel)


def test_without_numba_everything_works_and_says_so_once():
    script = """
import logging, sys
sys.modules["numba"] = None
logging.basicConfig(level="INFO", stream=sys.stdout)
from kvstore.codecs.presets import codec_by_name, warm
from tests.unit.kvstore.codecs.samples import layout_of
for name in ("tq3", "tq4", "lm3"):
    warm(codec_by_name(name), layout_of(64))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("codecs run in numpy, slower") == 1


def test_nobody_imports_numba_before_packing():
    script = """
import sys
from kvstore.codecs.presets import codec_by_name
from tests.unit.kvstore.codecs.samples import layout_of
codec_by_name("tq3").packed_nbytes(layout_of(64), 128, 0)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
