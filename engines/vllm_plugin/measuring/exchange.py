"""The shared object through which a rank's measuring thread and vLLM's own thread exchange data.

vLLM creates the connector, the logits processor and the worker extension itself, without references
to each other. They share this module's ``EXCHANGE``, one for each worker process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from engines.vllm_plugin.groups import NULL_BLOCK
from engines.vllm_plugin.plan import Given, StepWork, WantedBlocks
from kvstore.blobs.state_tree import StateTree
from kvstore.shapes import KVPair, KVRun

if TYPE_CHECKING:
    from torch import nn

    from engines.vllm_plugin.blocks.paging import PagedCache
    from engines.vllm_plugin.blocks.state_layers import StateBlocks
    from engines.vllm_plugin.measuring.layer_views import LayerViews

logger = logging.getLogger("thermocline.vllm")
T = TypeVar("T")


class FoundRows(NamedTuple):
    """KV that was read from blocks, and the ``state`` after them; None if there is no state."""

    rows: list[KVPair]
    state: StateTree


class Exchange:
    """Holds the data of one order at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._number = 0
        self._given: KVRun = ()
        self._given_state: StateTree = None
        self._was_given = False
        self.was_alone = False  # the model computed nothing else in the order's step
        self._found: FoundRows | None = None
        self._scores: list[np.ndarray] = []
        self._num_rows = 0  # the prompt tokens whose scores have not come yet
        self._expects_rows = False  # the next logits are the prompt's
        self._views: LayerViews | None = None  # observe the orders' steps
        self._armed: LayerViews | None = None  # observe the present step
        self._cache: PagedCache | None = None
        self._states: StateBlocks | None = None
        self.model: nn.Module | None = None
        self.sees_rows = False  # the logits of prompts can be noted

    def bind(self, cache: PagedCache, states: StateBlocks | None = None) -> None:
        """Set the rank's cache and states, before its first step."""
        self._cache, self._states = cache, states

    # ---- on the measuring thread

    def open(
        self, number: int, given: KVRun = (), state: StateTree = None, num_rows: int = 0
    ) -> None:
        """Begin an order.

        Args:
            given: KV of whole blocks, which is written into the request's blocks.
            state: the state after them, which is written, too.
            num_rows: the number of prompt tokens whose scores are noted.
        """
        with self._lock:
            self._number, self._given, self._given_state = number, given, state
            self._was_given = self.was_alone = False
            self._found, self._scores = None, []
            self._num_rows, self._expects_rows = num_rows, False

    def found(self, within_s: float) -> FoundRows:
        """Wait for the KV of the blocks that the order reads, and return it.

        Raises ``TimeoutError``, and ``RuntimeError`` in the same cases as ``scores``.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._found is not None, within_s):
                raise TimeoutError("the KV that a measurement wanted was not read")
            found, self._found = self._found, None
            assert found is not None
            self._check_given()
            return found

    def scores(self) -> np.ndarray:
        """Return the log-probabilities after the scored tokens, fp32 (num_tokens, vocabulary).

        Raises ``RuntimeError``: the blocks did not get the given KV, or another request's logits
        came in between.
        """
        with self._lock:
            self._check_given()
            scores, self._scores = self._scores, []
            self._given, self._given_state = (), None
            if self._num_rows or not scores:
                raise RuntimeError("some scores of a measurement are missing")
        return np.concatenate(scores)

    def _check_given(self) -> None:
        if self._given and not self._was_given:
            raise RuntimeError("vLLM did not use the KV that was prepared for its blocks")

    def watch(self, views: LayerViews | None) -> None:
        """Observe the layers with ``views`` in the steps of the next orders; None stops that."""
        with self._lock:
            self._views = views

    # ---- on vLLM's thread

    def begin_step(self, step: StepWork) -> None:
        """Start to observe the layers, if views are set and the step computes only the order."""
        with self._lock:
            is_alone = step.alone == self._number
            self.was_alone = self.was_alone or is_alone
            views = self._views if is_alone else None
        self._observe(views)

    def fill(self, given: Sequence[Given]) -> None:
        """Write the prepared KV into the blocks that a step names for it."""
        self._try_each(self._fill, given, "a measurement could not fill its blocks")

    def read(self, wanted: Sequence[WantedBlocks]) -> None:
        """End the observation of a step, and read the wanted blocks."""
        self._observe(None)
        self._try_each(self._read, wanted, "a measurement could not read its blocks")

    def _try_each(self, work: Callable[[T], None], items: Sequence[T], failed: str) -> None:
        """Call ``work`` for each item; log ``failed`` if that raises."""
        for x in items:
            try:
                with self._lock:
                    work(x)
            except Exception:  # on vLLM's thread: a failed measurement must not end the engine
                logger.exception(failed)

    def _fill(self, given: Given) -> None:
        assert self._cache is not None
        if given.number == self._number and self._given:
            self._cache.write(given.block_ids, self._given, 0)
            if self._states is not None:
                if NULL_BLOCK in given.state_ids:
                    raise RuntimeError("vLLM has allocated no block for a state")
                self._states.write(len(given.block_ids), given.state_ids, self._given_state)
            self._was_given = True

    def _read(self, wanted: WantedBlocks) -> None:
        assert self._cache is not None
        if wanted.number == self._number:
            state: StateTree = None
            if self._states is not None and wanted.state_ids:
                state = self._states.read(wanted.boundary, wanted.state_ids)
            self._found = FoundRows(self._cache.read(wanted.block_ids), state)
            self._lock.notify_all()

    def _observe(self, views: LayerViews | None) -> None:
        """Observe layers with ``views`` until the next call; None observes none."""
        if self._armed is not None:
            self._armed.disarm()
        if views is not None:
            views.arm()
        self._armed = views

    def expect_rows(self, number: int) -> None:
        """Note that the next logits belong to this order's prompt: see ``model_access``."""
        with self._lock:
            self._expects_rows = number == self._number

    def wants_rows(self) -> bool:
        """Return whether the logits just computed belong to a prompt that is scored."""
        with self._lock:
            return self._expects_rows and self._num_rows > 0

    def note_rows(self, rows: np.ndarray) -> None:
        """Note the log-probabilities after the prompt's next tokens, fp32 (tokens, vocabulary)."""
        with self._lock:
            self._expects_rows = False
            self._num_rows -= len(rows)
            self._scores.append(rows)


EXCHANGE = Exchange()
