"""A model's first start: served exactly at once, measured beside it, packed from then on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.calibrate.orders import FIRST_PRESETS
from tests.integration.launch.test_serve import PROGRAM, Server
from tests.integration.tiny_models import write_model

# A calibration has the lowest priority: on a busy machine it takes its time.
pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(900)]

CHILD = "engines.mlx_worker.calibrate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    (folder / "tiny").mkdir()
    write_model("llama", folder / "tiny")
    return folder


def start(folder: Path, *arguments: str, name: str = "one") -> Server:
    own = folder / name
    own.mkdir(exist_ok=True)
    data = ["--data-dir", str(folder / "data")]
    model = ["--model", str(folder / "tiny")]
    return Server(own, *model, *data, *arguments, engine="mlx", calibrate=True)


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        body: bytes = answer.read()
        return body.decode()


def codec_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(server, "/v1/sessions"))["codec"]
    return found


def until(condition: Callable[[], object], within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(server: Server) -> list[psutil.Process]:
    """Calibrations that this gateway runs."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if CHILD in child.cmdline():
                found.append(child)
    return found


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    model = ["--model", str(folder / "tiny"), "--set", f"data_dir={folder / 'data'}"]
    return subprocess.run(
        [*PROGRAM, command, *model, "--set", "engine.kind=mlx", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "THERMOCLINE_GATEWAY__PORT": "0"},
    )


@pytest.fixture
def killed(folder: Path) -> Iterator[Server]:
    server = start(folder)
    yield server
    server.stop()


def test_a_calibration_ends_with_its_gateway(killed: Server) -> None:
    """First of all, while nothing is measured yet."""
    until(lambda: children(killed))
    (child,) = children(killed)
    assert child.nice() == 19
    assert codec_of(killed)["name"] == "raw" and codec_of(killed)["unmeasured"]
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_and_with_one_that_is_asked_to_end(folder: Path) -> None:
    server = start(folder)
    until(lambda: children(server))
    (child,) = children(server)
    assert server.stop() == 0
    assert not child.is_running()


def test_two_gateways_measure_once_and_both_adopt(folder: Path) -> None:
    one = start(folder)
    two = start(folder, "--disk", "0", name="two")
    try:
        with urllib.request.urlopen(_chat(one), timeout=60) as answer:
            assert answer.status == 200  # also while it is measured
        until(lambda: codec_of(one)["name"] != "raw" and codec_of(two)["name"] != "raw", 600)
        assert sum("measured in" in "".join(x.log) for x in (one, two)) == 1
        codec = codec_of(one)
        assert codec["name"] in FIRST_PRESETS and not codec["unmeasured"]
        assert codec | {"why": ""} == codec_of(two) | {"why": ""}  # which has one tier only
        for row in codec["rows"]:
            assert row["kl"] <= 0.01 and row["context"] == 1024
            assert min(row["restore_s"], row["prefill_s"], row["chain_tokens"]) > 0
        metrics = get(one, "/metrics")
        assert f'thermocline_codec_info{{codec="{codec["id"]}",tier="ram"}} 1.0' in metrics
        assert f'thermocline_codec_kl{{codec="{codec["id"]}",context="1024"}}' in metrics
    finally:
        assert (one.stop(), two.stop()) == (0, 0)


def _chat(server: Server) -> urllib.request.Request:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )


def test_the_next_start_knows_it(folder: Path) -> None:
    server = start(folder)
    try:
        assert codec_of(server)["name"] in FIRST_PRESETS
        time.sleep(3)  # longer than it takes to look for what is unmeasured
        assert not children(server) and "measuring" not in "".join(server.log)
    finally:
        server.stop()


def test_doctor_and_plan_tell_what_was_measured(folder: Path) -> None:
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", "--json").stdout)}
    assert found["codec"]["verdict"] == "ok"
    assert re.match(r"(\w+) \(.*\1: KL 0\.00", found["codec"]["text"]), found["codec"]
    plan = json.loads(run(folder, "plan", "--context", "2048", "--json").stdout)
    rows = {x["codec"]: x for x in plan["contexts"][0]["cold"]}
    assert 0 < rows["dense3"]["kl"] <= 0.01 and rows["tq3"]["kl"] is None
    assert any(
        re.match(r"codec auto is (\w+) (here|in \w+).*: .*\1: KL 0\.00", x) for x in plan["notes"]
    )


@pytest.mark.parametrize("tier", ["store.codec", "store.disk_codec", "store.redis_codec"])
def test_a_named_codec_out_of_bounds_is_refused_by_doctor_and_serve(
    folder: Path, tier: str
) -> None:
    bound = ("--set", "store.max_kl=0", "--set", f"{tier}=dense3")
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", *bound, "--json").stdout)}
    assert found["codec"]["verdict"] == "failure"
    assert "above the bound of 0" in found["codec"]["text"]
    refused = run(folder, "serve", *bound)
    assert refused.returncode == 1
    assert "tiny cannot be served: codec dense3 at 1024 tokens has a KL of" in refused.stderr
    assert "starting it again" not in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("setting", "verdict", "said"),
    [
        ("store.accept_loss=true", "ok", "tq4 ("),
        ("store.max_kl=0", "failure", "engine.hot_codec: codec tq4 at"),
    ],
)
def test_doctor_judges_what_packs_live_kv(
    folder: Path, setting: str, verdict: str, said: str
) -> None:
    hot = ("--set", "engine.hot_codec=tq4", "--set", setting)
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", *hot, "--json").stdout)}
    assert found["codec"]["verdict"] == verdict
    assert found["codec"]["text"].startswith(said)


def test_what_cannot_be_measured_is_served_all_the_same(tmp_path: Path) -> None:
    """The window is too short for any text."""
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    (tmp_path / "tiny" / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 200})
    )
    server = start(tmp_path)
    try:
        server.wait_for("is not measured beside the service: tiny takes no more than 200 tokens")
        assert codec_of(server)["name"] == "raw"
    finally:
        assert server.stop() == 0
