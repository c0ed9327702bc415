"""Two servers on one Redis: a tenant's bytes of memory are within its limit on each engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engines.fake_worker.fake_sessions import COLD_BYTES_PER_TOKEN
from tests.integration.launch.test_several_models import ask, metrics
from tests.integration.launch.two_servers import Pair, listed
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

WORDS = 100
SESSION = (2 * WORDS + 10) * COLD_BYTES_PER_TOKEN  # the fake engine repeats the prompt
MOST = 12 * SESSION
TENANTS = {"bounded": f"ram_bytes={MOST}", "free": "sessions=1000"}


def chat(pair: Pair, name: str, i: int, session: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "word " * WORDS}]}
    headers = {**pair.headers(name), "x-session-id": session}
    assert ask(pair.servers[i], "/v1/chat/completions", body, **headers)[0] == 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with RedisServer() as redis:
        pair = Pair(tmp_path_factory.mktemp("bytes"), redis, TENANTS)
        yield pair
        pair.stop()


def test_each_engine_holds_to_the_number_and_no_turn_fails(pair: Pair) -> None:
    for i in range(2):
        chat(pair, "bounded", i, "first")
    time.sleep(2.0)  # from now on the engines know their limits
    for i in range(40):
        chat(pair, "bounded", i % 2, f"s{i}")
        chat(pair, "free", i % 2, f"f{i}")
    time.sleep(2.0)  # from now on the gateways know what they hold
    for i in range(2):
        shown = listed(pair, "bounded", i)["tier_bytes"]["ram"]
        assert shown["limit"] == MOST
        assert MOST - 2 * SESSION < shown["held"] <= MOST
        free = listed(pair, "free", i)
        assert "tier_bytes" not in free
        own = [x for x in free["data"] if "elsewhere" not in x]
        assert len(own) == 20  # its sessions are not touched


def test_metrics_count_tenants_at_their_limit_and_why_copies_went(pair: Pair) -> None:
    text = metrics(pair.servers[0])
    assert 'thermocline_tenants_full{tier="ram"} 1.0' in text
    assert "bounded" not in text
