"""A process that asks a tiny model's instrument for gradients, and prints what it saw.

A process of its own: vLLM runs in one process here, and the tests' own engine does not.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from engines.calibration.corpus import Text
from engines.calibration.instrument import NotDifferentiable
from engines.calibration.learn import Windows, samples_of
from kvstore.shapes import KVPair, KVRun, slice_tokens
from tests.vllm.rig.calibration_facts import TOKENS, order

if TYPE_CHECKING:
    from engines.vllm_plugin.calibration.instrument import VllmInstrument

PAST, WINDOW = 150, 200  # no whole number of blocks
CHANGE = 0.05  # of the loss, by one small step along a gradient
TEXTS = [Text("one", "ab cd " * 60), Text("two", "the quick brown fox " * 15)]


def main(folder: Path) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines.vllm_plugin.calibration.calibration_engine import open_engine
    from engines.vllm_plugin.calibration.instrument import VllmInstrument

    class Spelling(VllmInstrument):
        """The tiny model has no tokenizer."""

        def encode(self, text: str) -> list[int]:
            return [3 + x for x in text.encode()]

    engine = open_engine(order(str(folder)))
    instrument = Spelling(engine, None)
    run = instrument.prefill(TOKENS[:WINDOW])
    past, tokens = slice_tokens(run, 0, PAST), TOKENS[PAST:WINDOW]
    gradients = instrument.gradients(past, tokens)
    instrument.gradients_done()
    samples = samples_of(instrument, TEXTS, Windows(2, 200))
    facts = {
        "slopes": slopes(instrument, past, tokens, gradients),
        "shapes": _shapes(gradients) == _shapes(past),
        "dtypes": sorted({str(x.dtype) for pair in gradients for x in pair}),
        "metrics": len(samples.metrics or ()),
        "heads": sum(2 * x.num_kv_heads for x in instrument.layout.layers),
        "reference models": _num_reference_models(),
        "refused": refusals(instrument, engine.vllm_config.model_config, folder, past, tokens),
    }
    instrument.close()
    return facts


def slopes(
    instrument: VllmInstrument, past: KVRun, tokens: Sequence[int], gradients: Sequence[KVPair]
) -> list[tuple[float, float]]:
    """The slopes of vLLM's own loss along each gradient: as measured, and as foretold."""
    import torch

    from engines.vllm_plugin.calibration.reference_model import draw_tokens

    chosen = draw_tokens(torch.from_numpy(instrument.log_probs(past, tokens))).numpy()

    def loss(layer: int, side: int, change: np.ndarray) -> float:
        changed = [[k.copy(), v.copy()] for k, v in past]
        changed[layer][side] += change
        scores = instrument.log_probs([(k, v) for k, v in changed], tokens)
        return -float(np.take_along_axis(scores, chosen, 1).sum(dtype=np.float64))

    found = []
    for layer, pair in enumerate(gradients):
        for side, gradient in enumerate(pair):
            slope = float(np.square(gradient, dtype=np.float64).sum())
            step = CHANGE / slope * gradient
            ahead, behind = loss(layer, side, step), loss(layer, side, -step)
            found.append(((ahead - behind) / 2 / CHANGE * slope, slope))
    return found


def refusals(
    instrument: VllmInstrument, model: Any, folder: Path, past: KVRun, tokens: Sequence[int]
) -> dict[str, str]:
    """The refusals after files or configuration were changed since vLLM has read them.

    ``model``: vLLM's ``ModelConfig``.
    """
    from transformers import PretrainedConfig

    wrongs: dict[str, Callable[[], object]] = {
        "another rotation": lambda: model.hf_config.rope_parameters.update(rope_theta=3e4),
        "fewer layers": lambda: setattr(model.hf_config, "num_hidden_layers", 1),
        "no class": lambda: setattr(model, "hf_config", PretrainedConfig()),
        "quantised": lambda: setattr(model, "quantization", "fp8"),
        "other heads": lambda: _rewrite(folder, "v_proj", lambda x: np.roll(x, 32, 0)),
        "other words": lambda: _rewrite(folder, "lm_head", lambda x: x[::-1].copy()),
        "no weights": (folder / "model.safetensors").unlink,
        "no room": lambda: setattr(instrument, "most_bytes", 1),
    }
    found = {}
    for name, spoil in wrongs.items():
        with _restored(instrument, model, folder):
            spoil()
            try:
                instrument.gradients(past, tokens)
            except NotDifferentiable as error:
                found[name] = str(error)
            instrument.gradients_done()
    instrument.gradients(past, tokens)  # all is as it was, so it was not refused for anything else
    instrument.gradients_done()
    return found


@contextmanager
def _restored(instrument: VllmInstrument, model: Any, folder: Path) -> Iterator[None]:
    config, quantization = model.hf_config, model.quantization
    model.hf_config = type(config).from_dict(config.to_dict())
    shutil.copytree(folder, folder.with_suffix(".kept"))
    yield
    model.hf_config, model.quantization, instrument.most_bytes = config, quantization, 0
    shutil.rmtree(folder)
    folder.with_suffix(".kept").rename(folder)


def _rewrite(folder: Path, part: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    file = folder / "model.safetensors"
    weights = {
        name: change(weight) if part in name and weight.ndim > 1 else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def _num_reference_models() -> int:
    from engines.vllm_plugin.calibration.reference_model import ReferenceModel

    return sum(isinstance(x, ReferenceModel) for x in gc.get_objects())


def _shapes(run: KVRun) -> list[tuple[int, ...]]:
    return [x.shape for pair in run for x in pair]


if __name__ == "__main__":
    print("facts:", json.dumps(main(Path(sys.argv[1]))))
