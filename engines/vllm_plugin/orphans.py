"""Processes that outlive their parent hold memory, the data folder and a core for hours.

Linux only; elsewhere ending the process group has to do.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Whatever descends from this process and loses its parent becomes a child of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
