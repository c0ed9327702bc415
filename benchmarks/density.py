"""How many sessions fit where one fitted: bytes of whole cold sessions over bf16.

Every byte counts: blob headers, exact first tokens, escaped rows, the raw tail, the session record,
the keys, and what the tier itself needs per blob. Sessions of one length differ in their tail, so
the average over all tail lengths is what a box sees.

    python benchmarks/density.py [--codec tq3] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvstore.by_tokens.store import ColdStore
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVRun, StoredModel, slice_tokens
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier

SMOLLM2 = KVLayout("bfloat16", tuple(KVLayer(3, 64, 64) for _ in range(30)))
DIM_128 = KVLayout("bfloat16", tuple(KVLayer(2, 128, 128) for _ in range(8)))
LAYOUTS = {"SmolLM2-135M, head_dim 64": SMOLLM2, "8 layers, head_dim 128": DIM_128}
NUM_TOKENS = (2048, 4096, 8192)
TARGETS = {(64, 4096): 4.2, (64, 8192): 4.6, (128, 8192): 4.8}
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    layout: str
    head_dim: int
    codec: str
    num_tokens: int
    bf16_bytes: int
    chunk_bytes: int
    tail_bytes: int
    record_bytes: int
    key_bytes: int
    ram_bytes: int  # as the tier itself counts the session, its index included
    disk_bytes: int
    ratio_ram: float
    ratio_disk: float
    ratio_ram_mean_tail: float
    ratio_disk_mean_tail: float
    target: float | None

    @property
    def passes(self) -> bool:
        return self.target is None or self.ratio_ram_mean_tail >= self.target


def synthetic_run(layout: KVLayout, num_tokens: int) -> KVRun:
    """bf16 bit patterns of normal noise: sizes depend on the values only through escaped rows."""
    rng = np.random.default_rng(0)
    run = layout.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        values = rng.standard_normal(array.shape, np.float32)
        array[...] = values.view(np.uint32) >> 16
    return run


@dataclass(frozen=True)
class Weighed:
    chunks: int
    tail: int
    record: int
    keys: int
    ram: int
    disk: int


def weigh(layout: KVLayout, codec: str, run: KVRun, num_tokens: int) -> Weighed:
    """One session alone in a fresh store; what each tier says it takes."""
    with tempfile.TemporaryDirectory() as folder:
        tiers: list[Tier] = [RamTier(4 * GIB), DiskTier(Path(folder), 4 * GIB)]
        store = ColdStore(
            StoreConfig(), StoredModel("density", "density", layout), codec_by_name(codec), tiers
        )
        session = SessionRef("tenant", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", b"salt")
        token_ids = np.random.default_rng(1).integers(0, 49152, num_tokens).tolist()
        assert store.save(session, token_ids, slice_tokens(run, 0, num_tokens))
        assert store.flush(60)
        counted = store.session_bytes(session)
        assert counted is not None
        ram, disk = (x.nbytes for x in store.stats().tiers)
        store.close()
    return Weighed(counted.chunks, counted.tail, counted.record, counted.keys, ram, disk)


def measure(name: str, layout: KVLayout, codec: str, num_tokens: int, run: KVRun) -> Row:
    """A session of whole chunks, and the mean over the 128 tail lengths behind it.

    Tails are rows as they are, so their bytes grow evenly: the mean is the middle of the two ends.
    """
    bf16 = layout.elements_per_token * 2
    first, last = (weigh(layout, codec, run, num_tokens + x) for x in (0, 127))
    mean_tokens = num_tokens + 63.5
    head_dim = layout.layers[0].head_dim
    return Row(
        layout=name,
        head_dim=head_dim,
        codec=codec,
        num_tokens=num_tokens,
        bf16_bytes=bf16 * num_tokens,
        chunk_bytes=first.chunks,
        tail_bytes=(first.tail + last.tail) // 2,
        record_bytes=first.record,
        key_bytes=first.keys,
        ram_bytes=first.ram,
        disk_bytes=first.disk,
        ratio_ram=bf16 * num_tokens / first.ram,
        ratio_disk=bf16 * num_tokens / first.disk,
        ratio_ram_mean_tail=bf16 * mean_tokens / ((first.ram + last.ram) / 2),
        ratio_disk_mean_tail=bf16 * mean_tokens / ((first.disk + last.disk) / 2),
        target=TARGETS.get((head_dim, num_tokens)) if codec == "tq3" else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args()
    rows = []
    for name, layout in LAYOUTS.items():
        run = synthetic_run(layout, max(NUM_TOKENS) + 127)
        rows += [measure(name, layout, arguments.codec, n, run) for n in NUM_TOKENS]
    print(
        f"{'layout':26} {'tokens':>6} {'bf16 MiB':>9} {'ram MiB':>8} {'ram':>6} {'disk':>6}", end=""
    )
    print(f" {'mean ram':>9} {'mean disk':>9} {'target':>7}")
    for x in rows:
        print(f"{x.layout:26} {x.num_tokens:6} {x.bf16_bytes / 2**20:9.1f}", end=" ")
        print(f"{x.ram_bytes / 2**20:8.1f} {x.ratio_ram:6.2f} {x.ratio_disk:6.2f}", end=" ")
        verdict = "" if x.target is None else f"{x.target:7.1f} {'met' if x.passes else 'MISSED'}"
        print(f"{x.ratio_ram_mean_tail:9.2f} {x.ratio_disk_mean_tail:9.2f} {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(x) for x in rows], indent=2) + "\n")
    if not all(x.passes for x in rows):
        raise SystemExit("a target was missed")


if __name__ == "__main__":
    main()
