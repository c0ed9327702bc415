"""Logs on standard error, one line per event, and spans to a collector, if one is set.

2026-01-31T12:00:00.000Z info gateway: POST /v1/chat/completions 200 ...
"""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib.metadata import version

from gateway.config import GatewayConfig
from gateway.watch.log_ring import LogRing
from gateway.watch.tracing import PassOn, Tracing
from launch.errors import UsageError

# Line ends, escape sequences and other controls come from clients and engines; in a log they
# would forge lines or steer a terminal.
_ESCAPED = {code: f"\\x{code:02x}" for code in [*range(32), *range(0x7F, 0xA0)]}
_ESCAPED |= {ord("\n"): " | ", ord("\t"): " ", 0x2028: " | ", 0x2029: " | "}
# Bidirectional overrides make a text look different from its characters.
_ESCAPED |= {code: f"\\u{code:04x}" for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]}

_QUIET = ("uvicorn", "uvicorn.error", "asyncio", "aiohttp")


class OneLine(logging.Formatter):
    """Formats a record as one line, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = record.name.removeprefix("thermocline.")
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        level = record.levelname.lower()
        return f"{stamp}.{record.msecs:03.0f}Z {level:7} {name}: {text.translate(_ESCAPED)}"


class OneObject(logging.Formatter):
    """Formats a record as one JSON object; ids of request and session have fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "name": record.name.removeprefix("thermocline."),
            "message": record.getMessage(),
        }
        for name in ("request_id", "session"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def keep_lines(ring: LogRing) -> None:
    """Have the last lines kept for admins, too."""
    ring.text_of = lambda text: text.translate(_ESCAPED)
    logging.getLogger().addHandler(ring)


def configure_logging(level: str, form: str = "text") -> None:
    """Set up the root logger of this process. Called once, when the server starts.

    ``form``: "text", or "json" for an object on each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneObject() if form == "json" else OneLine())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in _QUIET:  # they repeat what we say, at the level of our own important lines
        logging.getLogger(name).setLevel(logging.WARNING)


def tracing_of(config: GatewayConfig) -> Tracing:
    """Make what traces turns. Raises ``UsageError``: its packages are not installed."""
    if not config.otlp_endpoint:
        return PassOn()
    try:
        from gateway.watch.otlp import OtlpTracing
    except ImportError as error:
        raise UsageError(
            "gateway.otlp_endpoint needs OpenTelemetry's packages: pip install 'thermocline[otlp]'"
        ) from error
    return OtlpTracing(config.otlp_endpoint, version("thermocline"))
