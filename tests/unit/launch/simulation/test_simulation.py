"""Small fleets whose figures can be computed by hand, and rules that hold for larger ones."""

from __future__ import annotations

import msgspec
import pytest

from launch.simulation.conditions import Conditions, Habits, ModelSize, Speeds
from launch.simulation.figures import FleetFigures, simulate
from launch.simulation.sized_tier import Link

MIB = 1 << 20
# A turn brings 800 new tokens and 200 of an answer: 1000 a turn.
HABITS = Habits(think_s=10.0, context=4000, turns=4, answer_tokens=200)
SPEEDS = Speeds(prefill_tokens_s=800.0, answer_tokens_s=200.0, unpack_bytes_s=1e6, disk_bytes_s=1e6)
PACKED = {"ram": 100.0, "disk": 100.0, "redis": 100.0}
LIVE = 1000.0


def fleet(**changes: object) -> Conditions:
    """One user on one machine, where everything fits, unless changed."""
    of_model = ("hot_bytes", "ram_bytes", "disk_bytes")
    size: dict[str, object] = {"hot_bytes": 64 * MIB, "ram_bytes": 64 * MIB, "disk_bytes": 0}
    size |= {x: changes.pop(x) for x in of_model if x in changes}
    model = ModelSize(name="m", live_token_bytes=LIVE, packed_token_bytes=PACKED, **size)  # type: ignore[arg-type]
    values: dict[str, object] = {
        "machines": 1,
        "users": 1,
        "habits": HABITS,
        "speeds": SPEEDS,
        "shared_bytes": 1 << 40,
        "idle_after_s": 1e9,
        "turns_per_user": 40,
        "loses_machine": False,
    }
    return Conditions(models=(model,), **(values | changes))  # type: ignore[arg-type]


def test_a_session_that_stays_hot_costs_the_prefill_of_its_new_tokens():
    found = simulate(fleet())
    assert found.sources == {"hot": found.returns, "ram": 0, "disk": 0, "redis": 0, "miss": 0}
    assert (found.hit_rate, found.token_hit_rate) == (1.0, 1.0)
    assert found.first_token.p50 == pytest.approx(1.0)  # 800 tokens at 800 a second
    assert found.first_token.p99 == pytest.approx(1.0)
    assert found.returns == pytest.approx(40 * 3 / 4, abs=2)  # three of a conversation's four


def test_without_memory_every_return_is_a_prefill_of_all():
    found = simulate(fleet(hot_bytes=MIB // 2, ram_bytes=0))
    assert (found.hit_rate, found.token_hit_rate) == (0.0, 0.0)
    # Returns have 1800, 2800 and 3800 tokens in their prompts, equally often.
    assert found.first_token.p50 == pytest.approx(2800 / 800)
    assert found.first_token.p99 == pytest.approx(3800 / 800)


@pytest.mark.parametrize(
    ("tier", "changes", "link_s"),
    [
        ("ram", {}, 0.0),
        ("disk", {"ram_bytes": 0, "disk_bytes": 64 * MIB}, 0.1),
        ("redis", {"ram_bytes": 0, "shared_bytes_s": 2e6}, 0.05),
    ],
)
def test_a_restore_costs_reading_and_unpacking(tier, changes, link_s):
    found = simulate(fleet(idle_after_s=0.0, **changes))
    assert found.sources[tier] == found.returns
    # Of 1000, 2000 or 3000 tokens, at 100 bytes each.
    assert found.first_token.p50 == pytest.approx(1.0 + 2 * (0.1 + link_s))
    assert found.first_token.p99 == pytest.approx(1.0 + 3 * (0.1 + link_s))


def test_a_restore_that_takes_too_long_becomes_a_prefill():
    slow = fleet(
        idle_after_s=0.0, ram_bytes=0, shared_bytes_s=1e4, restore_deadline_s=5.0
    )  # ten seconds for each thousand tokens
    found = simulate(slow)
    assert found.hit_rate == 0.0
    assert found.first_token.p50 == pytest.approx(5.0 + 2800 / 800)


def test_requests_of_one_engine_wait_for_each_others_prefill():
    link = Link(100.0)
    link.read(0.0, 200)
    assert link.done_at(1.0, 100) == 3.0
    assert link.done_at(5.0, 100) == 6.0
    alone, crowded = (simulate(fleet(users=x)).first_token.mean for x in (1, 12))
    assert crowded > alone + 0.2


MANY = {
    "machines": 4,
    "users": 80,
    "turns_per_user": 7,
    "speeds": Speeds(prefill_tokens_s=20_000.0, unpack_bytes_s=1e9, disk_bytes_s=1e9),
    "hot_bytes": 10 * MIB,
    "ram_bytes": 2 * MIB,
}


def test_more_memory_never_lowers_the_hit_rate():
    rates = [
        simulate(fleet(**(MANY | {"ram_bytes": x * MIB // 2}))).token_hit_rate
        for x in (0, 1, 2, 4, 8, 16, 64)
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.7 < 0.99 < rates[-1]


def test_the_shared_tier_keeps_sessions_that_machines_have_no_room_for():
    without, shared = (simulate(fleet(**MANY, shared_bytes_s=x)) for x in (0.0, 1e9))
    assert without.hit_rate < 0.9
    assert shared.hit_rate == 1.0
    assert 0 < shared.shared.used < 1
    # A turn's new tokens are written, and the rows after the last full chunk once more.
    turns_s = shared.turns / shared.seconds
    assert 1.0 < shared.shared.written_bytes_s / (turns_s * 1000 * PACKED["redis"]) < 1.4
    assert shared.shared.full_at_users > 80


@pytest.mark.parametrize(("bytes_s", "source"), [(1e9, "redis"), (0.0, "miss")])
def test_a_machine_that_is_lost_costs_a_restore_or_a_prefill(bytes_s, source):
    many = MANY | {"hot_bytes": 200 * MIB, "ram_bytes": 200 * MIB}
    found = simulate(fleet(**many, shared_bytes_s=bytes_s, loses_machine=True))
    lost = found.lost
    assert 80 / 4 * 0.4 < lost.sessions < 80 / 4 * 1.6
    # Some had moved before, and left a copy elsewhere.
    assert lost.sources[source] >= 0.5 * lost.sessions
    assert ("miss" in lost.sources) == (source == "miss")
    assert found.moves["away"] >= lost.sources[source]
    assert found.hit_rate > 0.99  # of all other returns; without a shared tier a move costs one
    unharmed = simulate(fleet(**many, shared_bytes_s=bytes_s))
    assert (unharmed.lost, unharmed.lost_at_s) == (None, None)


def test_models_of_one_machine_share_the_link():
    one = fleet(**MANY, shared_bytes_s=1e9)
    two = msgspec.structs.replace(one, models=one.models * 2)
    found = simulate(two)
    assert found.shared is not None
    assert found.hit_rate == 1.0


def test_a_seed_determines_a_simulation():
    def run(seed: int) -> FleetFigures:
        return simulate(fleet(**MANY, shared_bytes_s=1e9, loses_machine=True, seed=seed))

    assert run(1) == run(1)
    assert run(1) != run(2)
