"""The address of the server that runs here, by which commands find it without being given one.

``serve`` writes it into its data folder once it listens, and takes it away when it ends. A command
looks in the data folder of its own environment; an address that is left over from a server that was
killed only costs the words that nothing answers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engines.files import replace_file
from launch.machine.folders import default_data_dir

USUAL: Final = "http://127.0.0.1:8080"
NAME: Final = "address"
VARIABLE: Final = "THERMOCLINE_URL"
MOST_BYTES: Final = 256
_PRIVATE: Final = 0o600


@contextmanager
def announced(data: Path, url: str) -> Iterator[None]:
    """Keep the address of a server in its data folder while it runs."""
    file = data / NAME
    line = f"{url}\n".encode()
    with suppress(OSError):  # it is a convenience: the server runs without
        replace_file(file, line, _PRIVATE)
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_bytes() == line:  # another server may have come meanwhile
                file.unlink()


def server_address(environ: Mapping[str, str]) -> str:
    """Return the address of the server that commands ask: the one that is named, else ours here."""
    return environ.get(VARIABLE) or address_here(environ)


def address_here(environ: Mapping[str, str]) -> str:
    """Return the address of the server of this user's data folder, else the usual one."""
    try:
        with (default_data_dir(environ) / NAME).open("rb") as file:
            found = file.read(MOST_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return USUAL
    return found if found.isprintable() and found.startswith("http://") else USUAL
