"""Our connector, whose answers to the tests' own engine also have what was restored."""

from __future__ import annotations

from typing import Any

from engines.vllm_plugin.connector import ThermoclineConnector


class ReportingConnector(ThermoclineConnector):
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._scheduler.tracker.finished(request, block_ids)
        if tracked is None:
            return False, None
        restored, tier, reason = tracked.num_restored, tracked.tier, tracked.reason
        return False, {"restored_tokens": restored, "tier": tier, "reason": reason}
