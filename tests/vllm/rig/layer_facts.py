"""A process that looks at a tiny model's layers in vLLM, and prints what it saw.

A process of its own: vLLM runs in one process here, and the tests' own engine does not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.instrument import Notice, NotObservable
from engines.calibration.learn import Windows, samples_of
from kvstore.codecs.states.matrices import fp32, narrowed
from kvstore.shapes import DType, KVRun, slice_tokens
from tests.vllm.rig.calibration_facts import TOKENS, order

PAST, WINDOW = 150, 200  # no whole number of blocks
# Of K or V, relative to its size; attention bends with larger ones, and bf16 rounds smaller ones.
CHANGES: dict[DType, float] = {"float32": 0.003, "bfloat16": 0.01}
TEXTS = [Text("one", "ab cd " * 60), Text("two", "the quick brown fox " * 15)]


def main(folder: Path) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines.vllm_plugin.calibration.calibration_engine import open_engine
    from engines.vllm_plugin.calibration.instrument import VllmInstrument, connector_here
    from engines.vllm_plugin.measuring.layer_views import LayerViews

    class Spelling(VllmInstrument):
        """The tiny model has no tokenizer."""

        def encode(self, text: str) -> list[int]:
            return [3 + x for x in text.encode()]

    config = json.loads((folder / "config.json").read_text())
    dtype = config.get("dtype") or config["torch_dtype"]
    engine = open_engine(msgspec.structs.replace(order(str(folder)), dtype=dtype))
    instrument = Spelling(engine, None)
    names = connector_here().groups.layers
    (model,) = engine.apply_model(lambda x: x)
    found: list[Notice] = []
    run = instrument.observe(TOKENS[:WINDOW], PAST, found.append)
    hooks = sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules())

    def seen(past: KVRun) -> LayerViews:
        views = LayerViews(model, names, WINDOW - PAST, sum(TOKENS[:WINDOW]))
        views.arm()
        instrument.prefill(TOKENS[:WINDOW], past)
        views.disarm()
        return views

    past = slice_tokens(run, 0, PAST)
    before, slopes = seen(past), []
    for notice in found:
        cotangents = before.cotangents(notice.layer)[0]
        for side in (0, 1):
            gradient = notice.gradients[side][0]
            array = fp32(past[notice.layer][side], dtype)
            step = CHANGES[dtype] * np.linalg.norm(array) / np.linalg.norm(gradient)
            moved = [
                narrowed(array + sign * step * gradient, dtype, array.shape) for sign in (1, -1)
            ]
            ends = [seen(_with(past, notice.layer, side, x)) for x in moved]
            outputs = [x.outputs(notice.layer) for x in ends]
            change = float((cotangents * (outputs[0] - outputs[1])).sum())
            # What the run holds of a change that was rounded to its dtype.
            done = fp32(moved[0], dtype) - fp32(moved[1], dtype)
            slopes.append((change, float((done * gradient).sum())))
    unseen = LayerViews(model, names, WINDOW)
    samples = samples_of(instrument, TEXTS, Windows(2, 200))
    facts = {
        "layers": [x.layer for x in found],
        "heads of layers": [[x.num_kv_heads, x.head_dim] for x in instrument.layout.layers],
        "shapes": [list(x.gradients[0].shape) for x in found],
        "same run": all(
            np.allclose(fp32(a, dtype), fp32(b, dtype), atol=1e-4)
            for pair, other in zip(instrument.prefill(TOKENS[:WINDOW]), run, strict=True)
            for a, b in zip(pair, other, strict=True)
        ),
        "hooks": hooks,
        "slopes": slopes,
        "metrics": len(samples.metrics or ()),
        "heads": sum(2 * x.num_kv_heads for x in instrument.layout.layers),
        "products later": _products_later(before, run, instrument),
        "unseen": _refusal(unseen, run, instrument),
        "another prompt": _refusal(seen(past), [(k * 0, v) for k, v in run], instrument),
    }
    instrument.close()
    return facts


def _with(run: KVRun, layer: int, side: int, rows: np.ndarray) -> KVRun:
    pair = (rows, run[layer][1]) if side == 0 else (run[layer][0], rows)
    return [pair if i == layer else x for i, x in enumerate(run)]


def _products_later(views: Any, run: KVRun, instrument: Any) -> list[str]:
    """What is multiplied by torch where a seen step is looked back on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        list(views.notices(run, instrument.layout, PAST))
    assert called, "something is copied at least"
    return [x for x in called if "mm" in x or "linear" in x]


def _refusal(views: object, run: KVRun, instrument: object) -> str:
    try:
        list(views.notices(run, instrument.layout, PAST))  # type: ignore[attr-defined]
    except NotObservable as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(f"facts: {json.dumps(main(Path(sys.argv[1])))}", flush=True)
