"""SDKs and frameworks of JavaScript and Python against a running server, two turns each.

Prints how much of the second turn's prompt was reused, as the client itself reports it. Everything
stays on loopback.

    python -m benchmarks.clients.sdks --cache ~/.cache/thermocline/agents
    python -m benchmarks.clients.sdks --engine fake
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

from benchmarks.clients import packages
from benchmarks.clients.real_agents import server
from benchmarks.program import arguments, table, write_json
from benchmarks.stacks.product_stack import prose

HERE = Path(__file__).parent
NPM = ("openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
ASK = f"Here is a list of words. {prose('a conversation', 200)}. Name one of them."
MORE = "And another one?"
HEAD = ("client", "version", "result", "second prompt, tokens", "of it reused")


class Checked(NamedTuple):
    """The result of one client."""

    name: str
    version: str
    result: str
    prompt_tokens: str = ""  # of the second turn
    cached_tokens: str = ""

    @property
    def failed(self) -> bool:
        return self.result != "ok" or not int(self.cached_tokens)

    def cells(self) -> tuple[str, ...]:
        reused = ""
        if self.prompt_tokens:
            reused = f"{int(self.cached_tokens) / int(self.prompt_tokens):.1%}"
        return (self.name, self.version, self.result, self.prompt_tokens, reused)


def run(command: list[str], folder: Path) -> list[Checked]:
    """Run a script of checks; return its results, and one with the error if the script fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    rows = [x.split("\t") for x in done.stdout.splitlines()]
    found = [Checked(*row) for row in rows if len(row) == 5]
    if done.returncode:
        found.append(Checked(command[1], "", done.stderr[-300:]))
    return found


def langchain(python: Path, url: str, model: str) -> tuple[str, list[str]]:
    """Run LangChain's standard tests; return their counts, and the failed ones with reasons."""
    env = {**os.environ, "SDK_BASE_URL": f"{url}/v1", "SDK_MODEL": model}
    env |= {"OPENAI_API_KEY": "none"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    # Do not use this repository's pytest configuration, which needs plug-ins of its environment.
    command += ["-c", os.devnull, "-o", "asyncio_mode=auto", str(HERE / "langchain_standard.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=HERE)
    last = (done.stdout.strip().splitlines() or ["?"])[-1]
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|xfailed)", last))
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)(?: - (.*))?$", done.stdout, re.MULTILINE)
    return counts, [": ".join(x) for x in failed]


def main() -> int:
    line = f"--engine mlx|fake --cache {packages.CACHE} --model '' --standard"
    args = arguments(__doc__, line)
    cache = Path(args.cache).expanduser().resolve()
    npm, python = packages.npm(cache, *NPM), packages.pypi(cache, "sdks") / "python"
    with server(args.engine, cache, args.model) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        node = ["node", str(HERE / "sdk_checks.mjs"), url, model, str(npm), ASK, MORE]
        checked = run(node, npm)
        checked += run([str(python), str(HERE / "sdk_checks.py"), url, model, ASK, MORE], cache)
        standard = langchain(python, url, model) if args.standard else None
    print(*table(HEAD, [x.cells() for x in checked]), sep="\n")
    if standard:
        print(f"LangChain's standard tests: {standard[0]}", *standard[1], sep="\n")
    write_json(args.json, [x._asdict() for x in checked])
    return 1 if any(x.failed for x in checked) else 0


if __name__ == "__main__":
    sys.exit(main())
