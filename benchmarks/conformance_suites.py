"""Unpacks the tests of official Python clients and runs them against a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
NEEDS = ("pytest", "pytest-asyncio", "dirty-equals", "time-machine", "rich", "httpx2", "respx")
MORE_NEEDS = ("Pillow", "nest-asyncio", "trustme", "http-snapshot[httpx]", "inline-snapshot")
OURS = ("msgspec", "cryptography")  # needed to put objects into our store


@dataclass(frozen=True)
class Client:
    """An official client whose source package brings tests that talk to a server."""

    package: str
    words: str  # as the page calls it
    files: tuple[str, ...]  # of tests/api_resources
    base_path: str = ""  # appended to the server's URL

    @property
    def version(self) -> str:
        return version(self.package)


OPENAI = Client(
    "openai",
    "OpenAI's",
    (
        "chat/test_completions.py",
        "chat/completions/test_messages.py",
        "test_completions.py",
        "test_models.py",
        "test_embeddings.py",
        "test_responses.py",
        "responses/test_input_items.py",
        "responses/test_input_tokens.py",
        "test_conversations.py",
        "conversations/test_items.py",
    ),
    "/v1",
)
ANTHROPIC = Client(
    "anthropic", "Anthropic's", ("test_messages.py", "beta/test_messages.py", "test_models.py")
)
CLIENTS = (OPENAI, ANTHROPIC)


@dataclass
class FileResult:
    """The outcome of one file of tests."""

    passed: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # by the test's name without variants

    @property
    def total(self) -> int:
        return self.passed + sum(self.failed.values())


class Suite:
    """One client's tests, unpacked in ``folder``, with an environment to run them in."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self._folder = folder
        self._venv = folder / f"venv-{client.package}"
        self._tests = folder / f"{client.package}-{client.version}"

    def prepare(self) -> None:
        """Download the client's source and install the packages that its tests need."""
        package, version = self.client.package, self.client.version
        pip = [str(self._venv / "bin/python"), "-m", "pip"]
        if not self._venv.exists():
            _run(sys.executable, "-m", "venv", str(self._venv))
            client = f"{package}[aiohttp]=={version}"
            _run(*pip, "install", "--quiet", client, *NEEDS, *MORE_NEEDS, *OURS)
        if not self._tests.exists():
            args = ["download", "--quiet", "--no-deps", "--no-binary", package]
            _run(*pip, *args, f"{package}=={version}", "--dest", str(self._folder))
            with tarfile.open(self._tests.with_name(f"{self._tests.name}.tar.gz")) as archive:
                archive.extractall(self._folder, filter="data")

    def models(self) -> Iterator[str]:
        """Yield the models that the tests ask for."""
        for file in self.client.files:
            text = (self._tests / "tests/api_resources" / file).read_text()
            yield from re.findall(r'\bmodel(?:_id)?="([^"]+)"', text)

    def run(self, file: str, url: str, database: Path | None) -> FileResult:
        """Run a file of tests against a server; put objects into ``database`` before each test."""
        report = self._folder / f"report-{self.client.package}.xml"
        seed = ["-p", "benchmarks.conformance_objects"] if database else []
        env = {
            **os.environ,
            "TEST_API_BASE_URL": url + self.client.base_path,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self._tests}",
            "CONFORMANCE_DATABASE": str(database or ""),
        }
        command = [str(self._venv / "bin/python"), "-m", "pytest", "-o", "addopts=", "-q"]
        command += ["-p", "no:cacheprovider", *seed, f"--junitxml={report}"]
        report.unlink(missing_ok=True)
        log = report.with_name(f"log-{self.client.package}-{file.replace('/', '-')}.txt")
        with log.open("wb") as out:
            subprocess.run(
                [*command, f"tests/api_resources/{file}"],
                cwd=self._tests,
                env=env,
                stdout=out,
                stderr=out,
                check=False,
            )
        return _read_report(report)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _read_report(path: Path) -> FileResult:
    result = FileResult()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if any(x.tag in ("failure", "error") for x in case):
            name = case.attrib["name"].partition("[")[0]
            result.failed[name] = result.failed.get(name, 0) + 1
        elif not any(x.tag == "skipped" for x in case):
            result.passed += 1
    return result


def all_models(suites: Sequence[Suite]) -> list[str]:
    """Return the names of the models that any of the tests ask for."""
    return sorted({name for suite in suites for name in suite.models()})
