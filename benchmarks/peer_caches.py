"""Measures quantised and pruned caches of transformers on the texts of ``benchmarks.methods``.

    .venv-vllm/bin/python -m benchmarks.peer_caches [--context 2048] [--texts 2] [--json OUT]
        [--write docs/comparison.md]

The exact KV of each text's first tokens goes into a cache; the model then predicts the next 192
tokens from that cache and from the exact one; our own methods' rows are in docs/methods.md. Quanto
and HQQ are the backends of transformers' ``QuantizedCache``, the press is kvpress's. Bits count
scales and zero points at 16 bits each. Needs torch and transformers (vLLM's environment has both),
optimum-quanto, hqq and kvpress.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from benchmarks.program import arguments, replace_table, table, write_json
from engines.calibration.corpus import held_out_texts
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

NUM_SCORED: Final = 192
GROUP: Final = 64  # values that share a scale and a zero point
NEVER: Final = 1 << 20  # tokens after which a quantised cache quantises all of it once more
HEAD: Final = ("cache", "bits", "KL", "perplexity", "top 1")
Fill = Callable[[Any, torch.Tensor], Cache]  # a model, and the ids of a beginning


def quantised(backend: str, bits: int, axis: int) -> Fill:
    def fill(model: Any, ids: torch.Tensor) -> Cache:
        cache = QuantizedCache(
            backend,
            model.config,
            nbits=bits,
            axis_key=axis,
            axis_value=axis,
            q_group_size=GROUP,
            residual_length=NEVER,
        )
        model(ids, past_key_values=cache)
        return cache

    return fill


def pruned(share: float) -> Fill:
    """Return a cache without the ``share`` of tokens that kvpress expects least attention for."""
    from kvpress import ExpectedAttentionPress

    def fill(model: Any, ids: torch.Tensor) -> Cache:
        cache = DynamicCache(config=model.config)
        with ExpectedAttentionPress(compression_ratio=share)(model):
            places = torch.arange(ids.shape[1])  # transformers no longer passes it
            model.model(ids, past_key_values=cache, cache_position=places)
        return cache

    return fill


CACHES: Final[dict[str, tuple[float, Callable[[], Fill]]]] = {
    "transformers, quanto, 4 bits": (4 + 32 / GROUP, lambda: quantised("quanto", 4, 0)),
    "transformers, quanto, 2 bits": (2 + 32 / GROUP, lambda: quantised("quanto", 2, 0)),
    "transformers, HQQ, 4 bits": (4 + 32 / GROUP, lambda: quantised("hqq", 4, 1)),
    "transformers, HQQ, 2 bits": (2 + 32 / GROUP, lambda: quantised("hqq", 2, 1)),
    "kvpress, expected attention, a half pruned": (8.0, lambda: pruned(0.5)),
    "kvpress, expected attention, 4/5 pruned": (3.2, lambda: pruned(0.8)),
}


def scored(model: Any, cache: Cache, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return the log probabilities, (tokens, vocabulary), after the ``first`` tokens."""
    places = torch.arange(first, ids.shape[1])[None]
    logits = model(ids[:, first:], past_key_values=cache, position_ids=places).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def loss(model: Any, fill: Fill, texts: list[torch.Tensor]) -> dict[str, float]:
    """Return the loss of a cache against the exact one, over all scored tokens of all texts."""
    kl, top, change = [], [], []
    for ids in texts:
        first = ids.shape[1] - NUM_SCORED
        exact = DynamicCache(config=model.config)
        model(ids[:, :first], past_key_values=exact)
        wanted = scored(model, copy.deepcopy(exact), ids, first)
        found = scored(model, fill(model, ids[:, :first]), ids, first)
        kl.append(float((wanted.exp() * (wanted - found)).sum(-1).mean()))
        top.append(float((wanted.argmax(-1) == found.argmax(-1)).float().mean()))
        said = ids[0, first + 1 :, None]
        change.append(float((wanted[:-1].gather(1, said) - found[:-1].gather(1, said)).mean()))
    return {
        "kl": statistics.mean(kl),
        "top1": statistics.mean(top),
        "perplexity_pct": 100 * (math.exp(statistics.mean(change)) - 1),
    }


def main() -> None:
    args = arguments(__doc__, "--context 2048 --texts 2 --write PATH")
    folder = str(sample_model(default_cache_dir(os.environ)))
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encode = AutoTokenizer.from_pretrained(folder).encode
    length = args.context + NUM_SCORED
    ids = (encode(x.content[: 8 * length])[:length] for x in held_out_texts())
    texts = [torch.tensor([x]) for x in ids if len(x) == length][: args.texts]
    rows, cells = [], []
    for name, (bits, make) in CACHES.items():
        x = loss(model, make(), texts)
        rows.append({"cache": name, "bits": bits, **x})
        cells.append([name, f"{bits:.2f}", f"{x['kl']:.4f}", f"{x['perplexity_pct']:+.2f} %"])
        cells[-1].append(f"{x['top1']:.1%}")
        print(*cells[-1], flush=True)
    about = (
        f"SmolLM2-135M-Instruct in float32, {len(texts)} held-out texts of {args.context} tokens,"
        f" {NUM_SCORED} scored tokens each."
    )
    text = "\n".join([*table(HEAD, cells), "", about])
    write_json(args.json, rows)
    if args.write:
        replace_table(args.write, text)


if __name__ == "__main__":
    main()
