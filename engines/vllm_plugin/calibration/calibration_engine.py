"""Opens vLLM in this process, with the serving arguments that affect the KV it computes."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import vllm
from vllm import EngineArgs, LLMEngine
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engines.calibration.messages import CalibrationOrder
from engines.vllm_plugin.process.command import is_cpu_build, model_arguments
from engines.vllm_plugin.process.server import first_sentence
from engines.vllm_plugin.versions import make_arg_parser

STEP_TOKENS: Final = 2048  # prefilled in one step; raised if the scored tokens do not fit
# Room for more than a prefix and the tokens scored after it: the question of a needle test and one
# token of answer.
MORE_TOKENS: Final = 256
SPARE_BLOCKS: Final = 4
LEAST_POOL_BYTES: Final = 128 << 20


def version() -> str:
    return str(vllm.__version__)


def open_engine(order: CalibrationOrder) -> LLMEngine:
    """Open the engine that an order asks for.

    Raises ``ValueError`` with one sentence: vLLM or our plug-in refuses the settings.
    """
    try:
        args = engine_args(order)
        return LLMEngine.from_engine_args(args)
    except ValueError as error:
        raise ValueError(first_sentence(str(error))) from error


def engine_args(order: CalibrationOrder) -> EngineArgs:
    """vLLM's arguments for an order."""
    tokens = max(*order.contexts, order.window_tokens) + order.num_scored + MORE_TOKENS
    argv = [
        *model_arguments(order.model_path, order.dtype, order.vllm, cpu=is_cpu_build()),
        *order.vllm.args,
        *("--max-model-len", str(tokens)),
        *("--max-num-seqs", "1"),
        *("--max-num-batched-tokens", str(max(STEP_TOKENS, order.num_scored))),
        *("--kv-transfer-config", _transfer_config()),
        "--enforce-eager",  # the replay of a graph would not call the hook on the model's output
    ]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    args: EngineArgs = EngineArgs.from_cli_args(parsed)
    args.kv_cache_memory_bytes = _pool_bytes(args, tokens)
    return args


def _transfer_config() -> str:
    return msgspec.json.encode(
        {
            "kv_connector": "CalibrationConnector",
            "kv_connector_module_path": "engines.vllm_plugin.calibration.calibration_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    ).decode()


def _pool_bytes(args: EngineArgs, tokens: int) -> int:
    """The bytes of KV cache for one request, with a margin.

    Each group of layers takes whole blocks, and vLLM may later enlarge them for recurrent states.
    """
    config: Any = args.create_engine_config()
    model = config.model_config
    heads = model.get_total_num_kv_heads() * model.get_head_size()
    per_token = 2 * model.get_total_num_hidden_layers() * heads * model.dtype.itemsize
    spare = MORE_TOKENS + SPARE_BLOCKS * config.cache_config.block_size
    return max(LEAST_POOL_BYTES, int(1.25 * per_token * (tokens + spare)))
