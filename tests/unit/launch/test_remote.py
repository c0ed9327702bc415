"""A server elsewhere: its address as people write it, and the frames of ``top``."""

from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gateway.watch.shape import Snapshot
from launch.errors import LaunchError, UsageError
from launch.remote.server import Address, Remote, server_url
from launch.remote.top import FILTERS, ORDERS, frame
from tests.asking import http_ok, saying
from tests.fields import fields


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        (" 10.0.0.7:80/ ", "http://10.0.0.7:80"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("gpu-box", "http://gpu-box"),
        ("localhost:8080/v1", "http://localhost:8080"),
        ("http://localhost:8080/v1/", "http://localhost:8080"),
        ("https://example.org/prefix/v1", "https://example.org/prefix"),
    ],
)
def test_an_address_is_understood_with_and_without_its_scheme(given, url):
    assert server_url(given) == url
    assert Address(given).base == url


@pytest.mark.parametrize(
    "given", [":8080", "localhost:eighty", "ftp://host", "http://", "unix:/run/x", "a:70000"]
)
def test_text_that_is_no_address_is_refused(given):
    with pytest.raises(UsageError, match="is no address; write http://host:port"):
        server_url(given)
    if not given.startswith("unix:"):  # which is an address for this machine's own commands
        with pytest.raises(UsageError, match="is no address"):
            Remote(given)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:1", "connection refused"),
        ("unix:/no/such/socket", "no such file or directory"),
        ("http://example..com", "no such host"),
    ],
)
def test_a_server_that_is_away_is_spoken_of_in_plain_words(address, reason):
    with pytest.raises(LaunchError) as caught:
        Remote(address).models()
    assert f"{address} does not answer ({reason}); is `thermocline serve`" in str(caught.value)
    assert "Name another address with --url" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "said", "reason"),
    [
        ("http", b"", "the connection was closed"),
        ("http", b"hello\r\n\r\n", "the answer is no HTTP"),
        ("https", b"hello\r\n\r\n", "no TLS connection: wrong version number"),
    ],
)
def test_a_server_of_another_kind_is_spoken_of_in_plain_words(scheme, said, reason):
    with saying(said) as address, pytest.raises(LaunchError) as caught:
        Remote(f"{scheme}://{address}").models()
    assert f" does not answer ({reason}); is" in str(caught.value)


@pytest.mark.parametrize(
    "listed", [b'{"data": [{"id": "a"}]}', b'{"data": "none"}', b'{"data": [1]}', b"{}"]
)
def test_a_list_of_something_else_is_no_list_of_sessions(listed):
    with (
        saying(http_ok(listed)) as address,
        pytest.raises(LaunchError, match="not a Thermocline gateway: it lists other"),
    ):
        Remote(f"http://{address}").sessions()


ROW: dict[str, Any] = fields(
    "id=s1 client=codex kind=main parent=None state=cold tier=disk tokens=812 bytes=3_650_000",
    "cold_bytes=3_650_000 bf16_bytes=None ratio=5.12 idle_since=40.0 pinned=True",
    "last_source=miss last_reason=diverged saved_tokens=300 saved_s=4.12 turns=7",
    "retain_until=None",
)
SERVED = {**ROW, "id": "s2", "idle_since": None, "state": "active", "pinned": False}
REQUEST = fields(
    "id=r session=s2 client=codex operation=chat started_at=1.0 phase=prefill prompt_tokens=9",
    "prefilled_tokens=4 answered_tokens=None source=None reason=None",
)
SNAPSHOT: dict[str, Any] = {
    "server": {
        "loading": "",
        "trouble": "",
        "hibernation_reason": "",
        **fields(
            "model=m engine=mlx engine_version=v1 version=v1 started_at=0 ready=True",
            "draining=False max_context=None hibernation=True dialects=[] admin=True tenant=None",
        ),
    },
    "now": {
        "requests": [REQUEST],
        **fields(
            "running=1 waiting=2 prompt_tokens_per_s=3 answer_tokens_per_s=4 turns_today=3",
            "memory_available_bytes=1_073_741_824 prefill_tokens_per_s=None first_token={}",
            "saved_tokens_today=12_345 saved_s_today=90",
        ),
    },
    "memory": {
        "hot": fields(
            "bytes=90 idle_bytes=5 capacity_bytes=100 high_water=0.85 low_water=0.65",
            "save_queue_bytes=None measuring_bytes=45",
        ),
        "tiers": [
            fields(
                "name=ram bytes=1 profile_bytes=0 sessions=1 hot_sessions=6 capacity_bytes=4",
                "blobs=None evictions=None errors=None available=True codec=dense3",
            )
        ],
        **fields("cold_bytes=10 bf16_bytes=51 sessions={} outcomes={} departures={}"),
        "repacking": None,
    },
    "hour": fields("since=0 step_s=10 prompt_tokens_per_s=[] answer_tokens_per_s=[]"),
    **fields("quality=None moves=[] tenants=[] num_sessions=2"),
    "sessions": [ROW, SERVED],
}
QUALITY: dict[str, Any] = {
    "name": "dense3",
    "exact": False,
    "measured": True,
    "progress": "",
    "bound": {"kl": 0.01},
    "rows": [{"kl": 0.0094, "in_use": True}, {"kl": 1.5, "in_use": False}],
}


