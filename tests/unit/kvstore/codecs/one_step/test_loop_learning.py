"""Units are predicted from those before, from what texts show."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvstore.codecs.floats import narrow
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.one_step import loop_learning
from kvstore.codecs.one_step.one_step import OneStep
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import Scope
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.learning.calibration import ropes_of, turned

SIX_LAYERS = KVLayout("bfloat16", (KVLayer(2, 16, 16),) * 6)


def run_of_shared_causes(num_tokens, seed):
    """Many causes drive all layers, too many to describe a layer alone by few numbers."""
    model, text = np.random.default_rng(7), np.random.default_rng(seed)
    causes, run = text.standard_normal((num_tokens, 40)), SIX_LAYERS.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        mixing = model.standard_normal((2, 40, 16)) / 6
        own = text.standard_normal((2, num_tokens, 16)) / 16
        array[:] = narrow((causes @ mixing + own).astype(np.float32), "bfloat16")
    return turned(run, SIX_LAYERS, 0)


def learned(step, depth, texts=None, layout=SIX_LAYERS, metrics=None):
    ropes = ropes_of(layout)
    texts = texts or [run_of_shared_causes(400, seed=seed) for seed in range(100, 108)]
    samples = Samples(layout, ropes, texts, metrics)
    means = element_means(samples)
    preset = OneStep(Scope("layer"), step, depth)
    known = {"means": means, **preset.learn(samples, means)}
    return preset.assemble(Profile("made up", layout, ropes, {"balanced": known}), known, layout)


def floats(array):
    return (array.astype(np.uint32) << 16).view(np.float32)


def cost_of(parts, run, layout):
    """Bytes, and the mean square error of values."""
    nbytes, out = 0, layout.empty(run[0][0].shape[1])
    for part in parts:
        payload = part.encode(run, 0, 0, layout.dtype)
        part.decode([Reader(memoryview(payload))], out, 0, 0, layout.dtype)
        nbytes += len(payload)
    pairs = zip((x for p in out for x in p), (x for p in run for x in p), strict=True)
    errors = [np.square(floats(a) - floats(b)).mean() for a, b in pairs]
    return nbytes, float(np.mean(errors))


def test_predicting_layers_from_each_other_saves_bytes():
    run = run_of_shared_causes(400, seed=5)
    alone, predicted = (learned(0.3, depth) for depth in (0, 2))
    (alone_bytes, alone_error), (predicted_bytes, predicted_error) = (
        cost_of(parts, run, SIX_LAYERS) for parts in (alone, predicted)
    )
    assert predicted_error < 1.1 * alone_error
    assert predicted_bytes < 0.8 * alone_bytes


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("layers", [(0,), (2, 3), (0, 1, 2, 3, 4, 5)])
def test_layers_that_are_the_same_for_all_tokens(layers, value):
    runs = [run_of_shared_causes(60, seed=seed) for seed in range(3)]
    for run in runs:
        for array in (x for layer in layers for x in run[layer]):
            array[:] = narrow(np.full(array.shape, value, np.float32), "bfloat16")
    parts = learned(0.3, 2, runs[1:])
    out = SIX_LAYERS.empty(60)
    for part in parts:
        reader = Reader(memoryview(part.encode(runs[0], 0, 0, "bfloat16")))
        part.decode([reader], out, 0, 0, "bfloat16")
    assert all(np.isfinite(floats(x)).all() for pair in out for x in pair)


def test_layers_of_another_width_that_do_not_matter():
    layout = KVLayout("bfloat16", (KVLayer(2, 16, 16),) * 2 + (KVLayer(2, 32, 32),) * 2)
    rng = np.random.default_rng(0)
    texts = [layout.empty(60) for _ in range(2)]
    for array in (x for text in texts for pair in text for x in pair):
        array[:] = narrow(rng.standard_normal(array.shape).astype(np.float32), "bfloat16")
    metrics = [np.eye(16, dtype=np.float32)] * 8 + [np.eye(32, dtype=np.float32) * 1e-9] * 8
    parts = learned(0.3, 2, texts, layout, metrics)
    assert all(part.encode(texts[0], 0, 0, "bfloat16") for part in parts)


def test_rows_of_all_texts_need_not_be_in_memory_at_once(monkeypatch: pytest.MonkeyPatch):
    """So that wide units can be learned; what is learned is the same."""
    layout = KVLayout("bfloat16", (KVLayer(2, 64, 64),) * 2)
    rng = np.random.default_rng(0)
    text = layout.empty(1000)
    for array in (x for pair in text for x in pair):
        array[:] = narrow(rng.standard_normal(array.shape, np.float32), "bfloat16")
    samples = Samples(layout, (None, None), [text] * 4)
    means, peaks, found = element_means(samples), [], []
    for piece, kept in ((1 << 20, 8 << 20), (1 << 16, 0)):
        monkeypatch.setattr(loop_learning, "PIECE_VALUES", piece)
        monkeypatch.setattr(loop_learning, "KEPT_VALUES", kept)
        tracemalloc.start()
        found.append(OneStep(Scope("layer"), 0.5, 1).learn(samples, means))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 0.6 * peaks[0]
    whole, by_pieces = found
    assert np.abs(whole["classes.0"].astype(int) - by_pieces["classes.0"]).max() <= 1
    assert np.array_equal(whole["gain_centres.0"], by_pieces["gain_centres.0"])
