"""The log lines of an engine process: how they are written there, and read by the gateway.

An engine's standard error is relayed into the gateway's log, which gives every line a time, a level
and a name. So the engine's own lines hold nothing but a level and the words, one line per event.
"""

from __future__ import annotations

import logging
import re
from typing import Final

# The gateway cuts lines at 4096 bytes; of a traceback the end says most.
MOST_OF_A_TRACEBACK: Final = 3000
# vLLM: "(APIServer pid=7) WARNING 11-21 00:51:39 [core.py:12] words"; uvicorn: "ERROR:    words".
_LINE = re.compile(
    r"(?P<process>\([^()]*\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?"
    r" +(?:\d\d-\d\d \d\d:\d\d:\d\d )?(?P<text>.*)"
)


class LevelAndWords(logging.Formatter):
    """Formats a record as ``WARNING words``; the logger is named only if it is not one of ours."""

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


def read_line(line: str) -> tuple[int, str]:
    """Split a line into its level and its words; one that states no level gets ``INFO``."""
    found = _LINE.fullmatch(line)
    if found is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[found["level"]], (found["process"] or "") + found["text"]
