"""Attention in plain torch on blocks as a GPU's backends keep them: K and V side by side in a row.

The CPU's own backend keeps K in an order of its instruction set, which no kernel for GPUs reads.
It is registered as vLLM provides for, when a worker looks up its extension.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout


class DeviceAttentionImpl(CPUAttentionBackendImpl):
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to each request's own blocks; ``kv_cache``: (blocks, heads, tokens, K | V)."""
        if attn_metadata is None:  # a dry run
            return output
        starts = attn_metadata.query_start_loc.tolist()
        block_tokens = kv_cache.shape[2]
        for i, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
            length = int(attn_metadata.seq_lens[i])
            blocks = attn_metadata.block_table[i, : -(-length // block_tokens)].long()
            rows = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
            keys, values = rows.split(self.head_size, dim=-1)
            output[first:last] = self._attended(query[first:last], keys, values).to(output.dtype)
        return output

    def _attended(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        count, length = len(query), keys.shape[1]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        found = torch.nn.functional.scaled_dot_product_attention(
            query.float().transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=self.scale,
            enable_gqa=True,
        )
        return found[0].transpose(0, 1)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens = kv_cache.transpose(1, 2)  # (blocks, tokens, heads, K | V)
        slots = slot_mapping[slot_mapping >= 0]
        at = slots // tokens.shape[1], slots % tokens.shape[1]
        rows = torch.cat((key, value), -1)[: len(slot_mapping)][slot_mapping >= 0]
        tokens[at] = rows.to(tokens.dtype)


class DeviceAttention(CPUAttentionBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # token by token, as FlashAttention has it

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return DeviceAttentionImpl


register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{DeviceAttention.__name__}")
