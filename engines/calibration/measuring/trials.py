"""Takes sessions out of an instrument, through a codec and back: of rows alone, or with states.

Prompts are prefilled first, each going on from the one before where both begin alike.

With states the whole session goes the way of a sleep and a wake: its rows as chunks, its state as a
snapshot, by the store's own functions. Rows are packed once in a session's life, but a recurrent
state that came back and went on is packed anew with the next sleep, and its errors are carried
along. So the state goes through the codec ``SLEEPS`` times, a short turn apart, before it is
judged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np

from engines.calibration.footprint import Scratch
from engines.calibration.instrument import HeldSession, Instrument, StatefulInstrument, states_of
from kvstore.blobs.format import HEADER_BYTES
from kvstore.blobs.state_packer import (
    pack_matrices,
    unpack_matrices,
    with_windows,
    without_windows,
)
from kvstore.blobs.state_tree import decode_state, encode_state, state_elements
from kvstore.codecs.base import Codec
from kvstore.codecs.rows import sinks
from kvstore.codecs.session_codec import SessionCodec
from kvstore.shapes import KVLayout, KVRun, StateLayout, slice_tokens, tokens_in
from kvstore.workers import default_threads, usable_cores

LEAST_SHARED = 256  # tokens; to compute fewer again is as quick as to put them back
SLEEPS: Final = 4
TURN_TOKENS: Final = 16  # between two of them
# Packs rows alone, or whole sessions of a model with states.
AnyCodec: TypeAlias = Codec | SessionCodec


class Prefixes:
    """Keeps the KV of the last prompt, and of no other."""

    def __init__(
        self,
        instrument: Instrument,
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``folder``: the KV rests in a file there (see ``Scratch``); None = in memory."""
        self._instrument = instrument
        self._folder = folder
        self._clock = clock
        self._tokens: Sequence[int] = ()
        self._run: KVRun = ()
        # Seconds that all tokens of the last prompt took; None if some were of another prompt.
        self._spent_s: float | None = None

    @property
    def prefill_s(self) -> float | None:
        """Seconds for 1,000 tokens of the last prompt that was prefilled; None if not known."""
        return None if self._spent_s is None else 1000 * self._spent_s / len(self._tokens)

    def run(self, tokens: Sequence[int]) -> KVRun:
        """The KV of ``tokens``, as ``Instrument.prefill`` returns it; must not be written to.

        Raises ``OSError`` if the disk of the folder is full.
        """
        shared = common_length(self._tokens, tokens)
        if shared < len(tokens):
            past = slice_tokens(self._run, 0, shared) if shared >= LEAST_SHARED else ()
            before = self._spent_before(shared) if past else 0.0
            began = self._clock()
            computed = self._instrument.prefill(tokens, past)
            took = self._clock() - began
            self._run = self._kept(computed)
            self._spent_s = None if before is None else before + took
            self._tokens = tuple(tokens)
        return slice_tokens(self._run, 0, len(tokens))

    def _kept(self, run: KVRun) -> KVRun:
        if self._folder is None:
            return run
        with Scratch(self._folder) as scratch:
            return [(scratch.keep(k), scratch.keep(v)) for k, v in run]

    def _spent_before(self, shared: int) -> float | None:
        """Seconds that the first tokens of the last prompt took; known of all of them only."""
        return self._spent_s if shared == len(self._tokens) else None


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class RoundTrip:
    """KV that was packed and unpacked, the size that it had in between, and the time back."""

    run: KVRun
    nbytes: int  # of all blobs, headers included
    num_elements: int
    restore_s: float  # of unpacking 1,000 tokens

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.num_elements


