"""vLLM's blocks without vLLM: plain arrays that the worker side reads and writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.shapes import KVLayout, KVPair
from tests.block_sessions import BLOCK, LAYOUT, rows_of


class NumpyBlocks:
    """Stands in for ``paging.PagedCache``, on arrays.

    ``pages[layer]`` are K and V, (num_blocks, num_kv_heads, block_tokens, head_dim).
    """

    def __init__(self, num_blocks: int = 64) -> None:
        self.pages = [
            [np.zeros((num_blocks, x.num_kv_heads, BLOCK, x.head_dim), np.float32) for _ in "kv"]
            for x in LAYOUT.layers
        ]

    @property
    def layout(self) -> KVLayout:
        return LAYOUT

    @property
    def block_tokens(self) -> int:
        return BLOCK

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        return [(_rows(k[block_ids]), _rows(v[block_ids])) for k, v in self.pages]

    def write(self, block_ids: Sequence[int], run: Sequence[KVPair], first_block: int) -> None:
        for sides, rows in zip(self.pages, run, strict=True):
            for page, array in zip(sides, rows, strict=True):
                for i, block_id in enumerate(block_ids):
                    first = (first_block + i) * BLOCK
                    page[block_id] = array[:, first : first + BLOCK]

    def hold_reads(self) -> tuple[threading.Event, threading.Event]:
        """Hold each read until the first event; the second says that one has begun."""
        gate, entered, read = threading.Event(), threading.Event(), self.read

        def slowly(block_ids: Sequence[int]) -> list[KVPair]:
            entered.set()
            assert gate.wait(30)
            return read(block_ids)

        self.read = slowly
        return gate, entered

    def compute(self, chain: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Fill the blocks as a prefill of this chain would."""
        self.write(block_ids[: len(chain)], rows_of(chain, 0, len(chain)), 0)

    def holds(self, chain: Sequence[bytes], first: int, block_ids: Sequence[int]) -> bool:
        """True if these blocks are the chain's from ``first`` on, bit for bit."""
        wanted = rows_of(chain, first, len(block_ids))
        pairs = zip(self.read(block_ids), wanted, strict=True)
        return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


class NoStream:
    def mark(self) -> object:
        return None

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        yield


def _rows(blocks: np.ndarray) -> np.ndarray:
    heads = blocks.shape[1]
    return np.ascontiguousarray(blocks.transpose(1, 0, 2, 3)).reshape(heads, -1, blocks.shape[3])
