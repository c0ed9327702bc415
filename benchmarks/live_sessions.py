"""Live KV packed or plain: how many sessions stay hot in the same bytes, and how fast is decoding?

python -m benchmarks.live_sessions [--codec tq3] [--tokens 1024] [--users 4] [--json OUT]

Two servers on mlx have the same ``engine.hot_bytes``; one keeps live KV packed
(``engine.hot_codec``). First ``--users`` users have a session of ``--tokens`` tokens each and ask
for ``--answer`` more at once, on one server and on the other, round by round; speed is the sum of
what each gets between its first token and its last. Then new sessions come until each server has
put some to sleep; those that are still hot are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    prose,
)

PLAIN = "plain"
Message = dict[str, str]


class User:
    """A session on one server, and all that was said in it."""

    def __init__(self, client: Client, name: str, words: int) -> None:
        self._client = client
        self._name = name
        self._said: list[Message] = []
        self._words = words

    async def ask(self, max_tokens: int) -> Reply:
        text = "And what then?" if self._said else f"Notes: {prose(self._name, self._words)}"
        self._said.append({"role": "user", "content": text})
        reply = await self._client.chat(
            self._said, session=self._name, max_tokens=max_tokens, ignore_eos=True
        )
        assert reply.ok, reply
        self._said.append({"role": "assistant", "content": reply.text})
        return reply


def tokens_per_second(replies: list[Reply]) -> float:
    """All users' tokens a second, of answers that were asked at the same time."""
    return sum((x.completion_tokens - 1) / (x.total_s - x.ttft_s) for x in replies)


async def speeds_of(clients: dict[str, Client], args: argparse.Namespace) -> dict[str, list[float]]:
    words = int(args.tokens / WORD_TOKENS)
    users = {
        name: [User(client, f"user-{i}", words) for i in range(args.users)]
        for name, client in clients.items()
    }
    for those in users.values():
        for user in those:
            await user.ask(4)
    speeds: dict[str, list[float]] = {name: [] for name in clients}
    for at in range(args.rounds + 1):  # the first round warms up
        for name, those in users.items():
            replies = await asyncio.gather(*(user.ask(args.answer) for user in those))
            if at:
                speeds[name].append(tokens_per_second(replies))
        print(f"  round {at}: { ({name: x[-1:] for name, x in speeds.items()}) }", flush=True)
    return speeds


async def awake_of(client: Client, args: argparse.Namespace) -> int:
    """How many sessions are hot after so many came that some had to sleep."""
    words = int(args.tokens / WORD_TOKENS)
    for number in range(args.sessions):
        await User(client, f"session-{number}", words).ask(4)
        listed = (await client.get("/v1/sessions?limit=1000"))["data"]
        sessions = [x for x in listed if x["id"].startswith("session-")]
        if sum(x["state"] == "cold" for x in sessions) >= args.enough:
            break
    else:
        raise RuntimeError(f"{args.sessions} sessions fit all at once; ask for more of them")
    hot: int = sum(x["state"] != "cold" for x in sessions)
    print(f"  {hot} of {len(sessions)} sessions are hot", flush=True)
    return hot


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    engine = {"kind": "mlx", "hot_bytes": args.hot_mib * MIB}
    with ExitStack() as running:
        stacks = {}
        for name, more in ((PLAIN, {}), (args.codec, {"hot_codec": args.codec})):
            settings = {
                "engine": engine | more,
                "store": {"codec": args.codec, "accept_loss": True},
                "scheduler": {"idle_after_s": 3600.0},
            }
            stacks[name] = running.enter_context(Stack(settings))
        async with AsyncExitStack() as connected:
            clients = {
                name: await connected.enter_async_context(client_of(stack))
                for name, stack in stacks.items()
            }
            speeds = await speeds_of(clients, args)
            awake = {name: await awake_of(client, args) for name, client in clients.items()}
    medians = {name: statistics.median(of_rounds) for name, of_rounds in speeds.items()}
    ratios = [x / y for x, y in zip(speeds[args.codec], speeds[PLAIN], strict=True)]
    return {
        "tokens": args.tokens,
        "users": args.users,
        "tokens_per_second": {name: round(median, 1) for name, median in medians.items()},
        "speed_over_plain": round(statistics.median(ratios), 3),
        "awake": awake,
        "awake_over_plain": round(awake[args.codec] / awake[PLAIN], 2),
        "hot_mib": args.hot_mib,
    }


def main() -> None:
    args = arguments(
        __doc__,
        "--codec tq3 --tokens 1024 --users 4 --rounds 5 --answer 32 --hot-mib 512"
        " --enough 3 --sessions 200",
    )
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
