"""The command line as a user meets it, run in this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from launch.cli.main import app
from launch.cli.options import FLAGS
from tests.command_line import program

ROOT = Path(__file__).parents[4]
ATTACHED = ("serve", "--engine-url", "http://h:1", "--port", "0", "--engine-control")


def test_the_version_is_the_one_that_is_installed(run):
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run("--version") == (0, f"thermocline {expected}\n", "")


def test_config_shows_values_and_where_they_come_from(run, monkeypatch):
    monkeypatch.setenv("THERMOCLINE_STORE__REDIS_URL", "redis://:hush-hush@host:6379/0")
    code, out, _ = run("config", "--json", "--set", "engine.max_batch=3")
    shown = json.loads(out)
    assert code == 0
    assert shown["engine.max_batch"] == {"value": 3, "from": "--set"}
    assert shown["engine.hot_bytes"]["from"].startswith("derived: 35%")
    assert shown["store.redis_url"]["value"] == "redis://:***@host:6379/0"
    code, table, _ = run("config")
    assert "hush-hush" not in out + table
    assert "environment THERMOCLINE_STORE__REDIS_URL" in table


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["config", "--set", "engine.max_bach=3"], 2, "did you mean engine.max_batch?"),
        (["config", "--profile", "gpu"], 2, "there is no profile 'gpu'"),
        (["serve", "--model", "nope", "--port", "0"], 2, "'nope' is no model"),
        (["serve", "--hot", "4G"], 2, "engine.hot_bytes (from --hot): '4G' is not a size"),
        (["serve", "--port", "99999"], 2, "gateway.port (from --port)"),
        (["serve", "--engine", "nope", "--model", "a/b", "--port", "0"], 2, "no engine is called"),
        (["serve", "--engine", "fake", "--codec", "zip", "--port", "0"], 2, "no codec named 'zip'"),
        (["serve", "--engine", "fake", "--host", "0.0.0.0", "--port", "0"], 2, "--allow-anonymous"),
        (["serve", "--engine", "fake", "--codec", "os:system", "--port", "0"], 2, "cannot be made"),
        (["serve", "--engine", "fake", "--codec", "os:sep", "--port", "0"], 2, "is no codec"),
        (["serve", "--engine", "os:getcwd", "--model", "a/b", "--port", "0"], 2, "makes no engine"),
        (["serve", "--engine", "os:sep", "--model", "a/b", "--port", "0"], 2, "makes no engine"),
        (["serve", "--engine", "ast:Dict", "--model", "a/b", "--port", "0"], 2, "is no engine"),
        (["sessions", "list", "--api-key", "two\nlines"], 2, "the API key holds"),
        (["serve", "--engine", "attached", "--port", "0"], 1, "engine.control"),
        (["serve", "--engine", "fake", "--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1"),
        (["serve", "--engine", "fake", "--api-keys", "/nope", "--port", "0"], 2, "API keys /nope"),
        (
            ["serve", "--engine", "fake", "--data-dir", "/etc/hosts", "--port", "0"],
            1,
            "hosts cannot be made: this",
        ),
        ([*ATTACHED, "tcp://h:1", "--redis", "foo"], 2, "store.redis_url"),
        ([*ATTACHED, "foo"], 1, "engine.control must be like unix:/path or tcp://host:port"),
        ([*ATTACHED, "unix:/s", "--engine-url", "http://h:70000"], 1, "engine.url must be like"),
        (["keys", "new", "#bob"], 2, "'#bob' cannot be a tenant's name"),
        (["sessions", "list", "--url", "http://127.0.0.1:1"], 1, "does not answer"),
        (["sessions", "demote", "a", "--tier", "tape"], 2, "there is no tier 'tape'"),
        (["sessions", "forget", ""], 2, "'' is no session's id"),
        (["sessions", "show", "."], 2, "'.' is no session's id"),
        (["plan", "--model", "nope"], 2, "'nope' is no model"),
        (["plan", "--model", "no-one-1/not-here"], 1, "not on this machine yet"),
    ],
)
def test_mistakes_end_in_one_sentence(run, arguments, code, words):
    found, _, err = run(*arguments)
    last = err.strip().splitlines()[-1]
    assert (found, last.startswith("error: ")) == (code, True)
    assert words in last
    assert "Traceback" not in err


def test_unknown_commands_and_options_are_usage_errors(run):
    assert run("frobnicate")[0] == 2
    assert run("serve", "--hott", "1")[0] == 2


def test_plan(run, model):
    code, out, _ = run("plan", "--model", str(model), "--context", "100,4096", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["model"] == "tiny-llama"
    assert plan["wanted_context"] == 4096
    assert [x["context"] for x in plan["contexts"]] == [100, 4096]
    code, out, _ = run("plan", "--model", str(model))
    assert code == 0
    assert "2048" in out
    assert "8192" not in out  # longer than the model can
    code, _, err = run("plan", "--model", str(model), "--context", "5000")
    assert (code, "takes 1 to 4096 tokens" in err) == (2, True)


def test_plan_promises_no_session_of_a_model_that_cannot_be_loaded(run, model):
    huge = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "vocab_size": 512}
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | huge | {"num_hidden_layers": 4000}))
    here = [str(model), "--set", "engine.kind=mlx"]
    code, out, _ = run("plan", *here)
    assert code == 0
    said = r"does not fit: [\d.]+ TiB of weights, [\d.]+ [GM]iB here"  # what is free here changes
    assert re.fullmatch(f"{said}\n", out)
    code, as_json, _ = run("plan", *here, "--json")
    assert re.fullmatch(said, json.loads(as_json)["refused"])
    assert [x["context"] for x in json.loads(as_json)["contexts"]] == [2048]
    code, _, err = run("plan", *here, "--sessions", "200", "--context", "2048")
    assert code == 2 and re.fullmatch(f"error: {said}\n", err)


def test_plan_needs_config_json_alone(run, model):
    (model / "model.safetensors").unlink()
    code, out, _ = run("plan", "--model", str(model))
    assert (code, "2048" in out) == (0, True)
    code, _, err = run("serve", "--model", str(model), "--engine", "mlx", "--port", "0")
    assert (code, "holds no weights" in err) == (2, True)


def test_a_hot_budget_that_nothing_fits_into_is_refused_at_once(run, model):
    small = ["--model", str(model), "--hot", "1MiB", "--set", "engine.kind=mlx"]
    code, out, _ = run("plan", *small)
    assert code == 0
    assert out.startswith("alive: 0 sessions of 2,048 tokens")
    assert "usable context: 0 of 4096 tokens" in out
    assert "serve will refuse this: hot_bytes = 1048576 is too little" in " ".join(out.split())
    code, _, err = run("serve", *small, "--port", "0")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: engine.hot_bytes = 1048576 is too little")


def test_a_new_key_is_shown_once_and_kept_as_a_hash(run, tmp_path):
    file = tmp_path / "keys"
    for tenant in ("alice", "bob"):
        code, out, _ = run("keys", "new", tenant, "--append", str(file))
        key = out.splitlines()[0].split()[1]
        assert code == 0
        assert key not in file.read_text()
    assert [line.partition(":")[0] for line in file.read_text().splitlines()] == ["alice", "bob"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_key_file_without_a_key_does_not_open_the_server(run, tmp_path):
    (tmp_path / "keys").write_text("# none yet\n")
    arguments = ("serve", "--engine", "fake", "--api-keys", str(tmp_path / "keys"), "--port", "0")
    code, _, err = run(*arguments)
    assert (code, "holds no API key" in err) == (2, True)


def test_doctor_finds_what_is_wrong(run, model):
    code, out, _ = run("doctor", "--json", "--model", str(model), "--set", "gateway.port=0")
    findings = {x["about"]: x for x in json.loads(out)}
    assert findings["package"]["verdict"] == "ok"
    assert findings["model"]["text"] == "tiny-llama: 2 growing layers"
    arguments = ["--set", "engine.kind=fake", "--set", "gateway.port=0"]
    broken = [*arguments, "--set", "store.redis_url=redis://127.0.0.1:1"]
    code, out, _ = run("doctor", "--json", *broken, "--set", "engine.hot_bytes=900TiB")
    findings = {x["about"]: x for x in json.loads(out)}
    assert code == 1
    assert findings["redis"]["verdict"] == "failure"
    assert "lower engine.hot_bytes" in findings["memory"]["text"]
    words = ["doctor", "--json", "--set", "engine.kind=mxl", "--set", "gateway.port=0"]
    assert "no engine is called 'mxl'" in verdict(run(*words)[1], "engine")[1]


@pytest.fixture
def two(model, tmp_path):
    """The options that name two models."""
    other = shutil.copytree(model, tmp_path / "other")
    return ["--model", str(model), "--model", str(other), "--set", "engine.kind=mlx"]


def test_several_models_are_planned_each_with_its_part(run, two):
    budgets = ["--hot", "100MiB", "--ram", "64MiB"]
    code, out, _ = run("plan", *two, *budgets, "--json")
    plans = json.loads(out)
    assert (code, list(plans)) == (0, ["tiny-llama", "other"])
    assert [x["budgets"]["hot"] for x in plans.values()] == [50 << 20] * 2
    code, out, _ = run("plan", *two, *budgets)
    assert (code, "other (always), with its part of this machine:" in out) == (0, True)
    assert "engines: 1 of 2 parts" in run("config", *two)[1]
    code, _, err = run("plan", *two, "--machines")
    assert (code, "for one model" in err) == (2, True)


def test_doctor_counts_the_memory_of_all_models_once(run, two):
    doctor = ["doctor", "--json", *two, "--set", "gateway.port=0"]
    code, out, _ = run(*doctor, "--set", "engine.hot_bytes=900TiB", "--set", "store.ram_bytes=1GiB")
    assert code == 1
    assert "may take 900.0 TiB" in verdict(out, "memory")[1]
    assert [x["about"] for x in json.loads(out) if x["about"].startswith("model")] == [
        "model of tiny-llama",
        "model of other",
    ]


def test_doctor_knocks_at_the_engine_that_runs_elsewhere(run):
    elsewhere = ["doctor", "--json", "--set", "engine.url=http://127.0.0.1:1"]
    elsewhere += ["--set", "gateway.port=0"]
    with socket.create_server(("127.0.0.1", 0)) as there:
        control = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        words = [*elsewhere, "--set", f"engine.control={control}"]
        assert verdict(run(*words)[1], "engine")[0] == "ok"
    assert "nothing listens" in verdict(run(*words)[1], "engine")[1]
    words[-1] = "engine.control=foo"
    assert "engine.control must be like" in verdict(run(*words)[1], "engine")[1]
    assert "without our plug-in" in verdict(run(*elsewhere)[1], "engine")[1]


def verdict(out: str, about: str) -> tuple[str, str]:
    (found,) = (x for x in json.loads(out) if x["about"] == about)
    return found["verdict"], found["text"]


def test_every_option_of_serve_sets_something():
    """``options.chosen`` finds them by their names."""
    serve = get_command(app).commands["serve"]
    flags = {flag for parameter in serve.params for flag in parameter.opts}
    assert flags == {*FLAGS, "--profile", "--config", "--set"}


@pytest.mark.parametrize(
    ("profile", "width", "noted"),
    [("gb10", 2, True), ("cpu", 4 if sys.platform == "linux" else 2, False)],
)
def test_a_plan_counts_for_the_machine_of_the_profile(
    run, model, monkeypatch, profile, width, noted
):
    monkeypatch.setenv("PATH", "/nowhere")  # no program finds a GPU
    code, out, _ = run("plan", "--model", str(model), "--profile", profile, "--json")
    assert code == 0
    plan = json.loads(out)
    per_token = 2 * 2 * (64 + 64) * width  # layers, heads, keys and values
    assert plan["live_bytes_per_token"] == per_token
    assert any("no GPU here" in x for x in plan["notes"]) == noted


COMMAND = Path(sys.executable).with_name("thermocline")


def test_a_shell_completes_commands_and_options():
    for typed, at, wanted in (
        ("thermocline ser", 1, "serve"),
        ("thermocline chat --mod", 2, "--model"),
        ("thermocline sessions sh", 2, "show"),
    ):
        asked = {
            "_THERMOCLINE_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(at),
        }
        found = program(COMMAND, env={**os.environ, **asked}, timeout=60)
        assert found.stdout.split() == [wanted]
