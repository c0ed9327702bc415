"""How an engine process writes its log, and how the gateway reads it back.

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
    """``WARNING words``; the logger's name only where it is not one of ours."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)[-MOST_OF_A_TRACEBACK:]
        if not record.name.startswith(("engines", "kvstore")):
            text = f"{record.name}: {text}"
        return f"{record.levelname} " + " | ".join(text.splitlines())


def configure_logging(level: str) -> None:
    """The root logger of an engine process; ``level`` as in ``WorkerConfig``."""
    handler = logging.StreamHandler()
    handler.setFormatter(LevelAndWords())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)


def read_line(line: str) -> tuple[int, str]:
    """Level and words of a line; one that states no level is worth ``INFO``."""
    found = _LINE.fullmatch(line)
    if found is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[found["level"]], (found["process"] or "") + found["text"]
