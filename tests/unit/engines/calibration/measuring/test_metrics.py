"""The figures, on distributions small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engines.calibration.measuring.metrics import (
    WORST,
    Drift,
    LossTally,
    RowLoss,
    answers,
    drift,
    gaussian_gap_db,
    row_loss,
)
from engines.calibration.measuring.stopwatch import Speed
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayer, KVLayout


def logs(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, np.float32))


def tally(*texts: Drift, **figures: Any) -> LossTally:
    named = [(str(i), x) for i, x in enumerate(texts)]
    usual = {"prefills": [Speed(1.0)], "restores": [Speed(1.0)]}
    return LossTally("tq3", "tq3.2", 64, texts=named, **(usual | figures))


def test_divergence_loss_and_top_token() -> None:
    exact = logs([0.5, 0.5, 1e-9], [0.9, 0.05, 0.05])
    packed = logs([0.25, 0.75, 1e-9], [0.9, 0.05, 0.05])
    found = drift(exact, packed, [0])
    # 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75)
    assert found.kl == pytest.approx([0.1438410, 0], abs=1e-6)
    assert found.same_top == [False, True]
    # The next token is 0; its probability fell to a half.
    assert found.loss == pytest.approx([np.log(2)], abs=1e-6)
    assert found.delta_p == pytest.approx([-0.25], abs=1e-6)


def test_every_position_may_have_a_next_token() -> None:
    exact, packed = logs([0.9, 0.1], [0.2, 0.8]), logs([0.4, 0.6], [0.2, 0.8])
    found = drift(exact, packed, [1, 0])
    assert found.same_top == [False, True]
    assert found.kl == pytest.approx([0.9 * np.log(9 / 4) + 0.1 * np.log(1 / 6), 0], abs=1e-6)
    assert found.delta_p == pytest.approx([0.5, 0], abs=1e-6)  # of the tokens 1 and 0


def test_chains_have_figures_of_their_own() -> None:
    kept, halved = logs([0.5, 0.5], [0.5, 0.5]), logs([0.25, 0.75], [0.5, 0.5])
    moved, same = (drift(kept[:1], x[:1], [0]) for x in (halved, kept))
    found = tally(
        drift(kept, kept, [0]),
        chains={"table": [moved], "counting": [same, same, same]},
        prefills=[Speed(3.0), Speed(2.0)],
        restores=[Speed(x) for x in (0.5, 0.2, 0.4, 1.0)],
    ).quality()
    assert (found.kl, found.delta_p) == (0, 0)
    assert found.chain_tokens == 4 and found.chain_kl == pytest.approx(0.143841 / 4, abs=1e-6)
    assert found.chain_top1 == 0.75 and found.chain_delta_p == pytest.approx(0.125)
    assert {x.text: x.top1 for x in found.chains} == {"table": 0, "counting": 1}
    assert found.restore_share == pytest.approx(0.1)


def test_figures_that_were_not_measured_are_none() -> None:
    found = tally(needles=[True]).quality()
    assert (found.delta_p, found.chain_kl, found.chain_top1, found.chain_tokens) == (
        *(None, None, None),
        0,
    )


def test_perplexity_is_that_of_all_texts_as_one() -> None:
    halved, kept = logs([0.25, 0.75], [0.5, 0.5]), logs([0.5, 0.5], [0.5, 0.5])
    moved, same = (drift(kept, x, [0]) for x in (halved, kept))
    found = tally(moved, same).quality()
    assert found.perplexity_change_pct == pytest.approx(100 * (2**0.5 - 1), abs=1e-3)
    assert [x.perplexity_change_pct for x in found.texts] == pytest.approx([100, 0], abs=1e-3)


def test_figures_that_are_no_numbers_are_the_worst_there_are() -> None:
    kept = logs([0.5, 0.5], [0.5, 0.5])
    broken = drift(kept, np.full_like(kept, np.nan), [0])
    rows = [RowLoss(3.0, np.nan, 0.5, np.inf, 0.0), RowLoss(3.0, 0.5, np.inf)]
    found = tally(broken, broken, rows=rows).quality()
    assert (found.kl, found.perplexity_change_pct, found.error_k) == (WORST, WORST, WORST)
    assert (found.cos_k, found.cos_v) == (0, 0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Quality) == found


def test_an_answer_counts_only_as_a_whole() -> None:
    # After token i the model is sure of i + 1.
    scores = np.log(np.roll(np.eye(5, dtype=np.float32), 1, axis=1) + 1e-6)
    assert answers(scores, [0, 1, 2, 3, 4], 3)
    assert not answers(scores, [0, 1, 2, 2, 4], 3)
    assert answers(scores, [1, 1, 2, 3, 4], 3)  # tokens before the answer are not judged


def test_cosines_take_each_row_by_itself() -> None:
    layout = KVLayout("float32", (KVLayer(1, 2, 2),))
    k = np.array([[[1, 0], [1000, 0]]], np.float32)
    turned = np.array([[[0, 1], [1000, 0]]], np.float32)
    found = row_loss([(k, k)], [(turned, k)], layout, 3.0)
    assert (found.cos_k, found.cos_v) == pytest.approx((0.5, 1))


def test_errors_are_relative_to_the_size() -> None:
    layout = KVLayout("float32", (KVLayer(1, 2, 2),))
    k = np.array([[[3, 4], [0, 5]]], np.float32)
    assert row_loss([(k, k)], [(k * 2, k)], layout, 3.0)[3:] == (1, 0)


def test_rows_of_zeros_are_equal_to_themselves() -> None:
    layout = KVLayout("bfloat16", (KVLayer(1, 2, 2),))
    zeros = np.zeros((1, 3, 2), np.uint16)
    assert row_loss([(zeros, zeros)], [(zeros, zeros)], layout, 3.0) == (3.0, 1, 1, 0, 0)


def test_white_noise_at_the_bound_has_no_gap() -> None:
    assert gaussian_gap_db(3, 1 / 64) == pytest.approx(0)
    # Eight Lloyd-Max levels leave 0.0345 of a Gaussian: 3.45 dB above the bound.
    assert gaussian_gap_db(3, 0.03455) == pytest.approx(3.45, abs=0.01)


def test_of_times_the_least_disturbed_count() -> None:
    even = logs([0.5, 0.5], [0.5, 0.5])
    kept = drift(even, even, [0])
    speeds = [Speed(3.0, 0.0), Speed(2.0, 0.05), Speed(0.1, 0.9)]
    found = tally(kept, prefills=speeds, restores=speeds).quality()
    assert (found.prefill_s, found.restore_s, found.waited) == (2.0, 2.0, 0.05)
    found = tally(kept, prefills=speeds[2:], restores=speeds[2:]).quality()
    assert (found.prefill_s, found.waited) == (0.1, 0.9)
