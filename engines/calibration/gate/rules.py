"""The rules by which a measured preset may serve a model, and by which one of several is preferred.

A lossy codec must keep a bound to serve. Of those within it, ``auto`` chooses by size and by
measured times: a restore has to be a small part of the prefill that it saves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvstore.codecs.names import first_part, is_learned
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.shapes import is_latent
from kvstore.workers import processors

# One-sided 1 % quantiles of Student's t, by the number of texts. There are five checks, after the
# third to the seventh text; in at most 5 % of measurements one of them is wrong.
STUDENT: Final = {3: 6.965, 4: 4.541, 5: 3.747, 6: 3.365, 7: 3.143}
# The operator's bound is a KL: perplexity varies more between texts than a codec changes it.
LEAST_TOP1: Final = 0.9  # detects severe errors that KL, a mean, could hide
# The bound on the KL of reasoning chains, as a multiple of that of texts. Only answers are judged
# there, which depend on single facts, so their KL is higher than that of texts.
CHAIN_FACTOR: Final = 10.0
LEAST_CHAIN_TOP1: Final = 0.83
TOKENS: Final = 2000  # length of the restore whose time is compared with its prefill
QUIET: Final = 0.1  # a machine is quiet if threads wait for a CPU at most this part of the time
# Figures that are better if they are higher; all others are better if they are lower.
MORE_IS_BETTER: Final = frozenset(
    {"top1", "needle_found", "cos_k", "cos_v", "chain_top1", "prefill_s"}
)
OWN: Final = frozenset(
    {"preset", "context", "codec_id", "needle_total", "chain_tokens"}
)  # no figures, or the same on all ranks


def refusal(
    rows: Sequence[Quality], preset: str, max_kl: float, profile: Profile | None = None
) -> str:
    """Return a sentence that says why this preset must not serve this model; "" if it may.

    ``profile``: the model's profile, with what the preset has learned.
    """
    measured = [row for row in rows if row.preset == preset]
    if not measured:
        return f"codec {preset} was not measured on this model; run: thermocline calibrate"
    for row in measured:
        at = f"codec {preset} at {row.context} tokens"
        if not row.kl <= max_kl:
            return f"{at} has a KL of {row.kl:.4f}, above the bound of {max_kl:g}"
        if not row.top1 >= LEAST_TOP1:
            return f"{at} keeps {row.top1:.1%} of the most likely tokens, under {LEAST_TOP1:.0%}"
        if row.needle_found < row.needle_total:
            return f"{at} lost {row.needle_total - row.needle_found} of {row.needle_total} needles"
        if words := _chains_refusal(row, max_kl):
            return f"{at} {words}"
    return _beyond_measured(preset, profile)


def decided(rows: Sequence[Quality], max_kl: float) -> bool | None:
    """Return whether all presets keep the bound; None if the texts so far do not decide.

    It is decided if the mean over texts is farther from the bound than its standard error times
    ``STUDENT``.
    """
    found = [_decided(row, max_kl) for row in rows]
    return False if False in found else None if None in found or not found else True


def _decided(row: Quality, max_kl: float) -> bool | None:
    num_texts = min(len(row.texts), max(STUDENT))
    if num_texts not in STUDENT:
        return None
    kl, top1 = ([getattr(x, name) for x in row.texts] for name in ("kl", "top1"))
    wide = STUDENT[num_texts] / math.sqrt(len(row.texts))
    kl_margin, top1_margin = (wide * statistics.stdev(x) for x in (kl, top1))
    if row.kl - kl_margin > max_kl or row.needle_found < row.needle_total:
        return False
    if _chains_refusal(row, max_kl):
        return False
    sure = row.kl + kl_margin <= max_kl and row.top1 - top1_margin >= LEAST_TOP1
    return True if sure else None


def _chains_refusal(row: Quality, max_kl: float) -> str:
    """Return the rest of a sentence on the loss in reasoning chains; "" if it keeps the bound.

    A row of an earlier release has no chains; its other figures decide.
    """
    if row.chain_tokens == 0 or row.chain_kl is None or row.chain_top1 is None:
        return ""
    most = CHAIN_FACTOR * max_kl
    if not row.chain_kl <= most:
        return (
            f"loses the thread of reasoning: a KL of {row.chain_kl:.4f} at the answers to chains,"
            f" above the bound of {most:g}"
        )
    if not row.chain_top1 >= LEAST_CHAIN_TOP1:
        return (
            f"loses the thread of reasoning: {row.chain_top1:.1%} of the answers to chains stay the"
            f" same, under {LEAST_CHAIN_TOP1:.0%}"
        )
    return ""


def _beyond_measured(preset: str, profile: Profile | None) -> str:
    """Return why a preset is valid only near the measured positions; "" if it is valid everywhere.

    If RoPE of the keys beside a model's latents is unknown, a preset learns the keys as they are at
    the texts' positions. At later positions their mean is another, and the preset loses many times
    as much as measured.
    """
    layers = zip(profile.layout.layers, profile.ropes, strict=False) if profile is not None else ()
    if is_learned(first_part(preset)) and any(rope is None and is_latent(x) for x, rope in layers):
        return (
            f"codec {preset} learned the rotated keys beside this model's latents at the positions"
            " of short texts, since their rotation was not found, and does not hold for longer"
            " sessions"
        )
    return ""


def is_doubtful(row: Quality) -> bool:
    """Return whether other work disturbed the timing of a row, or another machine timed it."""
    if row.restore_share is None:
        return False
    return (row.waited or 0.0) > QUIET or not is_from_here(row)


def is_from_here(row: Quality) -> bool:
    """Return whether a row was timed on this kind of CPU; True if that was not recorded."""
    return row.timed_on in ("", processors())


class Preferred(NamedTuple):
    """The name of a preset, and the reason in words, with the figures."""

    name: str
    reason: str


def preferred(measured: Mapping[str, Sequence[Quality]], most_share: float) -> Preferred:
    """Return the densest preset that restores quickly; if there is none, the quickest.

    Args:
        measured: the rows of each preset that may serve; at least one preset, each with a row.
        most_share: the most time of a restore, as a fraction of the prefill's.
    """
    rows = {name: _usual(found) for name, found in measured.items()}
    by_bits = sorted(rows, key=lambda name: (rows[name].bits_per_element, rows[name].kl))
    quick = [name for name in by_bits if _share(rows[name]) <= most_share]
    name = quick[0] if quick else min(by_bits, key=lambda name: _share(rows[name]))
    words = f"none unpacks in {most_share:.0%} of a prefill's time, this is the quickest: "
    if quick:
        most = f"{most_share:.0%} of a prefill's time"
        words = f"the densest within the bound that unpacks in at most {most}: "
    denser = by_bits[: by_bits.index(name)]
    passed_over = "".join(_beside(x, rows[x], rows[name]) for x in denser)
    return Preferred(name, words + _times(rows[name]) + passed_over)


def _beside(name: str, row: Quality, chosen: Quality) -> str:
    """Return why a denser preset was passed over, with the figures if it also loses less."""
    untimed = row.restore_share is None
    words = f"; {name} was not timed" if untimed else f"; {name} would take {_share(row):.1%}"
    if row.kl < chosen.kl:
        words += (
            f", though it has {row.bits_per_element:.2f} bits and a KL of {row.kl:.4f}, and this"
            f" {chosen.bits_per_element:.2f} and {chosen.kl:.4f}"
        )
    return words


def _times(row: Quality) -> str:
    if row.restore_s is None or row.prefill_s is None:
        return "it was not timed"
    seconds = [x * TOKENS / 1000 for x in (row.restore_s, row.prefill_s)]
    return (
        f"{TOKENS:,} tokens are unpacked in {seconds[0]:.3f} s and prefilled in {seconds[1]:.2f} s,"
        f" that is {_share(row):.1%}"
    )


def _share(row: Quality) -> float:
    return math.inf if row.restore_share is None else row.restore_share


def _usual(rows: Sequence[Quality]) -> Quality:
    """Return the row with the context nearest to ``TOKENS``, preferring timed rows."""
    return min(rows, key=lambda x: (x.restore_share is None, abs(x.context - TOKENS)))


def worst_of(ranks: Sequence[Sequence[Quality]]) -> tuple[Quality, ...]:
    """Return a row for each preset and context with the worst of each figure over all ranks.

    A row that some rank lacks is left out. Other fields, such as the codec's id and the figures by
    text, are those of the first rank. So ``worst_of`` a rank's rows and the joint rows returns the
    joint figures with the rank's own codec ids.
    """
    by_name = [{(x.preset, x.context): x for x in rows} for rows in ranks]
    common = [x for x in by_name[0] if all(x in rows for rows in by_name)]
    return tuple(_worst([rows[x] for rows in by_name]) for x in common)


def _worst(rows: Sequence[Quality]) -> Quality:
    figures: dict[str, Any] = {}
    for name in Quality.__struct_fields__:
        found = [x for row in rows if isinstance(x := getattr(row, name), int | float)]
        if name not in OWN and len(found) == len(rows):
            figures[name] = min(found) if name in MORE_IS_BETTER else max(found)
    return msgspec.structs.replace(rows[0], **figures)
