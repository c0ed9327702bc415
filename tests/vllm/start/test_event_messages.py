"""What routers read: our events as vLLM's publisher packs them, and as llm-d needs them."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec

from engines.vllm_plugin.connector import ThermoclineConnector
from engines.vllm_plugin.groups import DENSE
from engines.vllm_plugin.inventory import Inventory, wants_events
from engines.vllm_plugin.messages import RankRests
from engines.vllm_plugin.reports import KVEvents
from kvstore.session import SessionRef

pytestmark = pytest.mark.vllm
SALT = b"a tenant's salt"
CHAIN = [bytes([i]) * 32 for i in range(1, 4)]
NAMES = [int.from_bytes(x[-8:], "big") for x in CHAIN]  # as of vLLM's blocks on the GPU
IDS = struct.pack("<6I", *range(100, 106))


@pytest.fixture
def inventory() -> Inventory:
    return Inventory(2)


@pytest.fixture
def events(inventory: Inventory) -> KVEvents:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return KVEvents(inventory, 2, DENSE, config)


def published(events: KVEvents) -> list[dict]:
    """What a subscriber unpacks."""
    batch = KVEventBatch(ts=1.0, events=events.take())
    _, found, *_ = msgspec.msgpack.decode(msgspec.msgpack.Encoder().encode(batch))
    return found


def rests(ram=0, storage=0, chain=CHAIN, ids=IDS) -> RankRests:
    return RankRests(SessionRef("t", "s", SALT), b"".join(chain), ids, ram, storage)


def test_a_session_that_is_saved_moved_and_deleted(inventory, events):
    inventory.update(rests(ram=3))
    stored = {
        "type": "BlockStored",
        "block_hashes": NAMES,
        "parent_block_hash": None,
        "token_ids": [100, 101, 102, 103, 104, 105],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert published(events) == [stored]
    inventory.update(rests(storage=3))
    removed = {"type": "BlockRemoved", "block_hashes": NAMES, "medium": "CPU", "group_idx": 0}
    moved = published(events)
    assert moved[0] == stored | {"medium": "STORAGE"}
    assert moved[1] | {"block_hashes": sorted(moved[1]["block_hashes"])} == removed
    inventory.update(rests(chain=[]))
    (gone,) = published(events)
    assert (gone["type"], gone["medium"]) == ("BlockRemoved", "STORAGE")
    assert published(events) == []


def test_later_blocks_have_a_parent_and_no_salt_ever(inventory, events):
    inventory.update(rests(ram=1))
    published(events)
    inventory.update(rests(ram=3))
    (stored,) = published(events)
    assert (stored["token_ids"], stored["parent_block_hash"]) == ([102, 103, 104, 105], NAMES[0])
    assert not stored.keys() & {"extra_keys", "session_id"}


def test_hashes_are_whole_where_vllm_is_set_to_that(inventory, events, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    inventory.update(rests(ram=2))
    (stored,) = published(events)
    assert stored["block_hashes"] == CHAIN[:2]


def test_the_connector_has_what_vllm_calls_and_events_are_off_unless_asked_for():
    assert ThermoclineConnector.take_events is not KVConnectorBase_V1.take_events
    on, off = (SimpleNamespace(enable_kv_cache_events=x) for x in (True, False))
    assert wants_events(SimpleNamespace(kv_events_config=on))
    assert not wants_events(SimpleNamespace(kv_events_config=off))
    assert not wants_events(SimpleNamespace(kv_events_config=None))
