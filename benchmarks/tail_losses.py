"""The cost of packing the newest tokens, too: KL of the next tokens, by how many stay exact.

    python -m benchmarks.tail_losses --profile FILE [--model FOLDER] [--tokens 300 1000]

A prefix of a held-out text is packed but for its last tokens: those after the last full chunk, or
fewer of them (``--exact``), or none. KL of the 64 tokens that follow: of the first eight, and of
the later ones, where an answer begins at the earliest; means of all texts. Learned presets take the
model's profile, as ``thermocline calibrate`` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.families.fast_blas import begin_with_blas
from engines.calibration.corpus import held_out_texts
from engines.calibration.measuring.metrics import drift
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.model.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import load_profile
from kvstore.shapes import KVLayout, KVRun, slice_tokens
from launch.machine.folders import default_cache_dir
from launch.model import sample_model

CHUNK_TOKENS = 128
SCORED, FIRST = 64, 8


@dataclass(frozen=True)
class Loss:
    preset: str
    num_tokens: int
    exact_tokens: int  # at the end of the prefix
    kl: float
    first_kl: float  # of the first ``FIRST`` positions
    later_kl: float  # of the later ones
    top1: float


def packed(codec: Codec, run: KVRun, layout: KVLayout, num_packed: int) -> KVRun:
    """The run with its first tokens packed and restored, chunk by chunk as the store does it."""
    back = [(k.copy(), v.copy()) for k, v in run]
    for first in range(0, num_packed, CHUNK_TOKENS):
        last = min(first + CHUNK_TOKENS, num_packed)
        payload = codec.encode(slice_tokens(run, first, last), layout, first)
        codec.decode(memoryview(payload), layout, first, slice_tokens(back, first, last))
    return back


def losses(
    instrument: MlxInstrument,
    texts: Sequence[Sequence[int]],
    codecs: dict[str, Codec],
    num_tokens: int,
    exact_tokens: Sequence[int],
) -> list[Loss]:
    ends = dict.fromkeys((num_tokens % CHUNK_TOKENS, *exact_tokens, 0))
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for ids in texts:
        run, rest = instrument.prefill(ids[:num_tokens]), ids[num_tokens : num_tokens + SCORED]
        exact = instrument.log_probs(run, rest)
        for name, codec in codecs.items():
            for end in ends:
                back = packed(codec, run, instrument.layout, num_tokens - end)
                x = drift(exact, instrument.log_probs(back, rest), rest)
                kls = (x.kl, x.kl[:FIRST], x.kl[FIRST:], x.same_top)
                found.setdefault((name, end), []).append(tuple(float(np.mean(y)) for y in kls))
    return [
        Loss(name, num_tokens, end, *(float(y) for y in np.mean(rows, axis=0)))
        for (name, end), rows in found.items()
    ]


def main() -> None:
    begin_with_blas("benchmarks.tail_losses")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="its folder; default: the sample model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--exact", type=int, nargs="+", default=[32, 16, 8, 4, 2, 1])
    parser.add_argument("--presets", nargs="+", default=["tq3", "dense3", "balanced", "max"])
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args()
    folder = arguments.model or sample_model(default_cache_dir(os.environ))
    loaded = load_model(str(folder), "auto")
    instrument = MlxInstrument(loaded, probe(loaded.model))
    profile = load_profile(arguments.profile)
    codecs = {name: open_codec(name, profile) for name in arguments.presets}
    texts = [instrument.encode(x.content) for x in held_out_texts()]
    print(f"{'preset':10} {'tokens':>6} {'exact':>6} {'KL':>8}", end=" ")
    print(f"{'first 8':>8} {'later':>8} {'top 1':>6}")
    rows: list[Loss] = []
    for num_tokens in arguments.tokens:
        long = [ids for ids in texts if len(ids) >= num_tokens + SCORED]
        for x in losses(instrument, long, codecs, num_tokens, arguments.exact):
            print(f"{x.preset:10} {x.num_tokens:6} {x.exact_tokens:6} {x.kl:8.5f}", end=" ")
            print(f"{x.first_kl:8.5f} {x.later_kl:8.5f} {x.top1:6.1%}")
            rows.append(x)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(x) for x in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
