"""The instrument with which ``engines.calibration`` measures a model on vLLM in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm import LLMEngine, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from engines.calibration.instrument import Note, NotObservable
from engines.vllm_plugin.calibration.calibration_connector import (
    BLOCKS,
    RESTORED,
    CalibrationConnector,
)
from engines.vllm_plugin.measuring.layer_views import LayerViews
from engines.vllm_plugin.measuring.ropes import ropes_of
from engines.vllm_plugin.worker.fingerprint import fingerprint
from kvstore.blobs.snapshot import StateTree
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun, slice_tokens


class VllmInstrument:
    """Implements ``Observing`` for one rank of vLLM.

    All layers of the model keep all tokens; for other models see ``session_instrument``.
    """

    def __init__(self, engine: LLMEngine, remembered: Path | None) -> None:
        """``remembered``: see ``fingerprint``."""
        self._engine = engine
        self._connector = connector = connector_here()
        self._fingerprint = fingerprint(engine.vllm_config, 0, remembered, connector.groups)
        self._numbers = itertools.count()
        self._hidden: list[torch.Tensor] = []  # the model's output, per step of the request
        (self._model,) = engine.apply_model(lambda model: model)
        self._model.register_forward_hook(self._seen)

    @property
    def layout(self) -> KVLayout:
        return self._connector.pages.layout

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        if self._connector.pages.has_latents:
            return (None,) * len(self.layout.layers)
        dims = [x.head_dim for x in self.layout.layers]
        return ropes_of(self._model, self._connector.groups.layers, dims)

    def encode(self, text: str) -> list[int]:
        return list(self._engine.get_tokenizer().encode(text))

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        """Return the KV of ``tokens``; ``past`` is the KV of the first of them."""
        return self._rows(self._forward(tokens, past), len(tokens))

    def _rows(self, output: RequestOutput, num_tokens: int) -> KVRun:
        """Return the KV of the first ``num_tokens`` tokens of the request that has just ended."""
        self._hidden.clear()
        pages = self._connector.pages
        used = output.kv_transfer_params[BLOCKS][: -(-num_tokens // pages.block_tokens)]
        return slice_tokens(pages.read(used), 0, num_tokens)

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities after each of ``tokens``: (num_tokens, vocabulary), fp32."""
        # The past tokens have their KV already, so vLLM needs only their number, not their ids.
        num_past = run[0][0].shape[1]
        self._forward([*[0] * num_past, *tokens], run)
        return self._scores(0, len(tokens))

    def _scores(self, first: int, num_tokens: int) -> np.ndarray:
        """Log-probabilities after tokens of the request that has just ended: see ``log_probs``.

        ``first``: the index of the first of these tokens among those that vLLM has computed.
        """
        hidden = torch.cat(self._hidden)[first : first + num_tokens]
        self._hidden.clear()
        if len(hidden) < num_tokens:
            raise RuntimeError(f"{len(hidden)} of {num_tokens} tokens went through the model")
        with torch.inference_mode():
            logits = self._model.compute_logits(hidden)
            scores = torch.log_softmax(logits.float(), -1).cpu().numpy()
        return np.asarray(scores)

    @property
    def sees_states(self) -> bool:
        return False

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        connector = self._connector
        if connector.pages.has_latents:
            raise NotObservable("this model keeps latents in the place of keys and values")
        views = LayerViews(self._model, connector.groups.layers, len(tokens) - first, sum(tokens))
        before = self.prefill(tokens[:first])
        views.arm()
        try:
            run = self.prefill(tokens, before)
        finally:
            views.disarm()
        for notice in views.notices(run, self.layout, first):
            note(notice)
        return run

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _forward(
        self, tokens: Sequence[int], past: KVRun, state: StateTree = None
    ) -> RequestOutput:
        """Run a request that samples one token. Its blocks keep their KV until the next request.

        ``state``: the state after the tokens of ``past``, which must then be whole blocks.
        """
        num_past = past[0][0].shape[1] if past else 0
        name = f"request{next(self._numbers)}"
        self._connector.past = _whole_blocks(past, self._connector.pages.block_tokens)
        self._connector.past_state = state
        self._hidden.clear()
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {RESTORED: num_past}},
        )
        prompt: Any = {"prompt_token_ids": list(tokens), "cache_salt": name}
        self._engine.add_request(name, prompt, params)
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        self._connector.past, self._connector.past_state = (), None
        output = outputs[-1] if outputs else None
        if not isinstance(output, RequestOutput) or output.num_cached_tokens != num_past:
            raise RuntimeError(f"vLLM did not continue after the {num_past} tokens it was given")
        return output

    def _seen(self, model: nn.Module, given: object, hidden: torch.Tensor) -> None:
        self._hidden.append(hidden.clone())


def connector_here() -> CalibrationConnector:
    """The connector of the engine in this process."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, CalibrationConnector)
    return connector


def _whole_blocks(run: KVRun, block_tokens: int) -> list[KVPair]:
    """Pad a run to whole blocks; vLLM overwrites the padding rows before it reads them."""
    lacking = -run[0][0].shape[1] % block_tokens if run else 0
    if not lacking:
        return list(run)
    room = ((0, 0), (0, lacking), (0, 0))
    return [(np.pad(k, room), np.pad(v, room)) for k, v in run]
