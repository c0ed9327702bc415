"""The texts to learn from and to evaluate on, which need no download.

Code and documentation come from Python's own library, which is installed wherever this runs; prose,
chat and other languages were written for this purpose and are in ``texts``. The two sets share no
file and no passage, so ``pdb``, which repeats the manual's chapter "debugger", is in neither. Some
held-out texts of each kind are long enough for the longest usual context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_FIT_MODULES = (
    *("argparse", "tarfile", "http.client", "ast", "decimal", "subprocess", "inspect"),
    *("email.message", "asyncio.base_events", "xml.dom.minidom", "difflib", "statistics"),
    *("smtplib", "csv", "textwrap", "optparse", "zipfile", "doctest", "configparser"),
    *("logging.handlers", "urllib.request", "json.decoder", "shutil", "random", "fractions"),
    *("calendar", "socket"),
)
_HELD_OUT_MODULES = ("unittest.mock", "typing", "pickle")
# Chapters of the reference manual, by the names of Python's interactive help.
_FIT_TOPICS = (
    ("specialnames", "types", "formatstrings", "compound", "typesseq"),
    ("assignment", "class", "exceptions", "operator-summary", "numbers", "strings", "with"),
    ("typesmapping", "typesmodules", "attribute-access", "calls", "execmodel", "naming"),
)
_HELD_OUT_TOPICS = ("debugger", "objects", "import", "string-methods")


class Text(NamedTuple):
    name: str
    content: str


def fit_texts() -> list[Text]:
    """Return the texts to learn from."""
    manual = [_topics(f"manual {n}", topics) for n, topics in enumerate(_FIT_TOPICS, 1)]
    return [*_written("fit"), *_modules(_FIT_MODULES), *manual]


def held_out_texts() -> list[Text]:
    """Return the texts to evaluate on."""
    return [
        *_written("held_out"),
        *_modules(_HELD_OUT_MODULES),
        _topics("manual, other parts", _HELD_OUT_TOPICS),
    ]


def texts_of(paths: Iterable[Path]) -> list[Text]:
    """Return the user's own texts, one for each file.

    Raises:
        OSError: a file cannot be read.
    """
    return [Text(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in paths]


def _written(folder: str) -> Iterator[Text]:
    found = files("engines.calibration").joinpath("texts", folder)
    for file in sorted(found.iterdir(), key=lambda x: x.name):
        yield Text(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))


def _modules(names: Iterable[str]) -> Iterator[Text]:
    """Yield the sources of modules; one that is missing or has no source is left out."""
    for name in names:
        spec = find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            yield Text(name, Path(spec.origin).read_text(encoding="utf-8"))


def _topics(name: str, wanted: Iterable[str]) -> Text:
    from pydoc_data.topics import topics  # half a megabyte: loaded only to calibrate

    return Text(name, "\n\n".join(topics[x] for x in wanted if x in topics))
