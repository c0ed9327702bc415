"""Methods made of a pair of functions."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

import thermocline
from kvstore.codecs.base import check_claim
from kvstore.codecs.floats import to_stored, widen
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.samples import uneven


def quantise(rows):
    scale = abs(rows).max(1, keepdims=True) / 7 + 1e-9
    return (rows / scale).round() + 7, scale.astype("float16")


def dequantise(codes, scale):
    return (codes - 7) * scale


METHOD = thermocline.simple(quantise, dequantise, bits=4, id="mine.1")


def test_rows_come_back_as_the_functions_make_them():
    rows = uneven((2, 20, 64))
    found = METHOD.restore(METHOD.pack(rows))
    stored = widen(to_stored(rows, "float32"), "float32")  # what a method sees of fp32
    expected = dequantise(*quantise(stored[:, 4:].reshape(-1, 64))).reshape(2, 16, 64)
    np.testing.assert_allclose(found[:, 4:], expected, rtol=1e-2)
    np.testing.assert_allclose(found[:, :4], stored[:, :4])  # first tokens
    assert METHOD.bits(KVLayout("bfloat16", (KVLayer(1, 64, 64),))) == 4 + 16 / 64
    again = METHOD.frombytes(METHOD.pack(rows).tobytes())
    assert np.array_equal(METHOD.restore(again), found)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_rows_of_16_bits(dtype):
    rows = uneven((2, 20, 64)).astype(np.float16)
    if dtype == np.uint16:
        rows = (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = METHOD.restore(METHOD.pack(rows))
    assert found.dtype == dtype and np.array_equal(found[:, :4], rows[:, :4])


@pytest.mark.parametrize("bits", [1, 3, 8, 11])
def test_codes_of_any_number_of_bits_come_back(bits):
    most = (1 << bits) - 1

    def to_codes(rows):
        return np.clip(np.round((rows + 4) / 8 * most), 0, most)

    method = thermocline.simple(to_codes, lambda codes: codes / most * 8 - 4, bits=bits)
    rows = np.random.default_rng(3).uniform(-4, 4, (1, 30, 8)).astype(np.float32)
    error = abs(method.restore(method.pack(rows)) - rows)[:, 4:].max()
    assert error <= 4 / most + 0.02
    payload = method.pack(rows).payload
    assert len(payload) == 4 * 8 * 2 + -(-26 * 8 * bits // 8)


def test_tensors():
    torch = pytest.importorskip("torch")

    def to_codes(rows):
        scale = rows.abs().amax(1, keepdim=True) / 7 + 1e-9
        return torch.round(rows / scale) + 7, scale

    method = thermocline.simple(to_codes, dequantise, bits=4, torch=True)
    rows = np.random.default_rng(3).uniform(-4, 4, (1, 30, 8)).astype(np.float32)
    assert abs(method.restore(method.pack(rows)) - rows).max() < 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, dequantise, 4), "quantise is 3; a function is wanted"),
        ((quantise, None, 4), "dequantise is None"),
        ((quantise, dequantise, 0), "1 to 16"),
        ((quantise, dequantise, "4"), "1 to 16"),
        ((quantise, dequantise, 2), "whole numbers from 0 to 3 are wanted, for bits=2"),
        ((lambda rows: rows, lambda codes: codes, 4), "whole numbers from 0 to 15"),
        ((lambda rows: np.zeros(7), lambda codes: codes, 4), "arrays of 3 rows are wanted"),
        ((quantise, lambda codes, scale: codes[:, :9], 4), r"\(3, 64\) are wanted"),
        ((quantise, lambda codes: codes, 4), r"given the 2 arrays that quantise returned"),
        ((lambda rows, more: rows, dequantise, 4), "given one array, the rows"),
    ],
)
def test_functions_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        thermocline.simple(*arguments[:2], bits=arguments[2])


def test_a_width_that_the_functions_refuse_is_one_that_the_method_cannot_pack():
    def even(rows):
        return quantise(rows.reshape(len(rows), 64))

    method = thermocline.simple(even, dequantise, bits=4)
    with pytest.raises(UnknownCodec, match="takes no vectors of 48 values"):
        method.codec.check(KVLayout("float32", (KVLayer(1, 48, 48),)))


def test_a_payload_that_was_cut_is_corrupt():
    layout = KVLayout("float16", (KVLayer(2, 64, 0),))
    rows = uneven((2, 20, 64)).astype(np.float16)
    run = [(rows, np.empty((2, 20, 0), np.float16))]
    payload = memoryview(METHOD.codec.encode(run, layout, 0)).cast("B")
    for wrong in (payload[:-1], memoryview(bytes(payload) + b"x")):
        with pytest.raises(Corrupt):
            METHOD.codec.decode(wrong, layout, 0, layout.empty(20))
    with pytest.raises(Corrupt):
        check_claim(METHOD.codec, layout, 1 << 40, 0, len(payload))


def test_it_is_registered_as_any_method_is():
    thermocline.register("mine", lambda: METHOD.codec)
    assert thermocline.codecs()["mine"].bits == 4.125
    rows = uneven((2, 20, 64))
    assert np.array_equal(
        thermocline.codec("mine").restore(thermocline.codec("mine").pack(rows)),
        METHOD.restore(METHOD.pack(rows)),
    )


def test_without_an_id_other_functions_have_another_one():
    def coarser(rows):
        scale = abs(rows).max(1, keepdims=True) / 6 + 1e-9
        return (rows / scale).round() + 7, scale.astype("float16")

    one = thermocline.simple(quantise, dequantise, bits=4)
    assert one.id == thermocline.simple(quantise, dequantise, bits=4).id != METHOD.id
    others = (
        thermocline.simple(coarser, dequantise, bits=4),
        thermocline.simple(quantise, dequantise, bits=5),
    )
    assert len({one.id, *(x.id for x in others)}) == 3 and len(one.id) <= 24
    assert thermocline.simple(functools.partial(quantise), dequantise, bits=4).id == one.id


@pytest.mark.parametrize("id", ["x" * 25, "mine 1", "naïve", "../up", 7, "tq3.1", "kivi.1-abc"])
def test_an_id_that_cannot_be_or_is_anothers_is_refused(id):
    with pytest.raises(ValueError, match="id="):
        thermocline.simple(quantise, dequantise, bits=4, id=id)


PROGRAM = """
import numpy as np, thermocline, helper
K, LEVELS, NAMES = 7, np.arange(16) - 7.0, {"b", "a", "c"}

def scaled(rows):
    return rows / K

def quantise(rows):
    steps = [(lambda x: x.round())(scaled(x) * helper.STEP + 7) for x in rows]
    def inner(x):
        return sum(y for y in (x, 0.0))
    return np.clip(inner(np.stack(steps)), 0, 15)

def dequantise(codes, _names=NAMES):
    return LEVELS[codes.astype(int)] * K / helper.STEP

print(thermocline.simple(quantise, dequantise, bits=4).id)
"""


def test_the_id_is_the_same_in_every_process_and_changes_with_the_values_used(tmp_path):
    changes = [("", ""), ("", ""), ("= 7, np", "= 3, np"), ("- 7.0", "- 6.5"), ("0.0)", "1.0)")]
    found = []
    for seed, (old, new) in enumerate([*changes, ("", "")]):
        (tmp_path / "helper.py").write_text(f"STEP = {1 if seed < len(changes) else 2}")
        program = PROGRAM.replace(old, new) if old else PROGRAM
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed + 1)}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        said = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
        found.append(said.stdout)
    assert found[0] == found[1] and len(set(found)) == len(found) - 1
