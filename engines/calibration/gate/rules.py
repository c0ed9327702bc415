"""The rules by which a measured preset may serve a model, and by which one of several is preferred.

A lossy codec must keep a bound to serve. Sessions that rest were packed by the earlier presets, and
are not packed again when presets are learned again. Of those within the bound, ``auto`` chooses by
size and by measured times. What a user waits for comes from the fastest tier, so there a restore
has to be a small part of the prefill that it saves. What rests in a slower tier is there to be
small.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

import msgspec

from engines.calibration.first_order import DENSEST
from kvstore.codecs.names import USUAL, first_part, is_learned
from kvstore.codecs.profile import OF_WINDOWS, Profile
from kvstore.codecs.quality import Quality
from kvstore.shapes import is_latent

logger = logging.getLogger(__name__)
WORTH: Final = 0.9  # of the KL of before: less is no reason to give a preset another form
TOKENS: Final = 2000  # of the restore that is held against its prefill
QUIET: Final = (
    0.1  # the share of its time that a thread may wait for a processor on a quiet machine
)


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest loss that is accepted.

    KL decides: the perplexity of single texts varies by more than codecs change it. The default
    admits three fixed bits with a profile, with a margin.
    """

    kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    # Against disasters that KL, a mean, could hide.
    top1: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9
    # Of reasoning chains. Only answers are judged there, which hang on single facts: they cost more
    # than a text does, and the bound is so many times that of texts.
    chain_factor: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    chain_top1: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.83


def refusal(rows: Sequence[Quality], preset: str, bound: Bound) -> str:
    """The reason, in one sentence, why this preset must not serve this model; "" if it may."""
    measured = [row for row in rows if row.preset == preset]
    if not measured:
        return f"codec {preset} was not measured on this model; run: thermocline calibrate"
    for row in measured:
        at = f"codec {preset} at {row.context} tokens"
        if not row.kl <= bound.kl:
            return f"{at} has a KL of {row.kl:.4f}, above the bound of {bound.kl:g}"
        if not row.top1 >= bound.top1:
            return f"{at} keeps {row.top1:.1%} of the most likely tokens, under {bound.top1:.0%}"
        if row.needle_found < row.needle_total:
            return f"{at} lost {row.needle_total - row.needle_found} of {row.needle_total} needles"
        if words := _chains_refusal(row, bound):
            return f"{at} {words}"
    return ""


def _chains_refusal(row: Quality, bound: Bound) -> str:
    """The rest of a sentence on the loss in reasoning chains; "" if they keep the bound.

    A row of an earlier release has no chains, and is judged by its other figures.
    """
    if row.chain_tokens == 0 or row.chain_kl is None or row.chain_top1 is None:
        return ""
    most = bound.chain_factor * bound.kl
    if not row.chain_kl <= most:
        return (
            f"loses the thread of reasoning: a KL of {row.chain_kl:.4f} at the answers to chains,"
            f" above the bound of {most:g}"
        )
    if not row.chain_top1 >= bound.chain_top1:
        return (
            f"loses the thread of reasoning: {row.chain_top1:.1%} of the answers to chains stay the"
            f" same, under {bound.chain_top1:.0%}"
        )
    return ""


def beyond_measured(preset: str, profile: Profile | None) -> str:
    """The reason why a preset holds only at positions near those measured; "" if it does not.

    Where a model's rotation of the keys beside its latents was not found, they are learned as they
    lie at the positions of the texts. Beyond them they have another mean, and a learned preset
    loses many times what was measured.
    """
    layers = zip(profile.layout.layers, profile.ropes, strict=False) if profile is not None else ()
    if is_learned(first_part(preset)) and any(rope is None and is_latent(x) for x, rope in layers):
        return (
            f"codec {preset} learned the rotated keys beside this model's latents at the positions"
            " of short texts, since their rotation was not found, and does not hold for longer"
            " sessions"
        )
    return ""


def was_learned_on(profile: Profile) -> bool:
    """Say whether a profile was learned from more texts than the first verdict takes."""
    return DENSEST in {first_part(x.preset) for x in profile.rows}


def worth_adopting(found: Profile, before: Profile | None, bound: Bound) -> Profile:
    """Leave out of ``found`` each preset that is hardly closer than its earlier form.

    One that keeps ``bound`` takes the place of a form that does not. Forms that were learned from
    keys rotated in another way are not compared.
    """
    if before is None or before.ropes not in ((), found.ropes):
        return found
    names = {first_part(x.preset) for x in found.rows}
    kept = {x for x in names if _is_worth(x, found.rows, before.rows, bound)}
    for name in sorted(names - kept):
        logger.info("%s stays as it was learned before: it is now hardly closer", name)
    dropped = {y for x in names - kept for y in (x, x + OF_WINDOWS)}
    return replace(
        found,
        learned={name: x for name, x in found.learned.items() if name not in dropped},
        rows=tuple(x for x in found.rows if first_part(x.preset) in kept),
    )


def _is_worth(
    name: str, rows: tuple[Quality, ...], old_rows: tuple[Quality, ...], bound: Bound
) -> bool:
    old = {(x.preset, x.context): x for x in old_rows}
    own = [x for x in rows if first_part(x.preset) == name]
    known = [(x, old[x.preset, x.context]) for x in own if (x.preset, x.context) in old]
    if any(refusal(old_rows, x.preset, bound) and not refusal(rows, x.preset, bound) for x in own):
        return True
    return not known or sum(x.kl for x, _ in known) < WORTH * sum(x.kl for _, x in known)


def is_disturbed(row: Quality) -> bool:
    """Say whether other work had the processors while a row was timed."""
    return row.restore_share is not None and (row.waited or 0.0) > QUIET


class Preferred(NamedTuple):
    """The name of a preset, and the reason in words, with the figures."""

    name: str
    reason: str


def preferred(measured: Mapping[str, Sequence[Quality]], most_share: float) -> Preferred:
    """Choose the densest preset that restores quickly.

    Args:
        measured: the rows of each preset that may serve; at least one preset, each with a row.
        most_share: of a prefill, that a restore may take.
    """
    rows = {name: _usual(found) for name, found in measured.items()}
    by_bits = sorted(rows, key=lambda name: (rows[name].bits_per_element, rows[name].kl))
    timed = [name for name in by_bits if rows[name].restore_share is not None]
    if not timed:
        return _untimed(rows, by_bits)
    for name in timed:
        if _share(rows[name]) <= most_share:
            how = f"the densest within the bound that unpacks in {most_share:.0%} of a prefill: "
            return Preferred(name, how + _times(rows[name]) + _passed_over(rows, by_bits, name))
    name = min(timed, key=lambda name: _share(rows[name]))
    how = f"; none takes {most_share:.0%}, this is the quickest"
    return Preferred(name, _times(rows[name]) + how + _passed_over(rows, by_bits, name))


def _untimed(rows: Mapping[str, Quality], by_bits: Sequence[str]) -> Preferred:
    """The rule of profiles without times: three bits, else the densest.

    One that is denser and closer than three bits goes before them.
    """
    untimed = "its restore was not timed; to choose by times, run:"
    if USUAL in by_bits and not any(_beats(rows[x], rows[USUAL]) for x in by_bits):
        return Preferred(USUAL, f"{untimed} thermocline calibrate")
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
