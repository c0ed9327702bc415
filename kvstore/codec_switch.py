"""Changing a store's codecs while it runs."""

from __future__ import annotations

import threading

from kvstore.codec_set import CodecSet
from kvstore.marks import Marks
from kvstore.packer import Packer
from kvstore.pins import Pins
from kvstore.tier_stack import TierStack


class CodecSwitch:
    """Thread-safe. Nobody waits: who has begun ends in the codec that he began with.

    What is stored stays as it is, and is found under the marks of all codecs that can be read.
    """

    def __init__(self, packer: Packer, stack: TierStack, pins: Pins) -> None:
        self._packer = packer
        self._stack = stack
        self._pins = pins
        self._switching = threading.Lock()

    def adopt(self, codecs: CodecSet, *, keep: bool) -> None:
        """As ``ColdStore.adopt``."""
        with self._switching:
            # A blob says in its header what it is in, so it does not matter which is first.
            self._packer.adopt(codecs, keep=keep)
            mark_tiers(self._stack, self._packer)
            self._pins.renew()


def mark_tiers(stack: TierStack, packer: Packer) -> None:
    """Put and look for blobs under the marks of the packer's codecs."""
    codecs, readable = packer.codecs, packer.readable
    stack.mark([Marks.among(codecs.of(name).id, readable) for name in stack.names])


def in_use(stack: TierStack, packer: Packer) -> dict[str, str]:
    """For ``StoreStats``."""
    codecs = packer.codecs
    return {name: codecs.of(name).id for name in stack.names}
