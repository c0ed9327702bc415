"""How long does the simulation of a large fleet take, and that of one engine?

python -m benchmarks.simulation_speed [--machines 1000] [--users 100000] [--profile F] [--json OUT]

The conditions are fixed, so the figures of two releases can be compared: each machine has room for
some of its sessions in live KV, memory and disk, and all share a tier. ``one_engine`` is the best
of three runs of one machine with a hundred users. Times are of the processor. ``--profile`` writes
the statistics of ``cProfile``, which slow the run down.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from typing import Any, Final

from benchmarks.stacks.product_stack import write_json
from launch.simulation.conditions import Conditions, Habits, ModelSize
from launch.simulation.figures import figures_of
from launch.simulation.simulation import Simulation, Turn

GIB: Final = 1 << 30
LIVE_TOKEN_BYTES: Final = 147_456  # Qwen3-8B in bf16
PACKED_TOKEN_BYTES: Final = 30_000
TRIES: Final = 3


def conditions(machines: int, users: int, turns_per_user: int) -> Conditions:
    size = ModelSize(
        name="measured",
        hot_bytes=40 * GIB,
        ram_bytes=8 * GIB,
        disk_bytes=12 * GIB,
        live_token_bytes=LIVE_TOKEN_BYTES,
        packed_token_bytes=dict.fromkeys(("ram", "disk", "redis"), PACKED_TOKEN_BYTES),
    )
    return Conditions(
        models=(size,),
        machines=machines,
        users=users,
        habits=Habits(),
        shared_bytes_s=1e12,
        shared_bytes=4 * GIB * machines,
        turns_per_user=turns_per_user,
        most_chunks=4 if users > 20_000 else 16,
    )


def simulate(described: Conditions) -> dict[str, Any]:
    """Run a simulation; returns its time and enough figures to see that it is the same one."""
    turns: list[Turn] = []
    began = time.process_time()
    simulation = Simulation(described, turns.append)
    simulation.run()
    seconds = time.process_time() - began
    figures = figures_of(described, simulation, turns)
    return {
        "seconds": round(seconds, 2),
        "us_per_turn": round(1e6 * seconds / len(turns), 1),
        "turns": len(turns),
        "hit_rate": round(figures.hit_rate, 4),
        "token_hit_rate": round(figures.token_hit_rate, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=2, help="of each user")
    parser.add_argument("--profile", default="")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    fleet = simulate(conditions(args.machines, args.users, args.turns))
    if args.profile:
        profile.disable()
        profile.dump_stats(args.profile)
    one = [simulate(conditions(1, 100, 100)) for _ in range(TRIES)]
    write_json(args.json, {"fleet": fleet, "one_engine": min(one, key=lambda x: x["seconds"])})


if __name__ == "__main__":
    main()
