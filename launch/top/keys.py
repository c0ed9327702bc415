"""Reads single keys from a terminal, without waiting for a line to end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOST = 64  # bytes of one look: more are a paste


@contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[bool]:
    """Call ``on_key`` for each key inside the block; yields False where there is no keyboard.

    Runs on the event loop. The terminal is as it was when the block ends.
    """
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def look() -> None:
        typed = os.read(descriptor, _MOST)
        if not typed:  # the terminal is gone
            on_key("q")
        for key in typed.decode(errors="replace"):
            on_key(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, look)
    try:
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
