"""What the plug-in takes for granted of vLLM: signatures, and how its scheduler behaves.

vLLM calls the interface experimental. When a newer release fails here, this is the list of points
to look at; the real scheduler runs, with made-up model outputs instead of a model.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.engine.protocol import EngineClient
from vllm.forward_context import ForwardContext
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.hashing import sha256_cbor
from vllm.v1 import attention
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

from engines.config import EngineConfig, VllmConfig, WorkerConfig
from engines.vllm_environment.environment import SUPPORTED, supported_releases
from engines.vllm_environment.model_files import REASONING_PARSERS, TOOL_CALL_PARSERS
from engines.vllm_plugin.connector import BlockAcks, StepPlan, ThermoclineConnector
from engines.vllm_plugin.grammar.backend import BoundedGrammar, TwoCompilers
from engines.vllm_plugin.process.command import command
from engines.vllm_plugin.reports import ColdMetrics, ColdStats
from engines.vllm_plugin.scheduler.vllm_scheduler import (
    AsyncSharedPrefillScheduler,
    SharedPrefillScheduler,
)
from engines.vllm_plugin.support import Unsupported, check_version
from kvstore.config import StoreConfig
from tests.vllm.rig.versions import make_arg_parser

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[3]


def is_own_init(owner: type, name: str) -> bool:
    return name == "__init__" and not is_dataclass(owner)


def test_vllm_has_every_parser_that_we_choose():
    assert set(ToolParserManager.list_registered()) >= TOOL_CALL_PARSERS
    assert set(ReasoningParserManager.list_registered()) >= REASONING_PARSERS


class Connector(KVConnectorBase_V1, SupportsHMA):
    """All that vLLM may call of one."""


# vLLM's classes that ours derive from; every method of ours that it calls is one of theirs.
OURS = [
    (ThermoclineConnector, Connector),
    (StepPlan, KVConnectorMetadata),
    (BlockAcks, KVConnectorWorkerMetadata),
    (ColdStats, KVConnectorStats),
    (ColdMetrics, KVConnectorPromMetrics),
    (TwoCompilers, StructuredOutputBackend),
    (BoundedGrammar, GuidanceGrammar),
    (SharedPrefillScheduler, Scheduler),
    (AsyncSharedPrefillScheduler, AsyncScheduler),
]
OVERRIDES = [
    pytest.param(ours, theirs, name, id=f"{ours.__name__}.{name}")
    for ours, theirs in OURS
    for name in vars(ours)
    if callable(getattr(ours, name)) and (not name.startswith("_") or is_own_init(ours, name))
]


def parameters(function: Any) -> list[str]:
    return [x for x in inspect.signature(function).parameters if x not in ("self", "cls")]


def shape(function: Any) -> list[tuple[str, Any, bool]]:
    """Name, kind, and whether it may be left out."""
    given = inspect.signature(function).parameters.values()
    return [(x.name, x.kind, x.default is not x.empty) for x in given]


def test_the_version_is_one_we_know():
    check_version(vllm.__version__)
    for release in SUPPORTED:
        check_version(f"{release}7")
    with pytest.raises(Unsupported, match=re.escape(supported_releases())):
        check_version("0.99.0")


@pytest.mark.parametrize(("ours", "theirs", "name"), OVERRIDES)
def test_what_we_override_is_there_and_called_alike(ours, theirs, name):
    assert hasattr(theirs, name), f"vLLM has no {theirs.__name__}.{name} any more"
    assert shape(getattr(ours, name)) == shape(getattr(theirs, name))
    assert is_a(classmethod, ours, name) == is_a(classmethod, theirs, name)


def is_a(kind: type, owner: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(owner, name), kind)


def test_the_properties_we_override_are_there():
    for name, value in vars(ThermoclineConnector).items():
        is_ours = name.startswith("_") or name == "num_held_back"  # for our own scheduler
        if isinstance(value, property) and not is_ours:
            assert is_a(property, KVConnectorBase_V1, name), name


def test_nothing_abstract_is_left_out():
    assert not ThermoclineConnector.__abstractmethods__
    assert not TwoCompilers.__abstractmethods__


def test_our_backend_of_grammars_can_be_put_where_vllms_would_be():
    """vLLM's scheduler is given the manager, whose backend is chosen by the first grammar."""
    assert "structured_output_manager" in inspect.signature(Scheduler).parameters
    used = inspect.getsource(StructuredOutputManager.grammar_init)
    assert "if self.backend is None" in used and "self.executor.submit" in used
    fields = [x.name for x in dataclasses.fields(GuidanceGrammar)]
    assert fields[:3] == ["ll_matcher", "ll_tokenizer", "vocab_size"]
    assert [x.name for x in dataclasses.fields(StructuredOutputBackend)] == [
        "vllm_config",
        "tokenizer",
        "vocab_size",
    ]


