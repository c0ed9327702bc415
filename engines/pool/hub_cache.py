"""Lists, downloads and deletes models in the hub client's cache on this machine.

``hub_program`` does the work, in a process of its own. All functions run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from engines.pool import hub_program

log = logging.getLogger("thermocline.engines")

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
LIST_S: Final = 60.0  # how long a list is reused, unless we have changed the cache
DEADLINE_S: Final = 60.0  # for a list or a deletion
MOST_LINE_BYTES: Final = 16 << 20  # the list of the models is one line


class HubRefusal(Exception):
    """A model was not listed, downloaded or deleted; the message says why."""


class CachedModel(msgspec.Struct, frozen=True):
    """A model in the cache."""

    id: str
    folder: str
    nbytes: int
    used_at: float  # seconds since 1970


class CachedModels(msgspec.Struct, frozen=True):
    """All models in the cache, the largest first."""

    models: tuple[CachedModel, ...] = ()
    free_bytes: int | None = None  # of the cache's disk; None: unknown, see ``problem``
    problem: str = ""


class Download(msgspec.Struct):
    """The download that runs, or the latest one."""

    id: str
    state: Literal["running", "done", "stopped", "failed"] = "running"
    done_bytes: int = 0
    total_bytes: int = 0  # 0 until the hub has said it
    problem: str = ""


class _Line(msgspec.Struct, frozen=True):
    """A line that ``hub_program`` prints; each kind of line sets some of the fields."""

    models: tuple[CachedModel, ...] = ()
    free_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    freed_bytes: int = 0
    problem: str = ""


class HubCache:
    """The cache; one list and one download at a time. The list can be read meanwhile."""

    def __init__(self, python: str = sys.executable) -> None:
        """``python``: the interpreter that runs the hub's client."""
        self._python = python
        self._listed: CachedModels | None = None
        self._listed_at = float("-inf")
        self._listing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.download: Download | None = None

    async def listed(self) -> CachedModels:
        """Return the list of the cache, at most ``LIST_S`` old."""
        async with self._listing:
            if self._listed is None or time.monotonic() - self._listed_at > LIST_S:
                try:
                    line = await self._run("list")
                    self._listed = CachedModels(line.models, line.free_bytes)
                except HubRefusal as error:
                    self._listed = CachedModels(problem=str(error))
                self._listed_at = time.monotonic()
            return self._listed

    async def delete(self, name: str) -> int:
        """Delete a model and return the number of bytes freed. Raises ``HubRefusal``."""
        if self.is_downloading and self.download and self.download.id == name:
            raise HubRefusal(f"{name} is being downloaded")
        line = await self._run("delete", name)
        self._listed_at = float("-inf")
        log.info("%s was deleted from the hub's cache: %d bytes", name, line.freed_bytes)
        return line.freed_bytes

    @property
    def is_downloading(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, name: str) -> Download:
        """Begin to download a model. Raises ``HubRefusal``: not a hub id, or a download runs."""
        if not HUB_ID.fullmatch(name):
            raise HubRefusal(f"{name[:100]!r} is no hub id like organisation/name")
        if self.is_downloading and self.download:
            raise HubRefusal(f"{self.download.id} is being downloaded; one at a time")
        self.download = Download(name)
        self._task = asyncio.create_task(self._fetch(self.download), name="hub-download")
        return self.download

    async def stop(self) -> None:
        """Stop the download; a later one reuses what it has fetched."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _fetch(self, download: Download) -> None:
        log.info("%s is being downloaded", download.id)
        try:
            async with aclosing(self._lines("download", download.id)) as lines:
                async for line in lines:
                    download.done_bytes = line.done_bytes
                    download.total_bytes = line.total_bytes
            download.state = "done"
        except HubRefusal as error:
            download.state, download.problem = "failed", str(error)
            log.warning("%s was not downloaded: %s", download.id, error)
        except asyncio.CancelledError:
            download.state = "stopped"
            raise
        finally:
            self._listed_at = float("-inf")

    async def _run(self, *words: str) -> _Line:
        """Run the program and return its last line. Raises ``HubRefusal``."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                async with aclosing(self._lines(*words)) as lines:
                    return [x async for x in lines][-1]
        except (TimeoutError, IndexError) as error:
            raise HubRefusal("the hub's client does not answer") from error

    async def _lines(self, *words: str) -> AsyncGenerator[_Line, None]:
        """Yield the program's lines, and kill it when the iteration ends. Raises ``HubRefusal``."""
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        program = str(Path(hub_program.__file__))
        try:
            child = await asyncio.create_subprocess_exec(
                *(self._python, "-I", program, *words),
                stdin=none,
                stdout=pipe,
                stderr=none,
                limit=MOST_LINE_BYTES,
            )
        except OSError as error:
            raise HubRefusal(f"the hub's client cannot be started: {error.strerror}") from error
        assert child.stdout is not None
        try:
            async for text in child.stdout:
                line = msgspec.json.decode(text, type=_Line)
                if line.problem:
                    raise HubRefusal(line.problem)
                yield line
            if await child.wait():
                raise HubRefusal("the hub's client ended")
        except (msgspec.DecodeError, ValueError) as error:
            raise HubRefusal("the hub's client printed a line that is not understood") from error
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
