"""The instrument for models with windows or recurrent states: it measures whole sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from vllm import LLMEngine

from engines.calibration.instrument import HeldSession
from engines.vllm_plugin.calibration.calibration_connector import STATE
from engines.vllm_plugin.calibration.instrument import VllmInstrument, connector_here
from engines.vllm_plugin.measuring.ropes import ropes_if_found
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVRun, StateLayout


def open_instrument(engine: LLMEngine, remembered: Path | None) -> VllmInstrument:
    """Open the instrument that fits the model; for arguments see ``VllmInstrument``."""
    states = connector_here().states
    kind = VllmInstrument if states is None else VllmSessionInstrument
    return kind(engine, remembered)


class VllmSessionInstrument(VllmInstrument):
    """Implements ``StatefulInstrument`` for one rank of vLLM."""

    def __init__(self, engine: LLMEngine, remembered: Path | None) -> None:
        super().__init__(engine, remembered)
        states = self._connector.states
        assert states is not None
        self._states = states
        self._block_tokens = self._connector.pages.block_tokens
        self._tokens: tuple[int, ...] = ()  # the prompt that was computed last

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return self._ropes_of(self._connector.groups.layers, self.layout)

    @property
    def states(self) -> StateLayout:
        return self._states.layout

    def window_ropes(self) -> tuple[Rope | None, ...]:
        windows = self.states.windows
        groups = self._connector.groups.states
        names = [name for group in groups if not group.recurrent for name in group.layers]
        return self._ropes_of(names, windows) if windows is not None else ()

    def _ropes_of(self, names: Sequence[str], layout: KVLayout) -> tuple[Rope | None, ...]:
        return ropes_if_found(self._model, names, [x.head_dim for x in layout.layers])

    @property
    def state_step(self) -> int:
        return self._block_tokens

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """Return the KV of ``tokens``. All are computed: rows cannot continue without a state."""
        return self._rows(self._forward(tokens, ()), len(tokens))

    def prefill_whole(self, tokens: Sequence[int], past: HeldSession | None = None) -> HeldSession:
        """Compute the session of the whole blocks of ``tokens``: states exist only after those.

        Raises ``RuntimeError``: vLLM has kept no state there.
        """
        # With ``past``, a prefix of the prompt is one turn of the prompt being measured. Keep the
        # whole prompt then: ``log_probs_whole`` needs it.
        if past is None or tuple(tokens) != self._tokens[: len(tokens)]:
            self._tokens = tuple(tokens)
        num_blocks = len(tokens) // self._block_tokens
        whole = num_blocks * self._block_tokens
        if not num_blocks or (past is not None and past.num_tokens == whole):
            return past or HeldSession(self.layout.empty(0), 0)
        given = past or HeldSession((), 0)
        # One token more: vLLM keeps a state only where the same prompt could continue from it.
        prompt = [*tokens[:whole], (*tokens, tokens[-1])[whole]]
        output = self._forward(prompt, given.run, given.state)
        ids = output.kv_transfer_params[STATE]
        if not ids:
            raise RuntimeError(f"vLLM did not keep its state after {whole} tokens")
        return HeldSession(self._rows(output, whole), whole, self._states.read(num_blocks, ids))

    def log_probs_whole(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        """Score ``tokens`` after a session; the prompt's tokens between them are computed, too."""
        self._forward([*self._tokens, *tokens], session.run, session.state)
        return self._scores(len(self._tokens) - session.num_tokens, len(tokens))
