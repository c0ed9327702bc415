"""The rules of the gate: bounds, preferences, and one verdict of several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.calibration.gate.rules import (
    STUDENT,
    decided,
    preferred,
    refusal,
    worst_of,
)
from kvstore.codecs.quality import Quality, TextQuality
from tests.qualities import GOOD

MAX_KL = 0.01


def row(**changes: object) -> Quality:
    return msgspec.structs.replace(GOOD, **changes)


TOO_FAR = [
    ({"kl": 0.011}, "KL of 0.0110"),
    ({"kl": math.nan}, "KL of nan"),
    ({"top1": 0.5}, "keeps 50.0% of the most likely"),
    ({"needle_found": 2}, "lost 1 of 3 needles"),
]


@pytest.mark.parametrize(("change", "said"), TOO_FAR)
def test_one_bad_context_is_enough(change: dict[str, object], said: str) -> None:
    found = refusal([GOOD, row(context=6144, **change)], "tq3", MAX_KL)
    assert said in found and "at 6144 tokens" in found


CHAINS = {"chain_tokens": 100, "chain_kl": 0.02, "chain_top1": 0.97}


def test_within_the_bound() -> None:
    for other in ({"context": 6144}, CHAINS):
        assert refusal([GOOD, row(**other)], "tq3", MAX_KL) == ""
    assert "thermocline calibrate" in refusal([GOOD], "tq4", MAX_KL), "it was not measured"


THREAD_LOST = [
    ({"chain_kl": 0.3}, "a KL of 0.3000 at the answers to chains, above the bound of"),
    ({"chain_kl": math.nan}, "a KL of nan at the answers"),
    ({"chain_top1": 0.6}, "60.0% of the answers to chains stay the same, under"),
]


@pytest.mark.parametrize(("change", "said"), THREAD_LOST)
def test_pass_keys_are_not_enough(change: dict[str, object], said: str) -> None:
    """Texts and needles as good as before; the thread of reasoning is lost."""
    found = refusal([GOOD, row(context=6144, **{**CHAINS, **change})], "tq3", MAX_KL)
    assert said in found and found.startswith("codec tq3 at 6144 tokens loses the thread")


def test_the_bound_of_chains_follows_the_operators() -> None:
    rows = [row(kl=0.0001, **{**CHAINS, "chain_kl": 0.02})]
    assert refusal(rows, "tq3", 0.01) == ""
    assert "above the bound of 0.01" in refusal(rows, "tq3", 0.001)


def judged(*kls: float, **changes: object) -> Quality:
    texts = tuple(
        TextQuality(text=str(i), kl=kl, perplexity_change_pct=0.0, top1=0.95 + 0.001 * i)
        for i, kl in enumerate(kls)
    )
    return row(kl=sum(kls) / len(kls), texts=texts, **changes)


FEW_TEXTS = [
    ((0.004, 0.004), None),  # of two texts nothing is certain
    ((0.004, 0.0041, 0.0042), True),
    ((0.004, 0.002, 0.009), None),  # within the bound, but not for certain
    ((0.004, 0.002, 0.009, 0.003, 0.004, 0.005), True),
    ((0.02, 0.0201, 0.0202), False),
    ((0.02, 0.002, 0.03), None),
]


@pytest.mark.parametrize(("kls", "wanted"), FEW_TEXTS)
def test_few_texts_decide_with_a_margin(kls: tuple[float, ...], wanted: bool | None) -> None:
    assert decided([judged(*kls)], MAX_KL) is wanted


def test_every_preset_has_to_be_certain() -> None:
    sure, unsure, bad = judged(0.004, 0.0041, 0.0042), judged(0.004, 0.002, 0.009), judged(*[1] * 3)
    assert decided([sure, sure], MAX_KL) is True
    assert decided([sure, unsure], MAX_KL) is None and decided([], MAX_KL) is None
    assert decided([unsure, bad], MAX_KL) is False
    for lost in ({"needle_found": 2}, {**CHAINS, "chain_kl": 0.3}):
        assert decided([msgspec.structs.replace(sure, **lost)], MAX_KL) is False


@pytest.mark.parametrize("num_texts", STUDENT)
def test_the_margin_errs_in_one_of_a_hundred(num_texts: int) -> None:
    """Means of texts lie above the bound, and pass for certain this seldom."""
    rng = np.random.default_rng(num_texts)
    draws = 0.0101 + 0.002 * rng.standard_normal((4000, num_texts))
    passed = sum(decided([judged(*x, top1=0.99)], MAX_KL) is True for x in draws.tolist())
    assert passed <= 0.015 * len(draws)


def timed(
    bits: float, restore_s: float | None, prefill_s: float | None = 1.0, context: int = 2048
) -> Quality:
    return msgspec.structs.replace(
        GOOD, bits_per_element=bits, restore_s=restore_s, prefill_s=prefill_s, context=context
    )


# A machine that prefills 1,000 tokens in a second.
MEASURED: Mapping[str, list[Quality]] = {
    "max": [timed(0.8, 0.12)],
    "balanced": [timed(1.5, 0.09)],
    "dense3": [timed(3.25, 0.04)],
    "safe": [timed(5.3, 0.2)],
}


def test_the_reason_has_the_times() -> None:
    reason = preferred(MEASURED, 0.1).reason
    assert (
        "in at most 10% of a prefill's time: 2,000 tokens"
        " are unpacked in 0.180 s and prefilled in 2.00 s" in reason
    )
    assert reason.endswith("that is 9.0%; max would take 12.0%")
    slow = preferred(MEASURED, 0.01).reason
    assert "in 0.080 s and prefilled in 2.00 s" in slow and "none unpacks in 1%" in slow


def test_one_that_is_denser_and_closer_but_slow_is_named_with_its_figures() -> None:
    closer = msgspec.structs.replace(timed(1.6, 0.127), kl=0.0041)
    worse = msgspec.structs.replace(timed(4.3, 0.005), kl=0.0098)
    name, reason = preferred({"tq4": [worse], "balanced": [closer]}, 0.1)
    assert name == "tq4"
    assert reason.endswith(
        "balanced would take 12.7%, though it has 1.60 bits and a KL of 0.0041, and this 4.30 and"
        " 0.0098"
    )
    assert preferred({"tq4": [worse], "balanced": [closer]}, 0.13).name == "balanced"
    quickest = preferred({"tq4": [worse], "balanced": [closer]}, 0.001)
    assert quickest.name == "tq4" and "1.60 bits" in quickest.reason


def test_the_context_nearest_to_two_thousand_tokens_counts() -> None:
    rows = {
        "max": [timed(0.8, 0.05), timed(0.7, 0.5, context=6144)],
        "dense3": [timed(3.25, 0.04), timed(3.2, 0.04, context=6144)],
    }
    assert preferred(rows, 0.1).name == "max"


def test_a_preset_that_was_not_timed_is_not_chosen_where_others_were() -> None:
    rows = {"max": [timed(0.8, None)], "dense3": [timed(3.25, 0.04)]}
    assert preferred(rows, 0.1).name == "dense3"
    rows["max"] = [timed(0.8, 0.04, None)]  # a restore, and no prefill to hold it against
    assert preferred(rows, 0.1).name == "dense3"


ROWS = st.builds(
    lambda bits, kl, restore_s: msgspec.structs.replace(timed(bits, restore_s), kl=kl),
    st.sampled_from([0.8, 1.5, 1.6, 3.25, 4.3]),
    st.sampled_from([0.001, 0.003, 0.005, 0.0098]),
    st.sampled_from([None, 0.01, 0.05, 0.0999, 0.1, 0.1001, 0.127, 0.5]),
)
PRESETS = st.dictionaries(
    st.sampled_from(["max", "balanced", "dense3", "tq4", "safe"]), ROWS, min_size=1
)


@given(PRESETS, st.sampled_from([0.01, 0.1, 1.0]))
def test_a_preset_that_another_beats_is_chosen_only_for_its_restore_time(
    rows: dict[str, Quality], share: float
) -> None:
    """And then the reason names the other one, with the figures of both."""
    name, reason = preferred({x: [row] for x, row in rows.items()}, share)
    chosen = rows[name]
    for other, row in rows.items():
        if not (row.bits_per_element < chosen.bits_per_element and row.kl < chosen.kl):
            continue
        took, own = row.restore_share, chosen.restore_share
        assert took is None or (took > share and (own is None or took > own))
        timing = "was not timed" if took is None else f"would take {took:.1%}"
        assert (
            f"; {other} {timing}, though it has {row.bits_per_element:.2f} bits and a KL" in reason
        )
        assert f"and this {chosen.bits_per_element:.2f} and {chosen.kl:.4f}" in reason


def ranked(preset: str = "dense3", **figures: float | str | None) -> Quality:
    return msgspec.structs.replace(GOOD, preset=preset, **figures)


FIGURES = [("kl", 0.001, 0.02), ("bits_per_element", 3.1, 3.3), ("top1", 0.99, 0.9)]


@pytest.mark.parametrize(("figure", "best", "worst"), FIGURES)
def test_the_worst_of_each_figure_counts(figure, best, worst):
    ranks = [[ranked(**{figure: best})], [ranked(**{figure: worst})]]
    assert worst_of(ranks) == worst_of(ranks[::-1])
    assert [getattr(x, figure) for x in worst_of(ranks)] == [worst]


def test_a_row_that_a_rank_lacks_is_left_out():
    found = worst_of([[ranked("dense3"), ranked("tq4")], [ranked("tq4")]])
    assert [x.preset for x in found] == ["tq4"]


def test_a_figure_that_a_rank_lacks_is_the_first_ranks():
    found = worst_of([[ranked(gaussian_gap_db=None)], [ranked(gaussian_gap_db=0.5)]])
    assert found[0].gaussian_gap_db is None


def test_every_rank_keeps_the_id_of_its_own_codec():
    mine = (ranked(codec_id="mine"),)
    agreed = worst_of([mine, [ranked(codec_id="theirs", kl=0.009)]])
    (found,) = worst_of([mine, agreed])
    assert (found.codec_id, found.kl) == ("mine", 0.009)
