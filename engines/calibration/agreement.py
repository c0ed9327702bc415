"""Makes one verdict of several ranks' figures, each measured on its share of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality

# Of these more is better; of all other figures less.
MORE_IS_BETTER: Final = frozenset(
    {"top1", "needle_found", "cos_k", "cos_v", "chain_top1", "prefill_s"}
)
OWN: Final = frozenset(
    {"preset", "context", "codec_id", "needle_total", "chain_tokens"}
)  # no figures, or the same


class Partners(Protocol):
    """The other ranks that measure the same model at the same time."""

    def agree(self, profile: Profile) -> Profile:
        """The same profile with the figures that all ranks have agreed on. Waits for them.

        Raises:
            Interrupted: the engine ends.
            RuntimeError: a rank has given up.
        """

    def give_up(self, reason: str) -> None:
        """Inform the others that this rank measures no more."""


def worst_of(ranks: Sequence[Sequence[Quality]]) -> tuple[Quality, ...]:
    """Take of each figure the worst that any rank has found, in a row for each preset and context.

    The answers are the same on every rank; bits, errors and times are not. A row that some rank
    does not have is left out. The rows by text are the first rank's.
    """
    by_name = [{(x.preset, x.context): x for x in rows} for rows in ranks]
    common = [x for x in by_name[0] if all(x in rows for rows in by_name)]
    return tuple(_worst([rows[x] for rows in by_name]) for x in common)


def with_figures_of(rows: Sequence[Quality], agreed: Sequence[Quality]) -> tuple[Quality, ...]:
    """The rows that were agreed on, each with the id of the rank's own codec."""
    ids = {(x.preset, x.context): x.codec_id for x in rows}
    return tuple(
        msgspec.structs.replace(x, codec_id=ids[x.preset, x.context])
        for x in agreed
        if (x.preset, x.context) in ids
    )


def _worst(rows: Sequence[Quality]) -> Quality:
    figures: dict[str, Any] = {}
    for name in Quality.__struct_fields__:
        found = [x for row in rows if isinstance(x := getattr(row, name), int | float)]
        if name not in OWN and len(found) == len(rows):
            figures[name] = min(found) if name in MORE_IS_BETTER else max(found)
    return msgspec.structs.replace(rows[0], **figures)
