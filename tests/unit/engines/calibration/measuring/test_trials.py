"""How often a state sleeps before it is judged, by an instrument whose state can be looked into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from engines.calibration.instrument import NOTHING, HeldSession
from engines.calibration.measuring.stopwatch import Stopwatch
from engines.calibration.measuring.trials import (
    SLEEPS,
    TURN_TOKENS,
    Trials,
    least_context,
)
from kvstore.blobs.state_tree import MatrixArray
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import KVLayer, KVLayout, StateLayout
from kvstore.store.blob_reader import BATCH
from tests.unit.engines.calibration.test_learn import Blind

RAW = codec_by_name("raw")


class Adding(Blind):
    """Adds every token to all values of its state, so a codec's loss stays in it."""

    layout = KVLayout("float32", ())
    ropes = ()
    sees_states = True
    states: StateLayout | None = StateLayout(has_matrices=True)

    def __init__(self, state_step: int = 1) -> None:
        self.state_step = state_step
        self.went_on_from: list[int] = []

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        first = np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8)
        self.went_on_from.append(past.num_tokens)
        if past.num_tokens:
            first = past.state.array
        end = len(tokens) // self.state_step * self.state_step
        added = tokens[past.num_tokens : end]
        state = MatrixArray("float32", first + np.float32(sum(added)))
        return HeldSession((), end, state)


def test_errors_of_all_sleeps_are_in_the_judged_session() -> None:
    instrument, tokens = Adding(), [1] * 200
    how = Trials(instrument, 1)
    exact = how.exact(tokens)
    before = 200 - (SLEEPS - 1) * TURN_TOKENS
    assert instrument.went_on_from == [0, before]
    codec = SessionCodec(RAW, None, matrix_codec("state4"))
    trip = how.trip(codec, exact)
    turns = [before + i * TURN_TOKENS for i in range(SLEEPS - 1)]
    assert instrument.went_on_from[2:] == turns

    once = codec.matrices
    array = np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8) + np.float32(before)
    for number in range(SLEEPS):
        payload = memoryview(once.encode(array, "float32"))
        array = once.decode(payload, "float32", array.shape)
        if number < SLEEPS - 1:
            array = array + np.float32(TURN_TOKENS)
    np.testing.assert_array_equal(trip.session.state.array, array)
    assert trip.nbytes < 400 and trip.num_elements == 16


def test_states_that_exist_only_after_blocks_sleep_as_often_as_there_is_room() -> None:
    for num_tokens, sleeps in [(300, [160, 192, 224]), (70, [32])]:
        instrument = Adding(state_step=32)
        how = Trials(instrument, 1)
        whole = num_tokens // 32 * 32
        first = whole - len(sleeps) * 32
        exact = how.exact([1] * num_tokens)
        assert exact.session.num_tokens == whole and instrument.went_on_from == [0, first]
        how.trip(SessionCodec(RAW, None, matrix_codec("state4")), exact)
        assert instrument.went_on_from[2:] == list(range(first, whole, 32))


def test_in_the_least_context_a_state_sleeps_as_often_as_it_is_judged_by() -> None:
    step = 32
    least = least_context(Adding.states, step)
    for num_tokens, sleeps in [(least, SLEEPS), (least - step, SLEEPS - 1)]:
        instrument = Adding(step)
        how = Trials(instrument, 1)
        exact = how.exact([1] * num_tokens)
        how.trip(SessionCodec(RAW, None, matrix_codec("state4")), exact)
        assert 1 + len(instrument.went_on_from[2:]) == sleeps
    assert least_context(StateLayout(), step) == least_context(None, step) == step


def test_an_exact_codec_changes_nothing() -> None:
    instrument, tokens = Adding(), [1] * 20
    how = Trials(instrument, 1)
    exact = how.exact(tokens)
    trip = how.trip(SessionCodec(RAW, None, matrix_codec("")), exact)
    np.testing.assert_array_equal(trip.session.state.array, exact.session.state.array)
    assert len(instrument.went_on_from) == 2


class Counting(Adding):
    """Its KV is the tokens themselves."""

    layout = KVLayout("float32", (KVLayer(1, 1, 1),))
    states = None

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        rows = np.array(tokens, np.float32)[None, :, None]
        return HeldSession([(rows, rows)], len(tokens))


def test_the_turns_of_users_are_no_part_of_a_prefills_time() -> None:
    times = iter([0.0, 4.0])
    instrument = Counting()
    stopwatch = partial(Stopwatch, lambda: next(times), dict)
    trials = Trials(instrument, stopwatch=stopwatch)
    computed = instrument.prefill

    def beside_a_user(tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        instrument.waited_s += 3.0
        return computed(tokens, past)

    instrument.prefill = beside_a_user  # type: ignore[method-assign]
    assert trials.exact(list(range(500))).prefill == (2.0, 0.75)


def test_rows_are_unpacked_in_batches_as_a_store_does() -> None:
    """Chunk by chunk a codec takes up to twice as long."""

    class Noted:
        def __init__(self) -> None:
            self.num_chunks: list[int] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(RAW, name)

        def decode_chunks(self, payloads: Sequence[memoryview], *where: Any) -> None:
            self.num_chunks.append(len(payloads))
            RAW.decode_chunks(payloads, *where)  # type: ignore[attr-defined]

    codec, trials = Noted(), Trials(Counting(), 1)
    exact = trials.exact(list(range(20 * CHUNK_TOKENS + 5)))
    trip = trials.trip(codec, exact)  # type: ignore[arg-type]
    assert codec.num_chunks == [BATCH - 1, BATCH, 20 - 2 * BATCH]  # others come alone
    ((keys, _),) = trip.session.run
    assert keys[0, :, 0].tolist() == list(exact.tokens)
