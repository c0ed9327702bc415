"""What ``rig.instrument`` sees of a tiny model's layers in a serving vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from engines.calibration.corpus import Text
from engines.calibration.instrument import LayerNotice, NotObservable
from engines.calibration.learn import TextReader, deal
from kvstore.codecs.states import fp32, narrowed
from kvstore.shapes import DType, KVRun, slice_tokens
from tests.vllm.rig.instrument_facts import TOKENS

PAST, WINDOW = 160, 200  # the first a whole number of blocks
# Of K or V, relative to its size; attention bends with larger ones, and bf16 rounds smaller ones.
CHANGES: dict[DType, float] = {"float32": 0.003, "bfloat16": 0.01}
TEXTS = [Text("one", "ab cd " * 60), Text("two", "the quick brown fox " * 15)]


def look(instrument: Any) -> dict[str, object]:
    from vllm.model_executor.layers.attention import Attention

    from engines.vllm_plugin.measuring.exchange import EXCHANGE
    from engines.vllm_plugin.measuring.layer_views import LayerViews

    model, dtype = EXCHANGE.model, instrument.layout.dtype
    names = [name for name, x in model.named_modules() if isinstance(x, Attention)]
    found: list[LayerNotice] = []
    run = instrument.observe(TOKENS[:WINDOW], PAST, found.append)
    hooks = sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules())

    def seen(past: KVRun) -> LayerViews:
        views = LayerViews(model, names, WINDOW - PAST, sum(TOKENS[:WINDOW]))
        EXCHANGE.watch(views)
        instrument.rows(TOKENS[:WINDOW], past)
        EXCHANGE.watch(None)
        return views

    past = slice_tokens(run, 0, PAST)
    before, slopes = seen(past), []
    for notice in found:
        cotangents = before.layers[notice.layer].read_cotangents()[0]
        for side in (0, 1):
            gradient = notice.gradients[side][0]
            array = fp32(past[notice.layer][side], dtype)
            step = CHANGES[dtype] * np.linalg.norm(array) / np.linalg.norm(gradient)
            moved = [
                narrowed(array + sign * step * gradient, dtype, array.shape) for sign in (1, -1)
            ]
            ends = [seen(_with(past, notice.layer, side, x)) for x in moved]
            outputs = [x.layers[notice.layer].read_outputs() for x in ends]
            change = float((cotangents * (outputs[0] - outputs[1])).sum())
            # What the run holds of a change that was rounded to its dtype.
            done = fp32(moved[0], dtype) - fp32(moved[1], dtype)
            slopes.append((change, float((done * gradient).sum())))
    unseen = LayerViews(model, names, WINDOW)
    samples = TextReader(instrument).samples([*deal(TEXTS, instrument.encode, 2, 200)])
    return {
        "layers": [x.layer for x in found],
        "heads of layers": [[x.num_kv_heads, x.head_dim] for x in instrument.layout.layers],
        "shapes": [list(x.gradients[0].shape) for x in found],
        "same run": all(
            np.allclose(fp32(a, dtype), fp32(b, dtype), atol=1e-4)
            for pair, other in zip(instrument.rows(TOKENS[:WINDOW]), run, strict=True)
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
