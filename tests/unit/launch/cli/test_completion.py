"""The shell asks the command line for the words that may come next."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.command_line import program

COMMAND = Path(sys.executable).with_name("thermocline")


def test_a_shell_completes_commands_and_options():
    for typed, at, wanted in (
        ("thermocline ser", 1, "serve"),
        ("thermocline chat --mod", 2, "--model"),
        ("thermocline sessions sh", 2, "show"),
    ):
        asked = {
            "_THERMOCLINE_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(at),
        }
        found = program(COMMAND, env={**os.environ, **asked}, timeout=60)
        assert found.stdout.split() == [wanted]
