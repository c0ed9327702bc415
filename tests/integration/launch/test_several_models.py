"""Several models behind one server, each in an engine process of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.asking import Answer, asked
from tests.command_line import thermocline
from tests.integration.launch.test_serve import Server
from tests.integration.tiny_models import write_model
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


FAKES = """
[[engines]]
name = "one"
kind = "fake"
[[engines]]
name = "two"
kind = "fake"
aliases = ["deux"]
load = "on-demand"
unload_after_s = "1h"
[[engines]]
name = "three"
kind = "fake"
load = "on-demand"
[[engines]]
name = "broken"
kind = "mlx"
model = "{broken}"
load = "on-demand"
"""


def ask(
    server: Server, path: str, body: Any = None, method: str | None = None, **more: str
) -> Answer:
    return asked(server.url + path, body, method=method, **more)


def chat(server: Server, model: str, session: str, *said: str) -> tuple[int, str, Any]:
    """Take a turn; returns status, the cache header and the body."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    status, headers, answer = ask(server, "/v1/chat/completions", body, session=session)
    return status, headers.get("x-thermocline-cache", ""), answer


def states(server: Server) -> dict[str, str]:
    return {x["id"]: x["state"] for x in ask(server, "/v1/models")[2]["data"]}


def metrics(server: Server) -> str:
    text: str = ask(server, "/metrics").content
    return text


def until_unloaded(server: Server, model: str) -> None:
    until(lambda: states(server)[model] == "unloaded", every_s=0.1)


def start(folder: Path, toml: str) -> Server:
    (folder / "t.toml").write_text(toml)
    return Server(folder, "--config", str(folder / "t.toml"))


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "broken").mkdir()
    write_model("llama", folder / "broken")
    for weights in (folder / "broken").glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    server = start(folder, FAKES.format(broken=folder / "broken"))
    yield server
    server.stop()


def test_each_model_answers_under_its_names(fakes):
    for name, model in [("one", "one"), ("two", "two"), ("deux", "two")]:
        status, _, answer = chat(fakes, name, "names", "hello")
        assert (status, answer["model"]) == (200, model)
    status, _, answer = chat(fakes, "four", "names", "hello")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "'one', 'two', 'three', 'broken'" in answer["error"]["message"]
    assert states(fakes)["two"] == states(fakes)["deux"] == "loaded"


def test_a_session_belongs_to_its_model(fakes):
    chat(fakes, "one", "shared", "hello")
    chat(fakes, "two", "shared", "hello")
    rows = [x for x in ask(fakes, "/v1/sessions")[2]["data"] if x["id"] == "shared"]
    assert sorted(x["model"] for x in rows) == ["one", "two"]
    (row,) = [x for x in ask(fakes, "/v1/sessions?model=two")[2]["data"] if x["id"] == "shared"]
    assert row["model"] == "two"
    assert ask(fakes, "/v1/sessions/shared/demote?model=one", {})[2]["model"] == "one"
    assert ask(fakes, "/v1/sessions/shared")[2]["model"] == "two"  # used last
    assert ask(fakes, "/v1/sessions/shared", method="DELETE")[0] == 200
    assert ask(fakes, "/v1/sessions/shared")[0] == 404


