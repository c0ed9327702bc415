"""The command ``thermocline`` in this process: a process of its own takes a second to begin."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
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
