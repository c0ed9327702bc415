"""A claim in a header costs nothing that its payload does not pay for, whichever codec reads it."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

import thermocline
from benchmarks.fuzz import fuzz
from benchmarks.fuzz_codecs import codec_targets, method_names, opened
from kvstore.blobs.state_packer import unpack_matrices
from kvstore.blobs.state_tree import StateArray, StateTree, decode_state, encode_state
from kvstore.codecs.names import LITERATURE, OWN
from kvstore.codecs.states import MOST_WIDTH, dealt_codec
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayer, KVLayout
from thermocline import Packed

MOST_BYTES = 64 << 20  # beyond the input
MOST_CPU_S = 1.0  # a busy machine; the benchmark's bound is a twentieth of it
MANY = 1 << 20
CLAIMS = {
    "heads": (KVLayer(MANY, 8, 8),),
    "heads of one value": (KVLayer(MANY, 1, 0),),
    "values of a key": (KVLayer(1, MANY, 0),),
    "values of a value": (KVLayer(1, 0, MANY),),
    "all": (KVLayer(MANY, MANY, MANY),) * 9,
    "more heads than bytes": (KVLayer(3001, 1, 0),),
    "layers": (KVLayer(1, 16, 16),) * 5000,
    "widths": tuple(KVLayer(1, dim, 0) for dim in range(1, 90)),
    "no values": (KVLayer(MANY, 0, 0),),
    "no layers": (),
}
TOKENS = ((1, 0), (1, 100), (9, 0), (65, 100), ((1 << 32) - 1, 0))


def thorough_for_papers(names: Iterable[str]) -> list[Any]:
    """Methods of papers are read by the same stages, and in full where that is asked for."""
    of_papers = {x for x in LITERATURE if x not in OWN}
    return [
        pytest.param(x, marks=[pytest.mark.thorough] * bool(of_papers & {*re.findall(r"\w+", x)}))
        for x in names
    ]


@dataclass
class Cost:
    nbytes: int = 0
    cpu_s: float = 0.0


@contextmanager
def cost() -> Iterator[Cost]:
    found, began = Cost(), time.thread_time()
    tracemalloc.start()
    try:
        yield found
    finally:
        found.cpu_s, found.nbytes = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@pytest.mark.parametrize("name", thorough_for_papers(method_names()))
def test_a_forged_header_is_refused_before_anything_is_built(name: str) -> None:
    """3,000 bytes that claimed 1,048,576 heads took gigabytes, or minutes."""
    method, layout = opened(name)
    rows = layout.empty(1)
    for array in (x for pair in rows for x in pair):
        array.fill(0)
    method.restore_run(method.pack_run(rows))  # makes what is made once
    for (claim, layers), (num_tokens, first) in product(CLAIMS.items(), TOKENS):
        claimed = KVLayout("bfloat16", layers)
        packed = Packed(method.id, claimed, first, num_tokens, memoryview(b"\x11" * 3000))
        data = packed.tobytes()
        with cost() as found, pytest.raises((Corrupt, Mismatch)):
            method.restore_run(method.frombytes(data))
        with cost() as again, pytest.raises((Corrupt, Mismatch)):
            method.restore(method.frombytes(data))
        assert max(found.nbytes, again.nbytes) < MOST_BYTES, (claim, num_tokens)
        assert min(found.cpu_s, again.cpu_s) < MOST_CPU_S, (claim, num_tokens)


def test_a_claim_of_no_tokens_builds_nothing() -> None:
    """Without tokens a payload is empty, so it bounds neither heads nor values."""
    for name in ("tq3", "kivi", "base11", "qjl"):
        method = thermocline.codec(name)
        layout = KVLayout("bfloat16", (KVLayer(MANY, 64, 0),))
        data = Packed(method.id, layout, 0, 0, memoryview(b"")).tobytes()
        with cost() as found:
            packed = method.frombytes(data)
            assert method.restore(packed).shape == (MANY, 0, 64)
        assert found.nbytes < MOST_BYTES and found.cpu_s < MOST_CPU_S, name


@pytest.mark.parametrize("name", ["tqprod", "qjl", "vecinfer", "rabitq"])
def test_a_matrix_for_wide_rows_is_not_made_for_a_claim(name: str) -> None:
    """Its size is the width's square, so a payload that is long enough does not pay for it."""
    method = thermocline.codec(name)
    layout = KVLayout("bfloat16", (KVLayer(1, 3000, 16),))
    data = Packed(method.id, layout, 100, 2, memoryview(bytes(4000))).tobytes()
    with cost() as found, pytest.raises((Corrupt, Mismatch)):
        method.restore_run(method.frombytes(data))
    assert found.nbytes < MOST_BYTES and found.cpu_s < MOST_CPU_S


@pytest.mark.parametrize("name", thorough_for_papers(codec_targets()))
def test_three_hundred_changes_are_read_or_refused(name: str) -> None:
    """``benchmarks/fuzz.py`` makes 200,000 of each."""
    found = fuzz(codec_targets()[name](), 300, 60.0, 7)
    assert [x for x in found.defects if " s, " not in x] == []
    assert found.most_bytes < MOST_BYTES and found.most_cpu_s < MOST_CPU_S


def test_a_row_of_zeros_is_as_wide_as_rows_are() -> None:
    """It has no bits, so its three bytes could claim any width."""
    codec = dealt_codec("dealt6", None, "0123456789")
    zeros = np.zeros(3 * 1000, np.uint8)
    state: dict[str, StateTree] = {
        "\0matrix": codec.id,
        "dtype": "float32",
        "payload": StateArray("uint8", zeros),
    }
    for width in (MOST_WIDTH + 1, 1 << 20, 1 << 60):
        forged = encode_state({**state, "shape": [1000, width]})
        with cost() as found, pytest.raises(Corrupt):
            unpack_matrices(decode_state(memoryview(forged)), [codec.id])
        assert found.nbytes < MOST_BYTES
    assert not codec.takes(np.zeros((2, MOST_WIDTH + 1), np.float32), "float32")
    forged = encode_state({**state, "shape": [1] * 70})
    with pytest.raises(Corrupt):
        unpack_matrices(decode_state(memoryview(forged)), [codec.id])
