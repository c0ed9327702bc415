"""How a model on vLLM turns its keys: see ``engines.calibration.turning``.

An attention layer is named by its place in the model. The module around it turns the keys before
it hands them over, by a module that vLLM's models call ``rotary_emb``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from engines.calibration.turning import read_rope
from kvstore.codecs.pieces.rope import Rope


def ropes_of(
    model: nn.Module, layer_names: Sequence[str], head_dims: Sequence[int]
) -> tuple[Rope | None, ...]:
    """One for each layer of the cache, whose keys have ``head_dims`` channels.

    Raises:
        ValueError: a layer turns its keys in a way that is not understood.
    """
    read = functools.cache(_read)  # layers share their modules
    modules = [_rotary_of(model, name) for name in layer_names]
    return tuple(read(x, dim) for x, dim in zip(modules, head_dims, strict=True))


def _rotary_of(model: nn.Module, layer_name: str) -> nn.Module:
    around, _, _ = layer_name.rpartition(".")
    try:
        module = model.get_submodule(around).get_submodule("rotary_emb")
    except AttributeError:
        raise ValueError("how this model turns its keys is not to be found") from None
    return module


def _read(module: nn.Module, dim: int) -> Rope | None:
    return read_rope(lambda position: _turned(module, dim, position))


def _turned(module: nn.Module, dim: int, position: int) -> np.ndarray:
    cache = next(iter(module.buffers()), torch.empty(0))
    device, dtype = cache.device, cache.dtype if cache.ndim else torch.float32
    with torch.inference_mode():
        identity = torch.eye(dim, device=device, dtype=dtype)
        positions = torch.full((dim,), position, device=device, dtype=torch.long)
        turned = module(positions, identity.clone(), identity)[0]  # in place, some of them
    found: np.ndarray = turned.float().cpu().numpy()
    return found
