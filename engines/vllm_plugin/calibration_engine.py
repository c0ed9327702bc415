"""vLLM in this process, set up as it is for serving in all that decides what KV it computes."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import vllm
from vllm import EngineArgs, LLMEngine
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engines.calibration.order import Order
from engines.vllm_plugin.command import model_arguments, on_cpu
from engines.vllm_plugin.server import first_sentence

STEP_TOKENS: Final = 2048  # of a prefill at a time; what is scored has to fit, too
# Beyond a prefix and what is scored behind it: the question for a needle, one token said.
MORE_TOKENS: Final = 256


def version() -> str:
    return str(vllm.__version__)


def open_engine(order: Order) -> LLMEngine:
    """Raises ``ValueError`` with one sentence for what vLLM, or our plug-in, refuses."""
    try:
        args = engine_args(order)
        return LLMEngine.from_engine_args(args)
    except ValueError as error:
        raise ValueError(first_sentence(str(error))) from error


def engine_args(order: Order) -> EngineArgs:
    tokens = max(*order.contexts, order.window_tokens) + order.num_scored + MORE_TOKENS
    argv = [
        *model_arguments(order.model_path, order.dtype, order.vllm, cpu=on_cpu()),
        *order.vllm.args,
        *("--max-model-len", str(tokens)),
        *("--max-num-seqs", "1"),
        *("--max-num-batched-tokens", str(max(STEP_TOKENS, order.num_scored))),
        *("--kv-transfer-config", _transfer_config()),
        "--enforce-eager",  # a replayed graph would pass by what looks at the model's output
    ]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    args: EngineArgs = EngineArgs.from_cli_args(parsed)
    args.kv_cache_memory_bytes = _pool_bytes(args, tokens)
    return args


def _transfer_config() -> str:
    return msgspec.json.encode(
        {
            "kv_connector": "CalibrationConnector",
            "kv_connector_module_path": "engines.vllm_plugin.calibration_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    ).decode()


def _pool_bytes(args: EngineArgs, tokens: int) -> int:
    """Room for one request, and some."""
    model: Any = args.create_model_config()
    heads = model.get_total_num_kv_heads() * model.get_head_size()
    per_token = 2 * model.get_total_num_hidden_layers() * heads * model.dtype.itemsize
    return int(1.25 * per_token * (tokens + MORE_TOKENS))
