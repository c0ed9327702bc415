"""A packed live cache for models of transformers.

    cache = thermocline.torch.PackedCache(model.config, "tq3")
    model.generate(**inputs, past_key_values=cache)

The first four tokens and the newest 64 to 191 stay in 16 bits, all others are packed. A row is
packed once and restored at every step: that saves memory and costs time. Needs the extra ``torch``.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvstore.shapes import KVLayer, KVLayout
from thermocline.catalogue import codec as make_method
from thermocline.method import SIDES, Method
from thermocline.packed import Packed

NUM_RECENT: Final = 64  # at least this many of the newest tokens are not packed
BLOCK: Final = 128  # tokens that are packed at a time
_BIT_PATTERNS: Final = {torch.bfloat16: torch.int16}  # numpy has no bfloat16


class PackedCache(Cache):
    """A ``transformers.Cache`` that packs attention layers whose KV grow with every token.

    Layers with sliding windows or recurrent states have their usual caches of transformers.
    Batches, beam search and cropping work; no row is packed twice. In a batch that is padded on
    the left, the first four columns, padding included, are the tokens that stay in 16 bits.
    """

    def __init__(self, config: Any, codec: str | Method = "tq3") -> None:
        """Make an empty cache for the model of ``config``.

        ``codec``: a method, or its name, that does not need all layers of a model at once.

        Raises:
            UnknownCodec: there is no such method, or it learns a model.
            ValueError: no layer of the model can be packed.
        """
        method = codec if isinstance(codec, Method) else make_method(codec)
        plain = DynamicCache(config=config).layers
        layers = [PackedLayer(method) if type(x) is DynamicLayer else x for x in plain]
        if not any(isinstance(x, PackedLayer) for x in layers):
            raise ValueError("no layer of this model keeps the KV of all tokens")
        text = config.get_text_config(decoder=True)
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        method.nbytes(BLOCK, KVLayout("bfloat16", (KVLayer(1, dim, 0),)))
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """The bytes of packed and recent rows, in all layers that are packed."""
        return sum(x.nbytes for x in self.layers if isinstance(x, PackedLayer))


class _Block(NamedTuple):
    """Packed K and V of one sequence; only the first ``num_tokens`` are valid after a crop."""

    pair: tuple[Packed, Packed]
    num_tokens: int


class PackedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The KV of one layer; ``keys`` and ``values`` hold only the recent tokens."""

    keys: Any  # tensors; None before the first tokens
    values: Any

    def __init__(self, method: Method) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.method = method
        self._sequences: list[list[_Block]] = []  # the blocks of each sequence of the batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._sequences = [[] for _ in range(key_states.shape[0])]
        self._pack_old()
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self._whole(0, self.keys), self._whole(1, self.values)

    @property
    def num_packed(self) -> int:
        """The number of packed tokens, which is the same in each sequence."""
        return sum(x.num_tokens for x in self._sequences[0]) if self._sequences else 0

    @property
    def nbytes(self) -> int:
        """The bytes of packed and recent rows."""
        recent = (self.keys, self.values) if self.is_initialized else ()
        packed = (y.nbytes for x in self._sequences for block in x for y in block.pair)
        return sum(packed) + sum(int(x.nbytes) for x in recent)

    def get_seq_length(self) -> int:
        if not self.is_initialized:
            return 0
        return self.num_packed + (int(self.keys.shape[-2]) if self.keys.numel() else 0)

    def _pack_old(self) -> None:
        """Pack whole blocks of the tokens that are older than the newest ``NUM_RECENT``."""
        recent = int(self.keys.shape[-2]) if self.keys.numel() else 0
        count = max(0, recent - NUM_RECENT) // BLOCK * BLOCK
        for start in range(0, count, BLOCK):
            first = self.num_packed
            arrays = [_array(x[:, :, start : start + BLOCK]) for x in (self.keys, self.values)]
            for sequence, keys, values in zip(self._sequences, *arrays, strict=True):
                pair = (
                    self.method.pack(keys, SIDES[0], first),
                    self.method.pack(values, SIDES[1], first),
                )
                sequence.append(_Block(pair, BLOCK))
        if count:
            self.keys = self.keys[:, :, count:].clone()
            self.values = self.values[:, :, count:].clone()

    def _whole(self, side: int, recent: torch.Tensor) -> torch.Tensor:
        """Return K or V of all tokens, (batch, heads, tokens, dim)."""
        num_packed = self.num_packed
        if not num_packed:
            return recent
        batch, heads, num_recent, dim = recent.shape
        whole = recent.new_empty(batch, heads, num_packed + num_recent, dim)
        for row, sequence in zip(whole, self._sequences, strict=True):
            at = 0
            for block in sequence:
                rows = self.method.restore(block.pair[side])[:, : block.num_tokens]
                row[:, at : at + block.num_tokens] = _tensor(rows, recent)
                at += block.num_tokens
        whole[:, :, num_packed:] = recent
        return whole

    def reset(self) -> None:
        super().reset()
        self._sequences = []

    def crop(self, tokens_to_remove: int) -> None:
        length = self.get_seq_length()
        # As in transformers, a positive number is the length to keep.
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        kept = min(max(kept, 0), length)
        if not length or kept == length:
            return
        recent = max(kept - self.num_packed, 0)
        self._sequences = [_cut(x, kept) for x in self._sequences]
        self.keys, self.values = self.keys[:, :, :recent], self.values[:, :, :recent]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            order = torch.arange(len(self._sequences))[indices.cpu()].tolist()
            self._sequences = [list(self._sequences[x]) for x in order]
            chosen = torch.tensor(order, device=self.keys.device)
            self.keys = self.keys.index_select(0, chosen)
            self.values = self.values.index_select(0, chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))


def _cut(blocks: list[_Block], length: int) -> list[_Block]:
    """Return the blocks of the first ``length`` tokens; of the last one only a part may count."""
    found = []
    for block in blocks:
        if length > 0:
            found.append(block._replace(num_tokens=min(block.num_tokens, length)))
        length -= block.num_tokens
    return found


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a numpy array on the host, bf16 as bit patterns in uint16."""
    tensor = tensor.detach().cpu().contiguous()
    pattern = _BIT_PATTERNS.get(tensor.dtype)
    if pattern is None:
        array: np.ndarray = tensor.numpy()
        return array
    bits: np.ndarray = tensor.view(pattern).numpy()
    return bits.view(np.uint16)


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor of an array of ``_array``, in the dtype and on the device of ``like``."""
    pattern = _BIT_PATTERNS.get(like.dtype)
    array = np.ascontiguousarray(array)
    if pattern is None:
        return torch.from_numpy(array).to(like.device)
    return torch.from_numpy(array.view(np.int16)).view(like.dtype).to(like.device)