def text_of(said: Any, width: int = 200, **options: Any) -> str:
    console = Console(width=width, file=StringIO())
    console.print(frame(said, now=100.0, **options))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_snapshot_of_these_tests_is_one() -> None:
    msgspec.convert(SNAPSHOT, Snapshot)


def test_a_frame_shows_server_memory_requests_and_sessions() -> None:
    text = text_of(SNAPSHOT)
    for words in (
        "m on mlx · thermocline v1 · ready · up 100 s · all tenants",
        "1 running, 2 waiting · prompts 3 tok/s · answers 4 tok/s",
        "saved today 12,345 tokens of prefill, 90 s · memory free 1 GiB",
        "45 B for measuring the model",
        "1 asleep, copies of 6 that are hot",
        "10 B packed, 51 B in bf16: 5.1x",
        "2 of 2 session(s), all, by recent",
    ):
        assert words in text
    (row,) = [line for line in text.splitlines() if line.startswith("s1")]
    words = "s1 (pinned) codex disk missed diverged 812 3.5 MiB 5.1x 1 m 4.1 s 7"
    assert " ".join(row.split()) == words
    (request,) = [line.split() for line in text.splitlines() if "prefill " in line]
    assert request == ["s2", "codex", "prefill", "9", "4"]


@pytest.mark.parametrize(
    ("quality", "words"),
    [
        (
            {"name": "tq3", "measured": False, "progress": "measuring: 2 of 9"},
            "codec tq3 · not measured on this model · measuring: 2 of 9 · in idle moments",
        ),
        ({}, "codec dense3 · measured: KL 0.0094 of at most 0.01"),
        ({"name": "raw", "exact": True, "rows": []}, "exact"),
        (
            {"name": "raw", "exact": True, "measured": False, "progress": "measuring: 2 of 9"},
            "exact, not packed yet · measuring: 2 of 9 · in idle moments",
        ),
    ],
)
def test_a_frame_shows_the_gates_verdict(quality: dict[str, Any], words: str) -> None:
    lines = text_of({**SNAPSHOT, "quality": {**QUALITY, **quality}}).splitlines()
    assert words in [x.strip() for x in lines]


def test_what_sleeps_exactly_is_not_called_packed() -> None:
    memory = {**SNAPSHOT["memory"], "cold_bytes": 100, "bf16_bytes": 51}  # float32, on CPUs
    text = text_of({**SNAPSHOT, "memory": memory})
    assert "100 B, exact" in text and "packed" not in text


def test_first_tokens_of_returns_stand_beside_those_of_first_turns() -> None:
    times = {
        "first": {"turns": 3, "p50_s": 3.2, "p95_s": 4.0, "prompt_tokens": 900},
        "restored": {"turns": 9, "p50_s": 0.4, "p95_s": 1.5, "prompt_tokens": 950},
    }
    text = text_of({**SNAPSHOT, "now": {**SNAPSHOT["now"], "first_token": times}})
    assert "first token: restored 0.4 s (p95 1.5 s) · first turns 3.2 s (p95 4 s)" in text


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", FILTERS)
def test_every_order_and_filter_takes_every_row(order: str, kept: str) -> None:
    rows = [ROW, {**SERVED, "id": "x", "bytes": None}, {**ROW, "id": "t", "kind": "task"}]
    text = text_of({**SNAPSHOT, "sessions": rows}, order=order, kept=kept)
    number = {"all": 2, "awake": 1, "asleep": 2, "pinned": 2, "tasks": 1}[kept]
    assert f"{number} of 2 session(s), {kept}, by {order}" in text


def test_served_sessions_come_first_then_the_latest() -> None:
    rows = [{**ROW, "id": "old", "idle_since": 1.0}, {**ROW, "id": "new", "idle_since": 9.0}]
    rows.append({**SERVED, "id": "busy"})
    text = text_of({**SNAPSHOT, "sessions": rows})
    assert text.index("busy") < text.index("new (") < text.index("old (")


def test_names_are_told_apart_and_cannot_steer_the_terminal() -> None:
    rows = [{**ROW, "tenant": "a"}, {**ROW, "tenant": "b", "id": "\x1b[2J[red]x[/red]\n"}]
    rows.append({**ROW, "id": "chat-0123456789abcdef", "title": "the stock of June"})
    text = text_of({**SNAPSHOT, "sessions": rows})
    assert "a/s1" in text and "b/?[2J[red]x[/red]?" in text
    assert "the stock of June 9abcdef" in text


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"state": "idle", "tier": "disk"}, "hot missed diverged"),
        ({"state": "active", "last_source": None, "last_reason": None}, "answering 812"),
        ({"state": "away", "tier": None}, "away missed"),
        ({"state": "waking", "last_source": "hot", "last_reason": None}, "waking hot"),
        ({"state": "cold", "last_source": "first", "last_reason": "diverged"}, "disk first"),
    ],
)
def test_a_row_says_the_fastest_place_and_calls_returns_missed_only(row, where):
    text = text_of({**SNAPSHOT, "sessions": [{**ROW, **row}]})
    (line,) = [x for x in text.splitlines() if x.startswith("s1")]
    assert where in " ".join(line.split())
