"""Learning from an instrument that plays a model which does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines.calibration.corpus import Text
from engines.calibration.instrument import NotDifferentiable
from engines.calibration.learn import Windows, learn, samples_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.rope import Rope
from kvstore.shapes import KVLayout, KVPair, KVRun
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of, turned

TEXTS = [Text("one", "ab" * 200), Text("two", "cd" * 125), Text("short", "ef" * 10)]


class Blind:
    """Has no gradients to offer."""

    fingerprint = "no model"

    def __init__(self) -> None:
        self.layout: KVLayout = model_layout()
        self.ropes: tuple[Rope | None, ...] = ropes_of(self.layout)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        if len(set(tokens)) > 1:
            return model_run(self.layout, len(tokens), seed=tokens[0])
        one = model_run(self.layout, 1)
        equal = [tuple(np.repeat(x, len(tokens), axis=1) for x in pair) for pair in one]
        return turned([(k, v) for k, v in equal], self.layout, 0)

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        raise AssertionError("nothing is judged while learning")


class Seeing(Blind):
    """Only the first head of K of the first layer matters, and the rest a hundredth of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.done = 0

    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        self.asked.append((run[0][0].shape[1], len(tokens)))
        found = [
            (np.full(k.shape, 0.01, np.float32), np.full(v.shape, 0.01, np.float32)) for k, v in run
        ]
        found[0][0][0] = 1
        return found

    def gradients_done(self) -> None:
        self.done += 1


class Failing(Seeing):
    def gradients(self, run: KVRun, tokens: Sequence[int]) -> list[KVPair]:
        raise NotDifferentiable("a kernel has no gradient")


def learned(instrument: Blind) -> Profile:
    return learn(samples_of(instrument, TEXTS, Windows(3, 200)), instrument.fingerprint, ["dense3"])


def test_what_matters_is_asked_at_the_end_of_every_window() -> None:
    instrument = Seeing()
    profile = learned(instrument)
    assert instrument.asked == [(150, 50)] * 3 and instrument.done == 1
    bits = profile.learned["dense3"]["bits.0"].sum(axis=1)
    assert bits.argmax() == 0 and bits[0] > 1.2 * bits.mean()


@pytest.mark.parametrize("make", [Blind, Failing])
def test_without_gradients_all_errors_count_alike(make: type[Blind]) -> None:
    instrument = make()
    profile = learned(instrument)
    assert getattr(instrument, "done", 1) == 1, "also where there were none"
    alike = learned(Blind())
    assert profile.ids == alike.ids != learned(Seeing()).ids
