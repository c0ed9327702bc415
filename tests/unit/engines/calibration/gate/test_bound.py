from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from engines.calibration.gate.rules import STUDENT, decided, refusal
from kvstore.codecs.quality import Quality, TextQuality

FIGURES = {"bits_per_element": 3.25, "perplexity_change_pct": 0.4, "kl": 0.005, "top1": 0.95}
FIGURES |= {"cos_k": 0.98, "cos_v": 0.98, "error_k": 0.03, "error_v": 0.03}
GOOD = Quality(preset="tq3", context=2048, needle_found=3, needle_total=3, **FIGURES)
MAX_KL = 0.01


def row(**changes: object) -> Quality:
    return msgspec.structs.replace(GOOD, **changes)


def test_within_the_bound() -> None:
    assert refusal([GOOD, row(context=6144)], "tq3", MAX_KL) == ""


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


def test_chains_within_the_bound() -> None:
    assert refusal([row(**CHAINS)], "tq3", MAX_KL) == ""


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


def test_a_codec_that_was_not_measured_is_refused() -> None:
    assert "thermocline calibrate" in refusal([GOOD], "tq4", MAX_KL)


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
    lost = msgspec.structs.replace(sure, needle_found=2)
    assert decided([lost], MAX_KL) is False
    lost = msgspec.structs.replace(sure, **{**CHAINS, "chain_kl": 0.3})
    assert decided([lost], MAX_KL) is False


@pytest.mark.parametrize("num_texts", STUDENT)
def test_the_margin_errs_in_one_of_a_hundred(num_texts: int) -> None:
    """Means of texts lie above the bound, and pass for certain this seldom."""
    rng = np.random.default_rng(num_texts)
    draws = 0.0101 + 0.002 * rng.standard_normal((4000, num_texts))
    passed = sum(decided([judged(*x, top1=0.99)], MAX_KL) is True for x in draws.tolist())
    assert passed <= 0.015 * len(draws)
