"""The profiles that ship with us, up to the command line that each makes of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.vllm_plugin.process.command import command
from launch.cli.options import layers
from launch.serve.preflight import check_memory
from launch.settings.schema import Settings, flat, resolve
from launch.settings.sources import Fields, from_profile
from tests.reports import worker_config

PROFILES = sorted(x.stem for x in (Path(__file__).parents[3] / "launch" / "profiles").iterdir())
DOCS = Path(__file__).parents[3] / "docs"
GIB = 1 << 30
GB10_BYTES = 117 * GIB  # MemAvailable after a fresh start, as owners report it


def settings_of(profile: str, **options) -> Settings:
    return resolve(layers({}, profile=profile, **options)).settings


def vllm_argv(settings: Settings) -> list[str]:
    worker = worker_config(
        "/run/thermocline", engine=settings.engine, store=settings.store, model_path="org/model"
    )
    return command(worker, Path("/run/thermocline/plugin.json"), cpu=False)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


KINDS = {"apple": "mlx", "cpu": "mlx", "cuda": "vllm", "gb10": "vllm"}


@pytest.mark.parametrize("name", KINDS)
def test_a_profile_names_its_engine_and_serves_on_this_machine_only(name):
    assert sorted(KINDS) == PROFILES
    settings = settings_of(name)
    assert settings.engine.kind == KINDS[name]
    assert settings_of(name, flags={"--engine": "fake"}).engine.kind == "fake"
    assert flat(settings)["gateway.host"] == "127.0.0.1"
    assert settings.scheduler.max_running == 0  # as many as the engine computes together
    assert (settings.scheduler.memory_low_bytes > 0) == (name == "gb10")  # elsewhere: not watched


@pytest.mark.parametrize("name", PROFILES)
def test_every_setting_of_a_profile_is_explained(name):
    page = (DOCS / "hardware.md").read_text()
    assert [x for x in from_profile(Fields(Settings), name) if f"`{x}" not in page] == []


def test_gb10_fixes_all_memory_in_bytes():
    given = from_profile(Fields(Settings), "gb10")
    assert {"engine.hot_bytes", "store.ram_bytes", "store.save_queue_bytes"} <= set(given)
    settings = settings_of("gb10")
    argv = vllm_argv(settings)
    assert option(argv, "--kv-cache-memory-bytes") == str(20 * GIB)
    assert option(argv, "--gpu-memory-utilization") == "0.6"
    assert option(argv, "--max-num-seqs") == "17"  # with the spare place
    assert option(argv, "--max-num-batched-tokens") == "2048"
    assert "--enforce-eager" not in argv


@pytest.mark.parametrize("name", ["gb10", "cuda"])
def test_no_second_home_for_unpacked_kv(name):
    """Packed blocks only; on a GB10 "CPU memory" would be the GPU's own once more."""
    argv = vllm_argv(settings_of(name))
    assert "ThermoclineConnector" in option(argv, "--kv-transfer-config")
    assert not {"--kv-offloading-size", "--cpu-offload-gb", "--swap-space"} & set(argv)


def test_gb10_leaves_room_for_weights_and_for_the_system():
    settings = settings_of("gb10")
    marks = settings.scheduler
    assert (marks.memory_low_bytes, marks.memory_stop_bytes) == (12 * GIB, 9 * GIB)
    assert marks.memory_end_bytes == 6 * GIB
    check_memory(
        weights=70 * GIB,
        hot_bytes=settings.engine.hot_bytes,
        ram_bytes=settings.store.ram_bytes,
        free_bytes=marks.memory_low_bytes,
        available=GB10_BYTES,
    )


def test_cuda_fits_its_pool_to_the_gpu():
    assert "engine.hot_bytes" not in from_profile(Fields(Settings), "cuda")
    argv = vllm_argv(settings_of("cuda", assignments=["engine.vllm.tensor_parallel=2"]))
    assert option(argv, "--gpu-memory-utilization") == "0.6"
    assert option(argv, "--max-num-seqs") == "65"
    assert option(argv, "--tensor-parallel-size") == "2"
    assert "--max-num-batched-tokens" not in argv
