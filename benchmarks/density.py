"""Measures how many cold sessions fit in the bytes of one in bf16.

All bytes count: blob headers, exact first tokens, escaped rows, the session's record and its pages,
the keys, and the tier's own overhead per blob. Tokens after the last full chunk are not stored and
not counted. *Own ratio* is the preset's, for these rows after the first four tokens and without
headers; a session of few tokens cannot reach it.

    python -m benchmarks.density [--codec tq3 dense3] [--json OUT]
    python -m benchmarks.density --profile FILE [--model FOLDER] [--codec dense3 balanced max]

Learned presets need a model's profile (``thermocline calibrate`` writes one) and pack rows that mlx
computes with the model from a held-out text; it is the sample model unless named.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.program import arguments, table, write_json
from kvstore.blobs.chain import Piece, as_tokens
from kvstore.codecs.base import NUM_SINKS, Codec
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS, SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVRun, StoredModel, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob, Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier

SMOLLM2 = KVLayout("bfloat16", tuple(KVLayer(3, 64, 64) for _ in range(30)))
DIM_128 = KVLayout("bfloat16", tuple(KVLayer(2, 128, 128) for _ in range(8)))
LAYOUTS = {"SmolLM2-135M, head_dim 64": SMOLLM2, "8 layers, head_dim 128": DIM_128}
SHARES = {300: 0.95, 1000: 0.98, 4000: 0.99}  # of the preset's own ratio, in RAM
NUM_TOKENS = (*SHARES, 8192)
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    layout: str
    codec: str
    num_tokens: int
    bf16_bytes: int
    ram_bytes: int  # as the tier itself counts the session, its index included
    disk_bytes: int
    own_ratio: float

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the preset's own ratio that are reached in RAM and on disk."""
        in_ram, on_disk = self.ratios
        return in_ram / self.own_ratio, on_disk / self.own_ratio

    @property
    def ratios(self) -> tuple[float, float]:
        """The bytes in bf16 over those in RAM, and over those on disk."""
        return self.bf16_bytes / self.ram_bytes, self.bf16_bytes / self.disk_bytes


def synthetic_run(layout: KVLayout, num_tokens: int) -> KVRun:
    """Return normal noise in bf16; the values change sizes only through escaped rows."""
    rng = np.random.default_rng(0)
    run = layout.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        values = rng.standard_normal(array.shape, np.float32)
        array[...] = values.view(np.uint32) >> 16
    return run


def model_run(model: Path | None, num_tokens: int) -> tuple[KVLayout, KVRun]:
    """Return the layout and the rows that a model computes from a held-out text."""
    from engines.calibration.corpus import held_out_texts
    from engines.mlx_worker.cache.layout import probe
    from engines.mlx_worker.measuring.instrument import MlxInstrument
    from engines.mlx_worker.model.loading import load_model
    from launch.machine.folders import default_cache_dir
    from launch.model.find import sample_model

    folder = model or sample_model(default_cache_dir(os.environ))
    loaded = load_model(str(folder), "auto")
    instrument = MlxInstrument(loaded, probe(loaded.model))
    texts = [instrument.encode(x.content) for x in held_out_texts()]
    tokens = max(texts, key=len)[:num_tokens]
    return instrument.layout, instrument.prefill(tokens).run


class Rows:
    """A ``kvstore.store.save_queue.RowSource`` over rows that exist already."""

    def __init__(self, store: ColdStore, run: KVRun) -> None:
        self._store = store
        self._run = run

    def is_restored(self, piece: Piece) -> bool:
        return False

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        packer = self._store.packer
        spans = [slice_tokens(self._run, x.first_token, x.end_token) for x in pieces]
        return [packer.pack_rows(x, rows) for x, rows in zip(pieces, spans, strict=True)]

    def release(self) -> None:
        """Do nothing: the rows are used again."""


def weigh(layout: KVLayout, codec: Codec, run: KVRun, num_tokens: int) -> tuple[int, int]:
    """Store one session alone in a new store; return the bytes that RAM and disk report."""
    with tempfile.TemporaryDirectory() as folder:
        tiers: list[Tier] = [RamTier(4 * GIB), DiskTier(Path(folder), 4 * GIB)]
        store = ColdStore(StoreConfig(), StoredModel("density", "density", layout), codec, tiers)
        session = SessionRef("tenant", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", b"salt")
        token_ids = as_tokens(np.random.default_rng(1).integers(0, 49152, num_tokens, np.int32))
        chain = store.maker.of_tokens(session.salt, token_ids)
        assert store.save(session, chain, Rows(store, run))
        assert store.flush(600)
        ram, disk = (x.nbytes for x in store.stats().tiers)
        store.close()
    return ram, disk


def own_ratio(layout: KVLayout, codec: Codec, run: KVRun, num_tokens: int) -> float:
    """Return the ratio of bf16 to packed bytes of these rows, first tokens and headers left out."""
    starts = [NUM_SINKS, *range(CHUNK_TOKENS, num_tokens, CHUNK_TOKENS)]
    ends = [*starts[1:], num_tokens]
    pieces = [
        len(codec.encode(slice_tokens(run, first, end), layout, first))
        for first, end in zip(starts, ends, strict=True)
    ]
    return layout.elements_per_token * 2 * (num_tokens - NUM_SINKS) / sum(pieces)


def measure(name: str, layout: KVLayout, codec: Codec, run: KVRun) -> list[Row]:
    """Measure sessions of the lengths for which there are rows."""
    rows = []
    for n in (n for n in NUM_TOKENS if n <= run[0][0].shape[1]):
        stored = n // CHUNK_TOKENS * CHUNK_TOKENS
        bf16, own = layout.elements_per_token * 2 * stored, own_ratio(layout, codec, run, stored)
        rows.append(Row(name, codec.id, n, bf16, *weigh(layout, codec, run, n), own))
    return rows


def main() -> None:
    args = arguments(__doc__, "--codec tq3 ... --profile PATH --model PATH")
    rows: list[Row] = []
    if args.profile is None:
        for name, layout in LAYOUTS.items():
            run = synthetic_run(layout, max(NUM_TOKENS))
            for codec in args.codec:
                rows += measure(name, layout, codec_by_name(codec), run)
    else:
        begin_with_blas("benchmarks.density")
        profile = load_profile(args.profile)
        layout, run = model_run(args.model, max(SHARES))  # a CPU prefills these in a minute
        for codec in args.codec:
            rows += measure("the model's own rows", layout, open_codec(codec, profile), run)
    head = ("rows", "codec", "tokens", "own ratio", "in RAM", "on disk", "of own: RAM", "disk")
    cells = [
        [x.layout, x.codec, x.num_tokens]
        + [f"{ratio:.2f}x" for ratio in (x.own_ratio, *x.ratios)]
        + [f"{share:.1%}" for share in x.shares]
        for x in rows
    ]
    write_json(args.json, [asdict(x) for x in rows])
    print(*table(head, cells), sep="\n")


if __name__ == "__main__":
    main()
