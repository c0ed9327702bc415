"""A process that lets a compiled tiny model be measured while it serves, and prints what it saw.

A process of its own: vLLM runs in one process here, so that its model can be looked at.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from engines.config import REPORT, CalibrationOrder, CalibrationReport
from engines.vllm_plugin.measuring.request_runner import LOGITS_PROCESSOR, WORKER_EXTENSION
from engines.wire import Measure
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import RealEngine
from tests.vllm.rig.measuring_front import MeasuringFront


class Notes(logging.Handler):
    """Keeps the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(model: Path) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CACHE_ROOT"] = str(model.with_name("cache"))
    notes = Notes()
    logger = logging.getLogger("engines.calibration.learn")
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    folder = model.with_name("vllm")
    folder.mkdir()
    store = StoreConfig(
        codec="auto", calibrate=True, learn_on=False, ram_bytes=1 << 28, disk_bytes=1 << 28
    )
    engine = RealEngine(
        str(model),
        folder,
        store,
        logits_processors=[LOGITS_PROCESSOR],
        worker_extension_cls=WORKER_EXTENSION,
        enforce_eager=False,
        max_model_len=400,  # a quick measurement: of 256 tokens
    )
    front = MeasuringFront(engine)

    def ended() -> bool:
        codec = engine.report().codec
        return codec is not None and codec.ended is not None and not codec.progress

    front.run_until(ended, step=engine.engine.step)
    order = CalibrationOrder(
        presets=("raw", "tq4"),
        contexts=(256,),
        num_windows=2,
        window_tokens=256,
        num_scored=32,
        depths=(),
        num_chains=0,
    )
    engine.control(Measure(order))
    front.run_until(ended, step=engine.engine.step)
    front.close()
    report = msgspec.json.decode((folder / REPORT).read_bytes(), type=CalibrationReport)
    (found,) = engine.engine.apply_model(_seen)
    facts = {
        **found,
        "notes": notes.lines,
        "kls": {x.preset: x.kl for x in report.rows},
    }
    engine.close()
    return facts


def _seen(model: Any) -> dict[str, object]:
    inner = model.model
    hooks = {id(x) for x in model.modules() if x._forward_hooks or x._forward_pre_hooks}
    return {
        "compiled": bool(inner.__dict__.get("compiled") or inner.__dict__.get("aot_compiled_fn")),
        "hooks": len(hooks),
    }


if __name__ == "__main__":
    print(f"facts: {json.dumps(main(Path(sys.argv[1])))}", flush=True)