def round_trip(
    codec: Codec,
    run: KVRun,
    layout: KVLayout,
    chunk_tokens: int,
    *,
    start: int = 0,
    num_threads: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundTrip:
    """Pack and unpack ``run`` as a sleep and a wake would, the last, shorter chunk as well.

    Args:
        start: the position of its first token; of windows it may lie inside a chunk.
        num_threads: that unpack, as many as the cold store has; 0 = its default.
    """
    num_tokens = run[0][0].shape[1]
    begun = start - start % chunk_tokens
    bounds = [max(x, start) for x in range(begun, start + num_tokens, chunk_tokens)]
    spans = list(itertools.pairwise([*bounds, start + num_tokens]))
    out = layout.empty(num_tokens)
    for array in (x for pair in out for x in pair):
        array.fill(0)  # memory that is touched first by the codec would count as its time

    def pack(span: tuple[int, int]) -> memoryview:
        rows = slice_tokens(run, span[0] - start, span[1] - start)
        return memoryview(sinks.encode(codec, rows, layout, span[0]))

    def unpack(span: tuple[int, int], payload: memoryview) -> None:
        rows = slice_tokens(out, span[0] - start, span[1] - start)
        sinks.decode(codec, payload, layout, span[0], rows)

    with ThreadPoolExecutor(usable_cores()) as pool:
        payloads = list(pool.map(pack, spans))
    with ThreadPoolExecutor(num_threads or default_threads()) as pool:
        began = clock()
        list(pool.map(unpack, spans, payloads))
        took = clock() - began
    return RoundTrip(
        run=out,
        nbytes=sum(HEADER_BYTES + len(x) for x in payloads),
        num_elements=layout.elements_per_token * num_tokens,
        restore_s=1000 * took / num_tokens,
    )


@dataclass(frozen=True)
class Trip:
    """A session that was packed and unpacked. ``rows``: its rows, with the figures of all of it."""

    session: HeldSession
    rows: RoundTrip


def least_context(states: StateLayout | None, state_step: int) -> int:
    """The tokens of the shortest prompt that can sleep as often as a session is judged by.

    ``state_step``: see ``StatefulInstrument``.
    """
    sleeps = SLEEPS if states is not None and states.has_matrices else 1
    return sleeps * state_step


class Trials(Protocol):
    """Does with an instrument and its sessions what a measurement needs."""

    @property
    def prefill_s(self) -> float | None:
        """Seconds for 1,000 tokens of the last prompt that was prefilled; None if not known."""

    def session(self, tokens: Sequence[int]) -> HeldSession:
        """The session of a prompt; must not be written to."""

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """The same as ``Instrument.log_probs``, after the session."""

    def trip(self, codec: AnyCodec, session: HeldSession) -> Trip:
        """Pack and unpack a session."""


def trials(
    instrument: Instrument,
    chunk_tokens: int,
    num_threads: int,
    folder: Path | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trials:
    """Make what suits the instrument; for arguments see ``measure``."""
    how = _Chunks(instrument, chunk_tokens, num_threads, clock)
    if states_of(instrument) is not None:
        assert isinstance(instrument, StatefulInstrument)
        return _WholeSessions(instrument, how)
    return _Rows(instrument, how, folder)


@dataclass(frozen=True)
class _Chunks:
    """Cuts rows into chunks, packs and unpacks them."""

    instrument: Instrument
    chunk_tokens: int
    num_threads: int
    clock: Callable[[], float]

    def trip(self, codec: Codec, session: HeldSession) -> RoundTrip:
        if not session.run:
            return RoundTrip(run=[], nbytes=0, num_elements=0, restore_s=0.0)
        return self.trip_of(codec, session.run, self.instrument.layout)

    def trip_of(self, codec: Codec, run: KVRun, layout: KVLayout, start: int = 0) -> RoundTrip:
        threads, clock, size = self.num_threads, self.clock, self.chunk_tokens
        return round_trip(codec, run, layout, size, start=start, num_threads=threads, clock=clock)


class _Rows:
    """Sessions of rows alone. A ``Trials``."""

    def __init__(self, instrument: Instrument, how: _Chunks, folder: Path | None) -> None:
        self._instrument = instrument
        self._how = how
        self._prefixes = Prefixes(instrument, folder, how.clock)

    @property
    def prefill_s(self) -> float | None:
        return self._prefixes.prefill_s

    def session(self, tokens: Sequence[int]) -> HeldSession:
        return HeldSession(self._prefixes.run(tokens), len(tokens))

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return self._instrument.log_probs(session.run, tokens)

    def trip(self, codec: AnyCodec, session: HeldSession) -> Trip:
        assert not isinstance(codec, SessionCodec)
        rows = self._how.trip(codec, session)
        return Trip(replace(session, run=rows.run), rows)


class _WholeSessions:
    """Sessions with states, which cannot be cut: each prompt is prefilled whole. A ``Trials``."""

    def __init__(self, instrument: StatefulInstrument, how: _Chunks) -> None:
        self._instrument = instrument
        self._how = how
        self._tokens: tuple[int, ...] = ()
        self._session = HeldSession((), 0)
        self._first = self._session  # as it was before the first sleep
        self.prefill_s: float | None = None

    def session(self, tokens: Sequence[int]) -> HeldSession:
        if self._tokens != tuple(tokens):
            self._session = self._first = HeldSession((), 0)  # two would be one too many
            asleep = self._first_sleep(len(tokens))
            began = self._how.clock()
            self._first = self._instrument.prefill_whole(tokens[:asleep])
            self.prefill_s = 1000 * (self._how.clock() - began) / asleep
            self._session = self._instrument.prefill_whole(tokens, self._first)
            self._tokens = tuple(tokens)
        return self._session

    @property
    def _turn_tokens(self) -> int:
        """``TURN_TOKENS``, or as many more as there are between two states."""
        step = self._instrument.state_step
        return -(-TURN_TOKENS // step) * step

    def _first_sleep(self, num_tokens: int) -> int:
        """The position of the first sleep of a prompt, where there can be a state."""
        step = self._instrument.state_step
        return max(step, (num_tokens - (SLEEPS - 1) * self._turn_tokens) // step * step)

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return self._instrument.log_probs_whole(session, tokens)

    def trip(self, codec: AnyCodec, session: HeldSession) -> Trip:
        assert isinstance(codec, SessionCodec)
        states = self._instrument.states
        assert states is not None
        exact = session
        session = self._slept_before(codec, session)
        rows = self._how.trip(codec.kv, session)
        parts = [rows]
        tree, windows = without_windows(session.state, states.windows)
        if codec.windows is not None and windows is not None and states.windows is not None:
            start = session.num_tokens - tokens_in(windows)
            parts.append(self._how.trip_of(codec.windows, windows, states.windows, start))
        else:
            tree = session.state
        if not codec.matrices.exact:
            tree = pack_matrices(tree, codec.matrices)
        payload = encode_state(tree)
        began = self._how.clock()
        came = unpack_matrices(decode_state(memoryview(payload)), [codec.matrices.id])
        came = with_windows(came, parts[1].run) if len(parts) > 1 else came
        took = self._how.clock() - began
        whole = RoundTrip(
            run=rows.run,
            nbytes=sum(x.nbytes for x in parts) + HEADER_BYTES + len(payload),
            num_elements=rows.num_elements + state_elements(exact.state),
            restore_s=sum(_seconds(x) for x in parts) * 1000 / session.num_tokens
            + 1000 * took / session.num_tokens,
        )
        return Trip(HeldSession(rows.run, session.num_tokens, came), whole)

    def _slept_before(self, codec: SessionCodec, session: HeldSession) -> HeldSession:
        """The session as it is after all sleeps but the last; ``session`` if states are exact.

        Of those sleeps it has the errors in matrices. Its rows, which are packed once, are not yet.
        """
        if codec.matrices.exact:
            return session
        came = self._first
        while came.num_tokens < session.num_tokens:
            packed = pack_matrices(came.state, codec.matrices)
            woken = replace(came, state=unpack_matrices(packed, [codec.matrices.id]))
            awake = min(came.num_tokens + self._turn_tokens, session.num_tokens)
            came = self._instrument.prefill_whole(self._tokens[:awake], woken)
        return came


def _seconds(trip: RoundTrip) -> float:
    """The seconds of unpacking all of it."""
    return trip.restore_s * tokens_in(trip.run) / 1000
