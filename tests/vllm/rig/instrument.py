"""The instrument of a serving engine, for programs that look at a model through it.

The engine is in the program's own process, so that the model's modules can be looked at, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from engines.vllm_plugin.measuring.request_runner import LOGITS_PROCESSOR, WORKER_EXTENSION
from kvstore.config import StoreConfig
from tests.vllm.rig.engine import RealEngine
from tests.vllm.rig.measuring_front import MeasuringFront

T = TypeVar("T")
POOL_BLOCKS = 200
LONGEST = 1500  # tokens


def seen_by(look: Callable[[Any], T], model: Path, **options: Any) -> T:
    """Open an engine of the model, and return what ``look`` finds with its instrument."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.distributed.kv_transfer import get_kv_transfer_group

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
        **options,
    )
    front = MeasuringFront(engine)
    worker: Any = get_kv_transfer_group()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: look(worker._worker.measuring.open_instrument()))
        front.run_until(found.done, step=engine.engine.step)
    front.close()
    engine.close()
    return found.result()
