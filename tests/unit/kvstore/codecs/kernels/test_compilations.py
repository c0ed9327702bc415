"""What is compiled, when, and what is said of it."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

pytest.importorskip("numba")


from kvstore.codecs.loops import numba_functions
from kvstore.codecs.loops.compiled import COMPILATIONS, Compilations
from kvstore.codecs.loops.numba_functions import compiled, places_of
from kvstore.codecs.presets import codec_by_name, warm
from kvstore.workers import in_background
from tests.unit.kvstore.codecs.fixed_rate.integer_models import codec_of, layout_with, rope_of
from tests.unit.kvstore.codecs.one_step.step_models import codec_of as learned_codec
from tests.unit.kvstore.codecs.one_step.step_models import parts_of, profile_of
from tests.unit.kvstore.codecs.samples import run_of


@pytest.fixture
def counted(monkeypatch):
    own = Compilations(silence_s=60)
    monkeypatch.setattr(numba_functions, "COMPILATIONS", own)
    return own


def fresh(number):
    """A function that no cache has: a constant is part of numba's key."""
    nonce = time.time_ns() + number

    def add(values):
        values[0] += nonce

    return compiled("void", add, "i8:1")


def test_a_function_is_compiled_when_it_is_first_called(counted):
    one, other = fresh(1), fresh(2)
    assert set(counted.as_counters().values()) == {0}
    for _ in range(2):
        one(np.zeros(1, np.int64))
    found = counted.as_counters()
    assert found["compilations"] == 1 and found["compilation_ms"] > 0
    other.prepare()
    assert counted.as_counters()["compilations"] == 2


def test_what_a_cache_has_is_not_counted(counted):
    def double(values):
        values[0] *= 2

    for _ in range(2):
        compiled("void", double, "i8:1").prepare()
    assert counted.as_counters()["compilations"] <= 1


def test_compilations_for_which_no_request_waits_are_counted_apart(counted):
    fresh(3).prepare()
    with in_background():
        fresh(4).prepare()
    found = counted.as_counters()
    assert (found["compilations"], found["background_compilations"]) == (2, 1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), EOFError()])
def test_a_cache_that_fails_ends_no_call_and_leaves_nothing(monkeypatch, caplog, error):
    flushed = []

    def full(*arguments):
        raise error

    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)
    monkeypatch.setattr("numba.core.caching.Cache.flush", lambda cache: flushed.append(cache))
    values = np.zeros(1, np.int64)
    fresh(5)(values)
    assert values[0] and "cannot be kept" in caplog.text
    assert len(flushed) == 1  # or the next start would take an older release's code for it


def test_long_compilations_are_said_once(caplog):
    impatient = Compilations(silence_s=0)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            with impatient.look(name, "/folder"):
                deadline = time.monotonic() + 30
                while not caplog.records and time.monotonic() < deadline:
                    time.sleep(0.001)
    assert [x.args for x in caplog.records] == [("first", " (kept in /folder)")]


def test_what_comes_before_a_compilation_counts_as_silence(caplog):
    own = Compilations(silence_s=1e6)
    with own.wait():
        pass
    assert own.waited_s > 0 and own.seconds == 0
    with own.look("one") as cached:
        cached.append(True)
    assert not caplog.records and own.as_counters()["compilations"] == 0


LAYOUT = layout_with((64, 64), (64, 64))
ROPE = rope_of(64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: codec_by_name("tq3"),
        lambda: codec_of(LAYOUT, ROPE),
        lambda: learned_codec(parts_of(profile_of(LAYOUT, ROPE))),
    ],
    ids=["tq3", "dense3", "max"],
)
def test_after_a_warm_up_nothing_is_compiled(make):
    codec = make()
    warm(codec, LAYOUT)
    before = COMPILATIONS.num_functions
    for num_tokens, first_token in ((1, 0), (32, 0), (128, 4096), (300, 7)):
        run = run_of(LAYOUT, num_tokens)
        for array in (x for pair in run for x in pair):
            array[:, -1] = 0x7F80  # infinite: no kernel packs such a row
        payload = codec.encode(run, LAYOUT, first_token)
        codec.decode(memoryview(payload), LAYOUT, first_token, LAYOUT.empty(num_tokens))
    assert COMPILATIONS.num_functions == before


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_places_of_arrays_are_read_from_the_arrays(dtype):
    whole = np.zeros((4, 6, 8), dtype)
    arrays = [whole, whole[1:3, ::2], whole.swapaxes(0, 1), np.empty((0, 3, 2), dtype)]
    places = places_of(arrays, written=True)
    for place, array in zip(places, arrays, strict=True):
        assert place[:7].tolist() == [array.ctypes.data, *array.strides, *array.shape]


def test_arrays_of_a_subclass_are_places_too():
    array = np.zeros((1, 2, 3), np.uint16).view(np.recarray)
    assert places_of([array])[0, 0] == array.ctypes.data


def test_arrays_that_do_not_fit_are_refused():
    read_only = np.zeros((1, 2, 3), np.uint16)
    read_only.flags.writeable = False
    assert not places_of([read_only])[0, 7]
    with pytest.raises(ValueError, match="read only"):
        places_of([read_only], written=True)
    with pytest.raises(ValueError, match="axes"):
        places_of([np.zeros((2, 3), np.uint16)])
