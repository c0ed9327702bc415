"""The README's tour, its commands word for word, shows what the README says it shows."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.stacks.product_stack import Stack
from tests.asking import asked

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
START = "bash launch/serve.sh &"  # as the fixture; tests/unit/launch/test_scripts.py runs it
ADDRESS = "localhost:8080"


class Step(NamedTuple):
    """A command of the tour, and the lines that the README shows below it."""

    command: str
    shown: list[str]


def steps() -> list[Step]:
    """Read the tour: a command begins with ``$`` and ends where its quotes and braces do."""
    tour = README.partition("## Sixty seconds")[2].partition("```\n")[2].partition("```")[0]
    found: list[Step] = []
    for line in tour.splitlines():
        if line.startswith("$ "):
            found.append(Step(line.removeprefix("$ "), []))
        elif is_open(found[-1].command):
            found[-1] = Step(f"{found[-1].command}\n{line}", [])
        elif line:
            found[-1].shown.append(line)
    return found


def is_open(command: str) -> bool:
    done = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True)
    return done.returncode != 0 or command.endswith("\\")


def pattern(line: str) -> re.Pattern[str]:
    """Turn a shown line into a pattern: ``...`` is anything."""
    return re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")))


def shows(step: Step, output: str) -> bool:
    """Return whether the shown lines are in the output in their order; others may lie between."""
    lines = iter(output.replace("\r", "").splitlines())
    return all(any(pattern(shown).search(line) for line in lines) for shown in step.shown)


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tour_has_the_steps_that_this_file_reads():
    found = steps()
    assert found[0].command.startswith(START)
    assert found[1].command.startswith("chat()") and found[1].command.endswith("; }")
    assert [len(step.shown) for step in found] == [0, 0, 3, 1, 1, 2]


def forget_all(url: str) -> None:
    """Delete the sessions of tests before: one may have asked the same."""
    for row in asked(f"{url}/v1/sessions?limit=1000").content["data"]:
        path = f"{url}/v1/sessions/{urllib.parse.quote(row['id'], safe='')}"
        assert asked(path, method="DELETE").status == 200


@pytest.mark.model
@pytest.mark.slow
def test_the_tour_shows_what_it_says(sample_stack: Stack):
    forget_all(sample_stack.url)
    _, definition, *tour = steps()
    address = sample_stack.url.removeprefix("http://")
    for step in tour:
        command = f"{definition.command}\n{step.command}".replace(ADDRESS, address)
        output = run(command)
        deadline = time.monotonic() + 60
        # A turn is saved just after its answer; a person who types is slower than that.
        while "/v1/sessions" in step.command and not shows(step, output):
            assert time.monotonic() < deadline, (step, output)
            time.sleep(0.2)
            output = run(command)
        assert shows(step, output), (step, output)


@pytest.mark.model
@pytest.mark.slow
def test_the_python_lines_run(sample_stack: Stack):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    code = code.replace("client.chat", "answer = client.chat")
    code = code.replace("http://127.0.0.1:8080", sample_stack.url)
    code = code.replace("messages=[", "max_tokens=2, messages=[")  # else it may talk for a minute
    names: dict[str, Any] = {}
    exec(code, names)
    with names["client"]:
        assert names["answer"].usage.completion_tokens == 2


def test_the_readme_takes_two_screens_at_most():
    lines = README.splitlines()
    assert len(lines) <= 125
    prose = [line for line in lines if not line.startswith("|")]
    assert max(map(len, prose)) <= 120
