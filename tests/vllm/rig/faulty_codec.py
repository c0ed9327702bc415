"""Codec ``raw`` with faults that a test in another process switches on, by files in a folder.

``fail``: first tokens, comma separated, of chunks that cannot be decoded. ``break``: of those whose
decoding itself breaks, so that they stay in the store. ``delay_s``: how long each decode takes; it
then says so in ``decoding``; likewise ``encode_delay_s`` and ``encoding``. The real engine is
exercised with nothing of the product changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.codecs.base import RawCodec
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun, tokens_in

FOLDER = "THERMOCLINE_TEST_FAULTS"


class FaultyRaw(RawCodec):
    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        self.decode_chunks([payload], layout, first_token, out)

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        size = tokens_in(out) // len(payloads)
        for first in range(first_token, first_token + tokens_in(out), size):
            if first in tokens_named("fail"):
                raise Corrupt("a fault that the test asked for")
            if first in tokens_named("break"):
                raise RuntimeError("a fault that the test asked for")
            _wait("delay_s", "decoding")
        super().decode_chunks(payloads, layout, first_token, out)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        _wait("encode_delay_s", "encoding")
        return super().encode(run, layout, first_token)


class OneRankFaulty(FaultyRaw):
    """Faults that strike one rank of several only; ``break``: what it cannot even encode."""

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        codec = FaultyRaw if _is_unlucky() else RawCodec
        codec.decode(self, payload, layout, first_token, out)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        if _is_unlucky() and first_token in tokens_named("break"):
            raise RuntimeError("a fault that the test asked for")
        return super().encode(run, layout, first_token)


def _is_unlucky() -> bool:
    import torch

    return torch.distributed.get_rank() == 1


def tokens_named(name: str) -> list[int]:
    return [int(x) for x in _read(name).split(",") if x]


def _wait(delay_name: str, sign: str) -> None:
    if delay := _read(delay_name):
        _file(sign).touch()
        time.sleep(float(delay))


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

    def break_decoding(self, *first_tokens: int) -> None:
        (self._folder / "break").write_text(",".join(map(str, first_tokens)))

    def delay(self, seconds: float) -> None:
        (self._folder / "delay_s").write_text(str(seconds))

    def delay_encoding(self, seconds: float) -> None:
        (self._folder / "encode_delay_s").write_text(str(seconds))

    def is_decoding(self) -> bool:
        """A delayed decode has begun since the last ``clear``."""
        return (self._folder / "decoding").exists()

    def is_encoding(self) -> bool:
        return (self._folder / "encoding").exists()

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
