"""Which preset ``auto`` prefers, by sizes and measured times."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.calibration.gate.rules import preferred
from kvstore.codecs.quality import Quality
from tests.unit.engines.calibration.gate.test_bound import GOOD


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


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(1.0, "max"), (0.12, "max"), (0.1, "balanced"), (0.05, "dense3"), (0.03, "dense3")],
)
def test_the_densest_that_is_quick_enough_is_chosen(share: float, wanted: str) -> None:
    assert preferred(MEASURED, share).name == wanted


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


def test_a_slower_prefill_makes_a_denser_preset_quick_enough() -> None:
    slow = {
        name: [msgspec.structs.replace(row, prefill_s=3.0) for row in rows]
        for name, rows in MEASURED.items()
    }
    assert preferred(slow, 0.1).name == "max"


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
