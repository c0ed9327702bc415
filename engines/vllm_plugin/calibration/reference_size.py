"""Decides whether there is memory for a second copy of the model, and in which dtype.

The estimate is on the safe side: a model that is refused costs some quality of a codec, and one
that is wrongly allowed may cost the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from safetensors import safe_open

from engines.calibration.instrument import NotDifferentiable

KEPT_FREE_BYTES: Final = 1 << 30  # in the machine's memory, and in the device's
# Numbers kept per token for the backward pass: a multiple of the hidden size in each layer (27 were
# measured with a Llama), and of the vocabulary at the end.
KEPT_WIDTHS: Final = 64
KEPT_VOCABULARIES: Final = 6
GIB: Final = 1 << 30


@dataclass(frozen=True)
class ModelSize:
    """The size of a model and of a backward pass, in numbers of two bytes or four each."""

    num_weights: int
    num_activations: int

    def bytes_in(self, dtype: torch.dtype, num_copies: int) -> int:
        """Bytes needed, with ``num_copies`` of the weights in memory while they are loaded."""
        return int(dtype.itemsize) * (num_copies * self.num_weights + self.num_activations)


def size_of(model_config: Any, folder: Path, num_tokens: int) -> ModelSize:
    """The size of the model in ``folder``; ``model_config``: vLLM's.

    ``num_tokens``: in a backward pass. Raises ``NotDifferentiable``: the weights are not in
    safetensors files.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise NotDifferentiable("its weights are in no safetensors")
    kept = KEPT_WIDTHS * model_config.get_total_num_hidden_layers() * model_config.get_hidden_size()
    kept += KEPT_VOCABULARIES * model_config.get_vocab_size()
    return ModelSize(sum(map(_num_weights, files)), num_tokens * kept)


def dtype_for(size: ModelSize, device: torch.device, most_bytes: int) -> torch.dtype:
    """The widest dtype that there is memory for. ``most_bytes``: see ``Order``.

    Raises ``NotDifferentiable``: there is not enough memory.
    """
    # The host has two copies for a while: the one read, and the one kept or sent to the device.
    host = _host_room(most_bytes)
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        _check(size.bytes_in(torch.bfloat16, 1), free - KEPT_FREE_BYTES, f"memory of {device}")
    elif size.bytes_in(torch.float32, 2) <= host:
        return torch.float32
    _check(size.bytes_in(torch.bfloat16, 2), host, "memory")
    return torch.bfloat16


def _host_room(most_bytes: int) -> int:
    room = int(psutil.virtual_memory().available) - KEPT_FREE_BYTES
    if most_bytes:
        room = min(room, most_bytes - int(psutil.Process().memory_info().rss))
    return max(room, 0)


def _check(needed: int, room: int, where: str) -> None:
    if needed > room:
        raise NotDifferentiable(
            f"gradients take a second copy of the weights, up to {needed / GIB:.1f} GiB of {where},"
            f" and {max(room, 0) / GIB:.1f} GiB are to spare"
        )


def _num_weights(file: Path) -> int:
    with safe_open(file, framework="np") as weights:
        names = weights.keys()
        return sum(_product(weights.get_slice(name).get_shape()) for name in names)


def _product(shape: list[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
