"""Every ``thermocline ...`` that a message, a help text or a document mentions is real."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from typer import BadParameter
from typer.core import TyperGroup
from typer.main import get_command

from launch.cli.main import app
from tests.command_line import program

# The command line's error; typer brings a click of its own, so the name is not click's.
UsageError = BadParameter.__mro__[1]

ROOT = Path(__file__).parents[3]
FOLDERS = ("launch", "gateway", "scheduler", "engines", "docs", "benchmarks")
SUFFIXES = (".py", ".md", ".sh", ".toml")
# Where a command begins: in back quotes, after a colon or a prompt, at the start of a line.
MENTION = re.compile(r"(?:`|: |\$ |^ *)thermocline (?P<words>[a-z][^`\"\n]*)", re.MULTILINE)


def mentions(text: str) -> Iterator[list[str]]:
    """The words after ``thermocline``; ``a | b`` stands for two commands."""
    for found in MENTION.finditer(text):
        command = found["words"].partition("  #")[0]
        for alternative in command.split(" | "):
            yield alternative.split()


@functools.cache
def whole_command() -> TyperGroup:
    return get_command(app)


def check(words: list[str]) -> None:
    """Raises ``UsageError`` for words that the command line would refuse."""
    command = whole_command()
    while words and isinstance(command, TyperGroup):
        name, *words = words
        if name not in command.commands:
            raise BadParameter(f"there is no command {name!r}")
        command = command.commands[name]
    if words:  # without any, only the command is meant
        command.make_context("thermocline", words)


def test_every_mentioned_command_parses():
    files = chain(
        ROOT.glob("*.md"), *((ROOT / folder).rglob("*") for folder in FOLDERS), [ROOT / "Makefile"]
    )
    num_mentions = 0
    for file in files:
        if file.suffix not in SUFFIXES and file.name != "Makefile":
            continue
        for words in mentions(file.read_text("utf-8")):
            num_mentions += 1
            try:
                check(words)
            except UsageError as error:
                message = error.format_message()
                pytest.fail(f"{file.name}: thermocline {' '.join(words)}: {message}")
    assert num_mentions > 10


def test_the_readmes_commands_run_as_pasted(tmp_path):
    """The first block says how to get the command; the README's other commands follow it."""
    readme = (ROOT / "README.md").read_text("utf-8")
    first = readme.partition("```\n")[2].partition("```")[0]
    ready = [x.partition("#")[0] for x in first.splitlines() if x.startswith(". ")]
    commands = sorted({" ".join(words[:1]) for words in mentions(readme)})
    (tmp_path / ".venv").symlink_to(sys.prefix)
    lines = ["set -e", *ready, *(f"thermocline {x} --help" for x in commands)]
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = program("bash", "-c", "\n".join(lines), cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stderr
    assert {"connect", "top", "plan"} <= {*commands}
