"""Programs that run to their end: ``thermocline`` in this process, which takes a second less."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

from launch.cli.main import main


def thermocline(*words: str) -> CompletedProcess[str]:
    """Run ``thermocline`` with these words; not for what lets signals or a terminal act."""
    out, err, argv = io.StringIO(), io.StringIO(), ["thermocline", *words]
    code: object = 0
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    assert isinstance(code, int)
    return CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def program(*words: object, **more: Any) -> CompletedProcess[str]:
    """Run a program in a process of its own; ``more`` is what ``subprocess.run`` takes."""
    return subprocess.run([str(x) for x in words], capture_output=True, text=True, **more)


def thermocline_apart(
    *words: object, variables: Mapping[str, str] | None = None, **more: Any
) -> CompletedProcess[str]:
    """Run ``thermocline`` in a process of its own, with these variables beside ours."""
    env = os.environ | (variables or {})
    return program(sys.executable, "-m", "launch", *words, env=env, **more)
