"""vLLM: time to first token of a returning session, restored from cold against prefilled again.

    python benchmarks/vllm_ttft.py [--tokens 2048 6144] [--rounds 5] [--codec tq3] [--json OUT]

As ``restore_ttft.py``, through gateway and HTTP, with vLLM's CPU engine in float32. One process and
one conversation per row; cold sessions are in RAM.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from restore_ttft import one_length
from stack import MIB, client_of, write_json
from vllm_stack import with_plugin


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with with_plugin(2048 * MIB, args.codec) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            rows = [await one_length(client, n, args.rounds) for n in args.tokens]
    return {"engine": "vllm", "codec": args.codec, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
