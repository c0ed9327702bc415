from __future__ import annotations

import math

import msgspec
import pytest

from engines.calibration.gate.bound import Bound, refusal
from kvstore.codecs.quality import Quality

GOOD = Quality(
    preset="tq3",
    context=2048,
    bits_per_element=3.25,
    perplexity_change_pct=0.4,
    kl=0.005,
    top1=0.95,
    needle_found=3,
    needle_total=3,
    cos_k=0.98,
    cos_v=0.98,
    error_k=0.03,
    error_v=0.03,
)
BOUND = Bound()


def row(**changes: object) -> Quality:
    return msgspec.structs.replace(GOOD, **changes)


def test_within_the_bound() -> None:
    assert refusal([GOOD, row(context=6144)], "tq3", BOUND) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kl": 0.011}, "KL of 0.0110"),
        ({"kl": math.nan}, "KL of nan"),
        ({"top1": 0.5}, "keeps 50.0% of the most likely"),
        ({"needle_found": 2}, "lost 1 of 3 needles"),
    ],
)
def test_one_bad_context_is_enough(change: dict[str, object], said: str) -> None:
    found = refusal([GOOD, row(context=6144, **change)], "tq3", BOUND)
    assert said in found and "at 6144 tokens" in found


def test_what_was_not_measured_is_refused() -> None:
    assert "thermocline calibrate" in refusal([GOOD], "tq4", BOUND)
