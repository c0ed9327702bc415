"""A vLLM that somebody else started by the lines of docs/hardware.md, a gateway attached to it.

One start of vLLM serves all tests of this file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.stacks.product_stack import MIB, Stack, free_port, prose
from engines.about_vllm.environment import import_path, inspect_environment
from launch.machine.folders import default_cache_dir
from launch.machine.interpreters import find_python
from launch.sample.sample_model import sample_model

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

PYTHON = find_python(os.environ.get("THERMOCLINE_ENGINE__VLLM__PYTHON", ""))
if not PYTHON or inspect_environment(PYTHON).problem:
    pytest.skip("no vLLM here; run: bash launch/install.sh vllm", allow_module_level=True)

DOC = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
HEADING = "### A vLLM that was started elsewhere"
TOKEN = "a-token-of-the-test"
# For a small CPU, beside what the documentation says; a pool for three of the tests' chats.
SMALL = (
    "--kv-cache-memory-bytes 268435456 --dtype float32 --enforce-eager --block-size 32"
    " --max-model-len 1024 --max-num-seqs 2"
)
POOL_BLOCKS = 60


@dataclass
class Elsewhere:
    """vLLM by hand. ``log`` has what it said."""

    folder: Path
    port: int
    control_port: int
    argv: list[str]
    env: dict[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "vllm.log"

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def end(self, within_s: float) -> int:
        """As a container is stopped: asked by SIGTERM, and then all that is left is killed."""
        os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait(within_s)
        self.kill()
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def settings(self) -> dict[str, dict[str, object]]:
        """The gateway's, by which it attaches."""
        return {
            "engine": {
                "url": f"http://127.0.0.1:{self.port}",
                "control": f"tcp://127.0.0.1:{self.control_port}",
                "token": TOKEN,
            },
            # The gateway lets all of them be hot, so what turns cold is vLLM's doing.
            "scheduler": {"idle_after_s": 3600.0, "high_water": 1.0},
        }

    def wait_for_port(self, within_s: float = 900.0) -> None:
        end = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    def drop_blocks(self, within_s: float = 60.0) -> None:
        """vLLM refuses while blocks are held for a save."""
        url = f"http://127.0.0.1:{self.port}/reset_prefix_cache"
        request = urllib.request.Request(url, method="POST")
        request.add_header("authorization", f"Bearer {TOKEN}")
        end = time.monotonic() + within_s
        while True:
            with urllib.request.urlopen(request, timeout=60) as answer:
                if json.load(answer)["success"]:
                    return
            assert time.monotonic() < end, "blocks are still held"
            time.sleep(0.05)


def documented() -> tuple[dict[str, object], dict[str, str], list[str]]:
    """The plug-in's settings, vLLM's environment, and the options behind ``vllm serve MODEL``."""
    text = DOC.read_text().partition(HEADING)[2]
    settings, commands = re.findall(r"```(?:json)?\n(.*?)```", text, re.DOTALL)[:2]
    words = shlex.split(commands.split("\n\n")[0].replace("\\\n", ""))
    program = words.index("vllm")
    assert words[program : program + 3] == ["vllm", "serve", "MODEL"]
    return json.loads(settings), dict(x.split("=") for x in words[:program]), words[program + 3 :]


