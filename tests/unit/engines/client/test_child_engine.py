"""The start of vLLM: its command line, its environment, and the fields of a request."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from engines.client.child_engine import FakeServer
from engines.client.engine_client import AttachedEngine
from engines.config import EngineConfig, VllmConfig, WorkerConfig
from engines.fake_worker.fake_sessions import FakeSessions
from engines.host.control_server import ControlServer
from engines.http import with_session
from engines.openai.requests import StopList
from engines.vllm_environment.environment import inspect_environment
from engines.vllm_plugin.config import BadSettings, settings_from, write_settings
from engines.vllm_plugin.process.command import (
    command,
    default_environment,
    environment,
    plugin_settings,
    refusal,
)
from engines.wire import Welcome
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from tests.unit.engines.client.test_client import PATH, scripted
from tests.unit.engines.conftest import WELCOME, worker_config
from tests.waiting import eventually


def worker(folder: Path, **engine) -> WorkerConfig:
    config = EngineConfig(kind="vllm", hot_bytes=1 << 28, **engine)
    named = {"model_path": str(folder), "served_model_name": "smol"}
    usual = worker_config(folder, token="very secret")
    return msgspec.structs.replace(usual, engine=config, store=StoreConfig(codec="tq3"), **named)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_command_sets_options_that_must_not_be_left_to_defaults(tmp_path):
    argv = command(worker(tmp_path), tmp_path / "plugin.json", cpu=True)
    transfer = json.loads(option(argv, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_role"] == "kv_both"
    assert option(argv, "--kv-cache-memory-bytes") == str(1 << 28)
    assert option(argv, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert option(argv, "--block-size") == "32"
    assert option(argv, "--served-model-name") == "smol"
    assert "--enable-prefix-caching" in argv
    assert "--enforce-eager" in argv


def test_on_gpus_block_size_and_compilation_are_vllms_and_the_pool_is_shared(tmp_path):
    wishes = VllmConfig(tensor_parallel=2, args=("--seed", "1"))
    argv = command(worker(tmp_path, vllm=wishes, max_context=4096), tmp_path / "p", cpu=False)
    assert not {"--block-size", "--enforce-eager"} & set(argv)
    assert option(argv, "--gpu-memory-utilization") == "0.6"  # has to be free at the start
    assert option(argv, "--tensor-parallel-size") == "2"
    assert option(argv, "--kv-cache-memory-bytes") == str(1 << 27)
    assert option(argv, "--max-model-len") == "4096"
    assert argv[-2:] == ["--seed", "1"], "own wishes come last"


def test_blocks_that_the_cpu_kernels_cannot_take_are_refused_before_vllm_starts(tmp_path):
    for block_tokens, cpu, refused in [(48, True, True), (48, False, False), (64, True, False)]:
        given = worker(tmp_path, vllm=VllmConfig(block_tokens=block_tokens))
        assert ("want a multiple of 32" in refusal(given, cpu=cpu)) == refused
    assert not refusal(worker(tmp_path), cpu=True)


def test_on_a_cpu_the_models_dtype_is_widened_unless_it_is_chosen(tmp_path):
    assert option(command(worker(tmp_path), tmp_path / "p", cpu=True), "--dtype") == "float32"
    assert option(command(worker(tmp_path), tmp_path / "p", cpu=False), "--dtype") == "auto"
    chosen = worker(tmp_path, dtype="bfloat16")
    assert option(command(chosen, tmp_path / "p", cpu=True), "--dtype") == "bfloat16"


def test_tools_and_reasoning_are_read_by_the_parsers_of_the_models_family(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text("{{ tools }} <tool_call> <think>")
    argv = command(worker(tmp_path), tmp_path / "p", cpu=True)
    assert "--enable-auto-tool-choice" in argv and "--chat-template" not in argv
    assert option(argv, "--tool-call-parser") == "hermes"
    assert option(argv, "--reasoning-parser") == "qwen3"


def test_a_template_that_knows_no_tools_is_wrapped(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    given = msgspec.structs.replace(worker(tmp_path), model_path=str(model))
    argv = command(given, tmp_path / "p", cpu=True)
    assert Path(option(argv, "--chat-template")).read_text().endswith("{{ messages }}")


def test_parsers_that_the_user_names_are_left_alone(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }} enable_thinking")
    said = ("--tool-call-parser=pythonic", "--reasoning-parser", "glm45")
    argv = command(worker(tmp_path, vllm=VllmConfig(args=said)), tmp_path / "p", cpu=True)
    assert argv[-3:] == list(said) and "hermes" not in argv and "qwen3" not in argv
    none = VllmConfig(args=("--no-enable-auto-tool-choice",))
    argv = command(worker(tmp_path, vllm=none), tmp_path / "p", cpu=True)
    assert not {"--tool-call-parser", "--chat-template", "--enable-auto-tool-choice"} & set(argv)


async def test_an_attached_engine_that_is_vllm_gets_vllms_fields(tmp_path):
    async def welcomed() -> Welcome:
        return msgspec.structs.replace(WELCOME, engine="vllm")

    address = f"unix:{tmp_path / 'control.sock'}"
    server = await ControlServer("its own", welcomed, FakeSessions(1 << 20)).serve(address)
    there = worker(tmp_path, url="http://127.0.0.1:1", control=address)
    attached = AttachedEngine(msgspec.structs.replace(there, token="its own"))
    await attached.start()
    await eventually(lambda: attached.ready)
    session = SessionRef("tenant", "id", b"\x01")
    assert attached.prepare_body({"model": "m"}, session) == with_session({"model": "m"}, session)
    await attached.stop(0)
    server.close()


def test_no_secret_is_on_the_command_line(tmp_path):
    settings = worker(tmp_path)
    assert "very secret" not in " ".join(command(settings, tmp_path / "p", cpu=True))
    assert environment(settings, "/elsewhere")["VLLM_API_KEY"] == "very secret"


@pytest.mark.parametrize(
    ("cores", "ranks", "reserved"), [(1, 1, 0), (2, 1, 0), (3, 1, 1), (4, 2, 0), (16, 2, 2)]
)
def test_the_model_gets_the_cores_that_it_has_without_a_connector(tmp_path, cores, ranks, reserved):
    settings = worker(tmp_path, vllm=VllmConfig(tensor_parallel=ranks))
    env = default_environment(settings, cpu=True, cores=cores, memory_nodes=ranks)
    assert env == {**env, "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved)}
    assert int(env["VLLM_MAX_STOP_STRINGS"]) == get_args(StopList)[1].max_length
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "2")])
def test_ranks_share_the_cores_where_memory_nodes_are_fewer(tmp_path, cores, threads):
    settings = worker(tmp_path, vllm=VllmConfig(tensor_parallel=3))
    env = default_environment(settings, cpu=True, cores=cores, memory_nodes=2)
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("nobind", threads)
    on_gpus = default_environment(settings, cpu=False, cores=cores, memory_nodes=2)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in on_gpus


@pytest.mark.parametrize(("cpu", "compiles"), [(True, False), (True, True), (False, False)])
def test_headers_are_prepared_only_where_a_model_is_compiled_on_a_cpu(tmp_path, cpu, compiles):
    args = ("--no-enforce-eager",) if compiles else ()
    settings = worker(tmp_path, vllm=VllmConfig(args=args))
    env = default_environment(settings, cpu=cpu, cores=4, memory_nodes=1)
    assert ("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS" in env) == (cpu and not compiles)
    argv = command(settings, tmp_path / "p", cpu=cpu)
    assert ("--enforce-eager" in argv) == (cpu and not compiles)


def test_settings_travel_in_a_private_file(tmp_path):
    settings = plugin_settings(worker(tmp_path))
    path = write_settings(settings)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert settings_from({"settings": str(path)}) == settings


def test_settings_that_are_not_there_or_make_no_sense(tmp_path):
    for extra in ({}, {"settings": "/nowhere/x"}, {"settings": 3}):
        with pytest.raises(BadSettings, match="settings"):
            settings_from(extra)
    (tmp_path / "x").write_text('{"store": 1}')
    with pytest.raises(BadSettings, match="are not valid"):
        settings_from({"settings": str(tmp_path / "x")})


def test_a_client_cannot_speak_for_another_session():
    forged = {"model": "m", "cache_salt": "theirs", "kv_transfer_params": {"thermocline": {}}}
    body = with_session(forged, SessionRef("tenant", "id", b"\x01\x02"))
    own = {"thermocline": {"tenant": "tenant", "session": "id"}}
    assert body == {"model": "m", "cache_salt": "0102", "kv_transfer_params": own}


def test_an_environment_without_vllm_has_an_error_of_its_own(tmp_path):
    assert "has no vLLM" in inspect_environment(sys.executable).problem
    assert "cannot be run" in inspect_environment(str(tmp_path / "python")).problem


def interpreter(folder: Path, **found: object) -> str:
    """Stands in for a Python that finds this."""
    whole = {"vllm": "0.32.1", "cpu": False, "missing": [], "plugin": True}
    whole["plugin_version"] = version("thermocline")
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(whole | found)}'\n")
    python.chmod(0o700)
    return str(python)


PROBLEMS = [
    ({"vllm": "0.31.0"}, "vLLM 0.31.0 is not supported; install vllm==0.32.* or vllm==0.33.*"),
    ({"vllm": "0.330.0"}, "vLLM 0.330.0 is not supported"),
    ({"missing": ["lmdb"]}, "lacks lmdb"),
    ({"plugin": False}, "our plug-in is missing"),
]


@pytest.mark.parametrize(("found", "words"), PROBLEMS)
def test_missing_parts_of_an_environment_are_named(tmp_path, found, words):
    for release in ("0.32.1", "0.33.0"):
        whole = inspect_environment(interpreter(tmp_path, vllm=release))
        assert (whole.version, whole.problem) == (release, "")
    assert words in inspect_environment(interpreter(tmp_path, **found)).problem


def test_a_plug_in_of_another_release_is_not_taken(tmp_path, monkeypatch):
    """An installed gateway adds no path: vLLM's environment has a plug-in of its own."""
    monkeypatch.setattr("engines.vllm_environment.environment.import_path", lambda: "")
    assert inspect_environment(interpreter(tmp_path)).problem == ""
    problem = inspect_environment(interpreter(tmp_path, plugin_version="0.0.1")).problem
    assert f"release 0.0.1, the gateway is {version('thermocline')}" in problem


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_stop_that_is_cancelled_ends_at_once(folder: Path, num_steps: int) -> None:
    """However far it is: a wait for a task that it has cancelled must not hide its own end."""
    engine = FakeServer(worker_config(folder))
    await engine.start()
    await eventually(lambda: engine.ready)
    body = scripted("chunks=100000 delay_s=0.01")
    try:
        async with engine.open(PATH, body, {}):
            stopping = asyncio.create_task(engine.stop(1000.0))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            stopping.cancel()
            async with asyncio.timeout(60):
                await asyncio.wait([stopping])
            assert stopping.cancelled()
    finally:
        await engine.stop(0)
