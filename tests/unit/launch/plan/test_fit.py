"""Budgets for a number of sessions: enough for all of them, and within the room there is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cli.options import layers
from launch.plan.capacity_plan import plan_of
from launch.plan.fit import MIB, Asleep, Needs, Space, choose_budgets, needs_of, refusal, what_would
from launch.settings.effective_settings import effective_settings
from launch.settings.units import show_bytes

GIB = 1 << 30
ROOMS = Space(hot=4 * GIB, ram=4 * GIB, shared=4 * GIB, disk=16 * GIB)


def needs_at(context: int) -> Needs:
    """32 KiB a token live, 5 times less asleep."""
    live = context * 32 << 10
    asleep = Asleep("dense3", live // 5 + 4096, planned=False)
    return Needs(context, running_bytes=2 * live, idle_bytes=live, asleep=asleep)


@given(
    sessions=st.integers(1, 100_000),
    context=st.integers(1, 65_536),
    memory=st.integers(64, 1 << 17),
    disk=st.integers(16, 1 << 19),
    apart=st.booleans(),
)
def test_budgets_stay_within_the_room_and_hold_sessions_that_were_not_refused(
    sessions, context, memory, disk, apart
):
    room = memory * MIB
    shared = 2 * room if apart else room
    space = Space(hot=room, ram=room, shared=shared, disk=disk * MIB)
    needs = needs_at(context)
    found = choose_budgets(needs, space, sessions)
    assert found.hot <= space.hot
    assert found.ram <= space.ram
    assert found.hot + found.ram <= space.shared
    assert found.disk <= space.disk
    if refusal(needs, space, sessions):
        assert found.most < sessions or found.hot < needs.running_bytes
    else:
        assert found.most >= sessions
        assert found.hot >= needs.running_bytes
        held = {"ram": found.ram, "disk": found.disk}
        assert any(nbytes >= sessions * needs.asleep.nbytes for nbytes in held.values())


@given(
    num=st.integers(1, 100_000),
    tier=st.sampled_from(["ram", "disk"]),
    nbytes=st.integers(1, 1 << 32),
)
def test_as_many_sleep_in_a_budget_as_it_was_made_for(num, tier, nbytes):
    needs = Needs(1, 1, 1, Asleep("x", nbytes, planned=False))
    budget = needs.cold_bytes(tier, num)
    held = needs.num_asleep(tier, budget)
    assert held >= num
    assert needs.cold_bytes(tier, held) <= budget < needs.cold_bytes(tier, held + 1)


def test_all_sleep_in_memory_while_it_has_room_and_else_on_disk():
    few, many = (choose_budgets(needs_at(8192), ROOMS, n) for n in (20, 250))
    assert few.num_held["ram"] >= 20
    assert few.num_held["disk"] >= 20  # survive a restart
    assert many.num_held["ram"] < 250 <= many.num_held["disk"]
    assert many.num_hot >= 4  # not one after the other


def test_given_budgets_stay_and_are_counted_with():
    space = Space(hot=GIB, ram=GIB, shared=2 * GIB, disk=0, given_hot=GIB, given_ram=64 * MIB)
    found = choose_budgets(needs_at(1024), space, 1000)
    assert (found.hot, found.ram, found.disk) == (GIB, 64 * MIB, 0)
    assert "1.0 GiB" not in refusal(needs_at(1024), space, 5)
    assert "64 MiB may be used" in refusal(needs_at(1024), space, 1000)


@pytest.mark.parametrize(("sessions", "context"), [(5000, 8192), (100, 65_536), (1, 400_000)])
def test_the_offers_are_really_possible(sessions, context):
    assert refusal(needs_at(context), ROOMS, sessions)
    ways = what_would(needs_at, ROOMS, sessions, context)
    offers = [way.split() for way in ways if way.startswith("--sessions")]
    assert offers
    for _, count, _, length in offers:
        assert refusal(needs_at(int(length)), ROOMS, int(count)) == ""


def test_a_model_that_was_not_measured_may_use_more_of_the_disk_until_it_is():
    live = 1024 * 32 << 10
    asleep = Asleep("dense3", live // 5, True, until_then=live)
    needs = Needs(1024, 2 * live, live, asleep)
    found = choose_budgets(needs, ROOMS, 300)
    assert found.num_at_first >= 300
    assert found.disk >= 300 * live
    small = Space(hot=GIB, ram=GIB, shared=GIB, disk=3 * GIB)
    assert refusal(needs, small, 300) == ""
    assert choose_budgets(needs, small, 300).num_at_first < 300


def test_the_wish_becomes_budgets_with_their_origin(run, model, tmp_path):
    toml = tmp_path / "wish.toml"
    toml.write_text(
        f'[capacity]\nsessions = 20\ncontext = 1024\n[engine]\nmodel = "{model}"\nkind = "mlx"\n'
    )
    code, out, _ = run("config", "--json", "--config", str(toml))
    shown = json.loads(out)
    assert code == 0
    for name in ("engine.hot_bytes", "store.ram_bytes", "store.disk_bytes"):
        assert shown[name]["from"] == "capacity: 20 sessions of 1024 tokens"
    live = 2 * 2 * (64 + 64) * 1024  # bytes of a session in a 16-bit dtype, over 1
    assert shown["store.ram_bytes"]["value"] >= 20 * live * 2 // 5
    kept = ("--config", str(toml), "--set", "store.ram_bytes=77MiB")
    _, out, _ = run("config", "--json", *kept)
    shown = json.loads(out)
    assert shown["store.ram_bytes"] == {"value": 77 * MIB, "from": "--set"}


def test_a_wish_in_words_and_impossible_ones(run, model):
    wish = ("--model", str(model), "--set", "engine.kind=mlx")
    code, out, _ = run("plan", *wish, "--sessions", "20", "--context", "1024")
    assert code == 0
    assert out.startswith("20 sessions of 1024 tokens: ")
    assert "not measured yet: counted with dense3" in " ".join(out.split())
    tight = ("--disk", "16MiB", "--ram", "4MiB", "--port", "0")
    code, _, err = run("serve", *wish, *tight, "--sessions", "900", "--context", "4096")
    assert code == 2
    assert "What would fit: --sessions " in err
    for arguments, words in (
        (("--sessions", "9"), "belong together"),
        (("--sessions", "9", "--context", "5000"), "takes 1 to 4096 tokens"),
        (("--sessions", "9", "--context", "100", "--engine", "fake"), "not fake"),
        (
            (*wish[2:], "--set", "engine.max_context=512", "--sessions", "2", "--context", "1024"),
            "exceed engine.max_context = 512",
        ),
    ):
        code, _, err = run("serve", "--model", str(model), "--port", "0", *arguments)
        assert (code, words in err) == (2, True), err


@pytest.mark.slow
def test_other_machines_are_counted(run, model):
    code, _, err = run("plan", str(model), "--machines")
    assert (code, "--weights 18GiB" in err) == (2, True)
    code, out, _ = run("plan", str(model), "--machines", "--weights", "16GiB", "--json")
    rows = {row["machine"]: row for row in json.loads(out)}
    assert code == 0
    assert len(rows) == 8
    gb10 = next(row for name, row in rows.items() if name.startswith("GB10"))
    assert gb10["ram"] > 4 * gb10["hot_only"] > 0
    refused = "does not fit: 40 GiB of weights, 26.8 GiB here"  # on a Mac of 32 GB
    assert refused in run("plan", str(model), "--machines", "--weights", "40GiB")[1]


def test_other_machines_are_counted_without_weights_and_with_budgets(run, model):
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": 32_000, "intermediate_size": 1024}
    (model / "config.json").write_text(json.dumps(config))

    def gb10(*arguments):
        code, out, err = run(
            "plan", str(model), "--machines", "--context", "4096", "--json", *arguments
        )
        assert code == 0, err
        return json.loads(out)[0]

    usual = gb10()
    assert usual["weights_estimated"] and 30 << 20 < usual["weights_bytes"] < 60 << 20
    assert "estimated from config.json" in run("plan", str(model), "--machines")[1]
    assert "estimated from config.json" in run("plan", str(model))[1]
    roomy = gb10("--disk", "1TiB", "--ram", "90GiB")
    assert roomy["disk_bytes"] == 1 << 40
    assert gb10("--codec", "tq4")["codec"] == "tq4" != usual["codec"]
    assert roomy["disk"] > 2.5 * usual["disk"] and roomy["ram"] > usual["ram"]
    assert usual["disk_bytes"] == 400 * 10**9  # half of what is free of a terabyte
    quantised = gb10("--bits", "4")
    assert quantised["weights_bytes"] < 0.3 * usual["weights_bytes"]  # with a scale for each group
    assert quantised["hot_only"] >= usual["hot_only"]
    here = run("plan", str(model), "--bits", "4")[1]
    memory = json.loads(run("plan", str(model), "--bits", "4", "--json")[1])["memory"]
    assert memory["free"] == memory["reserve"] + memory["weights"] + memory["kv"]
    assert f"{show_bytes(memory['weights'])} weights" in here
    assert f"weights of {show_bytes(quantised['weights_bytes'])}, as asked for" in here
    assert "does not fit: 1 TiB of weights" in run("plan", str(model), "--weights", "1TiB")[1]
    assert (
        "leave --bits out"
        in run("plan", str(model), "--machines", "--bits", "4", "--weights", "1GiB")[2]
    )
    assert gb10("--disk", "0")["disk"] == 0
    assert gb10("--hot", "1GiB")["kv_bytes"] < usual["kv_bytes"]
    assert "--hot and --ram would take 1 TiB, and 107" in gb10("--ram", "1TiB")["refused"]
    assert (
        "leave it out with --machines"
        in run("plan", str(model), "--machines", "--sessions", "3")[2]
    )
    (model / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 8}}))
    assert "is quantised, as its config.json says" in run("plan", str(model), "--bits", "4")[2]


def test_the_first_words_are_how_many_sessions_stay_alive(run, model):
    arguments = ("--hot", "256MiB", "--ram", "256MiB", "--disk", "2GiB", "--context", "512")
    out = run("plan", str(model), "--set", "engine.kind=mlx", *arguments)[1]
    (plan,) = json.loads(
        run("plan", str(model), "--set", "engine.kind=mlx", *arguments, "--json")[1]
    )["contexts"]
    alive = max(x["sessions"] for x in plan["served"])
    assert out.startswith(
        f"alive: {alive:,} sessions of 512 tokens instead of"
        f" {plan['without_sleep']:,} without sleep\n"
    )
    heads = [x.split() for x in out.splitlines() if x.lstrip().startswith("tokens")]
    assert [("states" in x, "KL" in x) for x in heads] == [(False, False)] * 2  # they were empty
    assert alive > 8 * plan["without_sleep"] > 8 * plan["hot_sessions"] > 0
    assert {x["codec"] for x in plan["served"]} == {"dense3"}  # by then the model is measured
    assert "until the first start has measured this model, sessions sleep exactly" in out


def test_a_plan_has_bars_and_is_of_one_model(run, model):
    code, out, _ = run("plan", str(model), "--context", "512,2048")
    assert code == 0
    assert "awake at once" in out and "█" in out
    assert "name the model once" in run("plan", str(model), "--model", str(model))[2]


def test_no_shorter_session_takes_more_than_was_counted(model, tmp_path):
    given = ["engine.kind=mlx", f"engine.model={model}", f"data_dir={tmp_path}"]
    given += ["store.codec=tq3", "store.accept_loss=true", "engine.dtype=bfloat16"]
    effective = effective_settings(layers({}, assignments=given), {})
    for context in (31, 32, 300, 1024):
        counted = needs_of(effective, context).asleep.nbytes
        lengths = ",".join(str(x) for x in range(max(1, context - 140), context + 1))
        for plan in plan_of(effective, lengths).contexts:
            (cold,) = (x for x in plan.cold if x.codec == "tq3")
            assert cold.bytes_per_session <= counted
