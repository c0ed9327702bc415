"""The instrument of a serving engine, for programs that look at a model through it.

    python -m tests.vllm.rig.instrument MODEL instrument layer

prints what ``look`` of ``instrument_facts`` and of ``layer_facts`` finds. The engine is in the
program's own process, so that the model's modules can be looked at, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engines.vllm_plugin.measuring.request_runner import LOGITS_PROCESSOR, WORKER_EXTENSION
from kvstore.config import StoreConfig
from tests.vllm.rig.device import skip_without_device
from tests.vllm.rig.engine import ROOT, RealEngine
from tests.vllm.rig.measuring_front import MeasuringFront

POOL_BLOCKS = 200
LONGEST = 1500  # tokens
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}


def facts_of(program: str, *words: str) -> dict[str, Any]:
    """What a program of the rig has seen."""
    skip_without_device()
    command = [sys.executable, "-m", f"tests.vllm.rig.{program}", *words]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == -signal.SIGILL:  # int8 products on some virtual machines with AMX
        pytest.skip("a kernel of vLLM's wheel has an instruction that this processor lacks")
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("facts: ")] or [done.stderr]
    found: dict[str, Any] = json.loads(line.removeprefix("facts: "))
    return found


def main(model: Path, kinds: list[str]) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    config = json.loads((model / "config.json").read_text())
    folder = model.with_name(f"{model.name}-vllm")
    folder.mkdir()
    engine = RealEngine(
        str(model),
        folder,
        StoreConfig(codec="raw", calibrate=False, ram_bytes=1 << 24, disk_bytes=0),
        logits_processors=[LOGITS_PROCESSOR],
        worker_extension_cls=WORKER_EXTENSION,
        num_gpu_blocks_override=POOL_BLOCKS,
        max_model_len=LONGEST,
        dtype=config.get("dtype") or config["torch_dtype"],
    )
    front = MeasuringFront(engine)
    worker: Any = get_kv_transfer_group()

    def looked() -> dict[str, object]:
        instrument = worker._worker.measuring.open_instrument()
        looks = {x: import_module(f"tests.vllm.rig.{x}_facts").look for x in kinds}
        return {kind: look(instrument) for kind, look in looks.items()}

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(looked)
        front.run_until(found.done, step=engine.engine.step)
    front.close()
    engine.close()
    return found.result()


if __name__ == "__main__":
    print("facts:", json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), flush=True)
