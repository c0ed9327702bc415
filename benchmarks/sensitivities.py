"""Which errors matter: presets learned with and without sensitivities, from few texts and many.

    python -m benchmarks.sensitivities [--source SAMPLE_MODEL] [--texts 8,48] [--json OUT]

Each preset is learned from so many texts, once by local sensitivities (decision 59)
and once with all errors counted alike, and judged on mlx in float32 by the held-out texts: KL over
all scored tokens (a first start's gate scores 64); the change of perplexity; KL at the answers of
reasoning chains; bits with everything counted. The seconds and the memory that learning takes are
printed beside it. An hour on two cores.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import psutil

from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.stacks.product_stack import MIB, write_json
from engines.calibration.corpus import fit_texts, held_out_texts
from engines.calibration.learn import TextReader, deal
from engines.calibration.measuring.cases import Case, chain_cases, text_cases
from engines.calibration.measuring.measure import Judge
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from kvstore.codecs.base import Codec
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.presets import open_codec
from kvstore.codecs.quality import Quality
from launch.machine.folders import default_cache_dir
from launch.model.sample import sample_model

NUM_CHAINS: Final = 4


@dataclass(frozen=True)
class Way:
    """One way to learn a preset: from so many texts, with a part of each that looks back."""

    preset: str
    num_texts: int
    is_local: bool

    @property
    def label(self) -> str:
        return f"{self.preset}, {self.num_texts} texts, {'local' if self.is_local else 'none'}"


def learned(
    instrument: MlxInstrument, ways: Sequence[Way], tokens: int, probed_share: float
) -> Iterator[tuple[Way, Codec, dict[str, Any]]]:
    """Learn every way; yields it with its codec, and with seconds and MiB of the learning."""
    by_texts: dict[int, list[Way]] = defaultdict(list)
    for way in ways:
        by_texts[way.num_texts].append(way)
    for num_texts, some in by_texts.items():
        began = time.monotonic()
        dealt = list(deal(fit_texts(), instrument.encode, num_texts, tokens))
        seen = TextReader(instrument, probed_share).samples(dealt)
        read_s = time.monotonic() - began
        alike = replace(seen, metrics=None)
        for way in some:
            began = time.monotonic()
            found = learn_profile(
                seen if way.is_local else alike, instrument.fingerprint, [way.preset]
            )
            costs = {
                "read_s": round(read_s),
                "learn_s": round(time.monotonic() - began),
                "rss_mib": round(psutil.Process().memory_info().rss / MIB),
            }
            print(way.label, costs, flush=True)
            yield way, open_codec(way.preset, found), costs


def cases(instrument: MlxInstrument, contexts: Sequence[int], num_scored: int) -> Iterator[Case]:
    texts, encode = held_out_texts(), functools.cache(instrument.encode)
    for context in contexts:
        yield from text_cases(texts, encode, context, num_scored)
        tokens = (encode(text.content) for text in texts)
        yield from chain_cases(tokens, encode, context, NUM_CHAINS, num_scored)


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield "| learned | tokens | bits | KL | perplexity | KL of chains | s | MiB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for x in rows:
        yield (
            f"| {x['label']} | {x['context']} | {x['bits_per_element']:.3f} | {x['kl']:.4f} |"
            f" {x['perplexity_change_pct']:+.2f} % | {x['chain_kl']:.4f} |"
            f" {x['read_s']} + {x['learn_s']} | {x['rss_mib']} |"
        )


def main() -> None:
    begin_with_blas("benchmarks.sensitivities")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", help="a model's folder; default: the sample model")
    parser.add_argument("--texts", default="8,48", help="to learn from")
    parser.add_argument("--presets", default="dense3,balanced,max,safe")
    parser.add_argument("--ways", default="none,local")
    parser.add_argument("--tokens", type=int, default=1024, help="of a text to learn from")
    parser.add_argument("--probed", type=float, default=0.25, help="of each text looks back")
    parser.add_argument("--contexts", default="1024,2048")
    parser.add_argument("--scored", type=int, default=192)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    source = args.source or str(sample_model(default_cache_dir(os.environ)))
    loaded = load_model(source, "float32")
    instrument = MlxInstrument(loaded, probe(loaded.model))
    ways = [
        Way(preset, int(num), kind == "local")
        for num in args.texts.split(",")
        for preset in args.presets.split(",")
        for kind in args.ways.split(",")
    ]
    found = list(learned(instrument, ways, args.tokens, args.probed))
    codecs = {way.label: codec for way, codec, _ in found}
    costs = {way.label: cost for way, _, cost in found}
    contexts = tuple(map(int, args.contexts.split(",")))
    judge = Judge(instrument, cases(instrument, contexts, args.scored))
    judged: list[Quality] = judge.rows(codecs)
    rows = [{"label": x.preset, **msgspec.to_builtins(x), **costs[x.preset]} for x in judged]
    print("\n".join(table(rows)), flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
