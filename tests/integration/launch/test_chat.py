"""``thermocline chat``, ``connect`` and ``top`` against the real gateway."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from launch.cli.main import app
from launch.errors import LaunchError
from launch.machine.folders import announced
from launch.remote.chat import PROMPT, Screen
from launch.remote.server import describe_server
from launch.remote.turn import RemoteTurn
from tests.asking import asked, http_ok, saying
from tests.command_line import program

COMMAND = [sys.executable, "-m", "launch", "chat"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("chat")) as running:
        yield running


def piped(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return program(*COMMAND, *arguments, input=lines, timeout=60)


def test_a_pipe_gets_the_answers_and_the_notes_go_elsewhere(stack):
    lines = "Hello there\n\n/sleep\nAnd now?\n/pin\n/info\n//slash\n/forget\n/new\n/quit\nnever\n"
    ran = piped(lines, "--url", stack.url, "--session", "piped")
    assert ran.returncode == 0, ran.stderr
    answers = ["You said: Hello there", "You said: And now?", "You said: /slash"]
    assert ran.stdout.splitlines() == answers
    notes = ran.stderr.splitlines()
    assert notes[1].startswith("miss · 0 of 3 tokens reused · because: never-stored · first token")
    assert notes[2].startswith("session piped is cold · cold copy in ram")
    assert notes[3].startswith("cold-ram · ")
    assert notes[4].endswith("pinned")
    assert "piped is forgotten" in ran.stderr


def test_a_turn_says_that_another_session_was_hot(capsys):
    screen, turn = Screen(), RemoteTurn(source="hot", cached_tokens=36, prompt_tokens=37)
    for was_hot in (True, False):
        screen.turn(turn, None, was_hot)
    screen.turn(RemoteTurn(source="cold-ram", cached_tokens=32, prompt_tokens=37), None, False)
    assert capsys.readouterr().err.splitlines() == [
        "hot · 36 of 37 tokens reused",
        "hot, of another session that begins the same · 36 of 37 tokens reused",
        "cold-ram · 32 of 37 tokens reused",
    ]


@pytest.mark.slow
def test_a_failure_is_reported_and_ends_in_an_exit_code(stack):
    assert "there is no /nap" in piped("/nap\n", "--url", stack.url).stderr
    unknown = piped("/pin\n", "--url", stack.url)
    assert (unknown.returncode, "error: 404" in unknown.stderr) == (1, True)
    absent = piped("Hi\n", "--url", "http://127.0.0.1:1")
    assert (absent.returncode, "does not answer" in absent.stderr) == (1, True)
    quiet = piped("Hi\n", "--url", stack.url, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("You said: Hi\n", "")


@pytest.mark.slow
def test_a_terminal_of_another_encoding(stack):
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = {
        "input": "Gr\u00fc\u00dfe\nHello\n",
        "env": variables,
        "encoding": "latin-1",
        "timeout": 60,
    }
    ran = program(*COMMAND, "--url", stack.url, **said)
    assert (ran.returncode, ran.stdout) == (1, "You said: Hello\n")
    assert "error: this line is not text in ascii, and was not sent" in ran.stderr
    assert "miss ? 0 of 2 tokens reused" in ran.stderr


@pytest.mark.slow
def test_streams_that_are_closed_or_full(stack):
    thermocline = f"{sys.executable} -m launch"
    for words, code, said in (
        (f"chat --url {stack.url} <&-", 0, "/help lists commands"),
        (f"sessions --url {stack.url} --json >&-", 0, ""),
        ("keys new bob >/dev/full", 1, "error: the output cannot be written: No space left"),
    ):
        ran = program("bash", "-c", f"{thermocline} {words}", timeout=60)
        assert (ran.returncode, said in ran.stderr, "Traceback" in ran.stderr) == (
            code,
            True,
            False,
        )


@pytest.mark.slow
def test_a_chat_at_a_terminal(stack):
    screen = Terminal(*COMMAND, "--url", stack.url, "--session", "shown")
    for typed, words in (
        ("Hello\n", "session shown is idle"),
        ("/sleep\n", "session shown is cold"),
        ("/wake\n", "is idle"),
    ):
        screen.until(PROMPT)  # keys pressed before it is there may be lost
        screen.type(typed)
        screen.until(words)
    screen.until(PROMPT)
    screen.type("\x04")
    assert screen.end() == 0


def test_control_characters_of_an_answer_do_nothing(capsys):
    screen = Screen()
    screen.piece("a\x1b[31mb\x07\n")
    screen.turn(RemoteTurn(source="unknown"), {"id": "x\x1b[2J", "state": "idle"})
    out, err = capsys.readouterr()
    assert out == "a?[31mb?\n"
    assert "\x1b[2J" not in err


def test_a_size_that_is_not_known_yet_is_not_shown(capsys):
    session = {"id": "a", "state": "idle", "tokens": 45, "bytes": 0}
    Screen().session(session, "a")
    Screen().session({**session, "bytes": 2 << 20}, "a")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("is idle · 45 tokens")
    assert second.endswith("is idle · 45 tokens in 2 MiB")


WAIT_S = 60.0


class Terminal:
    def __init__(self, *command: str) -> None:
        self._screen, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"},
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""

    def until(self, words: str) -> None:
        """Wait until these words were shown since something was typed."""
        end = time.monotonic() + WAIT_S
        while words not in self._seen:
            assert time.monotonic() < end, self._seen
            self._read()

    def _read(self) -> None:
        if select.select([self._screen], [], [], 0.2)[0]:
            self._seen += os.read(self._screen, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        self._seen = ""
        os.write(self._screen, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read on until the program has ended: a full terminal would hold it up."""
        end = time.monotonic() + WAIT_S
        try:
            while self._process.poll() is None and time.monotonic() < end:
                self._read()
        except OSError:  # the other end is closed
            pass
        code = self._process.wait(WAIT_S)
        os.close(self._screen)
        return code


