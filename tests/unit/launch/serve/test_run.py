"""SIGHUP takes over all settings if they are sound, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig
from gateway.config import GatewayConfig
from gateway.keys import generate_key
from gateway.models import Models, ServedModel
from launch.errors import UsageError
from launch.machine.folders import Folders
from launch.serve.run import Reload
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import EngineEntry, Resolved, Settings
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import MODEL, App

ALICE, BOB = (generate_key(x) for x in ("alice", "bob"))
BEFORE = {"api_keys": (ALICE[1],)}


def settings(scheduler: SchedulerConfig, **gateway: Any) -> EffectiveSettings:
    made = Settings(gateway=GatewayConfig(**gateway), scheduler=scheduler)
    return EffectiveSettings(Resolved(made, {}), Folders(Path(), Path()), "fake")


def key_works(app: App, key: str) -> bool:
    try:
        return bool(app.gateway.tenants.authenticate(f"Bearer {key}"))
    except Exception:  # refused
        return False


async def test_keys_limits_aliases_and_idle_times_are_taken(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    app = App(**BEFORE)
    now = settings(
        SchedulerConfig(idle_after_s=7.0, max_running=3),
        api_keys=(BOB[1],),
        model_aliases=("gpt-5",),
        key_limits="requests_per_minute=60",
        port=1234,
    )
    Reload(app.gateway, settings(SchedulerConfig(), **BEFORE), lambda: now)()
    assert key_works(app, BOB[0]) and not key_works(app, ALICE[0])
    assert app.gateway.config.means_served("gpt-5", MODEL)
    assert app.gateway.limits.usual.requests_per_minute == 60
    assert app.gateway.config.port == 8080, "that needs a restart, and the log says so"
    assert "gateway.port changed; restart to apply it" in caplog.text
    assert "scheduler.max_running changed; restart to apply it" in caplog.text
    assert "scheduler.idle_after_s: 120.0 -> 7.0" in caplog.text
    assert ALICE[1].partition(":")[2] not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": ("nonsense",)},
        {"api_keys": ()},  # no key would be needed any more
        {"api_keys": (BOB[1],), "admin_keys": ("x",)},
        {"api_keys_file": "/nowhere/at/all"},
        None,
    ],
)
async def test_where_anything_is_wrong_all_stays_as_it_was(wrong, caplog):
    def read() -> EffectiveSettings:
        if wrong is None:
            raise UsageError("gateway.port: Expected `int`")
        return settings(SchedulerConfig(idle_after_s=7.0), model_aliases=("gpt-5",), **wrong)

    app = App(**BEFORE)
    Reload(app.gateway, settings(SchedulerConfig(), **BEFORE), read)()
    assert key_works(app, ALICE[0]) and not key_works(app, BOB[0])
    assert not app.gateway.config.means_served("gpt-5", MODEL)
    assert ("the settings stay as they were" if wrong else "Expected `int`") in caplog.text


def of_two_models(budget: int, **second: Any) -> EffectiveSettings:
    entries = (EngineEntry(name="one"), EngineEntry(name="two", **second))
    made = Settings(engines=entries, engine=EngineConfig(hot_bytes=budget))
    origins = {"engine.hot_bytes": "derived: 50% of 8 GiB"}
    return EffectiveSettings(Resolved(made, origins), Folders(Path(), Path()), "fake")


async def test_models_take_their_aliases_and_derived_budgets_are_no_change(caplog):
    caplog.set_level("INFO")
    app = App()
    config, metrics = app.gateway.config, app.gateway.metrics
    two = ServedModel(app.engine, app.sessions, config, metrics, given_name="two")
    app.gateway.models = Models([app.model, two])
    reload = Reload(
        app.gateway,
        of_two_models(1 << 30),
        lambda: of_two_models(2 << 30, aliases=("deux",), share=3),
    )
    reload()
    assert two.is_named("deux")
    assert "engines, two: aliases is ('deux',) now" in caplog.text
    assert "engines, two: share changed; restart to apply it" in caplog.text
    assert "hot_bytes" not in caplog.text
    caplog.clear()
    reload()
    assert "aliases is" not in caplog.text
