"""Counts the tests of the official Python clients that pass against us, and explains the others.

The source packages of OpenAI's and Anthropic's clients, of the versions that are installed here,
bring tests that talk to a server and check the types of its answers. They run in environments of
their own; every object that they name by id is put into our store before each test.

    python benchmarks/conformance.py --servers mlx,vllm,mlx_lm.server,vllm-serve \\
        --write docs/conformance.md

``--results FILE`` keeps the counts, so that servers can be tested one after the other, and
``--servers "" --write PAGE`` writes the page from them again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from benchmarks.clients.roomy_model import roomy_model
from benchmarks.conformance_suites import CLIENTS, Client, FileResult, Suite, all_models
from benchmarks.program import options_of
from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import MIB, Stack, free_port
from benchmarks.stacks.vllm_stack import PlainVllm, python_with_vllm
from docs.generators.conformance_page import fields_section

INTRODUCTION = (
    "For those who ask how well a server speaks OpenAI's and Anthropic's APIs: how many tests of"
    " the official Python clients (`tests/api_resources` of their source packages) pass against it,"
    " what fails here and why, and how fields of other servers are treated. `python"
    " benchmarks/conformance.py --servers mlx,vllm,mlx_lm.server,vllm-serve --write"
    " docs/conformance.md` counts them.\n\nThe tests judge only the form of answers, so the model"
    " is one layer of the sample model. Each test runs with synchronous and asynchronous clients,"
    " strict and loose ones. Objects that tests name by id are put into Thermocline's store before"
    " each test; the other servers store none. `vllm serve` gets the flags with which Thermocline"
    " starts it, with tool parser and all names of models. Tests of empty ids send nothing to a"
    " server, and pass with all of them."
)
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"model_aliases": ["*"]},
    "engine": {"hot_bytes": 512 * MIB, "max_context": 4096},
    "store": {"ram_bytes": 64 * MIB, "disk_bytes": 0},
}
# The request of a failing test and why it is refused, by a part of the test's name.
REASONS = {
    "test_responses.compact": "conversations are not compacted here: 404, with the way to do it",
    "test_responses.create_with_all_params": (
        "asks for a background response, from a stored prompt, in a conversation and after a"
        " previous response at once: refused, the first of them by name"
    ),
    "test_responses.cancel": "only background responses could be cancelled; refused by name",
    "test_responses.steer": "responses are not steered here",
    "test_messages.create_with_all_params": (
        'has a strict tool with a property whose schema is a string (`"location": "bar"`): refused'
        " by name; it is served if the tool is not strict"
    ),
    "openai/test_embeddings.": (
        "strict clients request base64 and then accept no string as an embedding; vLLM makes no"
        " embeddings with a model that it serves for generation"
    ),
    "responses/test_input_tokens.count_with_all_params": (
        "names a conversation and a previous response at once: refused by name, as by OpenAI"
    ),
    "test_models.delete": "the served model cannot be deleted over HTTP",
    "openai/test_completions.create_with_all_params": (
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


# By server, then by the client's package and the file.
Results: TypeAlias = dict[str, dict[str, FileResult]]
Counted: TypeAlias = Iterator[tuple[str, FileResult]]


def _count(server: str, suites: Sequence[Suite], model: str, wanted: str) -> Counted:
    """Start a server and run the files against it whose names contain ``wanted``."""
    starts: dict[str, Any] = {
        "mlx_lm.server": mlx_lm_server,
        "vllm-serve": partial(vllm_serve, all_models(suites)),
    }
    start = starts.get(server) or partial(ours, server)
    with start(model) as (url, database):
        for suite, file in ((x, y) for x in suites for y in x.client.files):
            if wanted in (key := f"{suite.client.package}/{file}"):
                found = suite.run(file, url, database)
                print(key, found.passed, "of", found.total, flush=True)
                yield key, found


def _kept(path: Path | None) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results) if path and path.exists() else {}


def _keep(path: Path | None, results: Results) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


@contextmanager
def ours(kind: str, model: str) -> Iterator[tuple[str, Path]]:
    """Start the product with an engine; yield its URL and its store of responses."""
    engine = {**SETTINGS["engine"], "kind": kind, "model": model}
    if kind == "vllm":
        engine["vllm.python"] = python_with_vllm()
    with Stack({**SETTINGS, "engine": engine}, start_timeout_s=600.0) as stack:
        yield stack.url, stack.root / "data" / "stored" / "stored.sqlite"


@contextmanager
def vllm_serve(names: Sequence[str], model: str) -> Iterator[tuple[str, None]]:
    """Start vLLM's own server with all these names of models; yield its URL."""
    flags = ("--served-model-name", *names)
    context = SETTINGS["engine"]["max_context"]
    with PlainVllm(512 * MIB, context, arguments=flags, model_path=model) as server:
        yield server.url, None