def test_a_model_that_cannot_be_loaded_is_503_and_the_others_go_on(fakes):
    until_unloaded(fakes, "broken")  # a deletion may have tried to load it
    status, _, answer = chat(fakes, "broken", "b", "hello")
    assert status == 503
    assert "the model broken cannot be loaded" in answer["error"]["message"]
    assert chat(fakes, "one", "b", "hello")[0] == 200
    assert ask(fakes, "/readyz")[0] == 200
    until_unloaded(fakes, "broken")
    assert 'model_loads_total{model="broken",outcome="failed"}' in metrics(fakes)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/completions", {"prompt": 7}),
        ("/v1/messages", {"messages": [{"role": "other", "content": "x"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": 5}),
        ("/v1/responses", {"input": "x", "max_output_tokens": "many"}),
        ("/v1/embeddings", {"input": {}}),
        ("/tokenize", {"prompt": []}),
    ],
)
def test_a_wrong_request_loads_no_model(fakes, path, wrong):
    chat(fakes, "two", "right", "hello")
    status, _, answer = ask(fakes, path, {"model": "three", **wrong})
    assert status in (400, 422), answer
    assert (states(fakes)["two"], states(fakes)["three"]) == ("loaded", "unloaded")


def test_a_stream_shows_life_while_its_model_waits_for_a_place(fakes):
    slowly = {"fake": "chunks=4 delay_s=4"}  # longer than until a sign of life
    busy = {"model": "two", "metadata": slowly, "messages": [{"role": "user", "content": "a b c"}]}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    chat(fakes, "two", "busy", "hello")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, fakes, "/v1/chat/completions", busy)
        time.sleep(0.3)
        answer = ask(fakes, "/v1/messages", {"model": "three", "stream": True, **body})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert slow.result()[0] == 200
    text = answer.content
    assert ": the model three waits to be loaded, number 1 in line, in place of two\n\n" in text
    assert "message_stop" in text and "event: error" not in text


def test_top_shows_all_models(fakes):
    chat(fakes, "one", "of-one", "hello")
    chat(fakes, "two", "of-two", "hello")
    shown = command(fakes, "top", "--once")
    assert shown.returncode == 0, shown.stderr
    for words in ("one on fake", "two on fake", "broken on", "of-one", "of-two"):
        assert words in shown.stdout
    as_json = command(fakes, "top", "--once", "--json")
    assert [x["server"]["model"] for x in json.loads(as_json.stdout)] == states_by_root(fakes)


def states_by_root(server: Server) -> list[str]:
    rows = ask(server, "/v1/models")[2]["data"]
    return list(dict.fromkeys(x["root"] for x in rows))


def command(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    return thermocline(*words, "--url", server.url)


def test_the_command_line_names_the_model_that_is_meant(fakes):
    for name in ("one", "two"):
        assert chat(fakes, name, "named", "hello")[0] == 200
    listed = command(fakes, "sessions", "list").stdout
    assert listed.split()[:2] == ["id", "model"]
    rows = json.loads(command(fakes, "sessions", "list", "--model", "two", "--json").stdout)
    assert {x["model"] for x in rows} == {"two"}
    moved = command(fakes, "sessions", "demote", "named", "--model", "one", "--json")
    assert [(x["model"], x["state"]) for x in json.loads(moved.stdout)] == [("one", "cold")]
    shown = command(fakes, "sessions", "show", "named", "--model", "two", "--json")
    assert [x["model"] for x in json.loads(shown.stdout)] == ["two"]
    assert command(fakes, "sessions", "forget", "named", "--model", "two").returncode == 0
    rows = json.loads(command(fakes, "sessions", "show", "named", "--json").stdout)
    assert [x["model"] for x in rows] == ["one"]
    wrong = command(fakes, "sessions", "list", "--model", "nine")
    assert (wrong.returncode, "'one', 'two'" in wrong.stderr) == (1, True)
    assert "ANTHROPIC_MODEL='deux'" in command(fakes, "connect", "claude", "--model", "deux").stdout
    assert "no model 'nine'" in command(fakes, "connect", "claude", "--model", "nine").stderr
    measured = command(fakes, "calibrate", "--model", "nine")
    assert (measured.returncode, "'one', 'two'" in measured.stderr) == (1, True)


def test_lists_metrics_and_snapshots_name_each_model(fakes):
    chat(fakes, "two", "listed", "hello")
    text = metrics(fakes)
    assert 'thermocline_engine_ready{model="one"} 1.0' in text
    assert text.count("# TYPE thermocline_engine_ready ") == 1
    assert 'thermocline_model_loads_total{model="two",outcome="loaded"}' in text
    assert 'thermocline_model_load_seconds_total{model="two"}' in text
    for query, model in [("", "one"), ("?model=two", "two")]:
        assert ask(fakes, f"/v1/snapshot{query}").content["server"]["model"] == model
    rows = {x["id"]: x for x in ask(fakes, "/v1/models")[2]["data"]}
    assert rows["two"]["engine"] == rows["deux"]["engine"] == "fake"
    assert rows["two"]["max_model_len"] > 0
    assert (rows["broken"]["engine"], rows["broken"]["max_model_len"]) == (None, None)


def test_verbs_load_a_model_where_they_need_it(fakes):
    chat(fakes, "two", "verbs", "hello")
    chat(fakes, "three", "verbs-3", "hello")
    assert states(fakes)["two"] == "unloaded"
    assert ask(fakes, "/v1/sessions/verbs/demote", {"tier": "disk"})[2]["state"] == "cold"
    assert states(fakes)["two"] == "unloaded"
    status, _, answer = ask(fakes, "/v1/sessions/verbs/pin", {})
    assert status in (200, 404)  # the fake engine forgets when it ends
    assert states(fakes)["two"] == "loaded"


@pytest.mark.parametrize("verb", ["demote", "prefetch", "pin", "unpin"])
def test_a_verb_for_a_session_that_is_nowhere_loads_no_model(fakes, verb):
    chat(fakes, "three", "here", "hello")
    chat(fakes, "two", "here", "hello")  # both have listed their sessions since the start
    status, _, answer = ask(fakes, f"/v1/sessions/nowhere/{verb}?model=three", {})
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    assert states(fakes)["three"] == "unloaded"


TAKING_TURNS = """
[engine]
hot_bytes = "64MiB"
[store]
ram_bytes = "64MiB"
disk_bytes = "256MiB"
[[engines]]
name = "one"
kind = "mlx"
model = "{model}"
load = "on-demand"
[[engines]]
name = "two"
kind = "mlx"
model = "{model}"
load = "on-demand"
unload_after_s = 1
[[engines]]
name = "always"
kind = "fake"
"""
WORDS = "the ship sailed over the cold sea towards the far coast " * 8


@pytest.mark.mlx
def test_models_that_take_turns_come_back_with_their_conversations(tmp_path):
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    server = start(tmp_path, TAKING_TURNS.format(model=tmp_path / "tiny"))
    try:
        said: dict[tuple[str, str], list[str]] = {}
        for turn in range(2):
            for model in ("one", "two"):
                for session in ("a", "b"):
                    history = said.setdefault((model, session), [])
                    history.append(f"{model} {session} {turn} {WORDS}")
                    status, cache, answer = chat(server, model, session, *history)
                    assert status == 200
                    assert cache.split(";")[0] == ("cold-disk" if turn else "miss")
                    history.append(answer["choices"][0]["message"]["content"])
                assert _engines(server) <= 2  # one place, and the fake one
        tokens = [x["tokens"] for x in ask(server, "/v1/sessions")[2]["data"]]
        assert len(tokens) == 4 and min(tokens) > 100

        # Sessions of a model that is not loaded are listed, cold, and can be deleted.
        until(lambda: states(server)["two"] == "unloaded", every_s=0.2)
        rows = ask(server, "/v1/sessions?model=two")[2]["data"]
        assert [(x["state"], x["tier"]) for x in rows] == [("cold", "disk")] * 2
        assert ask(server, "/v1/sessions/a?model=two", method="DELETE")[0] == 200

        # After a start a model's sessions are not known before it is loaded; they can be deleted.
        server.stop()
        server = start(tmp_path, TAKING_TURNS.format(model=tmp_path / "tiny"))
        listed = ask(server, "/v1/sessions")[2]
        assert (listed["data"], listed["unlisted_models"]) == ([], ["one", "two"])
        assert ask(server, "/v1/sessions/b", method="DELETE")[0] == 200
        assert ask(server, "/v1/sessions/b", method="DELETE")[0] == 404
        assert [x["id"] for x in ask(server, "/v1/sessions?model=one")[2]["data"]] == ["a"]
        assert ask(server, "/v1/sessions?model=two")[2]["data"] == []
    finally:
        server.stop()


def _engines(server: Server) -> int:
    children = psutil.Process(server.process.pid).children()
    return sum("engines." in " ".join(x.cmdline()) for x in children)


def test_what_does_not_fit_is_refused_with_the_sum(tmp_path):
    available = psutil.virtual_memory().available
    (tmp_path / "t.toml").write_text(
        f"[engine]\nhot_bytes = {available}\n[scheduler]\nmemory_low_bytes = '1GiB'\n"
        + "".join(f"[[engines]]\nname = '{x}'\nkind = 'mlx'\n" for x in "ab")
    )
    run = thermocline("serve", "--port", "0", "--config", str(tmp_path / "t.toml"))
    assert run.returncode == 1
    assert "are needed" in run.stderr and "of weights" in run.stderr
