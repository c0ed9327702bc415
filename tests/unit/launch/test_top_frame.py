from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.top_frame import FILTERS, ORDERS, chosen, frame

ROW = {
    "id": "s1",
    "client": "codex",
    "kind": "main",
    "parent": None,
    "state": "cold",
    "tier": "disk",
    "tokens": 812,
    "bytes": 3_650_000,
    "ratio": 5.12,
    "idle_since": 40.0,
    "pinned": True,
    "last_source": "miss",
    "last_reason": "diverged",
    "saved_s": 4.12,
    "turns": 7,
}
SNAPSHOT = {
    "server": {"model": "m", "engine": "mlx", "version": "1", "ready": True, "started_at": 0},
    "now": {
        "running": 1,
        "waiting": 2,
        "saved_s_today": 90,
        "saved_tokens_today": 12_345,
        "memory_available_bytes": 1 << 30,
        "requests": [
            {"phase": "prefill", "session": "s2", "prompt_tokens": 9, "prefilled_tokens": 4}
        ],
        "first_token": {
            "first": {"turns": 3, "p50_s": 3.2, "p95_s": 4.0, "prompt_tokens": 900},
            "restored": {"turns": 9, "p50_s": 0.4, "p95_s": 1.5, "prompt_tokens": 950},
        },
    },
    "tenants": [
        {"name": "alice", "sessions": 2, "tokens_last_hour": 750, "share": 0.75, "wait_p95_s": 2},
        {"name": "bob", "sessions": 1, "running": 1, "tokens_last_hour": 250, "share": 0.25},
    ],
    "memory": {
        "hot": {"bytes": 90, "capacity_bytes": 100, "high_water": 0.85, "idle_bytes": 5},
        "tiers": [{"name": "ram", "bytes": 1, "capacity_bytes": 4, "codec": "dense3"}],
        "cold_bytes": 10,
        "bf16_bytes": 51,
    },
    "quality": {},
    "num_sessions": 2,
    "sessions": [ROW, {**ROW, "id": "s2", "idle_since": None, "state": "active", "pinned": False}],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(-1e300, 1e300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
LONG = {**ROW, "id": "refactor-the-stock-module/tests/and-more-of-it", "client": "openai-sdk"}


def text_of(said: Any, width: int = 200, **options) -> str:
    console = Console(width=width, file=StringIO())
    console.print(frame(said, now=100.0, width=width, **options))
    return console.file.getvalue()


def test_a_frame_shows_server_memory_requests_and_sessions():
    text = text_of(SNAPSHOT, keys=True)
    for words in (
        "m on mlx · thermocline 1 · ready · up 100 s · all tenants",
        "1 running, 2 waiting",
        "saved today 90 s of prefill (12,345 tokens) · memory free 1 GiB",
        "first token: restored 0.4 s (p95 1.5 s) · first turns 3.2 s (p95 4 s)",
        "10 B packed, 51 B in bf16: 5.1x",
        "4 of 9 tokens",
        "2 of 2 sessions, all, by recent    q quit",
    ):
        assert words in text
    (alice,) = [line for line in text.splitlines() if line.startswith("alice")]
    assert alice.split() == ["alice", "2", "0", "0", "750", "75", "%", "2", "s"]
    (row,) = [line for line in text.splitlines() if line.startswith("s1")]
    assert row.split() == (
        "s1 codex disk 812 3.5 MiB 5.1x 1 m pin missed diverged 4.1 s 7".split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("quality", "words"),
    [
        (
            {"name": "tq3", "measured": False, "progress": "measuring: 2 of 9"},
            "codec tq3 · not measured on this model · measuring: 2 of 9 · in idle moments",
        ),
        (
            {
                "name": "dense3",
                "measured": True,
                "bound": {"kl": 0.01},
                "rows": [
                    {"kl": 0.0094, "in_use": True},
                    {"kl": 0.0031, "in_use": True},
                    {"kl": 1.5, "in_use": False},
                ],
            },
            "codec dense3 · measured: KL 0.0094 of at most 0.01",
        ),
        ({"name": "raw", "exact": True, "measured": True, "rows": []}, "exact"),
    ],
)
def test_a_frame_shows_the_gates_verdict(quality, words):
    lines = text_of({**SNAPSHOT, "quality": quality}).splitlines()
    assert words in [x.strip() for x in lines]


def test_a_session_of_an_engine_that_is_away_is_not_called_hot():
    text = text_of({**SNAPSHOT, "sessions": [{**ROW, "state": "away", "tier": None}]})
    (row,) = [line for line in text.splitlines() if line.startswith("s1")]
    assert row.split()[2] == "away"


def test_the_same_id_of_two_tenants_is_two_rows():
    text = text_of({**SNAPSHOT, "sessions": [{**ROW, "tenant": "a"}, {**ROW, "tenant": "b"}]})
    assert "a/s1" in text and "b/s1" in text


def test_until_something_is_packed_no_density_is_shown():
    quality = {"name": "raw", "exact": True, "measured": False, "expected": "about 1/5"}
    memory = {
        "hot": {"bytes": 61, "capacity_bytes": 100, "idle_bytes": 5, "measuring_bytes": 45},
        "tiers": [{"name": "ram", "bytes": 20, "codec": "raw.v1"}],
        "cold_bytes": 20,
        "bf16_bytes": 10,
    }
    now = {"saved_s_today": None, "saved_tokens_today": 1581}
    row = {**ROW, "ratio": None, "saved_s": None, "saved_tokens": 300}
    said = {"quality": {**quality, "progress": "measuring: 9 of 24 cases"}, "memory": memory}
    text = text_of({**SNAPSHOT, **said, "now": now, "sessions": [row]})
    for words in (
        "exact, not packed yet · measuring: 9 of 24 cases, then about 1/5",
        "saved today 1,581 tokens of prefill",
        "45 B for measuring the model",
        "20 B, exact",
        "300 tok",
    ):
        assert words in text
    assert "raw" not in text and "x" not in text.partition("asleep")[2].splitlines()[0][7:20]


def test_a_title_comes_first_and_the_end_of_its_id_after():
    row = {**ROW, "id": "chat-0123456789abcdef", "title": "the stock of June"}
    assert "the stock of June …abcdef" in text_of({**SNAPSHOT, "sessions": [row]})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", FILTERS)
def test_every_order_and_filter_takes_every_row(order, kept):
    rows = [ROW, {"id": "bare"}, {**ROW, "id": "x", "tokens": None, "saved_s": None}]
    rows.append({**ROW, "id": "t", "kind": "task", "state": "gone", "pinned": False})
    found = chosen({**SNAPSHOT, "sessions": rows}, order, kept)
    assert len(found) == {"all": 3, "awake": 0, "asleep": 2, "pinned": 2, "tasks": 1}[kept]


def test_served_sessions_come_first_then_the_latest():
    rows = [{**ROW, "id": "old", "idle_since": 1.0}, {**ROW, "id": "new", "idle_since": 9.0}]
    rows.append({**ROW, "id": "busy", "idle_since": None})
    found = chosen({**SNAPSHOT, "sessions": rows}, "recent", "all")
    assert [x["id"] for x in found] == ["busy", "new", "old"]


def test_words_of_a_server_cannot_steer_the_terminal():
    rows = [{**ROW, "id": "\x1b[2J[red]x[/red]\n"}]
    text = text_of({**SNAPSHOT, "sessions": rows})
    assert "?[2J[red]x[/red]?" in text


@given(st.dictionaries(st.sampled_from([*SNAPSHOT]), JSON))
def test_a_frame_is_drawn_of_anything_that_another_version_may_send(fields):
    text_of({**SNAPSHOT, **fields})


def test_one_session_is_one():
    alone = {**SNAPSHOT, "num_sessions": 1, "sessions": [ROW]}
    alone["memory"] = {"tiers": [{"name": "ram", "bytes": 1, "sessions": 1}]}
    text = text_of(alone)
    assert "1 of 1 session, all" in text
    assert "1 sessions" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_figure_is_cut_however_narrow_the_terminal_is(width):
    rows = [LONG, {**LONG, "id": "hot", "state": "idle", "last_source": "cold-redis"}]
    text = text_of({**SNAPSHOT, "sessions": rows}, width)
    lines = text.splitlines()
    head = next(i for i, x in enumerate(lines) if x.startswith("session"))
    table = lines[head : head + 3]
    assert max(map(len, table)) <= width
    assert "…" not in table[0] and all("3.5 MiB" in x for x in table[1:])
    assert table[1].startswith("refactor-the") and table[1].count("…") <= 1
    assert table[2].split()[0] == "hot"
    if width >= 100:
        for name in ("client", "where", "tokens", "size", "vs bf16", "quiet", "last turn", "turns"):
            assert name in table[0]
        assert "missed diverged" in table[1] and "openai-sdk" in table[1]
        assert "redis diverged" in table[2] and "5.1x" in table[2]


@pytest.mark.parametrize(
    ("row", "where", "last"),
    [
        ({"state": "idle", "tier": "disk"}, "hot", "missed diverged"),
        ({"state": "cold", "tier": "disk"}, "disk", "missed diverged"),
        ({"state": "active", "last_source": None, "last_reason": None}, "answering", ""),
        ({"state": "waking", "last_source": "hot", "last_reason": None}, "waking", "hot"),
        ({"state": "cold", "last_reason": "never-stored"}, "disk", "first"),
    ],
)
def test_a_row_says_the_fastest_place_and_calls_returns_missed_only(row, where, last):
    text = text_of({**SNAPSHOT, "sessions": [{**ROW, **row}]})
    (line,) = [x for x in text.splitlines() if x.startswith("s1")]
    words = line.split()
    assert words[2] == where
    assert " ".join(words[words.index("pin") + 1 :]).startswith(last or "4.1 s")
