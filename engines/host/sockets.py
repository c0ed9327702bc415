"""Private sockets and bounded sends, for the servers inside an engine. Standard library only."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

MAX_UNSENT_BYTES: Final = 16 << 20


def private_socket(path: Path) -> socket.socket:
    """Bind a unix socket that only this user can connect to. Raises ``OSError``."""
    path.unlink(missing_ok=True)  # of a process that was killed
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def send_bounded(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Send without waiting. A peer that does not read, so that too much piles up, is cut off."""
    if writer.is_closing():
        return
    writer.write(body)
    if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
        writer.transport.abort()
