"""Codec ``raw`` with faults that a test in another process switches on, by files in a folder.

``fail``: first tokens, comma separated, of chunks that cannot be decoded. ``delay_s``: how long
each decode takes; it then says so in ``decoding``. The real engine is exercised with nothing of the
product changed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.codecs.raw import RawCodec
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun

FOLDER = "THERMOCLINE_TEST_FAULTS"


class FaultyRaw(RawCodec):
    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        if first_token in [int(x) for x in _read("fail").split(",") if x]:
            raise Corrupt("a fault that the test asked for")
        if delay := _read("delay_s"):
            _file("decoding").touch()
            time.sleep(float(delay))
        super().decode(payload, layout, first_token, out)


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER]) / name


def _read(name: str) -> str:
    path = _file(name)
    return path.read_text() if path.exists() else ""


class Faults:
    """The test's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.environ[FOLDER] = str(folder)

    def fail(self, *first_tokens: int) -> None:
        (self._folder / "fail").write_text(",".join(map(str, first_tokens)))

    def delay(self, seconds: float) -> None:
        (self._folder / "delay_s").write_text(str(seconds))

    def is_decoding(self) -> bool:
        """A delayed decode has begun since the last ``clear``."""
        return (self._folder / "decoding").exists()

    def clear(self) -> None:
        for name in ("fail", "delay_s", "decoding"):
            (self._folder / name).unlink(missing_ok=True)
