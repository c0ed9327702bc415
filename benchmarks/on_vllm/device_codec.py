"""The device's codec on CUDA: whether its bytes are right, its speed, and its cost to decoding.

    python benchmarks/on_vllm/device_codec.py [--codec tq3|tq4|dense3] [--dims 64 128 256]
        [--layers 32] [--seconds 2] [--json OUT]

Run it with the Python of vLLM's environment. The exit code is 2 if there is no CUDA device, and 1
if the device packs other bytes than the host.

1. Correctness: blobs and blocks of the whole path against those of the host's codec, in NHD and
   HND.
2. Speed: kernels alone and the whole path, in GB/s of hot KV, compared with a copy of the same
   memory on the device and with copies to and from pinned host memory.
3. Disturbance: the time of a step like decoding (a chain of matrix products, each with its own
   weight), alone and while saves or loads run on the side stream all the time. The step runs once
   as a CUDA graph, which shares only the device with them, and once launched product by product,
   which also shares the interpreter's lock.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.program import arguments, write_json
from engines.vllm_plugin.blocks.block_layout import SplitContent
from engines.vllm_plugin.blocks.blocks import Filling, Packing
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache
from engines.vllm_plugin.device.accelerator import Cuda
from engines.vllm_plugin.device.device_blocks import DeviceBlocks
from engines.vllm_plugin.device.device_check import STAGING_BYTES, kernels_agree
from engines.vllm_plugin.device.kv_views import view_groups
from engines.vllm_plugin.device.packed_layout import StagingLayouts
from engines.vllm_plugin.device.staging_layout import RawStagingLayout, TokenRun
from kvstore.blobs.chain import ChainKeys
from kvstore.codecs.base import Codec
from kvstore.codecs.calibrated import calibrated_codec, learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import LEARNABLE
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import Rope, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob

NO_DEVICE: Final = 2
LAYERS: Final = 32
KV_HEADS, BLOCK_TOKENS = 8, 16
SESSION_TOKENS: Final = 8192
LEARNED_BLOCKS: Final = 16  # blocks of each of four texts from which a codec learns
STEP_LAYERS, STEP_WIDTH = 32, 4096


@dataclass(frozen=True)
class Figure:
    """One measured speed."""

    dim: int
    layout: str
    what: str
    gb_per_s: float  # of hot KV


class Rig:
    """A cache with one session's blocks, and the device's codec for it."""

    def __init__(
        self, layers: int, codec: str, dim: int, layout: str, device: torch.device
    ) -> None:
        """Fill the cache with random numbers.

        ``layers``: their number; learning a codec takes a second or two for each.
        """
        self.device, chunk_tokens = device, CHUNK_TOKENS
        num_blocks = 2 * SESSION_TOKENS // BLOCK_TOKENS
        caches = {f"layer{i}": _fused(num_blocks, dim, layout, device) for i in range(layers)}
        self.cache: PagedCache = paged_cache(caches, SplitContent())
        chosen = codec_of(codec, self.cache)
        model = StoredModel("", "", self.cache.layout)
        self.store = ColdStore(StoreConfig(), model, chosen, [], chunk_tokens=chunk_tokens)
        groups = view_groups(self.cache)
        assert groups is not None
        self.layouts = StagingLayouts(groups, self.store.packer, self.cache.dtype)
        self.gpu = Cuda(device)
        self.blocks = DeviceBlocks(self.cache, self.layouts.of, self.store, self.gpu, STAGING_BYTES)
        ids = torch.randperm(num_blocks)[: SESSION_TOKENS // BLOCK_TOKENS].tolist()
        names = [i.to_bytes(32, "little") for i in range(SESSION_TOKENS // chunk_tokens)]
        self.wanted = [
            Packing(x, ids[x.first_token // BLOCK_TOKENS : x.end_token // BLOCK_TOKENS])
            for x in ChainKeys(chunk_tokens).chunks(names)
        ]
        self.hot_bytes = SESSION_TOKENS * self.cache.layout.bytes_per_token

    def save(self) -> list[Blob]:
        return [x.result() for x in self.blocks.pack(self.wanted, self.blocks.mark())]

    def load(self, blobs: list[Blob]) -> None:
        fillings = [
            Filling(x.piece, blob, 0, x.block_ids)
            for x, blob in zip(self.wanted, blobs, strict=True)
        ]
        filled = self.blocks.fill(fillings, self.blocks.mark())
        assert len(filled) == SESSION_TOKENS // BLOCK_TOKENS, "a blob was refused"

    def close(self) -> None:
        self.blocks.close()
        self.store.close()


def codec_of(name: str, cache: PagedCache) -> Codec:
    """Return the codec of that name; one that can learn has learned from rows of the cache.

    The rows are random numbers, so its tables fit no model; its speed does not depend on them.
    """
    if name not in LEARNABLE:
        return codec_by_name(name)
    blocks = range(0, 4 * LEARNED_BLOCKS, LEARNED_BLOCKS)
    texts = [cache.read(range(first, first + LEARNED_BLOCKS)) for first in blocks]
    dim = cache.layout.layers[0].head_dim
    rope = Rope(tuple(10000.0 ** (-2 * k / dim) for k in range(dim // 2)))
    samples = Samples(cache.layout, (rope,) * len(cache.layout.layers), texts)
    return calibrated_codec(name, learn_profile(samples, "random", [name]))


def _fused(num_blocks: int, dim: int, layout: str, device: torch.device) -> Tensor:
    inner = (BLOCK_TOKENS, KV_HEADS) if layout == "NHD" else (KV_HEADS, BLOCK_TOKENS)
    cache = torch.randn(num_blocks, *inner, 2 * dim, device=device, dtype=torch.bfloat16)
    return cache.transpose(1, 2) if layout == "NHD" else cache


class Kernels:
    """Launches the kernels for one chunk after the other, without blobs and staging ring."""

    def __init__(self, rig: Rig) -> None:
        self._layout = rig.layouts.of(rig.wanted[1].piece)  # no chunk of first tokens
        assert not isinstance(self._layout, RawStagingLayout), "the codec has no kernels"
        ids = [i for x in rig.wanted for i in x.block_ids]
        blocks = torch.tensor(ids, device=rig.device)
        size = CHUNK_TOKENS
        firsts = range(0, SESSION_TOKENS, size)
        self._runs = [TokenRun(blocks, first, size + first) for first in firsts]
        shape = (1, self._layout.nbytes)
        self.on_device = torch.empty(shape, dtype=torch.uint8, device=rig.device)
        self.on_host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def pack(self) -> None:
        for run in self._runs:
            self._layout.read(run, self.on_device)

    def pack_and_copy(self) -> None:
        for run in self._runs:
            self._layout.read(run, self.on_device)
            self.on_host.copy_(self.on_device, non_blocking=True)

    def unpack(self) -> None:
        for run in self._runs:
            self._layout.write(run, self.on_device)


def seconds_of(work: Callable[[], object], within_s: float) -> float:
    """Return the seconds of the fastest run; the first one, which compiles, is not counted."""
    work()
    torch.cuda.synchronize()
    best, end = float("inf"), time.perf_counter() + within_s
    while time.perf_counter() < end:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def speeds(rig: Rig, dim: int, layout: str, within_s: float) -> Iterator[Figure]:
    """Measure copies, kernels and the whole path, each for ``within_s`` seconds."""
    kernels, blobs = Kernels(rig), rig.save()
    hot = torch.empty(rig.hot_bytes, dtype=torch.uint8, device=rig.device)
    twin, host = torch.empty_like(hot), torch.empty(rig.hot_bytes // 8, dtype=torch.uint8)
    pinned = host.pin_memory()
    part = hot[: len(pinned)]
    works: dict[str, tuple[Callable[[], object], int]] = {
        "copy on the device": (lambda: twin.copy_(hot), rig.hot_bytes),
        "copy to pinned": (lambda: pinned.copy_(part, non_blocking=True), len(pinned)),
        "copy from pinned": (lambda: part.copy_(pinned, non_blocking=True), len(pinned)),
        "pack": (kernels.pack, rig.hot_bytes),
        "pack, and copy": (kernels.pack_and_copy, rig.hot_bytes),
        "unpack": (kernels.unpack, rig.hot_bytes),
        "save, whole path": (rig.save, rig.hot_bytes),
        "load, whole path": (lambda: rig.load(blobs), rig.hot_bytes),
    }
    for what, (work, nbytes) in works.items():
        yield Figure(dim, layout, what, nbytes / seconds_of(work, within_s) / 1e9)


class Step:
    """A step that reads every weight once, as decoding a token does."""

    def __init__(self, device: torch.device) -> None:
        shape = (STEP_LAYERS, STEP_WIDTH, STEP_WIDTH)
        self._weights = torch.randn(shape, device=device, dtype=torch.bfloat16) / STEP_WIDTH**0.5
        self._x = torch.randn(8, STEP_WIDTH, device=device, dtype=torch.bfloat16)
        self._launch()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._launch()

    def _launch(self) -> None:
        x = self._x
        for weight in self._weights:
            x = x @ weight

    def milliseconds(self, within_s: float, *, as_graph: bool) -> list[float]:
        """Return the milliseconds of each step, by the device's clock on the model's stream."""
        launch = self._graph.replay if as_graph else self._launch
        found, end = [], time.perf_counter() + within_s
        while time.perf_counter() < end:
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begun.record()
            launch()
            done.record()
            done.synchronize()
            found.append(begun.elapsed_time(done))
        return found


@contextmanager
def going_on(work: Callable[[], object] | None) -> Iterator[None]:
    """Run ``work`` repeatedly on another thread while the block runs; None: run nothing."""
    stop = threading.Event()

    def repeat() -> None:
        while work is not None and not stop.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def disturbance(rig: Rig, within_s: float) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of a step's milliseconds: alone, beside saves and beside loads."""
    blobs, step = rig.save(), Step(rig.device)
    step.milliseconds(0.5, as_graph=False)
    beside = {"alone": None, "beside saves": rig.save, "beside loads": lambda: rig.load(blobs)}
    found = {}
    for name, work in beside.items():
        for kind in ("graph", "launches"):
            with going_on(work):
                times = step.milliseconds(within_s, as_graph=kind == "graph")
            p99 = statistics.quantiles(times, n=100)[98]
            found[f"{kind}, {name}"] = {"p50_ms": statistics.median(times), "p99_ms": p99}
    return found


