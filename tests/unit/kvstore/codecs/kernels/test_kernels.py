"""Kernels against the definition in numpy: every byte, every dtype, awkward rows and strides."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from kvstore.codecs.floats import from_stored, narrow
from kvstore.codecs.rows.backend import ReferenceKernel, agree, best_kernel, reference_kernel
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.rotation import sign_masks
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.codecs.rows.row_format import PlainRows
from tests.unit.kvstore.codecs.samples import layout_of, uneven

pytest.importorskip("numba", reason="without numba there are no kernels")

SHAPES = [
    *((3, dim, "bfloat16") for dim in (16, 64, 80, 128, 256)),
    *((3, dim, "float32") for dim in (32, 64)),
    (3, 64, "float16"),
    *((bits, 64, "bfloat16") for bits in (1, 4, 8)),
]
# Compiling takes seconds each where numba's cache is empty.
RARE_SHAPES = [
    *((3, dim, "bfloat16") for dim in (32, 96, 112, 160, 192, 224, 576)),
    *((3, dim, "float32") for dim in (16, 80, 128, 256)),
    *((4, dim, "float32") for dim in (64, 128)),
    *((bits, dim, "bfloat16") for bits, dim in ((4, 128), (4, 256), (3, 512), (4, 1024))),
    *((4, dim, "float16") for dim in (16, 96, 128, 256)),
    *((bits, 128, "bfloat16") for bits in (1, 2, 5, 6, 7, 8)),
    *((bits, 64, "bfloat16") for bits in (2, 5, 6, 7)),
    *((bits, 80, "float32") for bits in (1, 2, 5, 8)),
]
SHAPES += [pytest.param(*x, marks=[pytest.mark.slow, pytest.mark.thorough]) for x in RARE_SHAPES]


def awkward(dim, dtype, num_tokens=150):
    """(4, num_tokens, dim): a head of ordinary rows, the others of all that can go wrong."""
    values = uneven((4, num_tokens, dim), seed=dim)
    values[1, ::3] *= 1e-5  # scales on both sides of fp16's range
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


def plan_for(rows, dim, dtype, source, num_layers=1):
    layout = layout_of(dim, dtype, num_layers, num_heads=source.shape[0])
    return plan_payload(rows, layout, source.shape[1], 1000)


def pack_with(kernel, source, plan):
    """Every array of the payload is ``source``, every other one with its heads reversed."""
    payload = np.zeros(plan.nbytes, np.uint8)
    sources = [source, source[::-1]] * (len(plan.slots) // 2)
    kernel.pack(sources, payload, plan.groups[0])
    # The packed bytes of a row without a scale mean nothing; ``RowCodec`` clears them.
    for slot in plan.slots:
        slot.packed(payload)[slot.scales(payload) == 0] = 0
    return payload


def unpack_with(kernel, payload, plan, like):
    outs = [np.zeros(like.shape, like.dtype) for _ in plan.slots]
    kernel.unpack([payload], plan.groups[0], outs)
    return b"".join(out.tobytes() for out in outs)


def assert_same(num_bits, dim, dtype, source, num_layers=1):
    rows = RotatedRows(num_bits)
    kernel, reference = best_kernel(rows, dim, dtype), ReferenceKernel(rows, dtype)
    assert not isinstance(kernel, ReferenceKernel)
    plan = plan_for(rows, dim, dtype, source, num_layers)
    payload = pack_with(kernel, source, plan)
    assert np.array_equal(payload, pack_with(reference, source, plan))
    expected = unpack_with(reference, payload, plan, source)
    assert unpack_with(kernel, payload, plan, source) == expected


@pytest.mark.parametrize(("num_bits", "dim", "dtype"), SHAPES)
def test_same_bytes_as_numpy(num_bits, dim, dtype):
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
    kernel, plan = (
        best_kernel(RotatedRows(3), 64, dtype),
        plan_for(RotatedRows(3), 64, dtype, source),
    )
    payload = pack_with(kernel, source, plan)
    outs = [strided(np.zeros(source.shape, source.dtype), how) for _ in range(2)]
    kernel.unpack([payload], plan.groups[0], outs)
    expected = unpack_with(kernel, payload, plan, source)
    assert b"".join(out.tobytes() for out in outs) == expected


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_any_number_of_arrays(num_layers):
    assert_same(3, 64, "float32", awkward(64, "float32", 10), num_layers)


def test_scattered_values_are_refused():
    scattered = np.zeros((2, 8, 128), np.float32)[:, :, ::2]
    rows = RotatedRows(3)
    kernel, plan = best_kernel(rows, 64, "float32"), plan_for(rows, 64, "float32", scattered)
    payload = np.zeros(plan.nbytes, np.uint8)
    with pytest.raises(ValueError, match="side by side"):
        kernel.pack((scattered, scattered), payload, plan.groups[0])
    with pytest.raises(ValueError, match="side by side"):
        kernel.unpack([payload], plan.groups[0], (scattered, scattered))


@pytest.mark.parametrize("dim", [64, 576])  # with 576, the largest sums need more than 16 bits
def test_random_scales_and_planes_unpack_alike(dim):
    """Not only packed rows: bits as they come from a damaged disk, were they let through."""
    rows, like = RotatedRows(3), np.zeros((2, 500, dim), np.uint16)
    plan = plan_for(rows, dim, "bfloat16", like)
    payload = np.random.default_rng(0).integers(0, 256, plan.nbytes, np.uint8)
    for slot in plan.slots:
        slot.scales(payload)[:] = slot.scales(payload) % 0x7C00
        largest, signs = slot.packed(payload)[..., :2, :], 2 * dim // 8
        largest[..., :signs] = 0xFF  # one level everywhere: its sums are all in one place
        largest[..., 0, signs:], largest[..., 1, signs:] = 0, 0xFF
    kernel = best_kernel(rows, dim, "bfloat16")
    assert not isinstance(kernel, ReferenceKernel)
    got = unpack_with(kernel, payload, plan, like)
    assert got == unpack_with(ReferenceKernel(rows, "bfloat16"), payload, plan, like)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_values_count_for_nothing(dtype):
    """Even where everything else cancels out, a small value does not decide about signs."""
    rows, payloads = RotatedRows(3), set()
    kernel, reference = best_kernel(rows, 64, dtype), ReferenceKernel(rows, dtype)
    for small in (0x0000, 0x1FFF, 0x2000, 0x9FFF, 0xA000):  # 0x2000 is 2^-63
        stored = np.zeros((1, 1, 64), np.uint16)
        stored[0, 0, :32] = (sign_masks(64)[:32] >> 16) | 0x3F80
        stored[0, 0, 40] = small
        source = from_stored(stored, dtype)
        plan = plan_for(rows, 64, dtype, source)
        payloads.add(pack_with(kernel, source, plan).tobytes())
        payloads.add(pack_with(reference, source, plan).tobytes())
    assert len(payloads) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_whole_payloads_are_the_same(dtype):
    """Rows that are kept as they are included: the kernels' remains of them are cleared."""
    key = awkward(64, dtype)
    run, layout = [(key, key[::-1])], layout_of(64, dtype, num_heads=4)
    codecs = [RowCodec("tq3.2", RotatedRows(3), b) for b in (best_kernel, reference_kernel)]
    fast, plain = (codec.encode(run, layout, 2) for codec in codecs)
    assert fast == plain


def test_threads_that_flush_denormals_get_the_same_bytes():
    """Libraries built with -ffast-math switch that on for every thread started after them."""
    flushing = pytest.importorskip(
        "tests.unit.kvstore.codecs.kernels.flushing", exc_type=ImportError
    )
    source, results = awkward(64, "float32"), []
    rows = RotatedRows(3)
    plan = plan_for(rows, 64, "float32", source)
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
        def unpack(self, payloads, group, outs):
            super().unpack(payloads, group, outs)
            outs[-1][-1, -1, -1] += 1

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


def test_numba_is_not_imported_before_packing():
    script = """
import sys
from kvstore.codecs.presets import codec_by_name
from tests.unit.kvstore.codecs.samples import layout_of
codec_by_name("tq3").packed_nbytes(layout_of(64), 128, 0)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
