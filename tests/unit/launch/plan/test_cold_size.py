"""The bytes of a sleeping session, against what the cold store really holds."""

from __future__ import annotations

import pytest

from kvstore.blobs.snapshot import Snapshot, StateArray
from kvstore.by_tokens.store import ColdStore
from kvstore.codecs.names import READY
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from kvstore.tiers.ram_tier import RamTier
from launch.plan.cache_shape import CacheShape, Window
from launch.plan.cold_size import cold_size
from launch.plan.families.table import cache_shape
from tests.kv_sessions import kv_of, np, ref, tokens
from tests.unit.launch.plan.published import DEEPSEEK_V3

GIB = 1 << 30
STORE = StoreConfig(ram_bytes=4 * GIB, disk_bytes=16 * GIB)
TINY = CacheShape((KVLayer(2, 64, 64),) * 3)


@pytest.mark.parametrize("num_tokens", [1, 100, 128, 1000])
@pytest.mark.parametrize("codec", sorted(READY))
def test_a_session_that_was_really_stored_takes_as_much(codec, num_tokens):
    layout = KVLayout("bfloat16", TINY.growing)
    tier = RamTier(GIB)
    store = ColdStore(STORE, StoredModel("m", "f", layout), codec_by_name(codec), [tier])
    ids = tokens(num_tokens)
    store.save(ref(), ids, kv_of(ids, layout))
    assert store.flush(30)
    held = tier.stats().nbytes
    store.close()
    expected = cold_size(TINY, codec_by_name(codec), "bfloat16", num_tokens, STORE).total
    assert held == pytest.approx(expected, rel=0.01, abs=300)


def test_windows_and_state_are_counted_once_per_snapshot():
    shape = CacheShape(TINY.growing, (Window(KVLayer(1, 32, 32), 100),), state_float32=5000)
    layout = KVLayout("bfloat16", TINY.growing)
    config = StoreConfig(max_snapshots=2)
    tier = RamTier(GIB)
    store = ColdStore(config, StoredModel("m", "f", layout, True), codec_by_name("tq3"), [tier])
    ids = tokens(1000)
    state = [
        StateArray("bfloat16", np.zeros((1, 100, 64), np.uint16)),
        StateArray("float32", np.zeros(5000, np.float32)),
    ]
    store.save(ref(), ids, kv_of(ids, layout), [Snapshot(104, state), Snapshot(1000, state)])
    assert store.flush(30)
    held = tier.stats().nbytes
    store.close()
    expected = cold_size(shape, codec_by_name("tq3"), "bfloat16", 1000, config).total
    # The plan takes every snapshot to be as long as the newest; the first one here is shorter.
    assert held == pytest.approx(expected, rel=0.15)


def test_a_codec_that_must_not_pack_a_cache_is_refused():
    with pytest.raises(UnknownCodec, match="latent attention"):
        cold_size(cache_shape(DEEPSEEK_V3), codec_by_name("tq3"), "bfloat16", 10, STORE)
