"""How many sessions fit, and pages that show today's plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import plan_sentences, plan_table
from engines.calibration.gate.choice import Choice
from kvstore.codecs.names import READY
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.shapes import NUMPY_DTYPES
from launch.cli.plan import print_plan
from launch.families.table import FAMILIES, NESTED, REFUSED, cache_shape
from launch.plan.capacity_plan import CapacityPlan, SessionSizes, make_plan
from launch.plan.served_model import HotBudget
from tests.command_line import program
from tests.unit.launch.plan.published import DEEPSEEK_V3, LLAMA_8B, PUBLISHED, QWEN35_35B
from tests.unit.launch.plan.test_families import GEMMA3_4B

GIB = 1 << 30
MIB = 1 << 20
STORE = StoreConfig(ram_bytes=4 * GIB, disk_bytes=16 * GIB)


def plan_of(
    config, contexts=(2048, 8192), store=STORE, dtype="bfloat16", choice=None
) -> CapacityPlan:
    itemsize = NUMPY_DTYPES[dtype].itemsize
    hot = HotBudget(cache_shape(config), itemsize, 8 * GIB, 1 << 17, pays_for_work=False)
    return make_plan("m", config, SessionSizes(hot, dtype, store, choice=choice), contexts)


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


def test_the_figures_of_the_first_prototype_are_the_row_of_its_codec():
    """ManthanQuant on Qwen3.5-35B-A3B: 20,480 bytes per token to 4,000, 640 MiB to 125 at 32K.

    It counted K and V only. A session's states, which it has beside them, are counted here.
    """
    store = StoreConfig(codec="manthan", ram_bytes=4 * GIB, disk_bytes=16 * GIB)
    plan = plan_of(QWEN35_35B, (32768,), store)
    assert plan.live_bytes_per_token == 20_480
    (manthan,) = (x for x in plan.contexts[0].cold if x.codec == "manthan+state8")
    assert manthan.kv_bytes_per_token == 4_000
    assert manthan.kv_times_smaller_than_bf16 == 5.12
    assert (20_480 * 32768 >> 20, 4_000 * 32768 >> 20) == (640, 125)
    rows = manthan.bytes_per_session - manthan.state_bytes
    assert rows == pytest.approx(125 * MIB, rel=0.01)


def test_two_states_are_kept_and_packed_as_the_codec_says():
    """A short sleep of a hybrid model saves little, and the plan says so."""
    plan = plan_of(QWEN35_35B, (1024, 32768))
    state = 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert plan.state_bytes == state
    for context in plan.contexts:
        assert context.hot_bytes_per_session == 20_480 * context.context + state
        by_name = {x.codec: x for x in context.cold}
        assert by_name["raw"].state_bytes == pytest.approx(2 * state, rel=0.01)
        assert 3.5 < 2 * state / by_name["dense3+state8"].state_bytes < 4
    short, long = ({x.codec: x for x in y.cold}["dense3+state8"] for y in plan.contexts)
    assert short.times_smaller_than_bf16 < 3 < 4 < long.times_smaller_than_bf16
    assert long.kv_times_smaller_than_bf16 > 5


def test_each_tier_is_planned_in_the_codec_that_will_serve():
    store = StoreConfig(codec="tq4", ram_bytes=4 * GIB, disk_bytes=16 * GIB)
    choice = Choice("tq4", codec_by_name("tq4"), "")
    context = plan_of(LLAMA_8B, (8192,), store, choice=choice).contexts[0]
    by_name = {x.codec: x.bytes_per_session for x in context.cold}
    assert [(x.tier, x.codec, x.bytes_per_session) for x in context.served] == [
        ("ram", "tq4", by_name["tq4"]),
        ("disk", "tq4", by_name["tq4"]),
    ]
    ram = context.served[0]
    assert ram.times_smaller_than_live == pytest.approx(1 * GIB / by_name["tq4"], abs=0.01)
    assert ram.sessions == 4 * GIB // by_name["tq4"]


def test_redis_does_not_count_since_only_its_server_knows_how_much_it_takes():
    store = StoreConfig(redis_url="redis://h")
    assert "redis" not in plan_of(LLAMA_8B, store=store).contexts[0].cold[0].sessions


def test_float32_doubles_live_and_raw_kv():
    half, full = plan_of(LLAMA_8B), plan_of(LLAMA_8B, dtype="float32")
    assert full.contexts[0].hot_bytes_per_session == 2 * half.contexts[0].hot_bytes_per_session
    packed = [{x.codec: x.bytes_per_session for x in p.contexts[0].cold} for p in (half, full)]
    assert packed[0]["tq3"] == packed[1]["tq3"]
    assert packed[1]["raw"] > 1.9 * packed[0]["raw"]


def test_latents_beside_an_index_are_planned_with_raw_only():
    plan = plan_of({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    refused = {cold.codec: cold.refused for cold in plan.contexts[0].cold}
    assert refused.pop("raw") == ""
    assert all("a sparse index" in reason for reason in refused.values())


def test_layers_that_do_not_grow_are_shown(capsys):
    plan = plan_of(GEMMA3_4B)
    assert plan.state_bytes == 29 * 1024 * 2 * 4 * 256 * 2
    print_plan(plan)
    text = capsys.readouterr().out
    assert "29 sliding windows" in text
    assert "packed where that was measured: a cold session has 2 of them" in text
    print_plan(plan_of({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}))
    assert "refused" in capsys.readouterr().out


DOCS = Path(__file__).parents[4] / "docs"
BENCH, MODELS = DOCS / "bench.md", DOCS / "models.md"
TOUR = (DOCS / "tour.md").read_text("utf-8")
COMMAND = "$ thermocline plan Qwen3-32B --machines --weights 62GiB --context 8192\n"


def test_the_tour_shows_the_plan_for_other_machines(tmp_path):
    (tmp_path / "Qwen3-32B").mkdir()
    config = json.dumps(PUBLISHED["Qwen3-32B"])
    (tmp_path / "Qwen3-32B" / "config.json").write_text(config)
    before, command, after = TOUR.partition(COMMAND)
    shown = after.partition("...\n```")[0].splitlines()
    assert command and len(shown) == 7

    asked = COMMAND.split()[2:]
    done = program(
        sys.executable,
        "-m",
        "launch",
        *asked,
        cwd=tmp_path,
        env={"COLUMNS": "160", "PATH": "", "HOME": str(tmp_path)},
    )
    assert [line.rstrip() for line in done.stdout.splitlines()[: len(shown)]] == shown, done.stderr


@pytest.mark.slow
def test_the_sentences_are_todays():
    assert "\n".join(plan_sentences.markdown()) in BENCH.read_text("utf-8")


def test_the_figures_are_todays():
    assert "\n".join(plan_table.markdown()) in MODELS.read_text()


def test_families_are_called_as_the_table_calls_them():
    section = (
        MODELS.read_text().partition("## How layers keep KV")[2].partition("Attention sinks")[0]
    )
    lines = [x.split("|")[3] for x in section.splitlines() if x.startswith("|")][2:]
    words = {w for line in lines for w in line.replace(",", " ").replace(";", " ").split()}
    known = {*FAMILIES, *NESTED, *REFUSED}
    # Types have digits or underscores in their names, plain words have not.
    named = {w for w in words if "_" in w or any(c.isdigit() for c in w)} - {"mlx_lm"}
    assert named and named <= known
