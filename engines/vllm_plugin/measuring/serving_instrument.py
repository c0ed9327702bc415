"""The instrument with which ``engines.calibration`` measures the serving vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import nn

from engines.calibration.instrument import NOTHING, HeldSession, Note, NotObservable
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.measuring.exchange import Exchange, FoundRows
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from engines.vllm_plugin.measuring.layer_views import LayerViews
from engines.vllm_plugin.measuring.ropes import ropes_of
from kvstore.shapes import KVLayout, KVPair, KVRun, Rope, StateLayout, slice_tokens

logger = logging.getLogger("thermocline.vllm")

STEP_TOKENS: Final = 256  # prefilled in one step: a user's request waits for at most this many
READ_S: Final = 60.0
MOST_TRIES: Final = 4  # to get a step without other requests, or the scores of a prompt
NO_SCORES: Final = "vLLM shows no scores of prompts: several heads, or --kv-sharing-fast-prefill"
MOST_UNSEEN: Final = 3  # texts in a row that could not be observed; then observing ends


class ServingInstrument:
    """Measures by requests to vLLM. Belongs to the measuring thread."""

    sees_states = False

    def __init__(
        self,
        client: ForwardClient,
        exchange: Exchange,
        cache: PagedCache,
        states: StateBlocks | None,
        groups: Groups,
        fingerprint: str,
        tokenizer: Any,
        salt: str,
    ) -> None:
        """``salt``: a salt that no other request uses.

        Sends a first request, which makes the workers show their models. Raises the errors of
        ``ForwardClient.order``.
        """
        self._client = client
        self._exchange = exchange
        self._cache = cache
        self._groups = groups
        self.fingerprint = fingerprint
        self.layout: KVLayout = cache.layout
        self.states: StateLayout | None = states.layout if states is not None else None
        self.state_step: int = cache.block_tokens
        self.waited_s = 0.0  # for steps that were done again
        self._tokenizer = tokenizer
        self._salt = salt
        # The tokens prefilled in one step, in whole blocks.
        self._whole_step = max(1, STEP_TOKENS // self.state_step) * self.state_step
        self._num_unseen = 0  # texts in a row
        self.rows([0])

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        if self._cache.has_latents:
            dims = [x.value_dim for x in self.layout.layers]
            known = self._model, self._groups.layers, dims
            return ropes_of(*known, of_latents=True, must_be_found=False)
        return self._ropes_of(self._groups.layers, self.layout)

    def window_ropes(self) -> tuple[Rope | None, ...]:
        windows = self.states.windows if self.states is not None else None
        names = [x for y in self._groups.states if not y.recurrent for x in y.layers]
        return self._ropes_of(names, windows) if windows is not None else ()

    def _ropes_of(self, names: Sequence[str], layout: KVLayout) -> tuple[Rope | None, ...]:
        dims = [x.head_dim for x in layout.layers]
        return ropes_of(self._model, names, dims, must_be_found=self.states is None)

    @property
    def _model(self) -> nn.Module:
        model = self._exchange.model
        if model is None:
            raise ValueError("vLLM did not show its model; another worker extension is in use")
        return model

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        if self.states is not None:
            return self._whole(tokens, past)
        run = self.rows(tokens, past.run)
        return HeldSession(run, len(tokens), prompt=tuple(tokens))

    def rows(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """Return the KV of ``tokens``, step by step; ``past`` is copied unchanged.

        With states, vLLM continues only from whole blocks, so a step computes at least one.
        """
        step = STEP_TOKENS if self.states is None else self._whole_step
        run = self.layout.empty(len(tokens))
        done = past[0][0].shape[1] if past else 0
        _copy(past, run, 0)
        while done < len(tokens):
            end = min(done + step, len(tokens))
            _copy(self._computed(tokens[:end], done, run), run, done)
            done = end
        return run

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        """Return the KV of ``tokens``; the last whole blocks, or more, are a step of their own.

        No notices are given for a text if other requests ran in that step.
        """
        if self._cache.has_latents:
            raise NotObservable("this model keeps latents in the place of keys and values")
        # Begin with a whole block: vLLM computes a partly known block again.
        block = self._cache.block_tokens
        first = max(first // block, -(-(len(tokens) - STEP_TOKENS) // block)) * block
        if not 0 < first < len(tokens):
            return self.rows(tokens)
        views = LayerViews(self._model, self._groups.layers, len(tokens) - first, sum(tokens))
        run = self.rows(tokens[:first])
        self._exchange.watch(views)
        try:
            run = self.rows(tokens, run)
        finally:
            self._exchange.watch(None)
        try:
            for notice in views.notices(run, self.layout, first):
                note(notice)
        except NotObservable as error:
            self._num_unseen += 1
            if self._num_unseen >= MOST_UNSEEN:
                raise
            logger.info("a text could not be observed: %s", error)
        else:
            self._num_unseen = 0
        return run

    def _computed(self, tokens: Sequence[int], first: int, run: KVRun) -> KVRun:
        """The KV of ``tokens`` from number ``first`` on; ``run`` has the KV of those before.

        For a model without states the result does not depend on vLLM's other work: the KV of the
        tokens before is given, not taken from vLLM's cache, and a step that other requests share is
        repeated, ``MOST_TRIES`` times at most.
        """
        skipped = first % self._cache.block_tokens
        wanted = skipped, skipped + len(tokens) - first
        if self.states is not None:
            return slice_tokens(self._found(tokens, first).rows, *wanted)
        whole = first - skipped
        past = HeldSession(slice_tokens(run, 0, whole), whole)
        for number in range(1, MOST_TRIES + 1):
            began = time.perf_counter()
            rows = self._found(tokens, first, past).rows
            if self._exchange.was_alone:
                break
            if number < MOST_TRIES:
                self.waited_s += time.perf_counter() - began
        return slice_tokens(rows, *wanted)

    def _found(
        self, tokens: Sequence[int], first: int, past: HeldSession | None = None
    ) -> FoundRows:
        """The KV of ``tokens`` from the block of number ``first`` on, and the state after them."""
        self._order(tokens, past, wanted_from=first)
        return self._exchange.found(READ_S)

    def _order(
        self,
        tokens: Sequence[int],
        past: HeldSession | None,
        *,
        wanted_from: int = -1,
        num_rows: int = 0,
    ) -> None:
        """Have vLLM compute ``tokens``.

        Args:
            past: whole blocks that it is given; None = it takes what is in its own cache.
            wanted_from: see ``messages.Forward``.
            num_rows: the number of tokens whose scores are noted.
        """
        number, salt, given = self._client.next_number(), self._salt, 0
        if past is None:
            self._exchange.open(number, num_rows=num_rows)
        else:
            run = _as_copied(past.run) if past.num_tokens else ()
            self._exchange.open(number, run, past.state, num_rows)
            # Its own: no other request may hit blocks filled with unpacked KV.
            salt, given = f"{salt}.{number}", past.num_tokens
        wants = {"given": given, "wanted_from": wanted_from}
        self._client.order(number, tokens, salt, **wants, scored=num_rows > 0)

    def _whole(self, tokens: Sequence[int], past: HeldSession) -> HeldSession:
        """Compute the session of the whole blocks of ``tokens``: states exist only after those.

        Without ``past``, blocks in vLLM's own cache are not computed again.
        """
        whole = len(tokens) // self._cache.block_tokens * self._cache.block_tokens
        run, session = self.layout.empty(whole), past
        _copy(session.run, run, 0)
        while session.num_tokens < whole:
            done = session.num_tokens
            end = min(done + self._whole_step, whole)
            # One token more: vLLM keeps a state only where the same prompt could continue from it.
            prompt = [*tokens[:end], (*tokens, tokens[-1])[end]]
            found = self._found(prompt, done, session if past.num_tokens else None)
            if found.state is None:
                raise RuntimeError(f"vLLM did not keep its state after {end} tokens")
            _copy(slice_tokens(found.rows, 0, end - done), run, done)
            session = HeldSession(slice_tokens(run, 0, end), end, found.state)
        return replace(session, prompt=tuple(tokens))

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities after each of ``tokens``: fp32 (num_tokens, vocabulary).

        The whole blocks of ``session`` are given to vLLM; its prompt's tokens after them are
        computed again.
        """
        given = session.num_tokens // self._cache.block_tokens * self._cache.block_tokens
        with_states = self.states is not None
        prompt = session.prompt if with_states else session.prompt[: session.num_tokens]
        held = HeldSession(slice_tokens(session.run, 0, given), given, session.state)
        if not self._exchange.sees_rows:
            raise ValueError(NO_SCORES)
        for _ in range(MOST_TRIES - 1):
            # With other requests in the step it may be unknown whose the logits are.
            try:
                return self._scored(held, prompt, tokens)
            except RuntimeError as error:
                logger.info("tokens are scored again: %s", error)
        return self._scored(held, prompt, tokens)

    def _scored(
        self, given: HeldSession, prompt: Sequence[int], tokens: Sequence[int]
    ) -> np.ndarray:
        """Score the tokens as a part of the prompt, in one step."""
        # One token more: after a prompt's last token vLLM samples, and gives no scores.
        whole = [*prompt, *tokens, tokens[-1]]
        self._order(whole, given, num_rows=len(whole) - 1 - given.num_tokens)
        return self._exchange.scores()[-len(tokens) :]


def _as_copied(run: KVRun) -> list[KVPair]:
    """Convert a run to the arrays that copies into blocks accept: C-contiguous and writable."""
    return [(np.require(k, None, ["C", "W"]), np.require(v, None, ["C", "W"])) for k, v in run]


def _copy(run: KVRun, into: KVRun, first: int) -> None:
    """Copy a run to the tokens of another from number ``first`` on."""
    for pair, targets in zip(run, into, strict=False):
        for rows, target in zip(pair, targets, strict=True):
            target[:, first : first + rows.shape[1]] = rows
