"""What the plug-in takes for granted of vLLM 0.32: signatures, and how its scheduler behaves.

vLLM calls the interface experimental. When a newer release fails here, this is the list of what
to look at; the real scheduler runs, with made-up model outputs instead of a model.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import attention
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engines.vllm_plugin.connector import ThermoclineConnector
from engines.vllm_plugin.support import SUPPORTED, Unsupported, check_version

pytestmark = pytest.mark.vllm

SIGNATURES = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "register_kv_caches": ["kv_caches"],
    "start_load_kv": ["forward_context", "kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": [],
    "get_finished": ["finished_req_ids"],
    "get_block_ids_with_load_errors": [],
    "build_connector_worker_meta": [],
    "bind_gpu_block_pool": ["gpu_block_pool"],
    "on_new_request": ["request"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "request_finished": ["request", "block_ids"],
    "has_pending_push_work": [],
    "shutdown": [],
}


def parameters(function: Any) -> list[str]:
    return [x for x in inspect.signature(function).parameters if x != "self"]


def test_the_version_is_one_we_know():
    check_version(vllm.__version__)
    with pytest.raises(Unsupported, match=SUPPORTED.replace(".", r"\.")):
        check_version("0.99.0")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_of_the_interface(name):
    assert parameters(getattr(KVConnectorBase_V1, name)) == SIGNATURES[name]
    assert parameters(getattr(ThermoclineConnector, name)) == SIGNATURES[name]


def test_nothing_abstract_is_left_out():
    assert not ThermoclineConnector.__abstractmethods__


def test_the_block_pool_has_what_we_use():
    assert parameters(BlockPool.get_cached_block) == ["block_hash", "kv_cache_group_ids"]
    assert parameters(BlockPool.touch) == ["blocks"]
    assert parameters(BlockPool.free_blocks) == ["ordered_blocks"]
    assert parameters(BlockPool.evict_blocks) == ["block_ids"]


def test_requests_and_outputs_have_what_we_read():
    wanted = {"block_hashes", "num_computed_tokens", "num_in_flight_tokens", "cache_salt"}
    source = inspect.getsource(Request.__init__)
    for name in (*wanted, "session_id", "kv_transfer_params", "lora_request"):
        assert f"self.{name}" in source, name
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__annotations__)
    assert "scheduled_new_reqs" in SchedulerOutput.__annotations__
    fields = set(KVConnectorOutput.__annotations__)
    assert {"invalid_block_ids", "finished_recving", "kv_connector_worker_meta"} <= fields


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
