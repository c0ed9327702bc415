"""Our plug-in with a GPU's part in it, on a machine without one; engines of tests import this.

    --kv-transfer-config '{... "kv_connector": "RehearsedConnector",
        "kv_connector_module_path": "tests.vllm.rig.rehearsal"}'
    --worker-extension-cls tests.vllm.rig.rehearsal.RehearsedWorker      TRITON_INTERPRET=1

The product has no switch for it, and no wheel has these files. The blocks lie as on a GPU
(``device_attention``); the device's own code packs and fills them, with kernels in Triton's
interpreter and streams that do nothing before they are waited for.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

import torch

import tests.vllm.rig.device_attention  # noqa: F401  vLLM is given it by that
from engines.vllm_plugin.blocks.blocks import Blocks
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.connector import BlockAcks
from engines.vllm_plugin.device.checked_blocks import CheckedBlocks
from engines.vllm_plugin.device.device_check import blocks_on
from engines.vllm_plugin.measuring.model_access import ModelView
from engines.vllm_plugin.support import Unsupported
from kvstore.store.cold_store import ColdStore
from tests.lazy_device import LazyDevice
from tests.vllm.rig.reporting import ReportingConnector

REHEARSED: Final = "rehearsed"


class RehearsedConnector(ReportingConnector):
    """Keeps in a file how much was asked of the device, its check left out.

    The file is written after each step that saved something: vLLM kills a worker whose end takes
    long, and then a number that is written at the end is missing.
    """

    _device: LazyDevice | None = None
    _num_checks = 0

    def _blocks_for(self, cache: PagedCache, store: ColdStore, spare_bytes: int) -> Blocks:
        if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("a GPU is rehearsed by tests only, and only where there is none")
        # The host cannot address a GPU's memory: nothing there is copied the quick way.
        self._device = LazyDevice()
        blocks = blocks_on(self._device, replace(cache, copies=None), store, spare_bytes)
        assert isinstance(blocks, CheckedBlocks), "the kernels were refused"
        self._num_checks = self._device.num_done
        return blocks

    def build_connector_worker_meta(self) -> BlockAcks | None:
        saved = super().build_connector_worker_meta()
        if saved is not None and self._device is not None:
            done = self._device.num_done - self._num_checks
            written = self._folder / f"{REHEARSED}.new"
            written.write_text(str(done))
            written.replace(self._folder / REHEARSED)
        return saved


class RehearsedWorker(ModelView):
    """vLLM looks it up in each worker before it loads the model."""
