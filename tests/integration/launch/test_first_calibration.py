"""A model's first start: served exactly at once, measured by its engine, packed from then on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.calibration.orders import FIRST_PRESETS
from tests.asking import asked
from tests.command_line import thermocline
from tests.integration.launch.test_serve import Server
from tests.integration.tiny_models import write_model
from tests.waiting import until

# A calibration has the lowest priority: on a busy machine it takes its time.
pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = 300  # tokens that a model has room for,
TEXT = 128  # and those of the texts that it is measured with then


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    write_tiny(folder, SHORT)
    return folder


def write_tiny(folder: Path, longest: int, kind: str = "llama") -> None:
    """Write a model with room for so many tokens."""
    (folder / "tiny").mkdir()
    write_model(kind, folder / "tiny")
    path = folder / "tiny" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": longest}))


def start(folder: Path, *arguments: str, name: str = "one") -> Server:
    own = folder / name
    own.mkdir(exist_ok=True)
    data = ["--data-dir", str(folder / "data")]
    model = ["--model", str(folder / "tiny")]
    return Server(own, *model, *data, *arguments, engine="mlx", calibrate=True)


def metrics(server: Server) -> str:
    text: str = asked(f"{server.url}/metrics").content
    return text


def codec_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = asked(f"{server.url}/v1/sessions").content["codec"]
    return found


def engine_of(server: Server) -> psutil.Process:
    """The engine process that this gateway runs now."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "engines.mlx_worker" in child.cmdline():
                found.append(child)
    (engine,) = found
    return engine


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    model = ["--model", str(folder / "tiny"), "--set", f"data_dir={folder / 'data'}"]
    port = ["--set", "gateway.port=0"]
    return thermocline(command, *model, *port, "--set", "engine.kind=mlx", *arguments)