def main() -> int:
    options = arguments(__doc__, f"--codec tq3 --dims 64 128 256 --layers {LAYERS} --seconds 2.0")
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return NO_DEVICE
    device, right = torch.device("cuda"), True
    figures: list[Figure] = []
    beside: dict[str, dict[str, float]] = {}
    for dim in options.dims:
        for layout in ("NHD", "HND"):
            rig = Rig(options.layers, options.codec, dim, layout, device)
            same = kernels_agree(rig.gpu, rig.cache, rig.store)
            print(f"dim {dim}, {layout}: {'the same bytes as the host' if same else 'WRONG'}")
            right = right and same
            figures += speeds(rig, dim, layout, options.seconds)
            if (dim, layout) == (options.dims[0], "NHD"):
                beside = disturbance(rig, options.seconds)
            rig.close()
    copies = {(x.dim, x.layout): x.gb_per_s for x in figures if x.what == "copy on the device"}
    for x in figures:
        share = x.gb_per_s / copies[x.dim, x.layout]
        print(f"{x.dim:4} {x.layout} {x.what:20} {x.gb_per_s:9.1f} GB/s, {share:.2f} of a copy")
    for name, times in beside.items():
        print(f"decode step as {name}: p50 {times['p50_ms']:.3f} ms, p99 {times['p99_ms']:.3f} ms")
    found = {
        "device": torch.cuda.get_device_name(device),
        "right": right,
        "figures": [asdict(x) for x in figures],
        "decode_step": beside,
    }
    write_json(options.json, found)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
