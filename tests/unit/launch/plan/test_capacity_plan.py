from __future__ import annotations

from kvstore.codecs.names import READY
from kvstore.config import StoreConfig
from kvstore.shapes import NUMPY_DTYPES, KVLayer
from launch.cli.plan_table import print_plan
from launch.plan.cache_shape import CacheShape
from launch.plan.capacity_plan import Plan, make_plan
from launch.plan.families.table import cache_shape
from launch.plan.hot_budget import HotBudget
from tests.unit.launch.plan.published import DEEPSEEK_V3, LLAMA_8B
from tests.unit.launch.plan.test_families import GEMMA3_4B

GIB = 1 << 30
STORE = StoreConfig(ram_bytes=4 * GIB, disk_bytes=16 * GIB)
TINY = CacheShape((KVLayer(2, 64, 64),) * 3)


def plan_of(config, contexts=(2048, 8192), store=STORE, dtype="bfloat16") -> Plan:
    itemsize = NUMPY_DTYPES[dtype].itemsize
    hot = HotBudget(cache_shape(config), itemsize, 8 * GIB, 1 << 17, pays_for_work=False)
    return make_plan("m", config, hot, dtype, contexts, store)


def test_budgets_are_divided_by_the_bytes_of_a_session():
    plan = plan_of(LLAMA_8B)
    short, long = plan.contexts
    assert plan.live_bytes_per_token == 128 << 10
    assert short.hot_bytes_per_session == 2048 * (128 << 10)
    assert (short.hot_sessions, long.hot_sessions) == (32, 8)
    by_name = {cold.codec: cold for cold in long.cold}
    assert set(by_name) == set(READY)
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


def test_latent_attention_is_planned_with_raw_only():
    plan = plan_of(DEEPSEEK_V3)
    refused = {cold.codec: cold.refused for cold in plan.contexts[0].cold}
    assert refused.pop("raw") == ""
    assert all("latent attention" in reason for reason in refused.values())


def test_what_does_not_grow_is_told(capsys):
    plan = plan_of(GEMMA3_4B)
    assert plan.state_bytes == 29 * 1024 * 2 * 4 * 256 * 2
    print_plan(plan)
    text = capsys.readouterr().out
    assert "29 sliding windows" in text
    assert "kept exact, in snapshots" in text
    print_plan(plan_of(DEEPSEEK_V3))
    assert "refused" in capsys.readouterr().out