class Asking(Scheduler):
    """Plans nothing, and notes the requests that it would divide a step among."""

    def __init__(self, num_held_back: int) -> None:
        self.running, self.waiting, self.kv_holding_waiting = [1], [2, 3], [4]
        self.connector = SimpleNamespace(num_held_back=num_held_back)

    def schedule(self, throttle_prefills=False):
        self.divided_among = self.get_request_counts()


class CountingAsking(SharedPrefillScheduler, Asking):
    pass


def test_a_step_is_not_divided_among_requests_that_are_held_back():
    assert "get_request_counts" in Scheduler.schedule.__code__.co_names
    scheduler = CountingAsking(num_held_back=2)
    scheduler.schedule()
    assert scheduler.divided_among == (1, 1)
    assert scheduler.get_request_counts() == (1, 3)  # vLLM has work as long as these wait


def test_vllms_client_has_what_grammars_are_tried_with():
    assert {"renderer", "model_config"} <= {
        *inspect.get_annotations(EngineClient),
        *dir(EngineClient),
    }


def test_the_block_pool_has_what_we_use():
    assert parameters(BlockPool.get_cached_block) == ["block_hash", "kv_cache_group_ids"]
    assert parameters(BlockPool.touch) == ["blocks"]
    assert parameters(BlockPool.free_blocks) == ["ordered_blocks"]
    assert parameters(BlockPool.evict_blocks) == ["block_ids"]


def test_a_chain_that_is_freed_tail_first_is_reused_so():
    """Hence, if the last block of a session is there, all are."""
    pool = BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=16)
    hashes = [bytes([i]) * 32 for i in range(10)]
    chain = pool.get_new_blocks(10)
    pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), chain, 0, 10, 16, 0)
    pool.free_blocks(reversed(chain))
    pool.get_new_blocks(12)  # nine that were never used, and three of the chain
    assert [bool(pool.get_cached_block(x, [0])) for x in hashes] == [True] * 7 + [False] * 3


def test_requests_and_outputs_have_what_we_read():
    wanted = {"block_hashes", "num_computed_tokens", "num_in_flight_tokens", "cache_salt"}
    source = inspect.getsource(Request.__init__)
    wanted |= {"all_token_ids", "mm_features", "prompt_embeds"}
    for name in (*wanted, "session_id", "kv_transfer_params", "lora_request"):
        assert f"self.{name}" in source, name
    assert "RUNNING" in RequestStatus.__members__
    assert "self.status" in source
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__annotations__)
    assert {"scheduled_new_reqs", "num_scheduled_tokens"} <= {*SchedulerOutput.__annotations__}
    fields = set(KVConnectorOutput.__annotations__)
    assert {"invalid_block_ids", "finished_recving", "kv_connector_worker_meta"} <= fields


def hashes_of(**fields: Any) -> list[bytes]:
    """Names of the blocks of one prompt of ids, with an image or an adapter or without."""
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(16, sha256_cbor)
    params = SamplingParams(max_tokens=1)
    request = Request("r", [7] * 64, params, None, block_hasher=hasher, **fields)
    return [bytes(x) for x in request.block_hashes]


def image(name: str) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=20, length=16))]


