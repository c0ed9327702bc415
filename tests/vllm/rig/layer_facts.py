"""A process that looks at a tiny model's layers in vLLM, and prints what it saw.

A process of its own: vLLM runs in one process here, and the tests' own engine does not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.instrument import Notice, NotObservable
from engines.calibration.learn import Windows, samples_of
from kvstore.shapes import KVRun, slice_tokens
from tests.vllm.rig.calibration_facts import TOKENS, order

PAST, WINDOW = 150, 200  # no whole number of blocks
CHANGE = 0.003  # of K or V, relative to its size; attention bends with larger ones
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

    engine = open_engine(order(str(folder)))
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
            moved = [(k.copy(), v.copy()) for k, v in past]
            array = moved[notice.layer][side]
            step = CHANGE * np.linalg.norm(array) / np.linalg.norm(gradient)
            ends = []
            for sign in (1, -1):
                array += sign * step * gradient
                ends.append(seen(moved).outputs(notice.layer))
                array -= sign * step * gradient
            change = float((cotangents * (ends[0] - ends[1])).sum())
            slopes.append((change, float(2 * step * np.square(gradient).sum())))
    unseen = LayerViews(model, names, WINDOW)
    samples = samples_of(instrument, TEXTS, Windows(2, 200))
    facts = {
        "layers": [x.layer for x in found],
        "shapes": [list(x.gradients[0].shape) for x in found],
        "same run": all(
            np.allclose(a, b, atol=1e-4)
            for pair, other in zip(instrument.prefill(TOKENS[:WINDOW]), run, strict=True)
            for a, b in zip(pair, other, strict=True)
        ),
        "hooks": hooks,
        "slopes": slopes,
        "metrics": len(samples.metrics or ()),
        "heads": sum(2 * x.num_kv_heads for x in instrument.layout.layers),
        "products later": _products_later(before, run, instrument),
        "unseen": _refusal(unseen, run, instrument),
        "another prompt": _refusal(seen(past), [(k + 1, v) for k, v in run], instrument),
    }
    instrument.close()
    return facts


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