@contextmanager
def mlx_lm_server(model: str) -> Iterator[tuple[str, None]]:
    """Start mlx_lm's own server with a model; yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        server = Running(command, Path(folder) / "log.txt", env=env, patience_s=10)
        server.wait_for(f"http://127.0.0.1:{port}/health", 120)
        yield f"http://127.0.0.1:{port}", None
        server.end()


def reason_of(key: str, test: str) -> str:
    """Return the reason why a test fails, from the table; "" if it has no entry."""
    plain = test.removeprefix("test_")
    for start in ("method_", "raw_response_", "streaming_response_", "path_params_"):
        plain = plain.removeprefix(start)
    for named, words in REASONS.items():
        where, _, what = named.partition(".")
        if key.removesuffix(".py").endswith(where) and plain.startswith(what):
            return words
    return ""


def page(found: Results) -> str:
    """Return the page: a table of passes, and a line for each test that fails on ours."""
    results = {NAMES[x]: found[x] for x in NAMES if x in found}
    lines = ["# Conformance", "", INTRODUCTION]
    for client in CLIENTS:
        lines += _table(client, results)
    lines += _failures(results)
    return "\n".join(lines) + "\n\n" + fields_section()


def _table(client: Client, results: Results) -> list[str]:
    names = list(results)
    lines = [
        "",
        f"## {client.words} client, `{client.package}` {client.version}",
        "",
        f"| file | tests | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    sums = dict.fromkeys(names, 0)
    everything = 0
    for file in client.files:
        row = {name: results[name].get(f"{client.package}/{file}") for name in names}
        total = max((x.total for x in row.values() if x), default=0)
        shown = [str(x.passed) if x else "not run" for x in row.values()]
        lines.append(f"| `{file}` | {total} | {' | '.join(shown)} |")
        everything += total
        for name, result in row.items():
            sums[name] += result.passed if result else 0
    return [*lines, f"| all | {everything} | {' | '.join(map(str, sums.values()))} |"]


def _failures(results: Results) -> list[str]:
    ours = [x for x in results if x.startswith("Thermocline")]
    lines = ["", "## What fails here", "", f"| test | {' | '.join(ours)} | why |"]
    lines.append(f"|---|{'---|' * len(ours)}---|")
    for client in CLIENTS:
        for key in (f"{client.package}/{file}" for file in client.files):
            files = {name: results[name].get(key, FileResult()) for name in ours}
            for test in sorted({test for x in files.values() for test in x.failed}):
                counts = " | ".join(str(x.failed.get(test, 0)) for x in files.values())
                why = reason_of(key, test) or "not explained yet"
                lines.append(f"| `{key}` `{test}` | {counts} | {why} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    line = "--model '' --work PATH --write PATH --servers mlx --files '' --results PATH"
    args = options_of(__doc__, line).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="conformance-") as own:
        work = args.work or Path(own)
        work.mkdir(parents=True, exist_ok=True)
        suites = [Suite(client, work) for client in CLIENTS]
        results = _kept(args.results)
        servers = [x for x in args.servers.split(",") if x]
        for suite in suites if servers else ():
            suite.prepare()
        model = args.model or (str(roomy_model(work / "model")) if servers else "")
        for server in servers:
            for key, counted in _count(server, suites, model, args.files):
                results.setdefault(server, {})[key] = counted
                _keep(args.results, results)
    text = page(results)
    print(text)
    if args.write:
        args.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
