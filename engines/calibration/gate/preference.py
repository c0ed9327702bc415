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
    by_bits = sorted(rows, key=lambda name: (rows[name].bits_per_element, rows[name].kl))
    timed = [name for name in by_bits if rows[name].restore_share is not None]
    if not timed:
        return _untimed(rows, by_bits)
    if not fastest:
        return Preferred(by_bits[0], "the densest within the bound, for a tier that is read seldom")
    for name in timed:
        if _share(rows[name]) <= most_share:
            how = f"the densest within the bound that unpacks in {most_share:.0%} of a prefill: "
            return Preferred(name, how + _times(rows[name]) + _passed_over(rows, by_bits, name))
    name = min(timed, key=lambda name: _share(rows[name]))
    how = f"; none takes {most_share:.0%}, this is the quickest"
    return Preferred(name, _times(rows[name]) + how + _passed_over(rows, by_bits, name))


def _untimed(rows: Mapping[str, Quality], by_bits: Sequence[str]) -> Preferred:
    """The rule of profiles without times: three bits for every tier, else the densest.

    One that is denser and closer than three bits goes before them.
    """
    untimed = "its restore was not timed, so all tiers have it; to choose for each, run:"
    if UNTIMED in by_bits and not any(_beats(rows[x], rows[UNTIMED]) for x in by_bits):
        return Preferred(UNTIMED, f"{untimed} thermocline calibrate")
    return Preferred(by_bits[0], f"the densest of these; {untimed} thermocline calibrate")


def _passed_over(rows: Mapping[str, Quality], by_bits: Sequence[str], name: str) -> str:
    """The presets that would be denser but for the time that they take, with their figures."""
    denser = by_bits[: by_bits.index(name)]
    return "".join(_beside(x, rows[x], rows[name]) for x in denser)


def _beside(name: str, row: Quality, chosen: Quality) -> str:
    untimed = row.restore_share is None
    words = f"; {name} was not timed" if untimed else f"; {name} would take {_share(row):.1%}"
    if _beats(row, chosen):
        words += (
            f", though it has {row.bits_per_element:.2f} bits and a KL of {row.kl:.4f}, and this"
            f" {chosen.bits_per_element:.2f} and {chosen.kl:.4f}"
        )
    return words


def _beats(row: Quality, other: Quality) -> bool:
    """True if a preset loses less and is no larger."""
    return row.bits_per_element <= other.bits_per_element and row.kl < other.kl


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
