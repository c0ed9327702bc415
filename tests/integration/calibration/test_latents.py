"""A whole calibration of models with latents: kept as they are, and unfolded into K and V."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.families.latent import write_latent
from engines.calibration.gate.served_codecs import ServedCodecs
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.model.loading import load_model
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from kvstore.shapes import KVLayer
from tests.integration.calibration.surveys import instrument_of, small_order, surveyed
from tests.integration.tiny_models import LATENTS, tiny_model, write_model

pytestmark = pytest.mark.mlx

KEPT = {"deepseek_v2": KVLayer(4, 64, 32), "deepseek_v3": KVLayer(1, 64, 16)}


@pytest.mark.parametrize("kind", LATENTS)
def test_latents_are_measured_and_packed(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(kind, folder)
    report = surveyed(folder, small_order("dense3", "raw", data_path=str(tmp_path)))
    dense3, raw = report.rows
    assert (raw.kl, raw.top1) == (0, 1)
    assert dense3.kl > 0 and dense3.bits_per_element < 6
    layout = load_profile(Path(report.profile)).layout
    assert set(layout.layers) == {KEPT[kind]}
    config = StoreConfig(codec="dense3", max_kl=1e9, accept_loss=True)
    codec = ServedCodecs(config, layout, report.fingerprint, tmp_path).codecs.rows
    run = instrument_of(kind, tmp_path).prefill([*range(64)]).run
    back = layout.empty(64)
    codec.decode(memoryview(codec.encode(run, layout, 0)), layout, 0, back)
    for pair, other in zip(run, back, strict=True):
        for array, found in zip(pair, other, strict=True):
            assert 0 < np.linalg.norm(array - found) < 0.6 * np.linalg.norm(array)


def test_a_llama_with_latents_is_the_same_model(tmp_path: Path) -> None:
    """The sample model is measured so (``benchmarks.families.latent``)."""
    plain = tiny_model("llama")
    write_model("llama", tmp_path)
    latent = load_model(str(write_latent(tmp_path, tmp_path / "latent")), "float32")
    assert set(probe(latent.model).layout.layers) == {KVLayer(1, 136, 128)}
    tokens = mx.array([[*range(3, 60)]])
    exact, found = (np.array(x.model(tokens)) for x in (plain, latent))
    assert np.abs(exact - found).max() < 1e-3 * np.abs(exact).max()
    assert np.array_equal(exact.argmax(-1), found.argmax(-1))


def test_turned_channels_may_be_the_last_ones(tmp_path: Path) -> None:
    ropes = instrument_of("deepseek_v2", tmp_path).ropes
    assert [x is not None and x.interleaved for x in ropes] == [True] * 3
    for rope in ropes:
        assert rope.frequencies[:24] == (0.0,) * 24  # pairs of 48 channels that are not turned
        assert rope.frequencies[24] == pytest.approx(1.0)
        assert len(rope.frequencies) == 32
