"""The orders by which an engine measures a model that it serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engines.calibration import scratch
from engines.calibration.orders import (
    EARLY_WINDOWS,
    FIRST_CONTEXT,
    FIRST_SCORED,
    FIRST_WINDOW_TOKENS,
    FIRST_WINDOWS,
    MOST_ROW_BYTES,
    MOST_WINDOWS,
    TooShort,
    early_order,
    first_order,
    further_order,
)
from kvstore.config import StoreConfig

LENGTHS = [
    (8192, 0, FIRST_CONTEXT, FIRST_WINDOW_TOKENS),
    # A state that can sleep every 784 tokens only.
    (8192, 5 * 784, 5 * 784, FIRST_WINDOW_TOKENS),
    (2048, 5 * 784, 1920, FIRST_WINDOW_TOKENS),
    (400, 0, 256, 128),
]


@pytest.mark.parametrize(("longest", "least", "context", "window_tokens"), LENGTHS)
def test_how_long_its_prompts_are(longest: int, least: int, context: int, window_tokens: int):
    order = first_order(StoreConfig(), longest, "", least)
    assert order.contexts == (context,)
    learned_from = (order.num_windows, order.window_tokens)
    assert learned_from == (FIRST_WINDOWS, window_tokens)


@pytest.mark.parametrize(
    ("step", "window_tokens"), [(160, 512), (384, 512), (512, 640), (784, 912), (1500, 512)]
)
def test_texts_to_learn_from_reach_beyond_the_first_state(step: int, window_tokens: int) -> None:
    """In one of 1,500 tokens there is no room for another step."""
    order = first_order(StoreConfig(), 1600 + 2 * FIRST_SCORED, "", 1600, step)
    assert order.contexts == (1536,)
    assert order.window_tokens == window_tokens


def test_an_engine_that_takes_next_to_nothing() -> None:
    with pytest.raises(TooShort, match="at most 200 tokens"):
        first_order(StoreConfig(), 200, "")


def test_it_judges_by_the_same_cases(tmp_path: Path) -> None:
    order = first_order(StoreConfig(codec="tq3"), 8192, str(tmp_path))
    more = further_order(order, 1)
    assert more.num_windows == MOST_WINDOWS > order.num_windows
    assert set(more.presets) == {"dense3", "balanced", "max"}
    assert more.fallbacks == order.fallbacks == ("tq4", "safe")
    assert 2 * more.window_tokens <= more.contexts[0], "other positions are judged, too"
    same = ("contexts", "num_scored", "depths", "num_chains", "window_tokens")
    assert [getattr(more, x) for x in same] == [getattr(order, x) for x in same]


def test_an_early_one_learns_from_fewer_texts(tmp_path: Path) -> None:
    order = first_order(StoreConfig(), 8192, str(tmp_path))
    early = early_order(order)
    assert early.num_windows == EARLY_WINDOWS and early.ends_early and not order.ends_early
    assert early_order(msgspec.structs.replace(order, num_windows=4)).num_windows == 4
    assert (early.presets, early.contexts) == (order.presets, order.contexts)


def test_rows_to_learn_from_fit_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = first_order(StoreConfig(), 8192, str(tmp_path))

    def learned(elements_per_token: int, free: int = 1 << 60) -> int:
        disk = SimpleNamespace(free=free)
        monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: disk)
        return further_order(order, elements_per_token).num_windows

    of_token = MOST_ROW_BYTES // (2 * FIRST_WINDOW_TOKENS * 43)
    assert learned(of_token) == 43
    assert learned(1 << 40) == FIRST_WINDOWS, "those were read before"
    assert learned(1 << 16, free=4 << 30) == FIRST_WINDOWS
