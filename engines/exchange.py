"""One request to an engine, from its first byte to the last of the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from engines.address import HttpAddress
from engines.answer import Answer
from engines.base import EngineStalled, EngineUnavailable
from engines.patience import Patience

log = logging.getLogger("thermocline.engines")

CONNECT_S = 5.0


class Exchange:
    """An ``engines.base.Upstream``.

    A stream must show a sign of life every ``stall_timeout_s`` seconds. An answer that comes whole
    has no such clock: its owner ends it with ``fail`` when the engine is found dead.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._answer = Answer()

    async def begin(
        self, address: HttpAddress, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Send the request and wait for the head of the answer.

        Raises:
            EngineUnavailable: no connection, or it ended, or ``fail`` was called.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                transport = await address.connect(self._answer)
        except OSError as error:  # TimeoutError is one
            log.info("no connection to the engine: %s", error or type(error).__name__)
            raise EngineUnavailable("it takes no connections") from error
        transport.write(address.request_head("POST", path, headers, len(body)))
        transport.write(body)
        await self._answer.head()

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._answer.headers

    @property
    def is_stream(self) -> bool:
        return self._answer.is_stream

    async def chunks(self) -> AsyncIterator[bytes]:
        """See ``engines.base.Upstream``."""
        next_piece = self._answer.piece
        patience = Patience(self._stall_timeout_s, self._stalled)
        if not self.is_stream:
            patience.stop()
        try:
            while True:
                patience.moves += 1
                piece = await next_piece()
                patience.moves += 1  # what follows is the reader's time, not the engine's
                if not piece:
                    return
                yield piece
        finally:
            patience.stop()

    async def read(self) -> bytes:
        """See ``engines.base.Upstream``."""
        return b"".join([piece async for piece in self.chunks()])

    def fail(self, failure: EngineUnavailable) -> None:
        """End the request now; whoever waits for it gets ``failure``."""
        self._answer.fail(failure)

    def close(self) -> None:
        """An answer that is not whole yet is cancelled in the engine by closing its connection."""
        self._answer.close()

    def _stalled(self) -> None:
        self.fail(EngineStalled(f"the engine sent nothing for {self._stall_timeout_s:g} s"))
