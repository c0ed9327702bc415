"""Learning from an instrument that plays a model which does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines.calibration.corpus import Text
from engines.calibration.instrument import NOTHING, HeldSession, LayerNotice, Note, NotObservable
from engines.calibration.learn import TextReader, deal, short_texts
from kvstore.blobs.state_tree import WindowArray
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.profile import Profile
from kvstore.shapes import KVLayer, KVLayout, KVRun, Rope, StateLayout
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of, turned

TEXTS = [Text("one", "ab" * 200), Text("two", "cd" * 125), Text("short", "ef" * 10)]


class Blind:
    """Shows nothing of its layers."""

    fingerprint = "no model"

    def __init__(self) -> None:
        self.layout: KVLayout = model_layout()
        self.ropes: tuple[Rope | None, ...] = ropes_of(self.layout)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    states: StateLayout | None = None
    state_step = 1
    sees_states = False
    waited_s = 0.0

    def window_ropes(self) -> tuple[Rope | None, ...]:
        return ()

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        if len(set(tokens)) > 1:
            run: KVRun = model_run(self.layout, len(tokens), seed=tokens[0])
        else:
            one = model_run(self.layout, 1)
            equal = [tuple(np.repeat(x, len(tokens), axis=1) for x in pair) for pair in one]
            run = turned([(k, v) for k, v in equal], self.layout, 0)
        return HeldSession(run, len(tokens))

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        raise AssertionError("nothing is judged while learning")

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        raise NotObservable("a kernel shows nothing")


class Seeing(Blind):
    """Only the first head of K of the first layer matters, and the rest a hundredth of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        self.asked.append((first, len(tokens) - first))
        run = self.prefill(tokens).run
        for layer, rows in enumerate(run):
            found = [np.full((1, len(x), first, x.shape[2]), 0.01, np.float32) for x in rows]
            if layer == 0:
                found[0][:, 0] = 1
            note(LayerNotice(False, layer, rows, (found[0], found[1])))
        return run


class Partial(Seeing):
    """Shows all layers but the last."""

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        last = len(self.layout.layers) - 1
        return super().observe(tokens, first, lambda x: note(x) if x.layer < last else None)


class Interrupted(Seeing):
    """Shows the first of three texts only, and then that nothing more is to be seen."""

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        if self.asked:
            raise NotObservable("other requests run in every step")
        return super().observe(tokens, first, note)


def learned(instrument: Blind) -> Profile:
    samples = TextReader(instrument).samples([*deal(TEXTS, instrument.encode, 3, 200)])
    return learn_profile(samples, instrument.fingerprint, ["dense3"])


def test_sensitivities_are_asked_for_at_the_end_of_every_window() -> None:
    instrument = Seeing()
    profile = learned(instrument)
    assert instrument.asked == [(150, 50)] * 3
    bits = profile.learned["dense3"]["bits.0"].sum(axis=1)
    assert bits.argmax() == 0 and bits[0] > 1.2 * bits.mean()


def test_texts_that_were_seen_count_though_later_ones_were_not() -> None:
    assert learned(Interrupted()).ids != learned(Blind()).ids


@pytest.mark.parametrize("make", [Blind, Partial])
def test_where_nothing_is_seen_all_errors_count_alike(
    make: type[Blind], caplog: pytest.LogCaptureFixture
) -> None:
    profile = learned(make())
    assert "count alike" in caplog.text
    alike = learned(Blind())
    assert profile.ids == alike.ids != learned(Seeing()).ids


class WholeBlocks(Blind):
    """Has windows of 128 tokens, and a state after every whole block of 128."""

    states = StateLayout(KVLayout("float32", (KVLayer(2, 16, 16),)), 128, False)
    state_step = 128

    def window_ropes(self) -> tuple[Rope | None, ...]:
        return (None,)

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        whole = len(tokens) // self.state_step * self.state_step
        if not whole:
            return HeldSession((), 0)
        array = np.ones((1, 2, whole, 16), np.float32)
        windows = [WindowArray("float32", array, side) for side in (0, 1)]
        return HeldSession((), whole, windows)


def test_windows_are_learned_from_texts_of_a_whole_block_at_least() -> None:
    texts = [Text("long", "x" * 300), Text("short", "y" * 100)]
    instrument = WholeBlocks()
    samples = TextReader(instrument, of_windows=True).samples(
        short_texts(instrument, texts, instrument.encode, 4, 64)
    )
    assert [run[0][0].shape[1] for run in samples.texts] == [128, 128]
