"""One verdict from the measurements of several ranks."""

from __future__ import annotations

import msgspec
import pytest

from engines.calibration.gate.rules import MORE_IS_BETTER, OWN, worst_of
from kvstore.codecs.quality import Quality
from tests.unit.engines.calibration.gate.test_bound import GOOD


def row(preset: str = "dense3", **figures: float | str | None) -> Quality:
    return msgspec.structs.replace(GOOD, preset=preset, **figures)


FIGURES = [("kl", 0.001, 0.02), ("bits_per_element", 3.1, 3.3), ("top1", 0.99, 0.9)]


@pytest.mark.parametrize(("figure", "best", "worst"), FIGURES)
def test_the_worst_of_each_figure_counts(figure, best, worst):
    ranks = [[row(**{figure: best})], [row(**{figure: worst})]]
    assert worst_of(ranks) == worst_of(ranks[::-1])
    assert [getattr(x, figure) for x in worst_of(ranks)] == [worst]


def test_a_row_that_a_rank_lacks_is_left_out():
    found = worst_of([[row("dense3"), row("tq4")], [row("tq4")]])
    assert [x.preset for x in found] == ["tq4"]


def test_a_figure_that_a_rank_lacks_is_the_first_ranks():
    found = worst_of([[row(gaussian_gap_db=None)], [row(gaussian_gap_db=0.5)]])
    assert found[0].gaussian_gap_db is None


def test_every_rank_keeps_the_id_of_its_own_codec():
    mine = (row(codec_id="mine"),)
    agreed = worst_of([mine, [row(codec_id="theirs", kl=0.009)]])
    (found,) = worst_of([mine, agreed])
    assert (found.codec_id, found.kl) == ("mine", 0.009)


def test_every_figure_named_here_exists():
    later = {"chain_top1", "prefill_s", "chain_tokens"}
    assert (MORE_IS_BETTER | OWN) - later <= set(Quality.__struct_fields__)
