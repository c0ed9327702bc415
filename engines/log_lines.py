"""The log lines of an engine process, as the engine writes them and the gateway reads them.

The gateway relays an engine's standard error into its own log, which gives every line a time, a
level and a name. So an engine writes only a level and the message, one line per event.
"""

from __future__ import annotations

import logging
import re
from typing import Final

# Characters kept of a traceback's end, which says most; the gateway cuts lines at 4096 bytes.
MOST_OF_A_TRACEBACK: Final = 3000
# vLLM: "(APIServer pid=7) WARNING 11-21 00:51:39 [core.py:12] words"; uvicorn: "ERROR:    words".
_LINE = re.compile(
    r"(?P<process>\([^()]*\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?"
    r" +(?:\d\d-\d\d \d\d:\d\d:\d\d )?(?P<text>.*)"
)


class LevelAndWords(logging.Formatter):
    """Formats a record as ``WARNING message``; names the logger only if it is not one of ours."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)[-MOST_OF_A_TRACEBACK:]
        if not record.name.startswith(("engines", "kvstore")):
            text = f"{record.name}: {text}"
        return f"{record.levelname} " + " | ".join(text.splitlines())


def configure_logging(level: str) -> None:
    """Set up the root logger of an engine process; ``level`` is that of ``WorkerConfig``."""
    handler = logging.StreamHandler()
    handler.setFormatter(LevelAndWords())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)


def log_as(name: str) -> None:
    """Have our loggers write as the logger ``name``, unless a handler has their lines already.

    For a process whose host sets up logging for its own loggers only, as vLLM does.
    """
    host = logging.getLogger(name)
    for ours in map(logging.getLogger, ("engines", "kvstore", "thermocline")):
        if not ours.hasHandlers():
            ours.handlers = list(host.handlers)
            ours.setLevel(host.level)


def read_line(line: str) -> tuple[int, str]:
    """Split a log line into its level and its message; a line without a level gets ``INFO``."""
    found = _LINE.fullmatch(line)
    if found is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[found["level"]], (found["process"] or "") + found["text"]
