"""vLLM: time to first token of a returning session: prefilled, still hot, and restored from cold.

    python benchmarks/vllm_ttft.py [--tokens 2048 6144] [--rounds 3] [--codec tq3]
        [--dtype float32] [--json OUT]

Through gateway and HTTP, with vLLM's CPU engine; cold sessions are in RAM. One process; per row one
conversation, whose first turn has nothing to reuse. It then comes back ``--rounds`` times with the
same short new message while it is hot, and as often after it was put to sleep. What a hot return
takes is the floor: computing the new message, with attention to all that is before it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from stack import MIB, WORD_TOKENS, Client, Reply, client_of, prose, write_json
from vllm_stack import with_plugin


async def comes_back(
    client: Client, name: str, history: list[dict[str, str]], *, cold: bool
) -> Reply:
    await client.until(name, "idle")
    if cold:
        await client.post(f"/v1/sessions/{name}/demote")
        await client.until(name, "cold")
    reply = await client.chat(history, session=name, max_tokens=4)
    assert reply.cache.startswith("cold" if cold else "hot"), reply
    print(f"  {reply.cache}: {reply.ttft_s:.3f} s", flush=True)
    return reply


async def one_length(client: Client, tokens: int, rounds: int) -> dict[str, Any]:
    name = f"t{tokens}"
    words = prose(name, int(tokens / WORD_TOKENS))
    first = [{"role": "user", "content": f"{words}\nOne word, please."}]
    reply = await client.chat(first, session=name, max_tokens=4)
    print(f"  prefill of {reply.prompt_tokens}: {reply.ttft_s:.2f} s", flush=True)
    again = {"role": "user", "content": "And another?"}
    history = [*first, {"role": "assistant", "content": reply.text}, again]
    hot = [await comes_back(client, name, history, cold=False) for _ in range(rounds)]
    cold = [await comes_back(client, name, history, cold=True) for _ in range(rounds)]
    hot_s = statistics.median(x.ttft_s for x in hot)
    cold_s = statistics.median(x.ttft_s for x in cold)
    return {
        "tokens": reply.prompt_tokens,
        "prefill_ttft_s": round(reply.ttft_s, 3),
        "hot_ttft_s": round(hot_s, 3),
        "restore_ttft_s": round(cold_s, 3),
        "speedup": round(reply.ttft_s / cold_s, 1),
        "speedup_worst": round(reply.ttft_s / max(x.ttft_s for x in cold), 1),
        "speedup_hot": round(reply.ttft_s / hot_s, 1),
        "cached_share": round(cold[0].cached_tokens / cold[0].prompt_tokens, 4),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with with_plugin(2048 * MIB, args.codec, dtype=args.dtype) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            rows = [await one_length(client, n, args.rounds) for n in args.tokens]
    return {"engine": "vllm", "codec": args.codec, "dtype": args.dtype, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