KEYS = {tenant: generate_key(tenant) for tenant in ("alice", "bob")}
LINES = [line for _, line in KEYS.values()]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("top")
    with FakeStack(folder, gateway={"api_keys": LINES}) as running:
        say(running.url, "alice", "hers")
        say(running.url, "bob", "his")
        yield running


def say(url: str, tenant: str, session: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    key = KEYS[tenant][0]
    assert asked(f"{url}/v1/chat/completions", body, key=key, session=session).status == 200


def top(keyed: FakeStack, *arguments: str, tenant: str = "alice"):
    key = KEYS[tenant][0]
    return CliRunner().invoke(app, ["top", "--url", keyed.url, "--api-key", key, *arguments])


def test_one_frame_for_a_pipe(keyed):
    shown = top(keyed)
    assert shown.exit_code == 0, shown.output
    assert f"{MODEL} on fake" in shown.output
    assert "tenant alice" in shown.output
    assert "hers" in shown.output
    assert "his" not in shown.output.split()
    assert "0 of 1 session(s), pinned" in top(keyed, "--only", "pinned").output


def test_the_snapshot_as_json(keyed):
    shown = json.loads(top(keyed, "--json", tenant="bob").output)
    assert [x["id"] for x in shown["sessions"]] == ["his"]
    assert shown["server"]["model"] == MODEL


def test_a_server_that_cannot_be_watched_is_reported(keyed):
    wrong = CliRunner().invoke(app, ["top", "--url", keyed.url, "--api-key", "wrong", "--once"])
    assert "another API key" in str(wrong.exception)
    absent = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:1", "--once"])
    assert "does not answer" in str(absent.exception)
    assert isinstance(top(keyed, "--sort", "luck").exception, LaunchError)


@pytest.mark.slow
def test_the_live_view_follows_the_server_until_it_is_interrupted(keyed):
    screen = live_view(keyed, "alice", "--sort", "tokens")
    screen.until("all, by tokens")
    say(keyed.url, "alice", "another")
    screen.until("another")
    screen.interrupt()
    assert screen.end() == 0


def live_view(keyed: FakeStack, tenant: str, *arguments: str) -> Terminal:
    command = [sys.executable, "-m", "launch", "top", "--url", keyed.url]
    return Terminal(*command, "--api-key", KEYS[tenant][0], *arguments)


@pytest.mark.slow
def test_a_server_that_goes_is_waited_for(keyed):
    """Last: no test after it has a server."""
    screen = live_view(keyed, "bob")
    screen.until(f"{MODEL} on fake")
    keyed.terminate()
    screen.until("trying again")
    screen.interrupt()
    assert screen.end() == 0


GONE = "http://127.0.0.1:1"


def test_connect_shows_and_writes(stack, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    run = CliRunner()
    shown = run.invoke(app, ["connect", "claude", "--url", stack.url])
    written = run.invoke(app, ["connect", "claude", "--url", f"{stack.url}/", "--write"])
    by_hand = run.invoke(app, ["connect", "cline", "--url", stack.url, "--write"])
    assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
    assert written.exit_code == 0, written.output
    env = json.loads((home / ".claude" / "settings.json").read_text())["env"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (stack.url, MODEL)
    assert by_hand.exit_code != 0


def test_the_server_that_runs_here_needs_no_address(stack, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("THERMOCLINE_URL", raising=False)
    run, doctor = CliRunner(), ["doctor", "--set", "engine.kind=fake", "--json"]
    with announced(tmp_path, stack.url):
        shown = run.invoke(app, ["connect", "claude"])
        assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
        port = ["--set", f"gateway.port={stack.port}"]
        found = {x["about"]: x for x in json.loads(run.invoke(app, [*doctor, *port]).output)}
        assert found["server"]["text"].startswith(f"{stack.url} packs sessions with words:")
        assert "is that of the server which runs here" in found["port"]["text"]
        alone, verb = (run.invoke(app, ["sessions", *x, "--json"]) for x in ([], ["list"]))
        assert alone.exit_code == 0
        assert [x["id"] for x in json.loads(alone.output)] == [
            x["id"] for x in json.loads(verb.output)
        ]
    found = {x["about"]: x for x in json.loads(run.invoke(app, doctor).output)}
    assert found["server"] == {"about": "server", "verdict": "ok", "text": "no server runs here"}


def test_doctor_and_sessions_find_the_server_that_is_named(stack, tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
    run, doctor = CliRunner(), ["doctor", "--set", "engine.kind=fake", "--json"]

    def server(*options: str) -> dict[str, str]:
        found = json.loads(run.invoke(app, [*doctor, *options]).output)
        return {x["about"]: x for x in found}["server"]

    assert server("--url", f"{stack.url}/v1")["text"].startswith(f"{stack.url} packs sessions")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    assert asked(f"{stack.url}/v1/chat/completions", body, session="named").status == 200
    listed = run.invoke(app, ["sessions", "--url", stack.url])
    assert listed.exit_code == 0 and "named" in listed.output
    monkeypatch.setenv("THERMOCLINE_URL", stack.url)
    assert server()["text"].startswith(f"{stack.url} packs sessions")
    monkeypatch.setenv("THERMOCLINE_URL", GONE)
    assert server()["verdict"] == "warning"
    assert server()["text"] == f"no Thermocline server answers at {GONE} (--url, THERMOCLINE_URL)"


@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"object": "list", "codec": 3}'])
def test_a_server_of_another_kind_is_none_of_ours(content: bytes, tmp_path: Path) -> None:
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    with saying(http_ok(content)) as address, announced(tmp_path, f"http://{address}"):
        assert describe_server(environ) == ""
    with announced(tmp_path, GONE):
        assert describe_server(environ) == ""


def test_a_server_that_wants_a_key_is_known_for_one(tmp_path: Path) -> None:
    keys = {"gateway": {"api_keys": ["t:" + "0" * 64]}}
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    with FakeStack(tmp_path / "stack", **keys) as stack, announced(tmp_path, stack.url):
        assert "wants a key (THERMOCLINE_API_KEY)" in describe_server(environ)
