"""The tokens behind a session's last full block: which of them are kept, and which come back.

vLLM knows full blocks only: what lies behind them it computes again, also of a session that is hot.
An engine on CPUs pays for each of these tokens, a device computes them beside the new ones for
nothing; so they are kept and restored on CPUs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Feature(Protocol):
    """An image or the like, as much of it as is needed here."""

    @property
    def mm_position(self) -> Any: ...


class Tokens(Protocol):
    """As much of ``vllm.v1.request.Request`` as is needed here."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def mm_features(self) -> Sequence[Feature]: ...

    @property
    def prompt_embeds(self) -> object: ...


def ids_between(request: Tokens, first: int, last: int) -> tuple[int, ...]:
    """Ids of tokens ``first .. last``; none if more than their ids decides on their KV.

    What stands before them is in the hash of the block before, with salt and all.
    """
    if request.prompt_embeds is not None or any(
        x.mm_position.offset < last and first < x.mm_position.offset + x.mm_position.length
        for x in request.mm_features
    ):
        return ()
    return tuple(request.all_token_ids[first:last])


def num_common(part: Sequence[int], request: Tokens, first: int, last: int) -> int:
    """With how many tokens of ``part`` the request goes on behind ``first``, up to ``last``."""
    ids = ids_between(request, first, min(first + len(part), last))
    pairs = zip(part, ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(part), len(ids)))