def started(folder: Path) -> Elsewhere:
    settings, variables, words = documented()
    port, control_port = free_port(), free_port()
    run = folder / "run"
    run.mkdir(mode=0o700)
    plugin = folder / "plugin.json"
    plugin.touch(mode=0o600)
    own = {
        "store": {"codec": "raw", "ram_bytes": 512 * MIB, "disk_bytes": 1024 * MIB},
        "runtime_dir": str(run),
        "disk_path": str(folder / "cold"),
        "token": TOKEN,
        "control": f"tcp://127.0.0.1:{control_port}",
    }
    assert own.keys() <= settings.keys()
    plugin.write_text(json.dumps(settings | own))
    options = [x.replace("/run/thermocline/plugin.json", str(plugin)) for x in words]
    options[options.index("--port") + 1] = str(port)
    model = str(sample_model(default_cache_dir(os.environ)))
    argv = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += [*options, *shlex.split(SMALL), "--num-gpu-blocks-override", str(POOL_BLOCKS)]
    env = {
        **os.environ,
        **variables,
        "VLLM_API_KEY": TOKEN,
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "PYTHONPATH": import_path(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    engine = Elsewhere(folder, port, control_port, argv, env)
    engine.start()
    return engine


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    engine = started(tmp_path_factory.mktemp("elsewhere"))
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def stack(elsewhere: Elsewhere) -> Iterator[Stack]:
    elsewhere.wait_for_port()
    with Stack(elsewhere.settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(sdk: openai.OpenAI, session: str, num_words: int = 400):
    return sdk.chat.completions.with_raw_response.create(
        model=sdk.models.list().data[0].id,
        messages=[{"role": "user", "content": prose(session, num_words)}],
        temperature=0,
        max_tokens=4,
        extra_headers={"X-Session-ID": session},
    )


def wait_for(
    sdk: openai.OpenAI, session: str, state: str, tier: str | None = None, within_s: float = 60
) -> None:
    end = time.monotonic() + within_s
    while True:
        row: dict[str, object] = {}
        with suppress(openai.APIStatusError):  # not attached, perhaps
            row = sdk.get(f"/sessions/{session}", cast_to=object)
        if row.get("state") == state and (tier is None or row["tier"] == tier):
            return
        assert time.monotonic() < end, row
        time.sleep(0.05)


def put_to_sleep(sdk: openai.OpenAI, elsewhere: Elsewhere, session: str) -> None:
    """A session that vLLM drops behind the gateway's back."""
    ask(sdk, session)
    wait_for(sdk, session, "idle", "ram")
    elsewhere.drop_blocks()
    wait_for(sdk, session, "cold")


def figures(url: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the last label's value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (
                sample.name,
                *(v for k, v in sample.labels.items() if k in ("event", "tier", "source")),
            ): sample.value
            for family in families
            for sample in family.samples
        }


def test_blocks_that_vllm_drops_turn_a_session_cold(sdk, elsewhere):
    put_to_sleep(sdk, elsewhere, "reset")
    answer = ask(sdk, "reset")
    cached = answer.parse().usage.prompt_tokens_details.cached_tokens
    assert answer.headers["x-thermocline-cache"] == f"cold-ram; tokens={cached}"
    assert cached > 300
    wait_for(sdk, "reset", "idle")


def test_blocks_that_vllm_reuses_turn_a_session_cold(sdk):
    ask(sdk, "old", 700)
    wait_for(sdk, "old", "idle", "ram")
    for name in ("new", "newer"):
        ask(sdk, name, 700)
    wait_for(sdk, "old", "cold")
    wait_for(sdk, "newer", "idle")


def test_both_metrics_tell_the_same(sdk, stack, elsewhere):
    put_to_sleep(sdk, elsewhere, "counted")
    ask(sdk, "counted")
    ours = figures(stack.url)
    assert ours["thermocline_engine_hot_capacity_bytes",] > 0
    assert ours["thermocline_tier_bytes", "ram"] > 0
    assert ours["thermocline_engine_events_total", "prompts"] >= 2
    end = time.monotonic() + 60
    while True:  # vLLM tells with its steps
        ask(sdk, "steps", 5)
        theirs = figures(f"http://127.0.0.1:{elsewhere.port}")
        restored = figures(stack.url)["thermocline_engine_events_total", "restored_tokens.ram"]
        told = theirs.get(("vllm:thermocline_events_total", "restored_tokens.ram"))
        by_source = theirs.get(("vllm:prompt_tokens_cached_by_source_total", "host"))
        if told == by_source == restored:
            break
        assert time.monotonic() < end, (theirs, restored)
        time.sleep(0.5)
    assert restored > 300
    assert theirs["vllm:thermocline_tier_bytes", "ram"] > 0
    assert theirs["vllm:thermocline_tier_available", "disk"] == 1


def test_a_gateway_that_comes_back_finds_its_sessions(sdk, stack, elsewhere):
    """The engine is none of its own, and goes on when a gateway ends."""
    ask(sdk, "kept")
    wait_for(sdk, "kept", "idle", "ram")
    again = elsewhere.folder / "again"
    shutil.copytree(stack.root / "data", again / "data")  # the secret, and so the salts
    with (
        Stack(elsewhere.settings, folder=again) as second,
        openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as other,
    ):
        wait_for(other, "kept", "idle", "ram")
        assert ask(other, "kept").headers["x-thermocline-cache"].startswith("hot; tokens=")
    assert elsewhere.process.poll() is None
    assert ask(sdk, "kept").headers["x-thermocline-cache"].startswith("hot; tokens=")


def test_an_engine_that_is_asked_to_end_comes_back_with_its_sessions(sdk, elsewhere):
    """Asked right behind an answer, while the turn is still being saved. The last test here."""
    said = ask(sdk, "ending", 700).parse().choices[0].message.content
    elsewhere.end(within_s=60)
    elsewhere.start()
    elsewhere.wait_for_port()
    wait_for(sdk, "ending", "cold", "disk", within_s=120)
    back = ask(sdk, "ending", 700)
    assert back.headers["x-thermocline-cache"].startswith("cold-disk; tokens=")
    assert back.parse().usage.prompt_tokens_details.cached_tokens > 600
    assert back.parse().choices[0].message.content == said
