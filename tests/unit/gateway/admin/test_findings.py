"""The server's findings about its engines and their tiers."""

from __future__ import annotations

import msgspec
import pytest

from engines.wire import TierStats
from tests.unit.gateway.in_process import App
from tests.unit.gateway.test_models import SLOW, TwoModels
from tests.unit.gateway.watch.test_metrics import REPORT


@pytest.mark.parametrize("trouble", ["", "it has no maxmemory"])
async def test_a_tier_that_its_server_does_not_bound_is_a_warning(trouble: str) -> None:
    app = App()
    tier = TierStats("redis", 7, 0, 2, 1, 0, True, trouble)
    app.model.live.engine_reported(msgspec.structs.replace(REPORT, tiers=[tier]))
    rows = (await app.get("/admin/findings")).json["data"]
    found = [x for x in rows if x["about"] == "tier redis"]
    assert [(x["verdict"], x["text"]) for x in found] == [("warning", trouble)] * bool(trouble)


async def test_a_model_that_is_loaded_on_demand_is_no_failure_while_it_is_not() -> None:
    app = TwoModels()
    rows = (await app.get("/admin/findings")).json["data"]
    (found,) = [x for x in rows if x["about"] == f"engine of {SLOW}"]
    assert found["verdict"] == "ok" and "loaded when a request asks for it" in found["text"]
    app.on_demand.failed = "too large"
    rows = (await app.get("/admin/findings")).json["data"]
    (found,) = [x for x in rows if x["about"] == f"engine of {SLOW}"]
    assert (found["verdict"], found["text"]) == ("warning", "too large")
