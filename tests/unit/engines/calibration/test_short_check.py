"""The cost of two texts here is compared with the cost of the same two there."""

from __future__ import annotations

import pytest

from engines.calibration.fleet_profiles import difference
from engines.calibration.gate.rules import Bound
from kvstore.codecs.quality import Quality, TextQuality

BOUND = Bound(kl=0.01, top1=0.9)


def row(*texts: tuple[str, float, float], kl: float, top1: float) -> Quality:
    return Quality(
        preset="dense3",
        context=1024,
        bits_per_element=3.3,
        perplexity_change_pct=0.0,
        kl=kl,
        top1=top1,
        needle_found=0,
        needle_total=0,
        cos_k=1.0,
        cos_v=1.0,
        texts=tuple(
            TextQuality(text=name, kl=kl, perplexity_change_pct=0.0, top1=top1)
            for name, kl, top1 in texts
        ),
    )


# Over all texts it keeps the bound; these two, whose KL is usual, keep fewer of the likely tokens.
THERE = row(("a", 0.004, 0.89), ("b", 0.004, 0.87), ("c", 0.001, 0.99), kl=0.004, top1=0.92)


@pytest.mark.parametrize(
    ("kl", "top1", "said"),
    [
        (0.004, 0.88, ""),  # as there
        (0.010, 0.83, ""),  # worse, by less than half
        (0.011, 0.88, "dense3 at 1024 tokens has a KL of 0.0110 here, above 0.0100"),
        (0.004, 0.81, "dense3 at 1024 tokens keeps 81.0% of the most likely tokens here, under 82"),
        (float("nan"), 0.88, "dense3 at 1024 tokens has a KL of nan here, above 0.0100"),
        (0.004, float("nan"), "dense3 at 1024 tokens keeps nan% of the most likely tokens here"),
    ],
)
def test_two_texts_may_cost_as_much_here_as_there(kl: float, top1: float, said: str) -> None:
    here = row(("a", kl, top1), ("b", kl, top1), kl=kl, top1=top1)
    found = difference(here, [THERE], BOUND)
    assert found.startswith(said) and bool(found) == bool(said)


def test_without_figures_of_these_texts_the_bound_decides() -> None:
    here = row(("d", 0.004, 0.88), kl=0.004, top1=0.88)
    assert "under 90.0%" in difference(here, [THERE], BOUND)
