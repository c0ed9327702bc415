from __future__ import annotations

import json
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launch.top_frame import FILTERS, ORDERS, Unreadable, View, chosen, frame

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
    },
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


def view_of(*events: tuple[str, object]) -> View:
    view = View()
    for number, (name, data) in enumerate(events):
        view.apply(name, json.dumps(data).encode(), str(number))
    return view


def text_of(view: View, width: int = 200, **options) -> str:
    console = Console(width=width, file=StringIO())
    console.print(frame(view, now=100.0, width=width, **options))
    return console.file.getvalue()


def test_a_frame_shows_server_memory_requests_and_sessions():
    text = text_of(view_of(("snapshot", SNAPSHOT)), keys=True)
    for words in (
        "m on mlx · thermocline 1 · ready · up 100 s · all tenants",
        "1 running, 2 waiting",
        "saved today 90 s of prefill (12,345 tokens) · memory free 1 GiB",
        "10 B packed, 51 B in bf16: 5.1x",
        "4 of 9 tokens",
        "2 of 2 sessions, all, by recent    q quit",
    ):
        assert words in text
    (row,) = [line for line in text.splitlines() if line.startswith("s1")]
    assert row.split() == (
        "s1 codex disk 812 3.5 MiB 5.1x 1 m pin missed diverged 4.1 s 7".split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("quality", "words"),
    [
        (
            {"name": "raw", "measured": False, "progress": "measuring: 2 of 9"},
            "codec raw · not measured on this model · measuring: 2 of 9",
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
        ({"name": "raw", "measured": True, "rows": []}, "codec raw"),
    ],
)
def test_a_frame_shows_the_gates_verdict(quality, words):
    lines = text_of(view_of(("snapshot", {**SNAPSHOT, "quality": quality}))).splitlines()
    assert words in [x.strip() for x in lines]


def test_changes_replace_rows_and_gone_ones_go():
    view = view_of(
        ("snapshot", SNAPSHOT),
        ("change", {"sessions": [{**ROW, "state": "idle"}], "gone": [{"id": "s2"}]}),
        ("change", {"now": {"running": 5}}),
        ("keep-alive", {"now": {"running": 9}}),
    )
    assert [row["state"] for row in view.rows.values()] == ["idle"]
    assert "5 running" in text_of(view)
    assert view.last_id == "2"
    assert [x["id"] for x in view.as_json()["sessions"]] == ["s1"]


def test_the_same_id_of_two_tenants_is_two_rows():
    rows = [{**ROW, "tenant": "a"}, {**ROW, "tenant": "b"}]
    view = view_of(("snapshot", {**SNAPSHOT, "sessions": rows}))
    assert "a/s1" in text_of(view) and "b/s1" in text_of(view)
    view.apply("change", b'{"gone": [{"id": "s1", "tenant": "a"}]}')
    assert [x["tenant"] for x in view.rows.values()] == ["b"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", FILTERS)
def test_every_order_and_filter_takes_every_row(order, kept):
    rows = [ROW, {"id": "bare"}, {**ROW, "id": "x", "tokens": None, "saved_s": None}]
    found = chosen(view_of(("snapshot", {**SNAPSHOT, "sessions": rows})), order, kept)
    assert len(found) == {"all": 3, "awake": 0, "asleep": 2, "pinned": 2}[kept]


def test_served_sessions_come_first_then_the_latest():
    rows = [{**ROW, "id": "old", "idle_since": 1.0}, {**ROW, "id": "new", "idle_since": 9.0}]
    rows.append({**ROW, "id": "busy", "idle_since": None})
    found = chosen(view_of(("snapshot", {**SNAPSHOT, "sessions": rows})), "recent", "all")
    assert [x["id"] for x in found] == ["busy", "new", "old"]


def test_words_of_a_server_cannot_steer_the_terminal():
    rows = [{**ROW, "id": "\x1b[2J[red]x[/red]\n"}]
    text = text_of(view_of(("snapshot", {**SNAPSHOT, "sessions": rows})))
    assert "?[2J[red]x[/red]?" in text


@settings(max_examples=25)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_event_are_unreadable_and_nothing_else(data):
    view = View()
    try:
        view.apply("snapshot", data)
    except Unreadable:
        return
    text_of(view)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([*SNAPSHOT]), JSON))
def test_a_frame_is_drawn_of_anything_that_another_version_may_send(fields):
    text_of(view_of(("snapshot", {**SNAPSHOT, **fields})))


def test_one_session_is_one():
    alone = {**SNAPSHOT, "num_sessions": 1, "sessions": [ROW]}
    alone["memory"] = {"tiers": [{"name": "ram", "bytes": 1, "sessions": 1}]}
    text = text_of(view_of(("snapshot", alone)))
    assert "1 of 1 session, all" in text
    assert "1 sessions" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_figure_is_cut_however_narrow_the_terminal_is(width):
    rows = [LONG, {**LONG, "id": "hot", "state": "idle", "last_source": "cold-redis"}]
    text = text_of(view_of(("snapshot", {**SNAPSHOT, "sessions": rows})), width)
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
    text = text_of(view_of(("snapshot", {**SNAPSHOT, "sessions": [{**ROW, **row}]})))
    (line,) = [x for x in text.splitlines() if x.startswith("s1")]
    words = line.split()
    assert words[2] == where
    assert " ".join(words[words.index("pin") + 1 :]).startswith(last or "4.1 s")


def test_moves_of_a_change_follow_those_of_the_snapshot():
    view = view_of(
        ("snapshot", {**SNAPSHOT, "moves": [{"number": 1}], "hour": {"step_s": 10}}),
        ("change", {"moves": [{"number": 2}]}),
        ("change", {"now": {}}),
    )
    assert [x["number"] for x in view.as_json()["moves"]] == [1, 2]
    assert view.as_json()["hour"] == {"step_s": 10}
