"""Property-based tests of /openapi.json: no answer to a generated request may be a 5xx.

schemathesis generates a bounded number of requests; the fake engine answers, so that it takes a
minute.

    python -m benchmarks.clients.fuzz --cache ~/.cache/thermocline/agents
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.clients import packages
from benchmarks.clients.real_agents import server
from benchmarks.program import arguments


def main() -> int:
    args = arguments(__doc__, f"--cache {packages.CACHE} --examples 25 --seed 1")
    cache = Path(args.cache).expanduser().resolve()
    command = [
        str(packages.pypi(cache, "fuzz") / "schemathesis"),
        "run",
        "--checks",
        "not_a_server_error",
    ]
    command += ["--max-examples", str(args.examples), "--seed", str(args.seed)]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "30"]
    command += ["--generation-database", "none", "--no-color"]
    with server("fake", cache) as url:
        return subprocess.run([*command, f"{url}/openapi.json"], cwd=cache).returncode


if __name__ == "__main__":
    sys.exit(main())
