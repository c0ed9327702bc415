"""Loads the model that vLLM serves a second time, in transformers, which has gradients of a cache.

vLLM's operators have no gradients, and their kernels write into blocks outside of any autograd
graph. transformers is in vLLM's own environment and has a class for most of vLLM's models. Whether
both compute the same is checked: see ``reference_check``.

The weights are frozen, so beside them a gradient needs memory only for the activations of the
tokens that it is asked for.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from engines.calibration.instrument import NotDifferentiable
from engines.calibration.measuring.freed_memory import return_freed_memory
from engines.vllm_plugin.calibration.reference_size import dtype_for, size_of
from kvstore.shapes import KVLayer, KVPair, KVRun

logger = logging.getLogger("thermocline.vllm")

DRAW: Final = 1  # seed for sampling the tokens that gradients are taken for

# K and V of one layer, (1, num_kv_heads, num_tokens, head_dim).
Leaves: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class ReferenceModel:
    """A frozen model that takes and gives KV as fp32 arrays, shaped as in a ``KVRun``.

    Every method raises ``NotDifferentiable`` if transformers cannot do it with this model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model.eval().requires_grad_(False)
        weight = next(self._model.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    def layers(self) -> tuple[KVLayer, ...]:
        """The layers of the model's cache."""
        with _border(), torch.inference_mode():
            _, cache = self._forward([], [0])
            pairs = [_pair(layer) for layer in cache.layers]
            return tuple(KVLayer(k.shape[1], k.shape[3], v.shape[3]) for k, v in pairs)

    def behind(self, run: KVRun, tokens: Sequence[int]) -> tuple[list[KVPair], np.ndarray]:
        """The KV of ``tokens`` behind those of ``run``, and log-probabilities after each of them.

        The latter are (num_tokens, vocabulary), fp32.
        """
        with _border(), torch.inference_mode():
            scores, cache = self._forward(self._leaves(run), tokens)
            pairs = [_pair(layer) for layer in cache.layers]
            found = [(_own(k, len(tokens)), _own(v, len(tokens))) for k, v in pairs]
            return found, scores.cpu().numpy()

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        """The gradients of ``engines.calibration.instrument.Differentiable``."""
        with _border(), torch.inference_mode(False), torch.enable_grad():
            pairs = self._leaves(run)
            leaves = [leaf.requires_grad_() for pair in pairs for leaf in pair]
            scores, _ = self._forward(pairs, tokens)
            loss = -scores.gather(1, draw_tokens(scores)).sum()
            found = torch.autograd.grad(loss, leaves)
            arrays = [_own(gradient, gradient.shape[2]) for gradient in found]
        if not all(np.isfinite(x).all() for x in arrays):
            raise NotDifferentiable("gradients of this model are no finite numbers")
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    def _forward(
        self, pairs: Sequence[Leaves], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, DynamicCache]:
        """Log-probabilities, (num_tokens, vocabulary) in fp32, and the cache with all tokens."""
        cache = DynamicCache(config=self._model.config)
        for number, (keys, values) in enumerate(pairs):
            cache.update(keys, values, number)
        given = torch.tensor([list(tokens)], device=self._device)
        output = self._model(input_ids=given, past_key_values=cache, use_cache=True)
        return torch.log_softmax(output.logits[0].float(), -1), cache

    def _leaves(self, run: KVRun) -> list[Leaves]:
        return [(self._leaf(keys), self._leaf(values)) for keys, values in run]

    def _leaf(self, array: np.ndarray) -> torch.Tensor:
        # Copied whatever the dtype is: no memory of the caller's becomes part of a graph.
        return torch.tensor(array, device=self._device, dtype=self._dtype)[None]


def open_reference_model(
    vllm_config: Any, device: torch.device, num_tokens: int, most_bytes: int
) -> ReferenceModel:
    """Load the files that vLLM has read, with the configuration that vLLM was given.

    ``num_tokens``: the number of tokens that gradients are asked for at a time. ``most_bytes``: see
    ``Order``.

    Raises:
        NotDifferentiable: transformers does not know this model, or there is no room for it.
    """
    ours = vllm_config.model_config
    if ours.quantization:
        raise NotDifferentiable(f"its weights are quantised ({ours.quantization})")
    with _border():
        folder = read_folder(ours, vllm_config.load_config.download_dir)
        dtype = dtype_for(size_of(ours, folder, num_tokens), device, most_bytes)
        logger.info("loading the model a second time, in %s, for its gradients", dtype)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(ours.hf_config),
            dtype=dtype,
            trust_remote_code=ours.trust_remote_code,
            code_revision=ours.code_revision,
            local_files_only=True,
            use_safetensors=True,
        )
        return ReferenceModel(model.to(device))


def release_memory() -> None:
    """Give back the memory of a model that nobody refers to any more."""
    gc.collect()  # modules refer to each other in cycles
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_folder(ours: Any, cache: str | None) -> Path:
    """The folder of the files that vLLM has read; nothing is downloaded.

    ``ours``: vLLM's ``ModelConfig``. ``cache``: the folder that vLLM downloads to; None = the
    hub's usual one. Raises ``OSError``: the files are not there.
    """
    if Path(ours.model).is_dir():
        return Path(ours.model)
    found = snapshot_download(
        ours.model, revision=ours.revision, cache_dir=cache, local_files_only=True
    )
    return Path(found)


def draw_tokens(scores: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row of log-probabilities; the same ones on any device.

    ``scores``: (num_tokens, vocabulary). Returns (num_tokens, 1), int64, on its device.
    """
    probabilities = scores.detach().exp().cpu()
    generator = torch.Generator().manual_seed(DRAW)
    return torch.multinomial(probabilities, 1, generator=generator).to(scores.device)


def _pair(layer: Any) -> Leaves:
    return layer.keys, layer.values


def _own(tensor: torch.Tensor, num_tokens: int) -> np.ndarray:
    """The last ``num_tokens`` rows as fp32, without the batch axis."""
    found: np.ndarray = tensor[0, :, -num_tokens:].float().cpu().numpy()
    return found


@contextmanager
def _border() -> Iterator[None]:
    """Raise ``NotDifferentiable`` for any error: it costs gradients, not the calibration."""
    try:
        yield
    except NotDifferentiable:
        raise
    except Exception as error:  # of transformers, or of code that came with the model: any kind
        words, _, _ = (str(error).strip() or type(error).__name__).partition("\n")
        raise NotDifferentiable(f"transformers cannot differentiate this model: {words}") from error
