"""``thermocline serve`` with settings that cannot be followed: one sentence, and an end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from kvstore.tiers.disk_folder import DiskFolder
from launch.serve.preflight import sole_server
from tests.command_line import thermocline, thermocline_apart

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like a model, as far as the command line looks."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def refused(
    tmp_path: Path, *arguments: object, cache: Path | None = None, begins: bool = False
) -> tuple[int, str, str]:
    """The exit code, the line that says why, and the whole log.

    ``begins``: what is wrong shows once the server has begun, so that it is a process of its own.
    """
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    variables["THERMOCLINE_DATA_DIR"] = str(tmp_path / "data")
    if cache:
        variables["THERMOCLINE_CACHE_DIR"] = str(cache)
    words = ["serve", "--engine", "mlx", "--port", "0", *(str(x) for x in arguments)]
    if begins:
        done = thermocline_apart(*words, variables=variables, timeout=120)
    else:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            done = thermocline(*words)
    assert "Traceback" not in done.stderr
    assert "starting it again" not in done.stderr
    (why,) = (x for x in done.stderr.splitlines() if x.startswith("error: ") or "Z error " in x)
    return done.returncode, why, done.stderr


def test_a_name_of_a_model_that_terminals_and_files_would_obey(tmp_path, folder):
    for name in ("m\ntest-cmd: touch x", "m\x1b]0;owned\x07"):
        code, why, _ = refused(tmp_path, "--model", folder, "--served-model-name", name)
        assert code == 2 and "served_model_name has control characters" in why


def test_a_hub_id_that_cannot_be_fetched(tmp_path):
    code, why, log = refused(tmp_path, "--model", "no-such/model", begins=True)
    assert code == 1
    assert "no-such/model could not be fetched from the hub; check the name" in why
    assert log.endswith(": stopped\n")


def test_a_model_that_no_engine_knows(tmp_path, folder):
    mx.save_safetensors(str(folder / "model.safetensors"), {"x": mx.zeros(1)})
    code, why, _ = refused(tmp_path, "--model", folder, begins=True)
    assert code == 1 and f"{folder} cannot be loaded" in why and "never-heard-of" in why


def test_weights_that_are_cut_off(tmp_path, folder):
    code, why, _ = refused(tmp_path, "--model", folder, begins=True)
    assert code == 1 and f"{folder} cannot be loaded; is it complete" in why


def test_a_cache_folder_that_cannot_be_written(tmp_path, folder):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    code, why, log = refused(tmp_path, "--model", folder, cache=cache)
    assert code == 1 and f"{cache}/compiled cannot be made: Not a directory; choose" in why
    assert "engine started" not in log
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("THERMOCLINE_CACHE_DIR", str(cache))
        done = thermocline("doctor", "--set", "engine.kind=fake")
    assert done.returncode == 1
    assert any("folders" in x and "cannot be made" in x for x in done.stdout.splitlines())


def test_the_sample_model_is_not_written_there(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    code, why, _ = refused(tmp_path, cache=tmp_path / "cache")
    assert code == 1 and f"other users can write {tmp_path}/cache" in why
    assert not list((tmp_path / "cache").iterdir())


def test_an_engine_that_never_becomes_ready_ends_the_server(tmp_path, folder):
    """It stands in for the interpreter of an environment with vLLM, and never gets beyond that."""
    python = tmp_path / "python"
    found = {"vllm": "0.32.1", "cpu": True, "missing": [], "plugin": True}
    found["plugin_version"] = version("thermocline")
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in "-m "*) echo "ERROR no such device" >&2; exit 3 ;; esac\n'
        f"echo '{json.dumps(found)}'\n"
    )
    python.chmod(0o700)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,'
        ' "intermediate_size": 64, "max_position_embeddings": 4096}'
    )
    words = ["--engine", "vllm", "--port", "0", "--model", str(folder), "--disk", "0"]
    words += ["--set", f"engine.vllm.python={python}"]
    variables = {"THERMOCLINE_DATA_DIR": str(tmp_path / "data")}
    done = thermocline_apart("serve", *words, variables=variables, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("starting it again") == 4
    assert "ended with code 3 5 times in a row and was never ready" in done.stderr
    assert "its last log line: no such device" in done.stderr


def test_no_client_hangs_while_the_disk_folder_is_waited_for(tmp_path, folder):
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


def test_a_second_server_on_a_data_folder_is_refused_at_once(tmp_path, folder):
    """A server that runs holds both: its engine the tier, itself the folder."""
    disk = DiskFolder(tmp_path / "data" / "cold")
    with sole_server(tmp_path / "data"):
        code, why, log = refused(tmp_path, "--model", folder, begins=True)
    disk.release(clean=False)
    assert (
        code == 1
        and f"{tmp_path}/data belongs to a server that runs (process {os.getpid()})" in why
    )
    assert "waiting up to" not in log