@pytest.fixture(scope="module")
def fresh(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model, of which nothing is known."""
    fresh = tmp_path_factory.mktemp("fresh")
    (fresh / "tiny").symlink_to(folder / "tiny")
    return fresh


@pytest.mark.thorough
def test_an_engine_that_is_killed_measures_again_in_its_next_life(fresh: Path):
    server = start(fresh)
    try:
        assert codec_of(server)["name"] == "raw" and codec_of(server)["unmeasured"]
        until(lambda: "texts to learn from" in codec_of(server)["progress"], 600)
        assert "thermocline_codec_measuring 1.0" in metrics(server)
        engine = engine_of(server)
        engine.send_signal(signal.SIGKILL)
        psutil.wait_procs([engine], timeout=60)
        until(lambda: (codec_of(server) or {}).get("unmeasured") is False, 600)
        assert codec_of(server)["name"] in FIRST_PRESETS
        until(lambda: "measured in" in "".join(server.log), 600)
        until(lambda: codec_of(server)["progress"] == "")
        log = "".join(server.log)
        assert log.index("a first verdict in") < log.index("measured in")
        assert engine_of(server).pid != engine.pid
        left = {x.suffix for x in (fresh / "data" / "profiles").iterdir()}
        assert left == {".tcpf", ".lock", ".model"}
    finally:
        assert server.stop() == 0


def calibrated(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``thermocline calibrate`` against a running server."""
    return thermocline("calibrate", "--url", server.url, *arguments)


@pytest.mark.thorough
def test_a_running_server_measures_when_asked(folder: Path, tmp_path: Path):
    (tmp_path / "tiny").symlink_to(folder / "tiny")
    server = start(tmp_path, "--set", "store.calibrate=false")
    try:
        assert codec_of(server)["unmeasured"] and not codec_of(server)["progress"]
        done = calibrated(server, "--json", str(tmp_path / "rows.json"))
        assert done.returncode == 0, done.stderr
        assert "measuring: " in done.stderr and "perplexity" in done.stdout
        rows = {x["preset"]: x for x in json.loads((tmp_path / "rows.json").read_text())["rows"]}
        assert set(rows) >= set(FIRST_PRESETS)
        codec = codec_of(server)
        assert not codec["unmeasured"] and codec["name"] in rows
    finally:
        assert server.stop() == 0


def test_what_a_server_measures_is_not_chosen_here():
    done = thermocline("calibrate", "--url", "http://127.0.0.1:9", "--contexts", "512")
    assert done.returncode == 2 and "leave out" in done.stderr
    gone = thermocline("calibrate", "--url", "http://127.0.0.1:1")
    assert gone.returncode == 1 and "does not answer" in gone.stderr


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_it_ends_at_once_with_its_gateway(folder: Path, how: signal.Signals):
    """Killed, or asked to; nothing is measured yet when the next test begins."""
    server = start(folder)
    until(lambda: codec_of(server)["progress"])
    engine = engine_of(server)
    server.process.send_signal(how)
    assert server.process.wait(60) == (0 if how == signal.SIGTERM else -how)
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running()
    server.stop()


def test_two_gateways_measure_once_and_both_adopt(folder: Path):
    one = start(folder)
    two = start(folder, "--disk", "0", name="two")
    try:
        answer = asked(f"{one.url}/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert answer.status == 200  # also while it is measured
        until(lambda: codec_of(one)["name"] != "raw" and codec_of(two)["name"] != "raw", 600)
        for each in (one, two):
            until(lambda each=each: codec_of(each)["progress"] == "", 600)  # type: ignore[misc]
        assert sum("measured in" in "".join(x.log) for x in (one, two)) == 1
        # The one that does not measure looks for what the other has found now and then.
        until(lambda: losses(codec_of(one)) == losses(codec_of(two)) != [], 60)
        codec = codec_of(one)
        assert codec["name"] in FIRST_PRESETS and not codec["unmeasured"]
        assert codec_of(two)["name"] in FIRST_PRESETS and not codec_of(two)["unmeasured"]
        for row in codec["rows"]:
            assert row["kl"] <= 0.01 and row["context"] == TEXT
            assert min(row["restore_s"], row["prefill_s"]) > 0
        figures = metrics(one)
        assert f'thermocline_codec_info{{codec="{codec["id"]}"}} 1.0' in figures
        assert f'thermocline_codec_kl{{codec="{codec["id"]}",context="{TEXT}"}}' in figures
    finally:
        assert (one.stop(), two.stop()) == (0, 0)


def losses(codec: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was measured once; times are each engine's own where the machine was busy."""
    rows = [*codec["rows"], *codec["others"]]
    return sorted((x["preset"], x["kl"], x["bits_per_element"]) for x in rows)


def test_the_next_start_knows_it(folder: Path):
    server = start(folder)
    try:
        assert codec_of(server)["name"] in FIRST_PRESETS
        time.sleep(3)  # longer than the look for unmeasured codecs
        assert "measuring" not in "".join(server.log) and codec_of(server)["progress"] == ""
    finally:
        server.stop()


def test_doctor_and_plan_show_the_measured_values(folder: Path):
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", "--json").stdout)}
    assert found["codec"]["verdict"] == "ok"
    assert re.match(r"(\w+) \(.*\1: KL 0\.00", found["codec"]["text"]), found["codec"]
    plan = json.loads(run(folder, "plan", "--context", "256", "--json").stdout)
    rows = {x["codec"]: x for x in plan["contexts"][0]["cold"]}
    assert 0 < rows["dense3"]["kl"] <= 0.01 and rows["tq3"]["kl"] is None
    assert any(
        re.match(r"codec auto is (\w+) (here|in \w+).*: .*\1: KL 0\.00", x) for x in plan["notes"]
    )


def test_a_named_codec_out_of_bounds_is_refused_by_doctor_and_serve(folder: Path):
    bound = ("--set", "store.max_kl=0", "--set", "store.codec=dense3")
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", *bound, "--json").stdout)}
    assert found["codec"]["verdict"] == "failure"
    assert "above the bound of 0" in found["codec"]["text"]
    refused = run(folder, "serve", *bound)
    assert refused.returncode == 1
    assert f"tiny cannot be served: codec dense3 at {TEXT} tokens has a KL of" in refused.stderr
    assert "starting it again" not in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("setting", "verdict", "said"),
    [
        ("store.accept_loss=true", "ok", "tq4 ("),
        ("store.max_kl=0", "failure", "engine.hot_codec: tq4 was not measured"),
    ],
)
def test_doctor_judges_what_packs_live_kv(folder: Path, setting: str, verdict: str, said: str):
    hot = ("--set", "engine.hot_codec=tq4", "--set", setting)
    found = {x["about"]: x for x in json.loads(run(folder, "doctor", *hot, "--json").stdout)}
    assert found["codec"]["verdict"] == verdict
    assert found["codec"]["text"].startswith(said)


def test_what_cannot_be_measured_is_served_all_the_same(tmp_path: Path):
    """The window is too short for any text."""
    write_tiny(tmp_path, 200)
    server = start(tmp_path)
    try:
        server.wait_for("the model is not measured: the engine accepts at most 200 tokens")
        assert codec_of(server)["name"] == "raw"
    finally:
        assert server.stop() == 0
