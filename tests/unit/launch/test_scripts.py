"""The scripts for each kind of machine, on a machine that is made of stubs.

Only the commands in one folder can be found. The arguments of the installer and of ``thermocline``
are written to standard output; neither is run.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import program

LAUNCH = Path(__file__).parents[3] / "launch"
SCRIPTS = ["apple.sh", "cpu.sh", "cuda.sh", "gb10.sh"]
REAL = ["awk", "basename", "bash", "dirname"]

INSTALLER = 'echo "install $*"'
THERMOCLINE = """#!/bin/sh
echo "$*"
echo "alloc=${PYTORCH_CUDA_ALLOC_CONF-unset},${PYTORCH_ALLOC_CONF-unset}"
"""


class Machine:
    """A checkout without anything installed, and the output of its commands."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.commands = folder / "bin"
        self.env = {"PATH": str(self.commands)}
        for made in (self.root / "launch", self.root / ".venv" / "bin", self.commands):
            made.mkdir(parents=True)
        for name in ("hardware.sh", "serve.sh", *SCRIPTS):
            shutil.copy(LAUNCH / name, self.root / "launch")
        (self.root / "launch" / "install.sh").write_text(INSTALLER)
        _program(self.root / ".venv" / "bin" / "thermocline", THERMOCLINE)
        self.says("gcc", "")
        for name in REAL:
            found = shutil.which(name)
            assert found
            (self.commands / name).symlink_to(found)

    def says(self, command: str, words: str, code: int = 0) -> None:
        _program(self.commands / command, f"#!/bin/sh\necho '{words}'\nexit {code}\n")

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.bash(str(self.root / "launch" / script), *arguments)

    def bash(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return program(self.commands / "bash", *arguments, timeout=60, cwd=self.root, env=self.env)


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Nothing was installed or served, and the reason is given in these words."""
    assert (done.returncode, done.stdout) == (code, "")
    assert all(x in done.stderr for x in words), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def fitting(machine: Machine) -> Machine:
    """A machine that is of every kind at once, so that each script gets as far as it can."""
    machine.says("uname", "Linux")
    machine.says("nvidia-smi", "NVIDIA H200")
    return machine


@pytest.mark.parametrize("name", sorted(x.name for x in LAUNCH.glob("*.sh")))
def test_bash_understands_it(name):
    done = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_scripts_import_of_ours_are_there():
    root, found = LAUNCH.parent, []
    for script in (*LAUNCH.glob("*.sh"), *(root / "engines").rglob("*.sh")):
        text = script.read_text()
        found += re.findall(r"^from ((?:launch|engines)[\w.]*) import ([\w, ]+)$", text, re.M)
    for module, names in found:
        assert {x.strip() for x in names.split(",")} <= {*dir(importlib.import_module(module))}
    assert found


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("arguments", [[], [""], ["--port", "8080"]])
def test_without_a_model_the_usage_is_printed(fitting, name, arguments):
    done = fitting.run(name, *arguments)
    refused(done, 2, f"usage: bash launch/{name} MODEL [PORT] [more arguments of")


def test_asking_for_help_is_no_mistake(fitting):
    assert fitting.run("cuda.sh", "--help").returncode == 0


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("port", ["65536", "80x", "123456789", "8080.", ""])
def test_a_port_that_is_none(fitting, name, port):
    done = fitting.run(name, "org/model", port)
    refused(done, 2, "is not a port; give 1 to 65535, or 0 for any free one")


@pytest.mark.parametrize(
    "model", ["model", "./missing", "/missing", "a/b/c", "-a/b", "org/", "/model", "o rg/model"]
)
def test_a_model_that_is_none_costs_no_installation(fitting, model):
    done = fitting.run("cpu.sh", model)
    refused(done, 2)
    assert "usage" in done.stderr or f"{model} is neither a folder nor a hub id" in done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["org/model-1.5_b"], "--model org/model-1.5_b"),
        (["."], "--model ."),
        (["org/m", "9000"], "--model org/m --port 9000"),
        (["org/m", "0", "--codec", "raw"], "--model org/m --port 0 --codec raw"),
        (["org/m", "--hot", "1GiB"], "--model org/m --hot 1GiB"),
    ],
)
def test_the_served_command(fitting, given, expected):
    done = fitting.run("cpu.sh", *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["install serve", f"serve --profile cpu {expected}"]


@pytest.mark.parametrize("name", ["cpu.sh", "serve.sh"])
def test_it_is_said_how_to_get_the_command(fitting, name):
    fitting.says("uname", "Linux")
    done = fitting.run(name, *(["org/m"] if name == "cpu.sh" else []))
    (line,) = (x for x in done.stderr.splitlines() if x.endswith("/activate"))
    assert line.strip() == f". {fitting.root}/.venv/bin/activate"


def test_the_environment_may_name_another_profile(fitting):
    fitting.env["THERMOCLINE_PROFILE"] = "mine"
    assert "serve --profile mine --model org/m" in fitting.run("cpu.sh", "org/m").stdout


# ---- the hardware in question


@pytest.mark.parametrize("name", ["cuda.sh", "gb10.sh"])
@pytest.mark.parametrize(
    "driver", [None, ("", 0), ("No devices were found", 0), ("NVIDIA-SMI has failed", 9)]
)
def test_without_a_gpu_nothing_is_installed(machine, name, driver):
    if driver:
        machine.says("nvidia-smi", *driver)
    done = machine.run(name, "org/m")
    refused(done, 1, "nvidia-smi finds no", "bash launch/cpu.sh MODEL")


def test_cuda_serves_on_gpus_with_memory_of_their_own(machine):
    machine.says("nvidia-smi", "NVIDIA H200")
    done = machine.run("cuda.sh", "org/m", "9000")
    assert done.stdout.splitlines()[:3] == [
        "install serve",
        "install vllm",
        "serve --profile cuda --model org/m --port 9000",
    ]
    assert "GPU" not in done.stderr


@pytest.mark.parametrize(("gpu", "warned"), [("NVIDIA GB10", False), ("NVIDIA H200", True)])
def test_gb10_serves_on_a_gb10_and_warns_of_another_gpu(machine, gpu, warned):
    machine.says("nvidia-smi", gpu)
    done = machine.run("gb10.sh", "org/m")
    assert "serve --profile gb10 --model org/m" in done.stdout
    assert "install vllm" in done.stdout
    assert ("warning: the GPU is NVIDIA H200, no GB10" in done.stderr) == warned
    assert ("warning" in done.stderr) == warned


@pytest.mark.parametrize("name", ["cuda.sh", "gb10.sh"])
def test_expandable_segments_are_dropped_and_the_rest_is_kept(machine, name):
    machine.says("nvidia-smi", "NVIDIA H200" if name == "cuda.sh" else "NVIDIA GB10")
    machine.env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    machine.env["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:512"
    done = machine.run(name, "org/m")
    assert "alloc=unset,max_split_size_mb:512" in done.stdout
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is not used" in done.stderr


@pytest.mark.parametrize("name", ["cuda.sh", "gb10.sh"])
def test_triton_needs_a_compiler(machine, name):
    machine.says("nvidia-smi", "NVIDIA H200" if name == "cuda.sh" else "NVIDIA GB10")
    (machine.commands / "gcc").unlink()
    done = machine.run(name, "org/m")
    refused(done, 1, "sudo apt install build-essential")
    machine.env["CC"] = "/opt/cc"
    assert "serve --profile" in machine.run(name, "org/m").stdout


@pytest.mark.parametrize("flag", [["--engine", "vllm"], ["--engine=vllm"]])
def test_vllm_on_cpus_if_asked(machine, flag):
    machine.says("uname", "Linux")
    done = machine.run("cpu.sh", "org/m", *flag)
    assert "install vllm" in done.stdout
    machine.says("nvidia-smi", "NVIDIA H200")
    done = machine.run("cpu.sh", "org/m", *flag)
    refused(done, 1, "bash launch/cuda.sh MODEL")


UNAME = "#!/bin/sh\ncase $1 in -s) echo %s ;; *) echo %s ;; esac\n"


@pytest.mark.parametrize(
    ("script", "system", "gpu", "words"),
    [
        ("cuda.sh", "Linux x86_64", "NVIDIA GB10", "bash launch/gb10.sh MODEL"),
        ("cpu.sh", "Darwin arm64", "", "on a Mac: bash launch/apple.sh MODEL"),
        ("apple.sh", "Linux aarch64", "", "this is no Mac; on Linux: bash launch/cpu.sh MODEL"),
        ("apple.sh", "Darwin x86_64", "", "mlx needs Apple silicon"),
    ],
)
def test_a_script_for_another_machine_names_the_right_one(machine, script, system, gpu, words):
    _program(machine.commands / "uname", UNAME % tuple(system.split()))
    machine.says("nvidia-smi", gpu)
    refused(machine.run(script, "org/m"), 1, words)


def test_apple_serves_and_names_the_wired_limit(machine):
    _program(machine.commands / "uname", UNAME % ("Darwin", "arm64"))
    done = machine.run("apple.sh", "org/m")
    assert "serve --profile apple --model org/m" in done.stdout
    assert "sudo sysctl iogpu.wired_limit_mb=" in done.stderr


# ---- any machine


@pytest.mark.parametrize(
    ("gpu", "profile"), [("", "cpu"), ("NVIDIA H200", "cuda"), ("NVIDIA GB10", "gb10")]
)
def test_serve_finds_the_profile_and_needs_no_arguments(machine, gpu, profile):
    _program(machine.commands / "uname", UNAME % ("Linux", "x86_64"))
    machine.says("nvidia-smi", gpu)
    done = machine.run("serve.sh", "--hot", "1GiB")
    assert done.stdout.splitlines()[:2] == ["install serve", "serve --profile cpu --hot 1GiB"]
    assert (f"bash launch/{profile}.sh MODEL" in done.stderr) is (profile != "cpu")
    _program(machine.root / ".venv-vllm" / "bin" / "python", "")
    done = machine.run("serve.sh")
    assert done.stdout.splitlines()[1] == f"serve --profile {profile}"
    assert "GPU" not in done.stderr


def test_serve_on_macs(machine):
    _program(machine.commands / "uname", UNAME % ("Darwin", "arm64"))
    assert "serve --profile apple" in machine.run("serve.sh").stdout
    _program(machine.commands / "uname", UNAME % ("Darwin", "x86_64"))
    assert machine.run("serve.sh").returncode == 1


# ---- advice


@pytest.mark.parametrize(("gib", "advised"), [(7, False), (8, True), (90, True)])
def test_a_large_page_cache_is_worth_a_word(machine, tmp_path, gib, advised):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 127000000 kB\nCached: {gib << 20} kB\nSwapCached: 0 kB\n")
    done = machine.bash("-c", f". launch/gb10.sh; advise_on_page_cache {meminfo}")
    assert done.returncode == 0
    assert ("drop_caches" in done.stderr) is advised
    assert (f"holds {gib} GiB" in done.stderr) is advised


def test_without_meminfo_there_is_no_advice(machine, tmp_path):
    done = machine.bash("-c", f". launch/gb10.sh; advise_on_page_cache {tmp_path / 'missing'}")
    assert (done.returncode, done.stderr) == (0, "")
