"""How many tests of OpenAI's own Python client pass against us, file by file, and why others fail.

The client's source package, of the version that is installed here, brings tests that speak to a
server and check the types of all it answers. They run in an environment of their own, with every
object that they name by id put into our store before each test. Other servers that run already are
asked the same with ``--peer NAME=URL``.

    python benchmarks/conformance.py --servers mlx,vllm,mlx_lm.server,vllm-serve \\
        --write docs/conformance.md

``--results FILE`` keeps what was counted, so that servers can be asked one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.stacks.lifeline import Lifeline
from benchmarks.stacks.product_stack import MIB, Stack, free_port
from benchmarks.stacks.vllm_stack import PlainVllm, python_with_vllm

ROOT = Path(__file__).parents[1]
FILES = (
    "chat/test_completions.py",
    "chat/completions/test_messages.py",
    "test_completions.py",
    "test_models.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
    "test_conversations.py",
    "conversations/test_items.py",
)
NEEDS = ("pytest", "pytest-asyncio", "dirty-equals", "time-machine", "rich", "httpx2", "respx")
MORE_NEEDS = ("Pillow", "nest-asyncio", "trustme")
# Answers are as long as the context allows, since nobody in these tests says how long.
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"model_aliases": ["*"]},
    "engine": {"hot_bytes": 512 * MIB, "max_context": 400},
    "store": {"ram_bytes": 64 * MIB, "disk_bytes": 0},
}
# What a failing test asks for, and why it is refused: the first words of its name that fit.
REASONS = {
    "test_responses.compact": "conversations are not compacted here: a summary would need a turn",
    "test_responses.create_with_all_params": (
        "asks for a background response, from a stored prompt, in a conversation and behind a"
        " previous response at once: refused, the first of them by name"
    ),
    "test_responses.cancel": "only background responses could be cancelled; refused by name",
    "test_responses.steer": "responses are not steered here",
    "test_models.delete": "the served model cannot be deleted over HTTP",
    "test_completions.create_with_all_params": (
        "asks for text in front of a suffix, which these engines cannot insert: refused by name"
    ),
}


# The servers that are started here, as the page calls them.
NAMES = {
    "mlx": "Thermocline, mlx",
    "vllm": "Thermocline, vLLM",
    "mlx_lm.server": "mlx_lm.server",
    "vllm-serve": "vllm serve",
}


@dataclass
class FileResult:
    """The outcome of one file of tests."""

    passed: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by the test's name without variants

    @property
    def total(self) -> int:
        return self.passed + sum(self.failed.values())


class Suite:
    """The client's tests, unpacked, with an environment to run them in."""

    def __init__(self, folder: Path) -> None:
        self.version = version("openai")
        self._folder = folder
        self._python = folder / "venv/bin/python"
        self._tests = folder / f"openai-{self.version}"

    def prepare(self) -> None:
        """Download and install what is not there yet."""
        if not self._tests.exists():
            package = f"openai=={self.version}"
            args = ["download", "--quiet", "--no-deps", "--no-binary", "openai", package]
            _run("pip", *args, "--dest", str(self._folder))
            with tarfile.open(self._folder / f"openai-{self.version}.tar.gz") as archive:
                archive.extractall(self._folder, filter="data")
        if not self._python.exists():
            _run(sys.executable, "-m", "venv", str(self._folder / "venv"))
            client = f"openai[aiohttp]=={self.version}"
            pip = [str(self._python), "-m", "pip", "install", "--quiet"]
            _run(*pip, client, *NEEDS, *MORE_NEEDS)

    def models(self) -> list[str]:
        """List the models that the tests ask for."""
        texts = [(self._tests / "tests/api_resources" / x).read_text() for x in FILES]
        return sorted({x for text in texts for x in re.findall(r'\bmodel="([^"]+)"', text)})

    def run(self, file: str, url: str, database: Path | None) -> FileResult:
        """Run one file of tests against a server; objects are put into ``database`` before each."""
        report = self._folder / "report.xml"
        seed = ["-p", "benchmarks.conformance_objects"] if database else []
        env = {
            **os.environ,
            "TEST_API_BASE_URL": url,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self._tests}",
            "CONFORMANCE_DATABASE": str(database or ""),
        }
        subprocess.run(
            [str(self._python), "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
            + [*seed, f"--junitxml={report}", f"tests/api_resources/{file}"],
            cwd=self._tests,
            env=env,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return _read_report(report)


def _counts(server: str, suite: Suite, model: str) -> Iterator[FileResult]:
    """Start a server, and run all files against it."""
    if server in ("mlx", "vllm"):
        with ours(server, model) as (url, database):
            yield from (suite.run(x, f"{url}/v1", database) for x in FILES)
        return
    alone = mlx_lm_server(model) if server == "mlx_lm.server" else vllm_serve(model, suite.models())
    with alone as url:
        yield from (suite.run(x, f"{url}/v1", None) for x in FILES)


def _kept(path: Path | None) -> dict[str, list[FileResult]]:
    if path is None or not path.exists():
        return {}
    return {
        name: [FileResult(x["passed"], Counter(x["failed"])) for x in files]
        for name, files in json.loads(path.read_text()).items()
    }


def _keep(path: Path | None, results: Mapping[str, Sequence[FileResult]]) -> None:
    if path is not None:
        shown = {name: [asdict(x) for x in files] for name, files in results.items()}
        path.write_text(json.dumps(shown, indent=1))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _read_report(path: Path) -> FileResult:
    result = FileResult()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if any(x.tag in ("failure", "error") for x in case):
            result.failed[case.attrib["name"].partition("[")[0]] += 1
        elif not any(x.tag == "skipped" for x in case):
            result.passed += 1
    return result


@contextmanager
def ours(kind: str, model: str) -> Iterator[tuple[str, Path]]:
    """Start the product with an engine; yields its URL and its store of responses."""
    engine = {**SETTINGS["engine"], "kind": kind, "model": model}
    if kind == "vllm":
        engine["vllm.python"] = python_with_vllm()
    with Stack({**SETTINGS, "engine": engine}, start_timeout_s=600.0) as stack:
        yield stack.url, stack.root / "data" / "stored" / "stored.sqlite"


@contextmanager
def vllm_serve(model: str, names: Sequence[str]) -> Iterator[str]:
    """Start vLLM's own server, which answers to all these names; yields its URL."""
    flags = ("--served-model-name", *names)
    context = SETTINGS["engine"]["max_context"]
    with PlainVllm(512 * MIB, context, arguments=flags, model_path=model) as server:
        yield server.url


@contextmanager
def mlx_lm_server(model: str) -> Iterator[str]:
    """Start mlx_lm's own server with a model; yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lifeline = Lifeline(process, patience_s=10)
    try:
        _wait(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
        lifeline.let_go()


def _sample_model() -> str:
    command = [sys.executable, "-m", "launch.sample.sample_model"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _wait(url: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


def reason_of(file: str, test: str) -> str:
    """Explain the failure of a test by the table; "" if nobody has."""
    plain = test.removeprefix("test_")
    for start in ("method_", "raw_response_", "streaming_response_", "path_params_"):
        plain = plain.removeprefix(start)
    for key, words in REASONS.items():
        where, _, what = key.partition(".")
        if file.startswith(where) and plain.startswith(what):
            return words
    return ""


def page(found: Mapping[str, Sequence[FileResult]], tested: str) -> str:
    """Write the document: a table of passes, and a line for each test that fails on ours."""
    results = {NAMES[x]: found[x] for x in NAMES if x in found}
    results |= {x: y for x, y in found.items() if x not in NAMES}
    names = list(results)
    lines = [
        "# Conformance",
        "",
        f"Tests of OpenAI's own Python client {tested} (`tests/api_resources`) that pass against a"
        " running server, as `python benchmarks/conformance.py --servers"
        " mlx,vllm,mlx_lm.server,vllm-serve --write docs/conformance.md` counts them"
        " (`--model FOLDER`: any will do, since only the wire is judged; these are of a tiny"
        " one). Each runs with clients that are synchronous and"
        " asynchronous, strict and loose. Objects that they name by id are put into our store"
        " before each test; other servers keep none. Tests of empty ids ask nothing of a server and"
        " pass everywhere.",
        "",
        f"| file | tests | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for i, file in enumerate(FILES):
        passes = [str(results[x][i].passed) for x in names]
        total = results[names[0]][i].total
        lines.append(f"| `{file}` | {total} | {' | '.join(passes)} |")
    sums = [str(sum(x.passed for x in results[name])) for name in names]
    everything = sum(x.total for x in results[names[0]])
    lines += [f"| all | {everything} | {' | '.join(sums)} |", "", "## What fails here", ""]
    shown = "; ".join(x for x in names if x.startswith("Thermocline"))
    lines += [f"| test | cases ({shown}) | why |", "|---|---|---|"]
    ours = [x for x in names if x.startswith("Thermocline")]
    for i, file in enumerate(FILES):
        tests = sorted({test for name in ours for test in results[name][i].failed})
        for test in tests:
            counts = "; ".join(str(results[name][i].failed[test]) for name in ours)
            why = reason_of(file, test) or "not explained yet"
            lines.append(f"| `{file}` `{test}` | {counts} | {why} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder; default: the sample model")
    parser.add_argument("--work", type=Path, help="keeps the tests and their environment")
    parser.add_argument("--write", type=Path, help="the document to write")
    parser.add_argument("--servers", default="mlx", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--results", type=Path, help="keeps what was counted")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="conformance-") as own:
        work = args.work or Path(own)
        work.mkdir(parents=True, exist_ok=True)
        suite = Suite(work)
        suite.prepare()
        results = _kept(args.results)
        model = args.model or _sample_model()
        for server in filter(None, args.servers.split(",")):
            results[server] = list(_counts(server, suite, model))
            _keep(args.results, results)
        for name, _, url in (x.partition("=") for x in args.peer):
            results[name] = [suite.run(x, f"{url}/v1", None) for x in FILES]
        text = page(results, suite.version)
    print(text)
    if args.write:
        args.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
