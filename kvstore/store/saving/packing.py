"""Packs the new blobs of a save again, for tiers whose codec is not that of the fastest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob
from kvstore.workers import Workers


class ToPack(NamedTuple):
    """A new blob, as any codec can pack it.

    ``lineage`` finds the surviving lossy copies that its rows continue; ``pack`` takes them.
    """

    span: Span
    pack: Callable[[Codec, Lineage], Blob]
    lineage: Callable[[Codec], Lineage]


def pack_again(
    workers: Workers, wanted: Iterable[ToPack], first: Mapping[Span, Lineage], codec: Codec
) -> dict[bytes, Blob]:
    """Pack the same blobs from the same rows, a few at a time; return them by key.

    ``first``: the lineages by which they were packed before. They are used again where the search
    finds nothing: a slower tier may lack a copy in its codec, and the fastest one has dropped the
    older tail.
    """

    def call(x: ToPack) -> Callable[[], Blob]:
        own = x.lineage(codec)
        return partial(x.pack, codec, own if own.segments else first.get(x.span, FRESH))

    return workers.few_at_once(((x.span.key, call(x)) for x in wanted), workers.num_spare)
