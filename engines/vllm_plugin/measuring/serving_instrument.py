"""The instrument with which ``engines.calibration`` measures the vLLM that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch import nn

from engines.vllm_plugin.calibration.ropes import ropes_of
from engines.vllm_plugin.measuring.exchange import Exchange
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun, slice_tokens

STEP_TOKENS: Final = 256  # of a prefill at a time: a user's request waits for so many at most
READ_S: Final = 60.0


class ServingInstrument:
    """Implements ``Instrument`` by requests to vLLM. Belongs to the measuring thread.

    All layers of the model must keep all tokens.
    """

    def __init__(
        self,
        client: ForwardClient,
        exchange: Exchange,
        layout: KVLayout,
        block_tokens: int,
        fingerprint: str,
        layer_names: Sequence[str],
        tokenizer: Any,
        salt: str,
    ) -> None:
        """``layer_names``: vLLM's, one for each layer of ``layout``. ``salt``: nobody else's.

        Its first request has the workers show their models. Raises as ``ForwardClient.order``.
        """
        self._client = client
        self._exchange = exchange
        self._layout = layout
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._layer_names = layer_names
        self._tokenizer = tokenizer
        self._salt = salt
        self._tokens: tuple[int, ...] = ()  # of the last prefill
        self.prefill([0])

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        dims = [x.head_dim for x in self._layout.layers]
        return ropes_of(self._model, self._layer_names, dims)

    @property
    def _model(self) -> nn.Module:
        model = self._exchange.model
        if model is None:
            raise ValueError("vLLM did not show its model; another worker extension is in use")
        return model

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """The KV of ``tokens``; what vLLM still has of them in its own cache is not computed again.

        ``past`` is taken as it is.
        """
        run = self._layout.empty(len(tokens))
        done = past[0][0].shape[1] if past else 0
        _copy(past, run, 0)
        while done < len(tokens):
            end = min(done + STEP_TOKENS, len(tokens))
            _copy(self._computed(tokens[:end], done), run, done)
            done = end
        self._tokens = tuple(tokens)
        return run

    def _computed(self, tokens: Sequence[int], first: int) -> KVRun:
        """The KV of ``tokens`` from number ``first`` on."""
        number = self._client.next_number()
        self._exchange.open(number)
        self._client.order(number, tokens, self._salt, wanted_from=first)
        rows = self._exchange.rows(READ_S)
        skipped = first % self._block_tokens
        return slice_tokens(rows, skipped, skipped + len(tokens) - first)

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities after each of ``tokens``: fp32 (num_tokens, vocabulary).

        ``run`` is of the tokens that were prefilled last, or of the first of them. Its whole blocks
        are given to vLLM; the tokens behind them are computed again.
        """
        num_tokens = run[0][0].shape[1]
        given = num_tokens // self._block_tokens * self._block_tokens
        number = self._client.next_number()
        self._exchange.open(number, _as_copied(slice_tokens(run, 0, given)))
        prompt = [*self._tokens[:num_tokens], tokens[0]]
        # A salt for each: nobody may find blocks that were filled with packed KV.
        salt = f"{self._salt}.{number}"
        self._client.order(number, prompt, salt, forced=tokens[1:], given=given)
        scores = self._exchange.scores()
        if len(scores) != len(tokens):
            raise RuntimeError(f"{len(scores)} of {len(tokens)} tokens were scored")
        return scores


def _as_copied(run: KVRun) -> list[KVPair]:
    """The run in arrays as copies into blocks take them: C-contiguous, and not read-only."""
    return [(np.require(k, None, ["C", "W"]), np.require(v, None, ["C", "W"])) for k, v in run]


def _copy(run: KVRun, into: KVRun, first: int) -> None:
    """Copy a run to the tokens of another from number ``first`` on."""
    for pair, targets in zip(run, into, strict=False):
        for rows, target in zip(pair, targets, strict=True):
            target[:, first : first + rows.shape[1]] = rows
