"""The first prototypes' tables by one command: users 1 to 25, and the stress of 67 requests.

    python benchmarks/bench_tables.py [--engine vllm] [--preset seeds] [--json OUT] [--plot OUT.png]

Starts the product with the sample model, and ``benchmarks.users --preset seeds`` against it. Ends
with 1 if any request failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import Any

from benchmarks.stacks.product_stack import MIB, Stack


def stack_of(engine: str, dtype: str) -> Stack:
    settings: dict[str, dict[str, Any]] = {
        "engine": {"kind": engine, "hot_bytes": 512 * MIB, "max_context": 4096, "dtype": dtype},
        "store": {"ram_bytes": 256 * MIB, "disk_bytes": 0},
        "scheduler": {"idle_after_s": 5.0},
    }
    if engine == "vllm":
        from benchmarks.stacks.vllm_stack import python_with_vllm

        settings["engine"]["vllm.python"] = python_with_vllm()
    return Stack(settings, start_timeout_s=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=["mlx", "vllm"], default="mlx")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--preset", default="seeds")
    args, rest = parser.parse_known_args()  # the rest is bench's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    with stack_of(args.engine, args.dtype) as stack:
        command = [sys.executable, "-m", "benchmarks.users", stack.url, "--preset", args.preset]
        raise SystemExit(subprocess.run([*command, *rest], check=False).returncode)


if __name__ == "__main__":
    main()
