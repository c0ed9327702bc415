"""An engine's reports and settings, of which a test names what it is about."""

from __future__ import annotations

from typing import Any

from engines.config import EngineConfig, WorkerConfig
from engines.wire import EngineReport, SessionReport
from kvstore.config import StoreConfig


def session_report(tenant: str, id: str, **given: Any) -> SessionReport:
    """By default a hot session with a copy in RAM."""
    usual = {"hot": True, "tier": "ram", "tokens": 9, "hot_bytes": 90, "cold_bytes": 20}
    usual |= {"idle_s": 0.0, "pinned": False, "busy": False}
    return SessionReport(tenant=tenant, id=id, **usual | given)


def engine_report(hot_bytes: int, capacity_bytes: int, **given: Any) -> EngineReport:
    """By default all that is hot belongs to running requests."""
    usual = {"idle_hot_bytes": 0, "active_bytes": hot_bytes, "num_running": 0, "num_waiting": 0}
    usual |= {"save_queue_bytes": 0, "tiers": [], "counters": {}}
    return EngineReport(hot_bytes=hot_bytes, hot_capacity_bytes=capacity_bytes, **usual | given)


def worker_config(runtime_dir: str = "", **given: Any) -> WorkerConfig:
    """The settings that an engine's process gets."""
    usual = {"engine": EngineConfig(), "store": StoreConfig(), "model_path": "", "token": "t"}
    return WorkerConfig(runtime_dir=runtime_dir, **usual | {"served_model_name": "fake"} | given)
