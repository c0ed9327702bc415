"""``thermocline serve`` and ``thermocline sessions`` as processes, with the fake engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.asking import Answer, asked
from tests.command_line import thermocline
from tests.waiting import until

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, "-m", "launch"]
START_S = 90.0


class Server:
    """A running server; ``log`` grows while it runs."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        engine: str = "fake",
        calibrate: bool = False,
        within: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """``within``: a command that runs the command after it."""
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        environ["THERMOCLINE_STORE__CALIBRATE"] = str(calibrate).lower()
        environ["THERMOCLINE_STORE__LEARN_ON"] = "false"
        self.process = subprocess.Popen(
            [*within, *program, "serve", "--engine", engine, "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "THERMOCLINE_DATA_DIR": str(folder / "data")},
        )
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.url = self.wait_for(r"listening on (\S+);")[1]
        self.wait_for("ready after")

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if found := re.search(pattern, "".join(self.log)):
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{pattern!r} is not in the log:\n{''.join(self.log)}")

    def chat(self, session: str) -> Answer:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        return asked(f"{self.url}/v1/chat/completions", body, session=session)

    def try_it(self) -> str:
        """Send the request that the log suggests; the answer's text."""
        command = shlex.split(self.wait_for(r"try: (curl .*)")[1])
        head = command.index("-H")
        name, _, value = command[head + 1].partition(": ")
        assert command[0] == "curl" and command[-2] == "-d" and len(command) == 6
        assert (name.lower(), value) == ("content-type", "application/json")
        answer = asked(command[1], json.loads(command[-1]))
        return answer.content["choices"][0]["message"]["content"]

    def sessions(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return thermocline("sessions", *arguments, "--url", self.url)

    def stop(self) -> int:
        """End it as a user would; one that has ended keeps its code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    def _ended(self) -> int:
        code = self.process.wait(timeout=60)
        self._reading.join()
        self.process.stderr.close()
        return code


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    if running.process.poll() is None:
        running.stop()


def test_a_server_is_started_used_and_stopped(server, tmp_path):
    assert server.chat("team/a").status == 200
    listed = json.loads(server.sessions("list", "--json").stdout)
    assert [(row["id"], row["state"]) for row in listed] == [("team/a", "idle")]
    assert "team/a" in server.sessions("demote", "team/a").stdout
    (shown,) = json.loads(server.sessions("show", "team/a", "--json").stdout)
    assert shown["state"] == "cold"
    assert server.sessions("forget", "team/a").stdout == "forgotten: team/a\n"
    gone = server.sessions("show", "team/a")
    said = "error: team/a: 404: There is no such session."
    assert (gone.returncode, gone.stderr.strip()) == (1, said)

    assert server.stop() == 0
    secret = (tmp_path / "data" / "secret").read_bytes()
    assert secret.hex() not in "".join(server.log)
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \w+ +\S+: ", line) for line in server.log)


def test_of_a_killed_server_no_folder_stays(tmp_path):
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as cache:  # a short path
        server = Server(tmp_path, "--set", f"cache_dir={cache}")
        (folder,) = Path(cache, "run").iterdir()
        assert {"http.sock", "control.sock", "tmp"} <= {x.name for x in folder.iterdir()}
        server.process.kill()
        server.stop()
        until(
            lambda: not list(Path(cache, "run").iterdir()), START_S, "its engine removes the folder"
        )


def test_the_log_says_how_to_take_a_turn(server):
    assert "capital of France" in server.try_it()
    log = "".join(server.log)
    assert re.search(r"Z info +engine\.fake: the fake engine serves fake\n", log)  # one level only


def test_with_keys_only_their_owners_see_their_sessions(tmp_path):
    keys = tmp_path / "keys"
    key = thermocline("keys", "new", "alice", "--append", str(keys)).stdout.split()[1]
    server = Server(tmp_path, "--api-keys", str(keys))
    try:
        refused = server.sessions("list")
        assert (refused.returncode, "401" in refused.stderr) == (1, True)
        assert server.sessions("list", "--api-key", key).stdout == "no sessions\n"
        other = thermocline("keys", "new", "bob").stdout.split()
        for text, said in [
            ("nonsense", "stay as they were"),
            (other[3], "settings were read again: 1 keys"),
        ]:
            keys.write_text(text + "\n")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for(said)
            found = server.sessions("list", "--api-key", key)
            assert ("401" in found.stderr) == (text != "nonsense")
        assert server.sessions("list", "--api-key", other[1]).stdout == "no sessions\n"
    finally:
        server.stop()
    assert key not in "".join(server.log)
