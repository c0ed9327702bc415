"""Two servers on one Redis: a tenant's bytes of memory are within its limit on both together."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engines.fake_worker.fake_sessions import COLD_BYTES_PER_TOKEN
from tests.integration.launch.test_several_models import ask
from tests.integration.launch.two_servers import Pair, listed, metrics
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

WORDS = 100
SESSION = (2 * WORDS + 10) * COLD_BYTES_PER_TOKEN  # the fake engine repeats the prompt
MOST = 12 * SESSION
TENANTS = {"bounded": f"ram_bytes={MOST}", "free": "sessions=1000"}
PATIENCE_S = 60.0


def chat(pair: Pair, name: str, i: int, session: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "word " * WORDS}]}
    headers = {**pair.headers(name), "x-session-id": session}
    assert ask(pair.servers[i], "/v1/chat/completions", body, **headers)[0] == 200


def held(pair: Pair) -> int:
    """The bytes of the bounded tenant in memory of both engines, as these said last."""
    shown = [listed(pair, "bounded", i)["tier_bytes"]["ram"] for i in range(2)]
    assert [x["limit"] for x in shown] == [MOST, MOST]
    assert not any("only_here" in x for x in shown)
    return max(x["held"] for x in shown)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with RedisServer() as redis:
        pair = Pair(tmp_path_factory.mktemp("bytes"), redis, TENANTS)
        yield pair
        pair.stop()


def test_bytes_of_both_count_and_no_turn_fails(pair: Pair) -> None:
    for i in range(2):
        chat(pair, "bounded", i, "first")
    time.sleep(2.0)  # from now on the engines know their limits
    for i in range(40):
        chat(pair, "bounded", i % 2, f"s{i}")
        chat(pair, "free", i % 2, f"f{i}")
        if i % 4 == 3:
            time.sleep(0.5)
        assert held(pair) <= MOST + SESSION
    end = time.monotonic() + PATIENCE_S
    while held(pair) < 0.7 * MOST:
        assert time.monotonic() < end, held(pair)
        for i in range(2):
            chat(pair, "bounded", i, f"more-{time.monotonic()}")
        time.sleep(0.3)
    free = [listed(pair, "free", i) for i in range(2)]  # its sessions are not touched
    assert len({x["id"] for each in free for x in each["data"] if x["tier"] == "ram"}) == 40
    assert not any("tier_bytes" in x for x in free)


def test_metrics_count_tenants_at_their_limit_and_why_copies_went(pair: Pair) -> None:
    text = metrics(pair.servers[0])
    assert 'thermocline_tenants_full{tier="ram"}' in text
    assert "bounded" not in text