def test_two_images_never_share_blocks():
    """They have the same ids in a prompt, and our keys are made of these hashes."""
    plain, cat, dog = (
        hashes_of(),
        hashes_of(mm_features=image("a")),
        hashes_of(mm_features=image("b")),
    )
    assert cat == hashes_of(mm_features=image("a"))
    assert plain[0] == cat[0] == dog[0], "before the image"
    assert not {*cat[1:]} & {*dog[1:]} and not {*cat[1:], *dog[1:]} & {*plain}


def test_an_adapter_never_shares_blocks():
    adapters = [LoRARequest(x, 1, f"/{x}") for x in ("a", "b")]
    one, other = (hashes_of(lora_request=x) for x in adapters)
    assert not {*one} & {*other} and not {*one, *other} & {*hashes_of()}


def test_single_steps_can_run_without_compiled_code_and_graphs():
    """A step that is seen asks for that when its metadata comes: before the model, in a context."""
    fields = {x.name for x in dataclasses.fields(ForwardContext)}
    assert {"skip_compiled", "cudagraph_runtime_mode"} <= fields
    ForwardContext({}, {}, {}).skip_compiled = True  # frozen it is not
    root = Path(vllm.__file__).parent
    asked = "is_forward_context_available() and get_forward_context().skip_compiled"
    assert asked in (root / "compilation" / "decorators.py").read_text()
    for name in ("cuda_graph", "breakable_cudagraph"):
        text = (root / "compilation" / f"{name}.py").read_text()
        assert "cudagraph_runtime_mode == CUDAGraphMode.NONE" in text
    orders = {
        "kv_connector_model_runner_mixin.py": ["bind_connector_metadata(", "yield output"],
        "gpu_model_runner.py": [
            "set_forward_context(\n                attn_metadata,",
            "self.maybe_get_kv_connector_output(",
            "self._model_forward(",
        ],
        "gpu/model_runner.py": [
            "set_forward_context(\n                attn_metadata,",
            "self.kv_connector.pre_forward(scheduler_output, input_batch)",
            ".run_pw_graph(",
        ],
        "gpu/kv_connector.py": ["def pre_forward(", "bind_connector_metadata(", "finish_forward("],
    }
    for name, steps in orders.items():
        text = (root / "v1" / "worker" / name).read_text()
        at = 0
        for step in steps:
            assert step in text[at:], f"{name}: {step} no longer comes after the steps before it"
            at = text.index(step, at)


def options() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("profile", ["cpu", "cuda", "gb10"])
def test_vllm_knows_every_flag_we_give(profile, tmp_path):
    tables = tomllib.loads((ROOT / "launch" / "profiles" / f"{profile}.toml").read_text())
    own = msgspec.convert(tables["engine"].get("vllm", {}), VllmConfig)
    for max_context in (0, 4096):
        worker = WorkerConfig(
            engine=EngineConfig(kind="vllm", vllm=own, max_context=max_context),
            store=StoreConfig(),
            model_path="m",
            served_model_name="m",
            runtime_dir=str(tmp_path),
            token="secret",
        )
        words = command(worker, tmp_path / "plugin.json", cpu=profile == "cpu")[3:]
        given = options().parse_args(words)
        assert given.max_model_len == (max_context or -1)
        assert given.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_vllm_knows_every_flag_that_the_documentation_names():
    text = (ROOT / "docs" / "hardware.md").read_text()
    named = set(re.findall(r"(?<=`)--[a-z-]+(?=[` ])", text.partition("## mlx_lm")[0]))
    assert {"--block-size", "--max-num-batched-tokens", "--kv-offloading-size"} <= named
    known = {x for action in options()._actions for x in action.option_strings}
    ours = {"--engine", "--hot", "--ram", "--set", "--profile"}
    assert named - known - ours == set()


BACKENDS = ["cpu_attn", "flash_attn", "flashinfer", "triton_attn"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_write_blocks_by_one_call(backend):
    """Read, not imported: most of them need a GPU for that."""
    file = Path(attention.__file__).with_name("backends") / f"{backend}.py"
    found = [
        [x.arg for x in node.args.args]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "do_kv_cache_update"
    ]
    assert found == [["self", "layer", "key", "value", "kv_cache", "slot_mapping"]]
