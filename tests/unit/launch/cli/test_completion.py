"""The shell asks the command line for the words that may come next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        found = subprocess.run(
            [COMMAND], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
        )
        assert found.stdout.split() == [wanted]
