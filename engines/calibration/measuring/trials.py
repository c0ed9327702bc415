"""Takes sessions out of an instrument, through a codec and back: of rows alone, or with states.

Prompts are prefilled first, each going on from the one before where both begin alike.

With states the whole session goes the way of a sleep and a wake: its rows as chunks, its state as
a blob, by the store's own functions. Rows are packed once in a session's life, but a recurrent
state that came back and went on is packed anew with the next sleep, and its errors are carried
along. So the state goes through the codec ``SLEEPS`` times, a short turn apart, before it is
judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from engines.calibration.footprint import Scratch
from engines.calibration.instrument import HeldSession, Instrument, StatefulInstrument, states_of
from engines.calibration.measuring.stopwatch import Stopwatch
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


class Speed(NamedTuple):
    """The time that 1,000 tokens took.

    Attributes:
        seconds: of the wall clock.
        waited: see ``Stopwatch``.
    """

    seconds: float
    waited: float = 0.0

    @classmethod
    def of(cls, watch: Stopwatch, num_tokens: int) -> Speed:
        """The speed of the work that ``watch`` has timed, on so many tokens."""
        return cls(1000 * watch.seconds / num_tokens, watch.waited)

    def plus(self, other: Speed) -> Speed:
        """The speed of doing both, one after the other."""
        return Speed(self.seconds + other.seconds, max(self.waited, other.waited))


class Prefixes:
    """Keeps the KV of the last prompt, and of no other."""

    def __init__(
        self,
        instrument: Instrument,
        folder: Path | None = None,
        stopwatch: Callable[[], Stopwatch] = Stopwatch,
    ) -> None:
        """``folder``: the KV rests in a file there (see ``Scratch``); None = in memory."""
        self._instrument = instrument
        self._folder = folder
        self._stopwatch = stopwatch
        self._tokens: Sequence[int] = ()
        self._run: KVRun = ()
        # Seconds that all tokens of the last prompt took; None if some were of another prompt.
        self._spent: Speed | None = None

    @property
    def prefill(self) -> Speed | None:
        """The speed of the last prompt's prefill; None if not known."""
        if self._spent is None:
            return None
        return self._spent._replace(seconds=1000 * self._spent.seconds / len(self._tokens))

    def run(self, tokens: Sequence[int]) -> KVRun:
        """The KV of ``tokens``, as ``Instrument.prefill`` returns it; must not be written to.

        Raises ``OSError`` if the disk of the folder is full.
        """
        shared = common_length(self._tokens, tokens)
        if shared < len(tokens):
            past = slice_tokens(self._run, 0, shared) if shared >= LEAST_SHARED else ()
            before = self._spent_before(shared) if past else Speed(0.0)
            with self._stopwatch() as watch:
                computed = self._instrument.prefill(tokens, past)
            self._run = self._kept(computed)
            took = Speed(watch.seconds, watch.waited)
            self._spent = None if before is None else before.plus(took)
            self._tokens = tuple(tokens)
        return slice_tokens(self._run, 0, len(tokens))

    def _kept(self, run: KVRun) -> KVRun:
        if self._folder is None:
            return run
        with Scratch(self._folder) as scratch:
            return [(scratch.keep(k), scratch.keep(v)) for k, v in run]

    def _spent_before(self, shared: int) -> Speed | None:
        """Return what the first tokens of the last prompt took; known of all of them only."""
        return self._spent if shared == len(self._tokens) else None


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
    restore: Speed

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
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
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
    with ThreadPoolExecutor(num_threads or default_threads()) as pool, stopwatch() as watch:
        list(pool.map(unpack, spans, payloads))
    return RoundTrip(
        run=out,
        nbytes=sum(HEADER_BYTES + len(x) for x in payloads),
        num_elements=layout.elements_per_token * num_tokens,
        restore=Speed.of(watch, num_tokens),
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
    def prefill(self) -> Speed | None:
        """The speed of the last prompt's prefill; None if not known."""

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
    stopwatch: Callable[[], Stopwatch] = Stopwatch,
) -> Trials:
    """Make what suits the instrument; for arguments see ``measure``."""
    how = _Chunks(instrument, chunk_tokens, num_threads, stopwatch)
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
    stopwatch: Callable[[], Stopwatch]

    def trip(self, codec: Codec, session: HeldSession) -> RoundTrip:
        if not session.run:
            return RoundTrip(run=[], nbytes=0, num_elements=0, restore=Speed(0.0))
        return self.trip_of(codec, session.run, self.instrument.layout)

    def trip_of(self, codec: Codec, run: KVRun, layout: KVLayout, start: int = 0) -> RoundTrip:
        return round_trip(
            codec,
            run,
            layout,
            self.chunk_tokens,
            start=start,
            num_threads=self.num_threads,
            stopwatch=self.stopwatch,
        )


class _Rows:
    """Sessions of rows alone. A ``Trials``."""

    def __init__(self, instrument: Instrument, how: _Chunks, folder: Path | None) -> None:
        self._instrument = instrument
        self._how = how
        self._prefixes = Prefixes(instrument, folder, how.stopwatch)

    @property
    def prefill(self) -> Speed | None:
        return self._prefixes.prefill

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
        self.prefill: Speed | None = None

    def session(self, tokens: Sequence[int]) -> HeldSession:
        if self._tokens != tuple(tokens):
            self._session = self._first = HeldSession((), 0)  # two would be one too many
            asleep = self._first_sleep(len(tokens))
            with self._how.stopwatch() as watch:
                self._first = self._instrument.prefill_whole(tokens[:asleep])
            self.prefill = Speed.of(watch, asleep)
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
        with self._how.stopwatch() as watch:
            came = unpack_matrices(decode_state(memoryview(payload)), [codec.matrices.id])
            came = with_windows(came, parts[1].run) if len(parts) > 1 else came
        restore = Speed.of(watch, session.num_tokens)
        for part in parts:
            restore = restore.plus(_for_each(part, session.num_tokens))
        whole = RoundTrip(
            run=rows.run,
            nbytes=sum(x.nbytes for x in parts) + HEADER_BYTES + len(payload),
            num_elements=rows.num_elements + state_elements(exact.state),
            restore=restore,
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


def _for_each(trip: RoundTrip, num_tokens: int) -> Speed:
    """The time of unpacking all of it, for 1,000 of the session's ``num_tokens``."""
    return trip.restore._replace(seconds=trip.restore.seconds * tokens_in(trip.run) / num_tokens)
