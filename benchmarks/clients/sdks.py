"""SDKs and frameworks of JavaScript and Python against a running server, on loopback.

python -m benchmarks.clients.sdks --cache ~/.cache/thermocline/agents
python -m benchmarks.clients.sdks --engine fake
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

from benchmarks.clients.real_agents import server

HERE = Path(__file__).parent
NPM = ("openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
PYPI = ("openai-agents", "litellm", "instructor", "pydantic-ai-slim[openai,anthropic]")
PYPI_MORE = ("langchain-openai", "langchain-anthropic", "langchain-tests", "pytest")


class Checked(NamedTuple):
    name: str
    version: str
    result: str


def install(cache: Path) -> tuple[Path, Path]:
    """Install what is not there yet; returns npm's folder and a Python interpreter."""
    npm, python = cache / "npm", cache / "py" / "bin" / "python"
    if not (npm / "node_modules" / "ai").exists():
        npm.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(npm), *NPM], check=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(cache / "py")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PYPI, *PYPI_MORE], check=True)
    return npm, python


def run(command: list[str], folder: Path) -> list[Checked]:
    """Run a script of checks; a script that breaks is one, too."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    rows = [x.split("\t") for x in done.stdout.splitlines()]
    found = [Checked(*row) for row in rows if len(row) == 3]
    if done.returncode:
        found.append(Checked(command[1], "", done.stderr[-300:]))
    return found


def langchain(python: Path, url: str, model: str) -> tuple[Checked, list[str]]:
    """Run LangChain's standard tests; returns their count, and what failed and why."""
    env = {**os.environ, "SDK_BASE_URL": f"{url}/v1", "SDK_MODEL": model}
    env |= {"OPENAI_API_KEY": "none"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    # Not our own configuration: it is of our environment.
    command += ["-c", os.devnull, "-o", "asyncio_mode=auto", str(HERE / "langchain_standard.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=HERE)
    last = (done.stdout.strip().splitlines() or ["?"])[-1]
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|xfailed)", last))
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)(?: - (.*))?$", done.stdout, re.MULTILINE)
    return Checked("LangChain's standard tests", "", counts), [": ".join(x) for x in failed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=["mlx", "fake"], default="mlx")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/thermocline/agents"))
    parser.add_argument("--model", default="", help="a folder; default: one layer of the sample's")
    parser.add_argument("--standard", action="store_true", help="LangChain's standard tests, too")
    args = parser.parse_args()
    cache = args.cache.expanduser().resolve()
    npm, python = install(cache)
    with server(args.engine, cache, args.model) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        command = ["node", str(HERE / "sdk_checks.mjs"), url, model, str(npm)]
        found = run(command, npm)
        found += run([str(python), str(HERE / "sdk_checks.py"), url, model], cache)
        failed: list[str] = []
        if args.standard:
            counted, failed = langchain(python, url, model)
            found.append(counted)
    print("| client | version | result |\n|---|---|---|")
    for x in found:
        print(f"| {x.name} | {x.version} | {x.result} |")
    print("\n".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
