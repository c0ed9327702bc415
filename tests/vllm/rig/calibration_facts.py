"""A process that looks at a tiny model with the calibration's own engine, and prints what it saw.

A process of its own: vLLM runs in one process here, and the tests' own engine does not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from engines.calibration.messages import CalibrationOrder
from engines.calibration.rope_probe import check_turning
from engines.config import VllmConfig
from kvstore.shapes import KVRun, slice_tokens

CONTEXT = 1024
TOKENS = [(37 * i * i + 11 * i + 3) % 1000 for i in range(CONTEXT + 64)]


def order(model: str, *args: str) -> CalibrationOrder:
    own = VllmConfig(args=("--skip-tokenizer-init", *args))
    return CalibrationOrder(model_path=model, vllm=own, presets=("raw",), contexts=(CONTEXT,))


def main(model: str) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines.vllm_plugin.calibration.calibration_engine import open_engine
    from engines.vllm_plugin.calibration.instrument import VllmInstrument

    class Speechless(VllmInstrument):
        """The tiny model has no tokenizer."""

        def encode(self, text: str) -> list[int]:
            return [17]

    instrument = Speechless(open_engine(order(model)), None)
    run = instrument.prefill(TOKENS[:CONTEXT])
    short = slice_tokens(run, 0, 1000)  # no whole number of blocks
    # From token 1000 on: once after the short past, once after a longer one.
    whole = instrument.log_probs(short, TOKENS[1000:])
    split = instrument.log_probs(run, TOKENS[CONTEXT:])
    again = instrument.log_probs(short, TOKENS[1000:])
    other = instrument.log_probs(slice_tokens(run, 24, CONTEXT), TOKENS[1000:])
    rope, _ = instrument.ropes
    check_turning(instrument, instrument.ropes)
    facts = {
        "layout": [run[0][0].shape, len(run), instrument.layout.dtype],
        "shape": whole.shape,
        "probabilities": float(np.exp(whole).sum(1).max()),
        "split": float(np.abs(whole[CONTEXT - 1000 :] - split).max()),
        "again": float(np.abs(whole - again).max()),
        "other past": float(np.abs(whole - other).max()),
        "continued": _difference(run, instrument.prefill(TOKENS[:CONTEXT], short)),
        "frequencies": rope.frequencies if rope else (),
        "interleaved": rope is not None and rope.interleaved,
        "fingerprint": instrument.fingerprint,
        "serving": _serving_fingerprint(model),
    }
    instrument.close()
    return facts


def _difference(a: KVRun, b: KVRun) -> float:
    pairs = [pair for p, q in zip(a, b, strict=True) for pair in zip(p, q, strict=True)]
    return max(float(np.abs(x - y).max()) for x, y in pairs)


def _serving_fingerprint(model: str) -> str:
    """The fingerprint of the engine that ``thermocline serve`` would start."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engines.config import EngineConfig, WorkerConfig
    from engines.vllm_plugin.process.command import command, is_cpu_build
    from engines.vllm_plugin.versions import make_arg_parser
    from engines.vllm_plugin.worker.fingerprint import fingerprint
    from kvstore.config import StoreConfig

    worker = WorkerConfig(
        engine=EngineConfig(hot_bytes=1 << 26, vllm=order(model).vllm),
        store=StoreConfig(),
        model_path=model,
        served_model_name="tiny",
        runtime_dir="/nowhere",
        token="x",
    )
    _, _, _, *argv = command(worker, Path("/nowhere"), cpu=is_cpu_build())
    args = EngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
    return fingerprint(args.create_engine_config(), 0, None)


if __name__ == "__main__":
    print("facts:", json.dumps(main(sys.argv[1])))
