from __future__ import annotations

import pytest

from engines.config import EngineConfig
from kvstore.codecs.presets import PRESETS, codec_by_name
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, KVLayer, KVLayout
from kvstore.snapshot import Snapshot, StateArray
from kvstore.store import ColdStore
from kvstore.tiers.ram_tier import RamTier
from launch.cache_shape import CacheShape, Window
from launch.families import cache_shape
from launch.hot_room import HotRoom
from launch.plan import Plan, cold_bytes, live_dtype, make_plan
from launch.plan_view import print_plan
from tests.kv_sessions import kv_of, np, ref, tokens
from tests.unit.launch.test_families import DEEPSEEK_V3, GEMMA3_4B, LLAMA_8B

GIB = 1 << 30
STORE = StoreConfig(ram_bytes=4 * GIB, disk_bytes=16 * GIB)
TINY = CacheShape((KVLayer(2, 64, 64),) * 3)


def plan_of(config, contexts=(2048, 8192), store=STORE, dtype="bfloat16") -> Plan:
    itemsize = NUMPY_DTYPES[dtype].itemsize
    room = HotRoom(cache_shape(config), itemsize, 8 * GIB, 1 << 17, pays_for_work=False)
    return make_plan("m", config, room, dtype, contexts, store)


def test_budgets_are_divided_by_the_bytes_of_a_session():
    plan = plan_of(LLAMA_8B)
    short, long = plan.contexts
    assert plan.live_bytes_per_token == 128 << 10
    assert short.hot_bytes_per_session == 2048 * (128 << 10)
    assert (short.hot_sessions, long.hot_sessions) == (32, 8)
    by_name = {cold.codec: cold for cold in long.cold}
    assert set(by_name) == set(PRESETS)
    assert 4.9 < by_name["tq3"].times_smaller_than_bf16 < 5.12
    assert by_name["raw"].bytes_per_session > long.hot_bytes_per_session
    for cold in long.cold:
        assert cold.sessions["ram"] == 4 * GIB // cold.bytes_per_session
        assert cold.sessions["disk"] == 16 * GIB // cold.bytes_per_session


def test_redis_counts_only_where_it_is_used():
    assert "redis" not in plan_of(LLAMA_8B).contexts[0].cold[0].sessions
    store = StoreConfig(redis_url="redis://h", redis_bytes=64 * GIB)
    cold = plan_of(LLAMA_8B, store=store).contexts[0].cold[0]
    assert cold.sessions["redis"] == 64 * GIB // cold.bytes_per_session


def test_float32_doubles_what_is_live_and_what_is_raw():
    half, full = plan_of(LLAMA_8B), plan_of(LLAMA_8B, dtype="float32")
    assert full.contexts[0].hot_bytes_per_session == 2 * half.contexts[0].hot_bytes_per_session
    packed = [{x.codec: x.bytes_per_session for x in p.contexts[0].cold} for p in (half, full)]
    assert packed[0]["tq3"] == packed[1]["tq3"]
    assert packed[1]["raw"] > 1.9 * packed[0]["raw"]


@pytest.mark.parametrize("num_tokens", [1, 100, 128, 1000])
@pytest.mark.parametrize("codec", sorted(PRESETS))
def test_a_session_that_was_really_stored_takes_as_much(codec, num_tokens):
    layout = KVLayout("bfloat16", TINY.growing)
    tier = RamTier(GIB)
    store = ColdStore(STORE, layout, "f", "m", codec_by_name(codec), [tier])
    ids = tokens(num_tokens)
    store.save(ref(), ids, kv_of(ids, layout))
    assert store.flush(30)
    held = tier.stats().nbytes
    store.close()
    expected = cold_bytes(TINY, codec_by_name(codec), "bfloat16", num_tokens, STORE)
    assert held == pytest.approx(expected, rel=0.01, abs=300)


def test_windows_and_state_are_counted_once_per_snapshot():
    shape = CacheShape(TINY.growing, (Window(KVLayer(1, 32, 32), 100),), state_float32=5000)
    layout = KVLayout("bfloat16", TINY.growing)
    config = StoreConfig(max_snapshots=2)
    tier = RamTier(GIB)
    store = ColdStore(config, layout, "f", "m", codec_by_name("tq3"), [tier], needs_state=True)
    ids = tokens(1000)
    state = [
        StateArray("bfloat16", np.zeros((1, 100, 64), np.uint16)),
        StateArray("float32", np.zeros(5000, np.float32)),
    ]
    store.save(ref(), ids, kv_of(ids, layout), [Snapshot(104, state), Snapshot(1000, state)])
    assert store.flush(30)
    held = tier.stats().nbytes
    store.close()
    expected = cold_bytes(shape, codec_by_name("tq3"), "bfloat16", 1000, config)
    # The plan takes every snapshot to be as long as the newest; the first one here is shorter.
    assert held == pytest.approx(expected, rel=0.15)


def test_latent_attention_is_planned_with_raw_only():
    plan = plan_of(DEEPSEEK_V3)
    refused = {cold.codec: cold.refused for cold in plan.contexts[0].cold}
    assert refused.pop("raw") == ""
    assert all("latent attention" in reason for reason in refused.values())
    with pytest.raises(UnknownCodec, match="latent attention"):
        cold_bytes(cache_shape(DEEPSEEK_V3), codec_by_name("tq3"), "bfloat16", 10, STORE)


def test_what_does_not_grow_is_told(capsys):
    plan = plan_of(GEMMA3_4B)
    assert plan.state_bytes == 29 * 1024 * 2 * 4 * 256 * 2
    print_plan(plan)
    text = capsys.readouterr().out
    assert "29 sliding windows" in text
    assert "kept exact, in snapshots" in text
    print_plan(plan_of(DEEPSEEK_V3))
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "engine", "widens", "expected"),
    [
        ({"torch_dtype": "float16"}, EngineConfig(), False, "float16"),
        ({"dtype": "float32"}, EngineConfig(), False, "float32"),
        ({"text_config": {"dtype": "float16"}}, EngineConfig(), False, "float16"),
        ({"torch_dtype": "int8"}, EngineConfig(), False, "bfloat16"),
        ({}, EngineConfig(), False, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, EngineConfig(), True, "float32"),
        ({"torch_dtype": "bfloat16"}, EngineConfig(dtype="float16"), True, "float16"),
    ],
)
def test_the_dtype_of_the_live_cache(content, engine, widens, expected):
    assert live_dtype(engine, content, widens) == expected
