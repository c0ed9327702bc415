"""Does the simulation of a fleet say what a real one does?

python -m benchmarks.fleet_simulation [--sessions 200] [--engines 3] [--ram-mib 20] [--json OUT]

Starts a server with replicas of a small random model on mlx, without disk and Redis, so that memory
has room for some of the sessions only. A simulation of the same budgets says in which order users
come; the same turns are then taken for real, one after the other. Compared are the share of returns
that found KV of their session, and the share of the tokens that they could have reused.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, prose, write_json
from launch.simulation.conditions import Conditions, Habits, ModelSize, Speeds
from launch.simulation.figures import figures_of
from launch.simulation.simulation import Simulation, Turn
from tests.integration.tiny_models import write_model

MODEL: Final = "tiny"
HOT_BYTES: Final = 12 * MIB  # of one replica
TURNS: Final = 4  # of a conversation
WORDS: Final = 60  # of a message
ANSWER: Final = 16
TOKEN_BYTES: Final = 3072  # of the model in float32
BLOB_BYTES: Final = 160  # of a chunk's or tail's header, with its tier's overhead
CHUNK: Final = 128


def settings(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "engine": {
            "kind": "mlx",
            "model": str(folder),
            "served_model_name": MODEL,
            "replicas": args.engines,
            "hot_bytes": HOT_BYTES * args.engines,
        },
        "store": {
            "codec": "raw",
            "ram_bytes": args.ram_mib * MIB * args.engines,
            "disk_bytes": 0,
        },
        "scheduler": {"idle_after_s": 3600},
    }


class Conversations:
    """What users and the model have said, by session."""

    def __init__(self) -> None:
        self._said: dict[str, list[dict[str, str]]] = {}

    async def take(self, client: Client, turn: Turn) -> Reply:
        said = self._said.setdefault(turn.session, [])
        while len(said) < 2 * turn.number:  # one that began before the simulation did
            said += [_user(turn.session, len(said)), {"role": "assistant", "content": "So it is."}]
        said.append(_user(turn.session, len(said)))
        reply = await client.chat(said, session=turn.session, max_tokens=ANSWER)
        said.append({"role": "assistant", "content": reply.text})
        return reply


def _user(session: str, number: int) -> dict[str, str]:
    return {"role": "user", "content": prose(f"{session} {number}", WORDS)}


async def measured_turn(stack: Stack) -> int:
    """Take one conversation; returns the tokens by which a turn makes it longer."""
    talk = Conversations()
    async with client_of(stack) as client:
        client.model = MODEL
        sizes = []
        for number in range(TURNS):
            reply = await talk.take(client, Turn(0, "measured", number, 0))
            sizes.append(reply.prompt_tokens)
    return (sizes[-1] - sizes[0]) // (TURNS - 1)


def conditions(args: argparse.Namespace, turn_tokens: int) -> Conditions:
    each = (TOKEN_BYTES * CHUNK + BLOB_BYTES) / CHUNK
    size = ModelSize(
        name=MODEL,
        hot_bytes=HOT_BYTES,
        ram_bytes=args.ram_mib * MIB,
        disk_bytes=0,
        live_token_bytes=TOKEN_BYTES,
        packed_token_bytes=dict.fromkeys(("ram", "disk", "redis"), each),
    )
    return Conditions(
        models=(size,),
        machines=args.engines,
        users=args.sessions,
        habits=Habits(think_s=60.0, context=turn_tokens * TURNS, turns=TURNS, answer_tokens=ANSWER),
        # Turns follow each other without waiting for one another, as the real ones do.
        speeds=Speeds(prefill_tokens_s=1e9, answer_tokens_s=1e9, unpack_bytes_s=1e12),
        idle_after_s=3600.0,
        turns_per_user=args.turns,
        chunk_tokens=CHUNK,
        loses_machine=False,
    )


async def replay(stack: Stack, turns: list[Turn]) -> list[Reply]:
    talk, replies = Conversations(), []
    async with client_of(stack) as client:
        client.model = MODEL
        for turn in turns:
            replies.append(await talk.take(client, turn))
    return replies


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="thermocline-") as root:
        write_model("llama", Path(root))
        with Stack(settings(Path(root), args)) as stack:
            turn_tokens = asyncio.run(measured_turn(stack))
            described = conditions(args, turn_tokens)
            turns: list[Turn] = []
            simulation = Simulation(described, turns.append)
            simulation.run()
            simulated = figures_of(described, simulation, turns)
            replies = asyncio.run(replay(stack, turns))
    returns = [
        (turn, reply)
        for turn, reply in zip(turns, replies, strict=True)
        if turn.counted and turn.is_return
    ]
    could = sum(max(0, x.number * turn_tokens) for x, _ in returns)
    hits = sum(not y.cache.startswith("miss") for _, y in returns) / len(returns)
    reused = sum(y.cached_tokens for _, y in returns) / could
    return {
        "sessions": len({x.session for x in turns}),
        "turn_tokens": turn_tokens,
        "returns": len(returns),
        "failed": sum(not x.ok for x in replies),
        "hit_rate": {"simulated": round(simulated.hit_rate, 4), "real": round(hits, 4)},
        "token_hit_rate": {
            "simulated": round(simulated.token_hit_rate, 4),
            "real": round(reused, 4),
        },
        "points_apart": round(100 * abs(simulated.hit_rate - hits), 2),
        "points_apart_tokens": round(100 * abs(simulated.token_hit_rate - reused), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200, help="users, at once")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4, help="of each user")
    parser.add_argument("--ram-mib", type=int, default=20, help="of one engine")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
