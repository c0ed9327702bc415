"""Packs and unpacks sessions of an instrument, as a sleep and a wake would.

It uses the store's own functions: rows are packed as chunks, a state as a blob. A row is packed
once in a session's life. But a recurrent state is packed again at every sleep, and carries the
errors of earlier sleeps along. So a state is packed and unpacked ``SLEEPS`` times, with a short
turn between two sleeps, before it is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from engines.calibration.instrument import NOTHING, HeldSession, Instrument
from engines.calibration.measuring.stopwatch import Speed, Stopwatch
from engines.calibration.scratch import Scratch
from kvstore.blobs.format import HEADER_BYTES
from kvstore.blobs.state_packer import (
    pack_matrices,
    unpack_matrices,
    with_windows,
    without_windows,
)
from kvstore.blobs.state_tree import (
    StateArray,
    StateTree,
    decode_state,
    encode_state,
    mapped,
    state_elements,
)
from kvstore.codecs.base import Codec
from kvstore.codecs.rows import sinks
from kvstore.codecs.session_codec import SessionCodec
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import KVLayout, KVRun, StateLayout, slice_tokens, tokens_in
from kvstore.store.blob_reader import BATCH
from kvstore.workers import default_threads, usable_cores

SLEEPS: Final = 4
TURN_TOKENS: Final = 16  # the least between two sleeps
# Packs rows alone, or whole sessions of a model with states.
AnyCodec: TypeAlias = Codec | SessionCodec


@dataclass(frozen=True)
class Exact:
    """A prompt's session as the engine has computed it; its arrays must not be changed.

    Attributes:
        session: the session of all ``tokens``.
        prefill: the speed of the prefill.
        first: the session at its first sleep; ``NOTHING`` for a model without states.
    """

    tokens: tuple[int, ...]
    session: HeldSession
    prefill: Speed
    first: HeldSession = NOTHING

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(x.nbytes for x in (*self.session.arrays, *self.first.arrays))

    def kept(self, scratch: Scratch) -> Exact:
        """Return a copy with all arrays in a file."""
        session, first = (_kept(x, scratch) for x in (self.session, self.first))
        return replace(self, session=session, first=first)


def _kept(session: HeldSession, scratch: Scratch) -> HeldSession:
    kept = iter(scratch.keep(session.arrays))

    def in_file(node: StateTree) -> StateTree:
        return replace(node, array=next(kept)) if isinstance(node, StateArray) else node

    run = [(next(kept), next(kept)) for _ in session.run]
    return replace(session, run=run, state=mapped(session.state, in_file))


@dataclass(frozen=True)
class Trip:
    """A session after it was packed and unpacked.

    Attributes:
        nbytes: the bytes of all its blobs, headers included.
        num_elements: the number of values that were packed.
        restore: the speed of the unpacking.
    """

    session: HeldSession
    nbytes: int
    num_elements: int
    restore: Speed

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.num_elements


def least_context(states: StateLayout | None, state_step: int) -> int:
    """Return the tokens of the shortest prompt that allows all sleeps of a trial.

    ``state_step``: see ``Instrument``.
    """
    sleeps = SLEEPS if states is not None and states.has_matrices else 1
    return sleeps * state_step


# The first token and the end (exclusive) of a chunk, and its payload.
_Chunk: TypeAlias = tuple[tuple[int, int], memoryview]


def _in_batches(chunks: Iterable[_Chunk]) -> Iterator[Sequence[_Chunk]]:
    """Yield chunks as a store unpacks them: up to ``BATCH`` at a time, of equal length."""
    for _, alike in itertools.groupby(chunks, lambda x: x[0][1] - x[0][0]):
        while few := list(itertools.islice(alike, BATCH)):
            yield few


class Trials:
    """Computes prompts, and has codecs pack and unpack them."""

    def __init__(
        self,
        instrument: Instrument,
        num_threads: int = 0,
        folder: Path | None = None,
        stopwatch: Callable[[], Stopwatch] = Stopwatch,
    ) -> None:
        """The arguments are those of ``Judge``."""
        self._instrument = instrument
        self._num_threads = num_threads or default_threads()
        self._folder = folder
        self._stopwatch = stopwatch

    def exact(self, tokens: Sequence[int]) -> Exact:
        """Compute a prompt and return its session.

        Its arrays are in a file if there is a folder. Raises ``OSError`` if the disk is full.
        """
        prompt, step = tuple(tokens), self._instrument.state_step
        if self._instrument.states is None:
            found = Exact(prompt, *self._timed(prompt))
        else:  # a session with a state cannot be cut back to its first sleep
            asleep = len(tokens) - (SLEEPS - 1) * self._turn_tokens
            asleep = max(step, asleep // step * step)
            first, speed = self._timed(prompt[:asleep])
            found = Exact(prompt, self._instrument.prefill(prompt, first), speed, first)
        if self._folder is not None:
            with Scratch(self._folder) as scratch:
                found = found.kept(scratch)
        return found

    def _timed(self, tokens: tuple[int, ...]) -> tuple[HeldSession, Speed]:
        """Compute a session and its speed; waiting for users' turns does not count."""
        before_s = self._instrument.waited_s
        with self._stopwatch() as watch:
            computed = self._instrument.prefill(tokens)
        watch.waited_also(self._instrument.waited_s - before_s)
        return computed, watch.speed(len(tokens))

    @property
    def _turn_tokens(self) -> int:
        """``TURN_TOKENS``, rounded up to a multiple of the distance between states."""
        step = self._instrument.state_step
        return -(-TURN_TOKENS // step) * step

    def trip(self, codec: AnyCodec, exact: Exact) -> Trip:
        """Pack and unpack a prompt's session."""
        if not isinstance(codec, SessionCodec):
            trip = self._trip_of(codec, exact.session.run, self._instrument.layout)
            return replace(trip, session=replace(exact.session, run=trip.session.run))
        states = self._instrument.states
        assert states is not None
        session = self._slept_before(codec, exact)
        parts = [self._trip_of(codec.kv, session.run, self._instrument.layout)]
        tree, windows = without_windows(session.state, states.windows)
        if codec.windows is not None and windows is not None and states.windows is not None:
            start = session.num_tokens - tokens_in(windows)
            parts.append(self._trip_of(codec.windows, windows, states.windows, start))
        else:
            tree = session.state
        if not codec.matrices.exact:
            tree = pack_matrices(tree, codec.matrices)
        payload = encode_state(tree)
        with self._stopwatch() as watch:
            came = unpack_matrices(decode_state(memoryview(payload)), [codec.matrices.id])
            came = with_windows(came, parts[1].session.run) if len(parts) > 1 else came
        restore = watch.speed(session.num_tokens)
        for part in parts:
            restore = restore.plus(part.restore, part.session.num_tokens / session.num_tokens)
        return Trip(
            replace(exact.session, run=parts[0].session.run, state=came),
            sum(x.nbytes for x in parts) + HEADER_BYTES + len(payload),
            parts[0].num_elements + state_elements(exact.session.state),
            restore,
        )

    def _trip_of(self, codec: Codec, run: KVRun, layout: KVLayout, start: int = 0) -> Trip:
        """Pack and unpack rows chunk by chunk, including a shorter last chunk.

        ``start``: the position of the first token; for windows, it may be inside a chunk.
        """
        if not run:
            return Trip(NOTHING, 0, 0, Speed(0.0))
        num_tokens, begun = tokens_in(run), start - start % CHUNK_TOKENS
        bounds = [max(x, start) for x in range(begun, start + num_tokens, CHUNK_TOKENS)]
        spans = list(itertools.pairwise([*bounds, start + num_tokens]))
        out = layout.empty(num_tokens)
        for array in (x for pair in out for x in pair):
            array.fill(0)  # memory that is touched first by the codec would count as its time

        def pack(span: tuple[int, int]) -> memoryview:
            rows = slice_tokens(run, span[0] - start, span[1] - start)
            return memoryview(sinks.encode(codec, rows, layout, span[0]))

        def unpack(chunks: Sequence[_Chunk]) -> None:
            first, end = chunks[0][0][0], chunks[-1][0][1]
            rows = slice_tokens(out, first - start, end - start)
            sinks.decode_chunks(codec, [x for _, x in chunks], layout, first, rows)

        with ThreadPoolExecutor(usable_cores()) as pool:
            payloads = list(pool.map(pack, spans))
        batches = list(_in_batches(zip(spans, payloads, strict=True)))
        with ThreadPoolExecutor(self._num_threads) as pool, self._stopwatch() as watch:
            list(pool.map(unpack, batches))
        return Trip(
            HeldSession(out, num_tokens),
            sum(HEADER_BYTES + len(x) for x in payloads),
            layout.elements_per_token * num_tokens,
            watch.speed(num_tokens),
        )

    def _slept_before(self, codec: SessionCodec, exact: Exact) -> HeldSession:
        """Return the session before its last sleep; unchanged if states are stored exactly.

        Its matrices have the errors of the earlier sleeps. Its rows, which are packed only once,
        are exact.
        """
        if codec.matrices.exact:
            return exact.session
        came, end = exact.first, exact.session.num_tokens
        while came.num_tokens < end:
            packed = pack_matrices(came.state, codec.matrices)
            woken = replace(came, state=unpack_matrices(packed, [codec.matrices.id]))
            awake = min(came.num_tokens + self._turn_tokens, end)
            came = self._instrument.prefill(exact.tokens[:awake], woken)
        return came
