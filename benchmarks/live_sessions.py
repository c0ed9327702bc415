"""Compares packed with plain live KV: sessions that stay hot in the same bytes, and speed.

    python -m benchmarks.live_sessions [--codec tq3] [--tokens 1024] [--users 4] [--json OUT]

Two servers on mlx have the same ``engine.hot_bytes``; one keeps live KV packed
(``engine.hot_codec``). First ``--users`` users have a session of ``--tokens`` tokens each and ask
for ``--answer`` more at once, on one server and on the other, round by round; speed is the sum of
the users' rates between first and last token. Then new sessions come until each server has put
``--enough`` to sleep; those that are still hot are counted. Takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, words_of

PLAIN = "plain"


class User:
    """A session on one server, with its messages."""

    def __init__(self, client: Client, name: str, tokens: int) -> None:
        self._client, self._name, self._tokens = client, name, tokens
        self._said: list[dict[str, str]] = []

    async def ask(self, max_tokens: int) -> Reply:
        first = f"Notes: {words_of(self._name, self._tokens)}"
        text = "And what then?" if self._said else first
        self._said.append({"role": "user", "content": text})
        reply = await self._client.chat(self._said, self._name, max_tokens, ignore_eos=True)
        assert reply.ok, reply
        self._said.append({"role": "assistant", "content": reply.text})
        return reply


async def speeds_of(clients: dict[str, Client], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return each server's tokens a second, all users asking at once, round by round."""
    users = {
        name: [User(client, f"user-{i}", args.tokens) for i in range(args.users)]
        for name, client in clients.items()
    }
    for user in (x for those in users.values() for x in those):
        await user.ask(4)
    speeds: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(args.rounds + 1):
        for name, those in users.items():
            replies = await asyncio.gather(*(user.ask(args.answer) for user in those))
            each = ((x.completion_tokens - 1) / (x.total_s - x.ttft_s) for x in replies)
            speeds[name].append(sum(each))
    return {name: x[1:] for name, x in speeds.items()}  # the first round warms up


async def hot_of(client: Client, args: argparse.Namespace) -> int:
    """Open sessions until some have to sleep; return how many are hot."""
    for number in range(args.sessions):
        await User(client, f"session-{number}", args.tokens).ask(4)
        listed = (await client.get("/v1/sessions?limit=1000"))["data"]
        asleep: list[bool] = [
            x["state"] == "cold" for x in listed if x["id"].startswith("session-")
        ]
        if sum(asleep) >= args.enough:
            return len(asleep) - sum(asleep)
    raise RuntimeError(f"{args.sessions} sessions fit all at once; ask for more of them")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as held:
        clients = {}
        for name, more in ((PLAIN, {}), (args.codec, {"hot_codec": args.codec})):
            settings = {
                "engine": {"kind": "mlx", "hot_bytes": args.hot_mib * MIB, **more},
                "store": {"codec": args.codec, "accept_loss": True},
                "scheduler": {"idle_after_s": 3600.0},
            }
            stack = held.enter_context(Stack(settings))
            clients[name] = await held.enter_async_context(client_of(stack))
        speeds = await speeds_of(clients, args)
        hot = {name: await hot_of(client, args) for name, client in clients.items()}
    ratios = [x / y for x, y in zip(speeds[args.codec], speeds[PLAIN], strict=True)]
    return {
        **vars(args),
        "tokens_per_second": {name: statistics.median(x) for name, x in speeds.items()},
        "speed_over_plain": [
            round(x, 3) for x in (min(ratios), statistics.median(ratios), max(ratios))
        ],
        "hot": hot,
    }


def main() -> None:
    args = arguments(
        __doc__,
        "--codec tq3 --tokens 1024 --users 4 --rounds 5 --answer 32 --hot-mib 512 --enough 3"
        " --sessions 200",
    )
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
