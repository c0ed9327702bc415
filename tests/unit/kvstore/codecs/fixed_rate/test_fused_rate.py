"""The fixed rate in one pass gives the bytes of its pipeline, and survives the same inputs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.fixed_rate.fused_rate import FusedRate
from kvstore.codecs.stacks.fused import packing_later, proven_or_pipeline
from kvstore.shapes import Rope, slice_tokens
from tests.unit.kvstore.codecs.fixed_rate.integer_models import (
    GOLDEN,
    codec_of,
    is_fused,
    layout_with,
    pipelines_of,
    rope_of,
)
from tests.unit.kvstore.codecs.fused_checks import (
    assert_damage_does_the_same,
    assert_views_are_filled,
    raw,
    restored,
    same_as_pieces,
)
from tests.unit.kvstore.codecs.samples import frozen_rows, run_of

LAYOUT = layout_with((64, 64), (64, 64))


@functools.cache
def usual():
    """A codec that takes seconds to compile, so no collection of tests makes it."""
    return codec_of(LAYOUT, rope_of(64))


def assert_same(codec, run, layout, first_token):
    return same_as_pieces(codec, pipelines_of(codec), run, layout, first_token)


FUSED = [
    ([(64, 64)], rope_of(64)),
    ([(128, 128)], rope_of(64)),  # half of the channels are turned
    ([(80, 80), (80, 80)], None),
    ([(80, 80)], rope_of(80)),  # five vectors of channels for two halves
    ([(64, 64)], rope_of(48)),
    ([(96, 64), (96, 64)], rope_of(96)),  # two stacks
    ([(256, 256)], rope_of(256)),
    ([(64, 64), (64, 64)], Rope(rope_of(64).frequencies, side="values")),
    ([(512, 64)], Rope(rope_of(64).frequencies, side="values")),  # as latents have it
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("dims", "rope"), FUSED)
def test_kernels_give_the_bytes_of_the_pieces(dims, rope, dtype):
    layout = layout_with(*dims, dtype=dtype)
    codec = codec_of(layout, rope)
    assert is_fused(codec)
    for num_tokens in (5, 64, 130):
        assert_same(codec, run_of(layout, num_tokens, seed=num_tokens), layout, 77)


@pytest.mark.parametrize(
    ("num_tokens", "first_token"),
    [*zip([1, 2, 7, 8, 9, 63, 65, 127, 128], itertools.cycle([0, 3, 4096, 1]), strict=False)],
)
def test_every_length(num_tokens, first_token):
    assert_same(usual(), run_of(LAYOUT, num_tokens), LAYOUT, first_token)


def test_empty_and_tiny_rows():
    run = run_of(LAYOUT, 20)
    run[0][1][:, 5] = 0
    run[1][1][:, 6] = 1  # the smallest denormal
    assert_same(usual(), run, LAYOUT, 128)


def test_views_of_any_stride_are_read_and_filled():
    part = slice_tokens(run_of(LAYOUT, 300), 100, 228)
    payload = usual().encode(part, LAYOUT, 100)
    assert payload == usual().encode([(k.copy(), v.copy()) for k, v in part], LAYOUT, 100)
    assert_views_are_filled(usual(), pipelines_of(usual()), LAYOUT)


def test_rows_whose_values_lie_apart_go_through_the_pieces():
    run = run_of(LAYOUT, 20)
    apart = [(np.asfortranarray(k), np.asfortranarray(v)) for k, v in run]
    assert usual().encode(apart, LAYOUT, 9) == usual().encode(run, LAYOUT, 9)


@pytest.mark.parametrize(
    ("dims", "rope"),
    [((72, 72), None), ((64, 64), Rope((1.0,) * 32, True)), ((64, 64), rope_of(24))],
)
def test_layouts_that_kernels_cannot_do_stay_with_the_pieces(dims, rope):
    layout = layout_with(dims)
    codec = codec_of(layout, rope)
    assert not is_fused(codec)
    assert_same(codec, run_of(layout, 20), layout, 9)


def test_kernels_pack_latents_beside_keys_that_they_cannot_rotate():
    layout = layout_with((512, 64), heads=1)
    codec = codec_of(layout, Rope((1.0,) * 32, True, side="values"))
    assert [isinstance(x, FusedRate) for x in codec.assemble(layout)] == [True, False]
    assert_same(codec, run_of(layout, 20), layout, 9)


@given(st.data())
def test_damage_is_found_or_gives_other_values(data):
    assert_damage_does_the_same(data, usual(), pipelines_of(usual()), LAYOUT)


@pytest.mark.parametrize("dim", GOLDEN)
@pytest.mark.parametrize("with_kernels", [False, True])
def test_payload_and_restored_values_are_frozen(dim, with_kernels):
    layout = layout_with((dim, dim))
    codec = codec_of(layout, rope_of(dim))
    if not with_kernels:
        codec = pipelines_of(codec)
    rows = frozen_rows(2 * 70, dim).reshape(2, 70, dim)
    run = [(rows, rows[::-1].copy())]
    payload = codec.encode(run, layout, 0)
    out = restored(codec, payload, layout, 70, 0)
    digests = [hashlib.blake2b(x, digest_size=8).hexdigest() for x in (payload, b"".join(raw(out)))]
    assert tuple(digests) == GOLDEN[dim]


@pytest.mark.parametrize("value", [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F7F])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_are_no_numbers_are_kept_as_they_are(value, side):
    """Not a number, of either sign; infinite; too large to be squared. RoPE makes NaNs of some."""
    run = run_of(LAYOUT, 40)
    run[0][side][0, 20] = value
    out = assert_same(usual(), run, LAYOUT, 100)
    assert np.array_equal(out[0][side][0, 20], run[0][side][0, 20])
    assert not np.array_equal(out[0][side][0, 21], run[0][side][0, 21])


def test_kernels_that_are_wrong_give_way_to_the_pieces(caplog):
    (fused,) = usual().assemble(LAYOUT)
    assert proven_or_pipeline(fused, LAYOUT, run_of(LAYOUT, 70), "rates") is fused

    def almost(planes, num_tokens, *others):
        fused.restoring.unpack(planes, num_tokens - 1, *others)

    def fails(*arguments):
        raise TypeError("of the compiler")

    for unpack in (almost, fails):
        others = SimpleNamespace(**{**vars(fused.restoring), "unpack": unpack})
        wrong = dataclasses.replace(fused, restoring=others)
        assert proven_or_pipeline(wrong, LAYOUT, run_of(LAYOUT, 70), "rates") is fused.pipeline
        assert "the kernels of rates are wrong on this host" in caplog.text


def test_the_pieces_pack_until_packing_is_proven():
    waiting, run = [], run_of(LAYOUT, 70)
    with packing_later(waiting.append):
        (fused,) = codec_of(LAYOUT, rope_of(64)).assemble(LAYOUT)

    def refused(*arguments):
        raise AssertionError("it is not compiled yet")

    early = SimpleNamespace(**{**vars(fused.packing), "pack": refused})
    meanwhile = dataclasses.replace(fused, packing=early, packing_is_proven=fused.packing_is_proven)
    before = meanwhile.encode(run, 0, 9, LAYOUT.dtype)
    for call in waiting:
        call()
    with pytest.raises(AssertionError, match="not compiled"):
        meanwhile.encode(run, 0, 9, LAYOUT.dtype)
    assert fused.encode(run, 0, 9, LAYOUT.dtype) == before


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_that_pack_wrongly_go_on_restoring(caplog, fails):
    (fused,) = usual().assemble(LAYOUT)
    run = run_of(LAYOUT, 70)

    def almost(*arguments):
        if fails:
            raise RuntimeError("of the compiler")
        packed = fused.packing.pack(*arguments)
        arguments[-2][0] ^= 1  # planes
        return packed

    others = SimpleNamespace(**{**vars(fused.packing), "pack": almost})
    wrong = dataclasses.replace(fused, packing=others, packing_is_proven=threading.Event())
    assert proven_or_pipeline(wrong, LAYOUT, run, "rates") is wrong
    assert "the kernels of rates that pack" in caplog.text
    assert wrong.encode(run, 0, 9, LAYOUT.dtype) == fused.encode(run, 0, 9, LAYOUT.dtype)
