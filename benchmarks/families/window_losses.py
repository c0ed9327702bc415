"""Where the loss of packed windows comes from: which half of their rows, keys or values.

    python -m benchmarks.families.window_losses --source SAMPLE_MODEL

The sample model with windows (``windowed``) goes on after a session of which only some rows of
windows, or only the rows of every token, went through a preset that learns nothing. KL at the
tokens that follow; the figures of one text each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.families.windowed import WINDOW, write_windowed
from benchmarks.stacks.product_stack import write_json
from engines.calibration.corpus import held_out_texts
from engines.calibration.instrument import HeldSession
from engines.calibration.measuring.metrics import drift
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from kvstore.blobs.state_packer import rows_of, window_arrays
from kvstore.blobs.state_tree import copied_state
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import codec_by_name
from kvstore.shapes import KVLayout, KVRun

SCORED = 64


@dataclass(frozen=True)
class Asleep:
    """A session, what follows it, and the rows of its windows: as they are, and packed."""

    instrument: MlxInstrument
    session: HeldSession
    rest: Sequence[int]
    exact: np.ndarray
    rows: KVRun
    packed: KVRun

    def kl(self, rows: KVRun, run: KVRun | None = None) -> float:
        """The mean KL with these rows of windows, and these of every token (None = exact)."""
        state = copied_state(self.session.state)
        arrays = (x for pair in rows for x in pair)
        for target, array in zip(window_arrays(state), arrays, strict=True):
            target.array[...] = array[None]
        woken = HeldSession(run or self.session.run, self.session.num_tokens, state)
        found = self.instrument.log_probs(woken, self.rest)
        return float(np.mean(drift(self.exact, found, self.rest[1:]).kl))

    def mixed(self, tokens: slice, keys: bool = True, values: bool = True) -> KVRun:
        """The exact rows, with those of ``tokens`` packed."""
        mixed = [(k.copy(), v.copy()) for k, v in self.rows]
        for (k, v), (packed_k, packed_v) in zip(mixed, self.packed, strict=True):
            if keys:
                k[:, tokens] = packed_k[:, tokens]
            if values:
                v[:, tokens] = packed_v[:, tokens]
        return mixed


def there_and_back(codec: Codec, run: KVRun, layout: KVLayout, first: int) -> KVRun:
    plain = [(np.ascontiguousarray(k), np.ascontiguousarray(v)) for k, v in run]
    back = layout.empty(plain[0][0].shape[1])
    codec.decode(memoryview(codec.encode(plain, layout, first)), layout, first, back)
    return back


def losses(
    instrument: MlxInstrument, ids: Sequence[int], context: int, name: str
) -> dict[str, Any]:
    """KL by the part of a session that was packed."""
    assert instrument.states is not None and instrument.states.windows is not None
    layout, codec = instrument.states.windows, codec_by_name(name)
    session = instrument.prefill(ids[:context])
    rest = ids[context : context + SCORED]
    rows = rows_of([x.array for x in window_arrays(session.state)], layout)
    assert rows is not None
    held = rows[0][0].shape[1]
    packed = there_and_back(codec, rows, layout, context - held)
    exact = instrument.log_probs(session, rest)
    of = Asleep(instrument, session, rest, exact, rows, packed)
    run = there_and_back(codec, session.run, instrument.layout, 0)
    older, newer = slice(held // 2), slice(held // 2, held)
    return {
        "rows of every token": of.kl(rows, run),
        "windows": of.kl(packed),
        "both": of.kl(packed, run),
        "windows, the older half": of.kl(of.mixed(older)),
        "windows, the newer half": of.kl(of.mixed(newer)),
        "windows, keys": of.kl(of.mixed(slice(held), values=False)),
        "windows, values": of.kl(of.mixed(slice(held), keys=False)),
    }


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    parts = [*found[0]["kl"]]
    yield "| text | preset | " + " | ".join(parts) + " |"
    yield "|---|---|" + "---:|" * len(parts)
    for x in found:
        figures = " | ".join(f"{x['kl'][part]:.4f}" for part in parts)
        yield f"| {x['text']} | `{x['preset']}` | {figures} |"


def main() -> None:
    begin_with_blas("benchmarks.families.window_losses")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the sample model's folder")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--presets", default="tq3,tq4")
    parser.add_argument("--texts", default="german,prose", help="beginnings of their names")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    assert args.context >= WINDOW
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(str(write_windowed(args.source, Path(folder) / "model")), "float32")
        instrument = MlxInstrument(loaded, probe(loaded.model), Path(folder))
        found = []
        for text in held_out_texts():
            if text.name.startswith(tuple(args.texts.split(","))):
                ids = instrument.encode(text.content)[: args.context + SCORED]
                for name in args.presets.split(","):
                    kl = losses(instrument, ids, args.context, name)
                    found.append({"text": text.name, "preset": name, "kl": kl})
    print("\n".join(table(found)))
    write_json(args.json, found)


if __name__ == "__main__":
    main()
