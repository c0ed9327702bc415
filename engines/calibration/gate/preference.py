"""The preset that ``auto`` prefers among those within the bound, by size and by measured times.

What a user waits for comes from the fastest tier, so there a restore has to be a small part of the
prefill that it saves. What rests in a slower tier is there to be small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.codecs.quality import Quality

UNTIMED: Final = "dense3"  # wherever it keeps the bound, if nothing is known of times
TOKENS: Final = 2000  # of the restore that is held against its prefill


class Preferred(NamedTuple):
    """The name of a preset, and the reason in words, with the figures."""

    name: str
    reason: str


def preferred(
    measured: Mapping[str, Sequence[Quality]], most_share: float, *, fastest: bool
) -> Preferred:
    """The preset for a tier.

    Args:
        measured: the rows of each preset that may serve; at least one preset, each with a row.
        most_share: of a prefill, that a restore from the fastest tier may take.
        fastest: the tier is the fastest one.
    """
    rows = {name: _usual(found) for name, found in measured.items()}
    by_bits = sorted(rows, key=lambda name: rows[name].bits_per_element)
    timed = [name for name in by_bits if rows[name].restore_share is not None]
    if not timed:
        return _untimed(by_bits)
    if not fastest:
        return Preferred(by_bits[0], "the densest within the bound, for a tier that is read seldom")
    for name in timed:
        if _share(rows[name]) <= most_share:
            denser = by_bits[0] if by_bits[0] != name else ""
            return Preferred(name, _quick_enough(rows, name, denser, most_share))
    quickest = min(timed, key=lambda name: _share(rows[name]))
    return Preferred(
        quickest, f"{_times(rows[quickest])}; none takes {most_share:.0%}, this is the quickest"
    )


def _untimed(by_bits: Sequence[str]) -> Preferred:
    """The rule of profiles without times: three bits for every tier, else the densest."""
    untold = "its restore was not timed, so all tiers have it; to choose for each, run:"
    name, how = (UNTIMED, "") if UNTIMED in by_bits else (by_bits[0], "the densest of these; ")
    return Preferred(name, f"{how}{untold} thermocline calibrate")


def _quick_enough(rows: Mapping[str, Quality], name: str, denser: str, most_share: float) -> str:
    words = f"the densest within the bound that unpacks in {most_share:.0%} of a prefill: "
    words += _times(rows[name])
    if denser and rows[denser].restore_share is not None:
        words += f"; {denser} would take {_share(rows[denser]):.1%}"
    return words


def _times(row: Quality) -> str:
    assert row.restore_s is not None and row.prefill_s is not None
    seconds = [x * TOKENS / 1000 for x in (row.restore_s, row.prefill_s)]
    return (
        f"{TOKENS:,} tokens are unpacked in {seconds[0]:.3f} s and prefilled in {seconds[1]:.2f} s,"
        f" that is {_share(row):.1%}"
    )


def _share(row: Quality) -> float:
    assert row.restore_share is not None
    return row.restore_share


def _usual(rows: Sequence[Quality]) -> Quality:
    """The row of the context that is nearest to ``TOKENS``, if one was timed a timed one."""
    timed = [x for x in rows if x.restore_share is not None]
    return min(timed or rows, key=lambda x: abs(x.context - TOKENS))
