"""The shell scripts: what can be tried without installing anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[3] / "launch"
HARDWARE = ["apple.sh", "cpu.sh", "cuda.sh", "gb10.sh"]


def bash(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=LAUNCH,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )


@pytest.mark.parametrize("name", sorted(x.name for x in LAUNCH.glob("*.sh")))
def test_bash_understands_it(name):
    assert bash(f"bash -n {name}").stderr == ""


@pytest.mark.parametrize("name", HARDWARE)
def test_without_a_model_the_usage_is_told(name):
    found = bash(f"bash {name}")
    assert found.returncode == 1
    assert f"usage: bash launch/{name} MODEL [PORT]" in found.stderr


@pytest.mark.parametrize("name", ["cuda.sh", "gb10.sh"])
def test_without_its_gpu_nothing_is_installed(name):
    found = bash(f"nvidia-smi() {{ return 1; }}; export -f nvidia-smi; bash {name} some/model")
    assert found.returncode == 1
    assert "nvidia-smi finds no" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("m", "m 8080"),
        ("m 9000", "m 9000"),
        ("m 9000 --codec raw", "m 9000 --codec raw"),
        ("m --codec raw", "m 8080 --codec raw"),
    ],
)
def test_model_port_and_options(arguments, expected):
    script = f'. ./hardware.sh; read_arguments {arguments}; echo $model $port "${{options[@]}}"'
    assert bash(script).stdout.strip() == expected


WATCH = """
. ./gb10.sh; set +e; look_every_s=0.05; available_gib() { echo %d; }
sleep 30 & server=$!
watch_memory $server & watcher=$!
if [ %d -lt 4 ]; then wait $server; echo "ended $?"; else sleep 0.5; kill $server && echo alive; fi
wait $watcher
"""


def test_the_memory_watch_stops_the_server_before_the_machine_freezes():
    found = bash(WATCH % (2, 2))
    assert "ended 143" in found.stdout
    assert "2 GiB of memory left; stopping" in found.stderr


def test_the_memory_watch_warns_once_and_lets_it_run():
    found = bash(WATCH % (6, 6))
    assert "alive" in found.stdout
    assert found.stderr.count("warning: 6 GiB") == 1
