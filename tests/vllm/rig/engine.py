"""A real vLLM engine with the plug-in, driven step by step. One start is shared by many tests."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engines.vllm_plugin.config import PluginSettings, write_settings
from engines.vllm_plugin.messages import receive
from engines.vllm_plugin.process.command import transfer_config
from engines.wire import (
    ControlReply,
    ControlRequest,
    EngineReport,
    FromEngine,
    GetStats,
    Hello,
    ListSessions,
    Notice,
    SessionReport,
    Sessions,
    Stats,
    Verb,
    VerbAnswer,
    frame,
)
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from tests.vllm.rig.device import skip_without_device

BLOCK = 32
POOL_BLOCKS = 40  # room for two of the tests' sessions: a third one evicts for real
TOKEN = "secret"
REPORTING = {
    "kv_connector": "ReportingConnector",
    "kv_connector_module_path": "tests.vllm.rig.reporting",
}
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    logprobs: list[float]
    cached: int
    restored: int
    tier: str | None
    reason: str | None
    finish: str | None


def may_fork() -> bool:
    """True if vLLM's processes can be forks of this one; spawned ones import vLLM for ten seconds.

    A fork has none of the threads of OpenMP's pool; and with numba loaded, vLLM's search through
    all modules for kernels to replace ends in an error.
    """
    return os.environ.get("OMP_NUM_THREADS") == "1" and "llvmlite" not in sys.modules


class RealEngine:
    def __init__(
        self,
        model: str,
        folder: Path,
        store: StoreConfig,
        *,
        connector: dict[str, str] | None = None,
        prepare: Callable[[Any], None] = lambda config: None,
        **options: Any,
    ) -> None:
        """``connector``: fields of vLLM's transfer configuration, on top of ours.

        ``prepare`` gets vLLM's whole configuration before the engine is made.
        """
        skip_without_device()
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        os.environ["PYTHONPATH"] = str(ROOT)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Of vLLM's own sockets; a test's folder can have too long a path for them.
        self._sockets = tempfile.mkdtemp(prefix="thermocline-rig-")
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets
        folder.chmod(0o700)
        self.settings = PluginSettings(
            store=store, runtime_dir=str(folder), disk_path=str(folder / "disk"), token=TOKEN
        )
        ours = msgspec.json.decode(transfer_config(write_settings(self.settings)))
        transfer = KVTransferConfig(**(ours | REPORTING | (connector or {})))
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": POOL_BLOCKS * BLOCK - BLOCK,
            "enforce_eager": True,
            "block_size": BLOCK,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "kv_cache_memory_bytes": 1 << 30,
            "prefix_caching_hash_algo": "sha256_cbor",
        }
        args = EngineArgs(model=model, kv_transfer_config=transfer, **(defaults | options))
        config = args.create_engine_config()
        prepare(config)
        if may_fork():
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = LLMEngine.from_vllm_config(config)
        self._count = 0

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def ask(self, ids: Sequence[int], session: str = "", **how: Any) -> Result:
        """One request alone; ``session`` "" = anonymous: restored by content, never saved."""
        return self.ask_all([(ids, session)], **how)[0]

    def ask_all(
        self,
        prompts: Sequence[tuple[Sequence[int], str]],
        abort_when: Callable[[], bool] | None = None,
        **how: Any,
    ) -> list[Result]:
        """``how``: see ``begin``."""
        return self.finish([self.begin(x, y, **how) for x, y in prompts], abort_when)

    def begin(
        self,
        ids: Sequence[int],
        session: str = "",
        *,
        tokens: int = 24,
        salt: str | None = None,
        **sampling: Any,
    ) -> str:
        """Send a request, and return its name; ``finish`` waits for its answer."""
        from vllm import SamplingParams

        self._count += 1
        name = f"request{self._count}"
        ours = {"thermocline": {"tenant": "t", "session": session}}
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=1,
            extra_args={"kv_transfer_params": ours} if session else None,
            **sampling,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt:
            prompt["cache_salt"] = salt
        self.engine.add_request(name, prompt, params)
        return name

    def finish(
        self, names: list[str], abort_when: Callable[[], bool] | None = None
    ) -> list[Result]:
        """The answers to these requests, all that were begun."""
        last: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            last |= {x.request_id: x for x in self.engine.step()}
            if abort_when is not None and abort_when():
                self.engine.abort_request(names)
                abort_when = None
        return [_result(last.get(x)) for x in names]

    def forget_local(self, within_s: float = 60.0) -> bool:
        """Empty vLLM's own prefix cache; it refuses while any block is held."""
        end = time.monotonic() + within_s
        while not (done := self.engine.reset_prefix_cache()) and time.monotonic() < end:
            time.sleep(0.05)
        return done

    # ---- the control connection

    def control(self, verb: Verb) -> VerbAnswer:
        path = self.settings.control_address.removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(60)
            link.connect(path)
            link.sendall(frame(ControlRequest(0, Hello(TOKEN))) + frame(ControlRequest(1, verb)))
            while True:
                message = msgspec.msgpack.decode(receive(link), type=FromEngine)
                if not isinstance(message, Notice) and message.number == 1:
                    assert isinstance(message, ControlReply)
                    return message.answer

    def sessions(self) -> dict[str, SessionReport]:
        answer = self.control(ListSessions())
        assert isinstance(answer, Sessions), answer
        return {x.id: x for x in answer.sessions}

    def counters(self) -> dict[str, int]:
        return self.report().counters

    def report(self) -> EngineReport:
        answer = self.control(GetStats())
        assert isinstance(answer, Stats), answer
        return answer.report

    def wait_saved(self, session: str, within_s: float = 60.0) -> SessionReport:
        """Wait until the newest turn of the session is in the store."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            waiting = self.report().save_queue_bytes
            found = self.sessions().get(session)
            if not waiting and found and found.tier:
                return found
            time.sleep(0.05)
        raise AssertionError(f"session {session} was not saved")


@contextmanager
def opened(
    folder: Path, write: Callable[[Path], Path], store: StoreConfig, **options: Any
) -> Iterator[RealEngine]:
    """An engine of the model that ``write`` makes, without a tokenizer if it has none."""
    (folder / "model").mkdir()
    (folder / "vllm").mkdir()
    model = write(folder / "model")
    plain = not (model / "tokenizer.json").exists()
    engine = RealEngine(str(model), folder / "vllm", store, skip_tokenizer_init=plain, **options)
    yield engine
    engine.close()


def ref(session: str) -> SessionRef:
    return SessionRef("t", session, b"")


def _result(output: Any) -> Result:
    if output is None:
        return Result([], [], 0, 0, None, None, None)
    answer, params = output.outputs[0], output.kv_transfer_params or {}
    return Result(
        list(answer.token_ids),
        [x[t].logprob for x, t in zip(answer.logprobs, answer.token_ids, strict=True)],
        output.num_cached_tokens or 0,
        params.get("restored_tokens", 0),
        params.get("tier"),
        params.get("reason"),
        answer.finish_reason,
    )
