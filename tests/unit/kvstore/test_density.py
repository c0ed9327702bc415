"""Short sessions reach most of their preset's ratio, everything counted in bytes."""

from __future__ import annotations

import pytest

from benchmarks.density import SHARES, SMOLLM2, measure, synthetic_run
from benchmarks.session_bytes import session_bytes
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.shapes import KVLayout, slice_tokens
from kvstore.tiers.ram_tier import ENTRY_BYTES
from tests.kv_sessions import kv_of, ram, ref, tokens
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run

CHUNK = 16  # of ``open_store``


@pytest.mark.parametrize("num_tokens", [300, 1000, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_short_session_reaches_its_share_in_ram_and_on_disk(num_tokens: int) -> None:
    """Before tails were packed, 300 tokens reached 63 %, and 1,000 tokens 70 %."""
    run = synthetic_run(SMOLLM2, num_tokens)
    row = measure("sample", SMOLLM2, codec_by_name("tq3"), run)[-1]
    assert row.num_tokens == num_tokens
    assert min(row.shares) >= SHARES[num_tokens]


@pytest.mark.parametrize("preset", ["tq3", "dense3", "balanced", "max", "safe"])
def test_a_tail_of_any_length_takes_as_much_as_its_tokens_in_a_chunk(preset: str) -> None:
    """All but ``dense3``, whose planes end with whole bytes: eight tokens, that is."""
    layout, codec = model_layout(), open_codec(preset, model_profile())
    run = model_run(layout, 128, seed=5)

    def nbytes(num_tokens: int) -> int:
        return len(codec.encode(slice_tokens(run, 0, num_tokens), layout, 64))

    # An entropy coder begins with its states: 80 bytes for each of this model's stacks.
    begin = {"tq3": 0, "dense3": 40}.get(preset, 400)
    for count in (1, 7, 44, 100, 127):
        whole = -(-count // 8) * 8 if preset == "dense3" else count
        assert nbytes(count) <= begin + 1.25 * nbytes(128) * whole / 128


def test_the_record_has_the_bytes_of_the_session(opened) -> None:
    layout = KVLayout("bfloat16", SMOLLM2.layers[:4])
    tier = ram()
    store = opened([tier], codec="tq3", layout=layout)
    for num_tokens in (44, 60, 64, 90):
        history = tokens(num_tokens)
        assert store.save(ref(), history, kv_of(history, layout)) and store.flush(20)
        record, counted = store.record(ref()), session_bytes(store, ref())
        assert record is not None and counted is not None
        assert record.packed_bytes == counted.chunks + counted.tail
        assert record.tail_bytes == counted.tail
        assert tier.stats().nbytes == counted.total + counted.num_blobs * ENTRY_BYTES
        assert counted.tail < layout.bytes_per_token * (num_tokens % CHUNK) / 3 + 200
