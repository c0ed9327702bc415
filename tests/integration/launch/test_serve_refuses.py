"""``thermocline serve`` with settings that cannot be followed: one sentence, and an end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from kvstore.tiers.disk.folder import DiskFolder
from tests.integration.launch.test_serve import Server
from tests.integration.tiny_models import write_model

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like a model, as far as the command line looks."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def refused(tmp_path: Path, *arguments: object) -> tuple[int, str, str]:
    """The exit code, the line that says why, and the whole log."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", "serve", "--engine", "mlx", "--port", "0"]
        + [str(x) for x in arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hub"),
            "THERMOCLINE_DATA_DIR": str(tmp_path / "data"),
        },
    )
    assert "Traceback" not in done.stderr
    assert "starting it again" not in done.stderr
    (why,) = (x for x in done.stderr.splitlines() if x.startswith("error: ") or "Z error " in x)
    return done.returncode, why, done.stderr


def test_a_model_folder_that_is_not_there(tmp_path):
    code, why, _ = refused(tmp_path, "--model", tmp_path / "nowhere")
    assert code == 2 and "config.json" in why


def test_a_hub_id_that_cannot_be_fetched(tmp_path):
    code, why, log = refused(tmp_path, "--model", "no-such/model")
    assert code == 1
    assert "no-such/model could not be fetched from the hub; check the name" in why
    assert log.endswith(": stopped\n")


def test_a_model_that_no_engine_knows(tmp_path, folder):
    mx.save_safetensors(str(folder / "model.safetensors"), {"x": mx.zeros(1)})
    code, why, _ = refused(tmp_path, "--model", folder)
    assert code == 1 and f"{folder} cannot be loaded" in why and "never-heard-of" in why


def test_weights_that_are_cut_off(tmp_path, folder):
    code, why, _ = refused(tmp_path, "--model", folder)
    assert code == 1 and f"{folder} cannot be loaded; is it whole" in why


def test_a_disk_folder_that_cannot_be_used(tmp_path, folder):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cold").write_text("not a folder")
    code, why, _ = refused(tmp_path, "--model", folder)
    assert code == 1 and "--disk 0" in why and str(tmp_path / "data" / "cold") in why


def test_too_little_hot_memory_is_refused_before_the_weights_are_read(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_model("llama", model)
    code, why, log = refused(tmp_path, "--model", model, "--hot", "1kB")
    assert code == 2 and "engine.hot_bytes = 1000 is too little for this model" in why
    assert "engine started" not in log


def test_nobody_hangs_while_the_disk_folder_is_waited_for(tmp_path, folder):
    disk = DiskFolder(tmp_path / "data" / "cold")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "launch", "serve", "--engine", "mlx", "--model", str(folder)]
    with subprocess.Popen(
        [*command, "--port", str(port), "--data-dir", str(tmp_path / "data")],
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stderr is not None
        assert any("waiting up to 30 s until another" in line for line in waiting.stderr)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
        waiting.kill()
    disk.release(clean=False)


def test_a_url_that_is_not_of_redis(tmp_path, folder):
    code, why, _ = refused(tmp_path, "--model", folder, "--redis", "http://u:secret@localhost:1")
    assert code == 2 and "redis_url" in why and "secret" not in why


def test_a_redis_that_does_not_answer_is_done_without(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_model("llama", model)
    redis = "redis://:secret@127.0.0.1:1/0"
    server = Server(tmp_path, "--model", str(model), "--redis", redis, engine="mlx")
    server.stop()
    log = "".join(server.log)
    assert server.process.returncode == 0
    assert "going on without redis until it answers" in log
    assert "secret" not in log and " error " not in log
