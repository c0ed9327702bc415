"""The end of an engine's input: a gateway that died, or one that asked for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engines.config import LAST_LINE

PROGRAM = (
    "from engines.host.lifeline import Lifeline, first_line\n"
    "print(first_line())\n"
    "lifeline = Lifeline()\n"
    "while lifeline.read(): pass\n"
    "print(lifeline.gateway_died())\n"
)


@pytest.mark.parametrize(
    ("rest", "died"), [(b"", True), (LAST_LINE, False), (b"e", True), (b"x" * 9 + LAST_LINE, False)]
)
def test_only_a_gateway_that_says_so_lives_on(rest, died):
    first = b"{}\n"  # all comes at once: it must not take more than itself
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=first + rest, stdout=subprocess.PIPE, check=True
    )
    assert ended.stdout.decode() == f"{first!r}\n{died}\n"
