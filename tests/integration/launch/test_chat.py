"""``thermocline chat`` in a pipe and at a terminal, against the real gateway."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.stacks.fake_stack import FakeStack
from launch.remote.chat import PROMPT, Screen
from launch.remote.turn import RemoteTurn
from tests.command_line import program
from tests.integration.launch.terminal import Terminal

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
