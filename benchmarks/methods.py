"""Measures all methods of the library: bits, loss on the sample model, and speed.

    python -m benchmarks.methods [--only tq3,kivi] [--context 2048] [--texts 2] [--learn 8]
        [--model FOLDER] [--json OUT] [--write docs/methods.md]

Loss is measured by ``thermocline.judge``: the KV of the first tokens of held-out texts is packed
chunk by chunk, and the model predicts the next tokens from the restored and from the exact KV. The
speeds are of this process on KV of the same model, as ratios within one run: packing and restoring
over a copy of the same KV, products of one query with packed keys over products with fp32 keys.
``--write`` replaces the table between the two marks of a page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import thermocline
import thermocline.mlx
from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.program import arguments, replace_table, table, write_json
from engines.calibration.corpus import Text, fit_texts, held_out_texts
from kvstore.codecs.names import family_of, is_learned, split_names
from kvstore.shapes import KVRun, slice_tokens
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

CHUNK_TOKENS: Final = 128
LEARN_TOKENS: Final = 1024
NUM_SCORED: Final = 192
SPEED_TOKENS: Final = 1024
ENOUGH_S: Final = 1.0  # after so long, the best round so far counts
NAMES: Final = [
    "q8",
    "fp8",
    "safe",
    "tq8",
    "tq7",
    "tq6",
    "tq5",
    "tq4",
    "tq3",
    "tq2",
    "tq1",
    "tqprod",
    "base11",
    "dense3",
    "balanced",
    "max",
    "ratequant",
    "spectral",
    "kvquant",
    "commvq",
    "kivi",
    "gear",
    "playground",
    "polar",
    "qjl",
    "rabitq",
    "rabitq:clusters=16",
    "rabitq:clusters=16,unbiased=0",
    "rabitq:bits=3,clusters=16",
    "rvq",
    "vecinfer",
    "vecinfer:bits=1",
    "manthan",
    "lm3",
]
HEAD: Final = (
    *("method", "source", "bits", "KL", "perplexity", "top 1", "chains"),
    *("pack / copy", "restore / copy"),
)


def main() -> None:
    args = arguments(
        __doc__,
        f"--only {','.join(NAMES)} --context 2048 --texts 2 --learn 8 --model PATH --write PATH",
    )
    begin_with_blas("benchmarks.methods")
    import mlx.core as mx
    import mlx_lm

    folder = args.model or sample_model(default_cache_dir(os.environ))
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)

    def tokens(texts: Sequence[Text], length: int, most: int) -> list[list[int]]:
        found = (tokenizer.encode(text.content[: 8 * length])[:length] for text in texts)
        return [x for x in found if len(x) == length][:most]

    names = split_names(args.only)
    held_out = tokens(held_out_texts(), args.context + NUM_SCORED, args.texts)
    profile = None
    if learned := [name for name in names if is_learned(name)]:
        texts = tokens(fit_texts(), LEARN_TOKENS, args.learn)
        profile = thermocline.learn(thermocline.mlx.capture(model, texts), *learned)
    qualities = thermocline.judge(
        model,
        names,
        held_out,
        context=args.context,
        num_scored=NUM_SCORED,
        profile=profile,
        encode=tokenizer.encode,
    )
    run = thermocline.mlx.instrument(model).prefill(held_out[0][:SPEED_TOKENS]).run
    rows = [
        row(name, quality, profile if is_learned(name) else None, run)
        for name, quality in zip(names, qualities, strict=True)
    ]
    text = "\n".join(
        [
            *table(HEAD, [cells(x) for x in rows]),
            "",
            f"SmolLM2-135M-Instruct in float32, {len(held_out)} held-out texts of {args.context}"
            f" tokens with {NUM_SCORED} scored tokens each, and reasoning chains hidden in each."
            f" Methods that learn a model learned it from {args.learn} other texts of"
            f" {LEARN_TOKENS} tokens.",
        ]
    )
    write_json(args.json, rows)
    print("", text, sep="\n")
    if args.write:
        replace_table(args.write, text)


def row(
    name: str, quality: thermocline.Quality, profile: thermocline.Profile | None, run: KVRun
) -> dict[str, Any]:
    """Return the figures of one method; speeds are its time over that of a copy."""
    method = thermocline.codec(name, profile=profile)
    places = range(0, SPEED_TOKENS, CHUNK_TOKENS)
    chunks = [(slice_tokens(run, i, i + CHUNK_TOKENS), i) for i in places]
    packed = [method.pack_run(x, i) for x, i in chunks]
    copy_s = _best(lambda: [array.copy() for pair in run for array in pair])
    kept = ("bits_per_element", "kl", "perplexity_change_pct", "top1", "chain_kl")
    return {
        "name": name,
        "paper": thermocline.codecs()[family_of(name)].paper or "this project",
        **{key: getattr(quality, key) for key in kept},
        "pack": _best(lambda: [method.pack_run(x, i) for x, i in chunks]) / copy_s,
        "restore": _best(lambda: [method.restore_run(x) for x in packed]) / copy_s,
    }


def cells(row: dict[str, Any]) -> list[str]:
    name, paper, bits, kl, perplexity, top1, chain_kl, pack, restore = row.values()
    found = [f"`{name}`", paper, f"{bits:.3f}", f"{kl:.5f}", f"{perplexity:+.2f} %", f"{top1:.1%}"]
    return [*found, "" if chain_kl is None else f"{chain_kl:.4f}", f"{pack:.0f}", f"{restore:.0f}"]


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the quickest of the rounds that fit into a second."""
    best, begun = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - begun < ENOUGH_S:
        work()
        best = min(best, time.perf_counter() - before)
    return best


if __name__ == "__main__":
    main()
