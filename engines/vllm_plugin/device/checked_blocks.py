"""Uses the device's kernels for the codec they were checked with, and the host for all others.

A store may adopt another codec while it runs, and hold blobs of an earlier codec. Kernels are
checked for one codec at a time: at the start, and again when another codec is adopted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing
from engines.vllm_plugin.process.processes import unbind_thread
from kvstore.blobs.format import codec_in
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")

MOST_TRIES: Final = 3


class DeviceTransfer(Protocol):
    """The methods of ``blocks.Blocks`` that a device implements for one codec."""

    def mark(self) -> object:
        """Return a mark of the work queued so far on the device; called on the model's thread."""

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        """Make blobs of blocks; see ``blocks.Blocks.pack``."""

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks out of blobs; see ``blocks.Blocks.fill``."""

    def close(self) -> None:
        """Wait until the device is done."""


class KernelsUnusable(Exception):
    """The device's kernels cannot be used for a codec; the message is the reason."""


# Returns the device's transfer for the store's present codec, after checking it. Raises
# ``KernelsUnusable``.
Prove: TypeAlias = Callable[[], DeviceTransfer]


@dataclass(frozen=True)
class _Checked:
    """The device's transfer, and the id of the codec that it was checked for."""

    transfer: DeviceTransfer
    codec: str

    def fills(self, filling: Filling) -> bool:
        return codec_in(filling.blob) == self.codec.encode()


class CheckedBlocks:
    """Implements ``blocks.Blocks``. Thread-safe: a call uses one checked transfer to its end.

    Args:
        on_device: the device's transfer, which was checked for the store's present codec.
        prove: called on a separate thread when another codec was adopted. Compiling and comparing
            take seconds; the host packs meanwhile, and also afterwards if the kernels are wrong.
    """

    def __init__(
        self, on_device: DeviceTransfer, on_host: Blocks, store: ColdStore, prove: Prove
    ) -> None:
        self._checked = _Checked(on_device, store.packer.codec.id)
        self._on_host = on_host
        self._store = store
        self._prove = prove
        self._lock = threading.Lock()
        self._under_check: set[str] = set()  # codecs under check, or found wrong
        self._num_tries: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # why the host packs, by codec
        self._prover = ThreadPoolExecutor(1, "thermocline-prove", initializer=unbind_thread)

    @property
    def block_bytes(self) -> int:
        return self._on_host.block_bytes

    @property
    def why_host(self) -> str:
        """The reason for the present codec; "" also while its kernels are not yet checked."""
        codec = self._store.packer.codec.id
        return "" if codec == self._checked.codec else self._reasons.get(codec, "")

    def mark(self) -> object:
        """Return a mark of the model's work queued so far; it is valid for device and host."""
        return self._checked.transfer.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        checked, codec = self._checked, self._store.packer.codec.id
        if codec == checked.codec:
            return checked.transfer.pack(wanted, ready)
        self._check_soon(codec)
        return self._on_host.pack(wanted, ready)

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        checked = self._checked
        by_device = [x for x in wanted if checked.fills(x)]
        by_host = [x for x in wanted if not checked.fills(x)]
        filled = checked.transfer.fill(by_device, ready)
        return filled | (self._on_host.fill(by_host, ready) if by_host else set())

    def close(self) -> None:
        self._prover.shutdown(wait=True, cancel_futures=True)
        self._checked.transfer.close()
        self._on_host.close()

    def _check_soon(self, codec: str) -> None:
        """Start a check of the kernels for an adopted codec, unless they were found wrong before.

        A check that failed to run is tried again, ``MOST_TRIES`` times in all.
        """
        with self._lock:
            if codec in self._under_check or self._num_tries[codec] >= MOST_TRIES:
                return
            self._under_check.add(codec)
            self._num_tries[codec] += 1
        self._prover.submit(self._check, codec)

    def _check(self, codec: str) -> None:
        codecs = self._store.packer.codecs
        found: DeviceTransfer | None = None
        error: Exception | None = None
        try:
            if self._store.packer.codec.id != codec:
                raise RuntimeError("sessions are packed by another codec by now")
            found = self._prove()
        except Exception as raised:  # the top level of this thread; the host continues to pack
            error = raised
        with self._lock:
            if not isinstance(error, KernelsUnusable):
                self._under_check.discard(codec)
            if self._store.packer.codecs is not codecs:
                # Another codec was adopted meanwhile, and either may have been checked.
                self._under_check.discard(codec)
                self._num_tries[codec] -= 1
            elif found is None:
                # After any error but ``KernelsUnusable`` a later save tries again: the device may
                # be full only now.
                self._reasons[codec] = str(error) or type(error).__name__
                logger.warning("codec %s is packed by the host, slower", codec, exc_info=error)
            else:
                self._num_tries.pop(codec, None)
                self._reasons.pop(codec, None)
                self._checked = _Checked(found, codec)
                logger.info("KV is packed in codec %s by the device from now on", codec)
