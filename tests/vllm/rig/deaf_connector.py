"""Our connector with a defect, for as long as a test wants it.

Deaf, it is without the cure of the recompute livelock: the scheduler side never hears
which blocks could not be loaded, as in a connector that does not drop failed blocks. Or a part of a
block cannot be restored: no codec is asked for it, so that none could fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.vllm_plugin.connector import ThermoclineConnector
from tests.vllm.rig.faulty_codec import is_deaf, loses_parts


class DeafConnector(ThermoclineConnector):
    def update_connector_output(self, connector_output: Any) -> None:
        if is_deaf():
            connector_output = replace(connector_output, invalid_block_ids=set())
        super().update_connector_output(connector_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._step.loads if loses_parts() else []
        self._lost = {x.block_ids[-1] for x in loads if x.part_tokens}
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return super().get_block_ids_with_load_errors() | self._lost
