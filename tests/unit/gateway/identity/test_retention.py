"""How long clients and routers ask a session to be kept."""

from __future__ import annotations

import pytest

from gateway.identity.retention import MAX_RETAIN_S, asked_seconds


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({}, 0.0),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"prompt_cache_options": {"ttl": "9d"}}, MAX_RETAIN_S),
        ({"prompt_cache_options": "30m", "prompt_cache_retention": "24h"}, 0.0),
    ],
)
def test_openais_field(body, seconds):
    assert asked_seconds(body) == seconds


def directive(priority: object, **more: object) -> dict[str, object]:
    return {"start": 0, "end": 100, "priority": priority, **more}


@pytest.mark.parametrize(
    ("directives", "seconds"),
    [
        ([directive(90, duration=60.0)], 60.0),
        ([directive(70, duration=60), directive(50, duration=90.5)], 90.5),  # the longest one
        ([directive(90)], MAX_RETAIN_S),
        ([directive(90, duration=1e9)], MAX_RETAIN_S),
        ([directive(90, duration=-5)], 0.0),
        ([directive(49, duration=60)], 0.0),  # may go sooner than others
        ([], 0.0),
        ("90", 0.0),
        ([None, "90", [90], directive("90"), directive(True), directive(90, duration="60")], 0.0),
        ([directive(90, duration=None)], MAX_RETAIN_S),
    ],
)
def test_directives_of_a_router(directives, seconds):
    assert asked_seconds({"retention_directives": directives}) == seconds
    both = {"retention_directives": directives, "prompt_cache_options": {"ttl": "30s"}}
    assert asked_seconds(both) == max(seconds, 30.0)
