"""Brings texts to the owner thread to be embedded: one text at a time, one step at a time.

Tenants take turns, see ``tenant_line``. A step stands between two rounds of the batches, so answers
go on meanwhile, and takes no longer than a chunk of a prefill may beside them: a short answer waits
for several. Its tokens count as those of the tenant's prompts do, and while that tenant is ahead of
another, the engine is the other's between two steps, for as long as its share is. A text of several
steps holds KV, which counts in no budget: one that is longer than the longest step begins only when
no request lacks memory or waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from engines.host.fair_shares import PROMPT_TOKEN
from engines.host.tenant_line import Payer, QueueFull, TenantLine
from engines.mlx_worker.batch.prefill import ChunkSizer
from engines.mlx_worker.embeddings.hidden_states import HiddenStates, inner_of, pooling_of
from engines.mlx_worker.embeddings.vectors import Vector, check_size, cut
from engines.mlx_worker.owner import Owner
from engines.openai.embeddings import EmbeddingsRequest
from engines.openai.errors import InvalidRequest

T = TypeVar("T")

MAX_WAITING: Final = 64  # requests
NO_PAYER: Final = Payer()
LOOK_AGAIN_S: Final = 0.05
MAX_PAUSE_S: Final = 5.0  # between two steps, however large the others' shares are


class Embedder:
    """Embeds texts with the model of a started owner. Belongs to the event loop.

    Args:
        patience_s: for how long a text waits until no request lacks memory.
    """

    def __init__(
        self,
        owner: Owner,
        step: int,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owner = owner
        self._step = step
        self._sizes = ChunkSizer(step)
        self._patience_s = patience_s
        self._clock = clock
        self._inner = inner_of(owner.loaded.model)
        self._pooling = pooling_of(owner.loaded.path)
        self._line = TenantLine(MAX_WAITING)

    def check(self) -> None:
        """Raise ``InvalidRequest`` (404) if this model makes no embeddings."""
        if self._inner is None:
            message = "This model makes no embeddings: its class keeps its hidden states to itself."
            raise InvalidRequest(message, "model", "not_supported", 404)

    async def embed(
        self, asked: EmbeddingsRequest, texts: Sequence[Sequence[int]], payer: Payer = NO_PAYER
    ) -> list[Vector]:
        """Embed texts; each vector has the length 1.

        Raises:
            InvalidRequest: more dimensions than the model has, or far too many values.
            QueueFull: too many wait already, or there is no room for a long text.
        """
        with self._line.place(payer), self._counted(payer):
            vectors = []
            for text in texts:
                async with self._line.turn(payer, len(text)):
                    vector, pause_s = await self._of(text, payer)
                vectors.append(cut(vector, asked.dimensions))
                check_size(vectors[0], len(texts))
                await asyncio.sleep(pause_s)
            return vectors

    @contextmanager
    def _counted(self, payer: Payer) -> Iterator[None]:
        """Let what is embedded meanwhile count in the tenant's share of the engine."""
        owner = self._owner
        owner.post(lambda: owner.parts.shares.come(*payer))
        try:
            yield
        finally:
            owner.post(lambda: owner.parts.shares.leave(payer.tenant))

    async def _of(self, text: Sequence[int], payer: Payer) -> tuple[Vector, float]:
        """Embed a text; return for how many seconds the engine is the others' now, too."""
        if len(text) > self._step:
            await self._room_for(len(text))
        states = HiddenStates(self._owner.loaded.model, self._inner, self._pooling)
        pause_s, first = 0.0, 0
        while first < len(text):
            await asyncio.sleep(pause_s)
            part = text[first : first + self._sizes.chunk(busy=True)]
            first += len(part)
            last = first == len(text)
            pause_s = await self._on_owner(partial(self._feed, states, part, last, payer))
        return states.pooled(), pause_s

    def _feed(self, states: HiddenStates, part: Sequence[int], last: bool, payer: Payer) -> float:
        """Do a step; return for how many seconds the engine is the others' now."""
        begin = self._clock()
        states.feed(part, last=last)
        took_s = self._clock() - begin
        self._sizes.took(len(part), took_s)
        shares = self._owner.parts.shares
        shares.serve(payer.tenant, len(part) * PROMPT_TOKEN)
        return min(took_s * shares.owed(payer.tenant), MAX_PAUSE_S)

    async def _room_for(self, num_tokens: int) -> None:
        nbytes = self._owner.sequence_bytes(num_tokens)
        try:
            async with asyncio.timeout(self._patience_s):
                while await self._on_owner(lambda: self._owner.parts.loop.lacks(nbytes)):
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise QueueFull("no memory was free for a long text; try again later") from None

    async def _on_owner(self, work: Callable[[], T]) -> T:
        if self._owner.is_closing:
            raise QueueFull("the engine is shutting down")
        return await self._owner.call(work)
