"""Places for connections: the total, one address, and who makes room."""

from __future__ import annotations

import logging

import pytest

from gateway.config import GatewayConfig
from gateway.edge.connections import (
    ADMIN_PLACES,
    LOG_EVERY_S,
    MAX_CONNECTIONS,
    Connections,
    most_connections,
)


class Held:
    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


class Counts:
    def __init__(self) -> None:
        self.open, self.ended = 0, list[str]()

    def connections_open(self, number: int) -> None:
        self.open = number

    def connection_ended(self, reason: str) -> None:
        self.ended.append(reason)


def places(total: int, each: int, counts: Counts, now: list[float] | None = None) -> Connections:
    clock = now or [0.0]
    return Connections(total, each, ["10.0.0.0/8"], counts, lambda: clock[0])


def test_the_longest_idle_makes_room_and_the_busy_stay() -> None:
    counts = Counts()
    held = [Held() for _ in range(4)]
    room = places(3, 9, counts)
    assert [room.admit(x, "1.2.3.4") for x in held[:3]] == ["", "", ""]
    room.busy(held[0])
    assert room.admit(held[3], "1.2.3.4") == ""
    assert [x.evicted for x in held] == [False, True, False, False]
    for x in held[2:]:
        room.busy(x)
    assert room.admit(Held(), "5.6.7.8") == "total"
    room.idle(held[0])  # its request is over
    assert room.admit(Held(), "5.6.7.8") == "" and held[0].evicted
    assert counts.open == 3 and counts.ended == ["idle", "total", "idle"]


def test_admins_get_a_few_places_of_a_full_server_and_take_no_others() -> None:
    counts = Counts()
    room = places(2, 9, counts)
    for x in (Held(), Held()):
        assert room.admit(x, "1.2.3.4") == ""
        room.busy(x)
    admins = [Held() for _ in range(ADMIN_PLACES)]
    for x in admins:
        assert room.admit(x, "", for_admins=True) == ""
        room.busy(x)
    assert room.admit(Held(), "", for_admins=True) == "total"
    room.leave(admins[0])
    assert room.admit(Held(), "1.2.3.4") == "total"
    assert room.admit(Held(), "", for_admins=True) == ""


def test_an_address_of_the_admins_alone_is_known() -> None:
    config = GatewayConfig(admin_address="127.0.0.1:9000", admin_socket="/run/s")
    assert config.is_for_admins(("127.0.0.1", 9000)) and config.is_for_admins(("/run/s", None))
    for other in (("127.0.0.1", 8080), ("/run/other", None), None):
        assert not config.is_for_admins(other)
    for other in (("127.0.0.1", 0), ("", None), None):
        assert not GatewayConfig().is_for_admins(other)


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("1.2.3.4", "1.2.3.4", True),
        ("1.2.3.4", "1.2.3.5", False),
        ("2001:db8::1", "2001:db8::ffff", True),  # one client has all of a /64
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:1.2.3.4", "1.2.3.4", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("10.1.1.1", "10.1.1.1", False),  # a proxy that is trusted
        ("", "", False),  # a unix socket has none
    ],
)
def test_one_address_has_its_share(first: str, second: str, refused: bool) -> None:
    room = places(9, 1, Counts())
    one = Held()
    assert room.admit(one, first) == ""
    assert room.admit(Held(), second) == ("address" if refused else "")
    room.leave(one)
    room.leave(one)
    assert room.admit(Held(), first) == "" or not refused


def test_the_log_reports_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    room = places(1, 1, Counts(), now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            room.ended("body_timeout")
        now[0] = LOG_EVERY_S
        room.ended("head_timeout")
    first, second = (x.getMessage() for x in caplog.records)
    assert "1 body_timeout" in first
    assert "99 body_timeout, 1 head_timeout" in second


@pytest.mark.parametrize(
    ("files", "wanted", "most"),
    [(1024, 0, 768), (256, 0, 64), (20_000, 0, MAX_CONNECTIONS), (1 << 30, 9, 9), (10, 0, 1)],
)
def test_connections_stay_below_the_limit_of_open_files(files: int, wanted: int, most: int) -> None:
    assert most_connections(files, wanted) == most
