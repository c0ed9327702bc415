"""Finds out how a model on vLLM rotates its keys, with ``engines.calibration.rope_probe``.

vLLM names an attention layer by its path in the model. The module that contains the layer rotates
the keys first, with a submodule that vLLM's models call ``rotary_emb``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import nn

from engines.calibration.rope_probe import read_rope
from kvstore.shapes import Rope


def ropes_of(
    model: nn.Module,
    layer_names: Sequence[str],
    head_dims: Sequence[int],
    *,
    of_latents: bool = False,
    must_be_found: bool = True,
) -> tuple[Rope | None, ...]:
    """The rotation of each layer of the cache; None for a layer that does not rotate its keys.

    A rotation that is not found costs bits, not correctness: the gate measures the resulting error.

    Args:
        head_dims: channels of each layer's rotated keys.
        of_latents: these keys lie beside latents, in the place of values.
        must_be_found: False = None also for a layer whose rotation is not found.

    Raises:
        ValueError: a layer rotates its keys in an unknown way.
    """
    read = functools.cache(functools.partial(_read, of_latents))  # layers share their modules

    def one(name: str, dim: int) -> Rope | None:
        try:
            return read(_rotary_of(model, name), dim)
        except ValueError:
            if must_be_found:
                raise
            return None

    return tuple(one(*x) for x in zip(layer_names, head_dims, strict=True))


def _rotary_of(model: nn.Module, layer_name: str) -> nn.Module:
    around, _, _ = layer_name.rpartition(".")
    try:
        module = model.get_submodule(around).get_submodule("rotary_emb")
    except AttributeError:
        raise ValueError("the position encoding of this model's keys is not found") from None
    return module


def _read(of_latents: bool, module: nn.Module, dim: int) -> Rope | None:
    table = getattr(module, "cos_sin_cache", None)  # a row for each position
    known = () if table is None else (len(table),)
    rope = read_rope(lambda position: _turned(module, dim, position, of_latents), *known)
    if rope is None or not of_latents:
        return rope
    return msgspec.structs.replace(rope, side="values")


def _turned(module: nn.Module, dim: int, position: int, heads: bool) -> np.ndarray:
    """Return the matrix (dim, dim) that rotates a key at ``position``.

    ``heads``: the module takes rows (tokens, heads, dim), as those of latent attention do.
    """
    cache = next(iter(module.buffers()), torch.empty(0))
    device, dtype = cache.device, cache.dtype if cache.ndim else torch.float32
    with torch.inference_mode():
        identity = torch.eye(dim, device=device, dtype=dtype)
        identity = identity[:, None] if heads else identity
        positions = torch.full((dim,), position, device=device, dtype=torch.long)
        turned = module(positions, identity.clone(), identity)[0]  # some modules work in place
    found: np.ndarray = turned.float().cpu().numpy().reshape(dim, dim)
    return found
