"""Our connector with a defect, for as long as a test wants it.

Deaf, it is without the cure of the recompute livelock: the scheduler side never hears
which blocks could not be loaded, as in a connector that does not drop failed blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.vllm_plugin.connector import ThermoclineConnector
from tests.vllm.rig.faulty_codec import is_deaf


class DeafConnector(ThermoclineConnector):
    def update_connector_output(self, connector_output: Any) -> None:
        if is_deaf():
            connector_output = replace(connector_output, invalid_block_ids=set())
        super().update_connector_output(connector_output)
