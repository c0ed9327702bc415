"""``thermocline top``: fetches a snapshot of a server each second and draws it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.watch.shape import Snapshot
from launch.errors import LaunchError
from launch.printing import one_line
from launch.remote.server import Address
from launch.settings.units import show_bytes, show_duration

PATH: Final = "/v1/snapshot"
ONCE_ROWS: Final = 200
OTHER_LINES: Final = 23  # of a frame, besides sessions
LEAST_RATIO: Final = 1.05  # bf16 bytes per stored byte; below it copies count as not packed
KINDS: Final = {"restored": "restored", "hot": "hot", "missed": "missed", "first": "first turns"}
Row = Mapping[str, Any]
FILTERS: Final[Mapping[str, Callable[[Row], bool]]] = {
    "all": lambda row: row["kind"] != "task",
    "awake": lambda row: row["state"] not in ("cold", "away"),
    "asleep": lambda row: row["state"] == "cold",
    "pinned": lambda row: row["pinned"],
    "tasks": lambda row: row["kind"] == "task",  # requests of programs, such as for a title
}
ORDERS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "recent": lambda row: -(row["idle_since"] or float("inf")),  # first those with a running turn
    "tokens": lambda row: -row["tokens"],
    "bytes": lambda row: -(row["bytes"] or 0),
    "saved": lambda row: -row["saved_tokens"],
}
REQUESTS: Final = "session,client,phase,prompt_tokens,prefilled_tokens,answered_tokens"
SESSIONS: Final = "session,client,where,last turn,tokens,size,vs bf16,quiet,saved,turns"
STYLES: Final = {"active": "bold green", "idle": "green", "cold": "cyan", "away": "red"}


def watch(address: Address, console: Console, order: str, kept: str) -> None:
    """Show frames until Ctrl-C. Raises ``LaunchError`` if the first request fails."""
    snapshots, trouble = asyncio.run(fetch_snapshots(address)), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            most = max(1, console.height // len(snapshots) - OTHER_LINES)
            frames = [frame(x, order=order, kept=kept, most_rows=most) for x in snapshots]
            live.update(Group(*frames, _text(trouble, "red")), refresh=True)
            time.sleep(1.0)
            try:
                snapshots, trouble = asyncio.run(fetch_snapshots(address)), ""
            except LaunchError as error:
                trouble = f"{error}; trying again"


async def fetch_snapshots(address: Address) -> list[dict[str, Any]]:
    """Return a snapshot of each model of a server. Raises ``LaunchError`` if it gives none."""
    async with aiohttp.ClientSession() as http:
        _, listed = await address.ask(http, "GET", "/v1/models")
        rows = listed.get("data") if isinstance(listed, dict) else None
        names = list(dict.fromkeys(x["root"] for x in rows or () if x.get("root")))
        queries = ["?" + urlencode({"model": x}) for x in names] if len(names) > 1 else [""]
        answers = [await address.ask(http, "GET", PATH + query) for query in queries]
    for status, content in answers:
        if status != 200:
            raise address.refused(status, content)
        try:
            msgspec.convert(content, Snapshot)
        except msgspec.ValidationError as error:
            raise LaunchError(f"{address.base}{PATH} is no snapshot: {error}") from error
    return [content for _, content in answers]


def frame(
    snapshot: Row,
    *,
    order: str = "recent",
    kept: str = "all",
    most_rows: int = 50,
    now: float = 0.0,
) -> RenderableType:
    """Draw a snapshot; ``kept`` is a name in ``FILTERS``, ``now`` Unix time (0 = the clock's)."""
    moment = now or time.time()
    rows = sorted(filter(FILTERS[kept], snapshot["sessions"]), key=ORDERS[order])
    parts: list[Any] = [_head(snapshot["server"], moment), _now(snapshot["now"])]
    if times := snapshot["now"]["first_token"]:
        kinds = [(KINDS[x], times[x]) for x in KINDS if x in times]
        each = [f"{x} {_seconds(y['p50_s'])} (p95 {_seconds(y['p95_s'])})" for x, y in kinds]
        parts.append(_text(f"first token: {' · '.join(each)}"))
    parts.append(_memory(snapshot["memory"]))
    if snapshot["quality"] and snapshot["quality"]["name"]:
        parts.append(_quality(snapshot["quality"]))
    if requests := snapshot["now"]["requests"][:6]:
        shown = [["" if x[y] is None else x[y] for y in REQUESTS.split(",")] for x in requests]
        parts.append(_table(REQUESTS, shown, left=3))
    parts.append(_table(SESSIONS, [_cells(row, moment) for row in rows[:most_rows]], left=4))
    words = (
        f"{len(rows[:most_rows])} of {snapshot['num_sessions']:,} session(s), {kept}, by {order}"
    )
    return Group(*parts, _text(words, "dim"))


def _text(words: object, style: str = "") -> Text:
    """Make styled text of a server's words; control characters in them have no effect."""
    return Text(one_line(str(words)), style=style)


def _table(columns: str, rows: Sequence[Sequence[object]], left: int) -> Table:
    """Make a table whose first ``left`` columns are left-aligned text, the others figures."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns.split(",")):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(x if isinstance(x, Text) else _text(x) for x in row))
    return table


def _head(server: Row, moment: float) -> Text:
    state = "ready" if server["ready"] else server["trouble"] or "not ready"
    words = [
        f"{server['model'] or 'no model yet'} on {server['engine'] or 'no engine yet'}",
        f"thermocline {server['version']}",
        "shutting down" if server["draining"] else state,
        f"up {_since(server['started_at'], moment)}",
        "all tenants" if server["tenant"] is None else f"tenant {server['tenant']}",
    ]
    return _text(" · ".join(words), "bold")


def _now(now: Row) -> Text:
    seconds, spared = now["saved_s_today"], f"{now['saved_tokens_today']:,} tokens of prefill"
    words = [
        f"{now['running']} running, {now['waiting']} waiting",
        f"prompts {now['prompt_tokens_per_s']:.0f} tok/s",
        f"answers {now['answer_tokens_per_s']:.0f} tok/s",
        f"saved today {spared}" + ("" if seconds is None else f", {_seconds(seconds)}"),
    ]
    if now["memory_available_bytes"] is not None:
        words.append(f"memory free {show_bytes(now['memory_available_bytes'])}")
    return _text(" · ".join(words))


def _memory(memory: Row) -> Table:
    table, hot = Table.grid(padding=(0, 2)), memory["hot"]
    idle = f"{show_bytes(hot['idle_bytes'])} of idle sessions"
    if measuring := hot["measuring_bytes"]:
        idle += f", {show_bytes(measuring)} for measuring the model"
    table.add_row(*_bar("hot", hot), _text(idle, "dim"))
    for tier in memory["tiers"]:
        notes = f"{tier['sessions']} asleep" if tier["available"] else "not available"
        if tier["available"] and tier["hot_sessions"]:
            notes += f", copies of {tier['hot_sessions']} that are hot"
        if tier["profile_bytes"]:
            notes += f", {show_bytes(tier['profile_bytes'])} of tables"
        table.add_row(*_bar(tier["name"], tier), _text(notes, "dim"))
    packed, plain = memory["cold_bytes"], memory["bf16_bytes"] or 0
    if packed:
        words = f"{show_bytes(packed)}, exact"
        if plain > LEAST_RATIO * packed:
            words = f"{show_bytes(packed)} packed, {show_bytes(plain)} in bf16:"
            words += f" {plain / packed:.1f}x"
        table.add_row(_text("copies"), Text(), _text(words), Text())
    return table


def _bar(name: str, place: Row) -> tuple[Text, Text, Text]:
    used, most = place["bytes"], place["capacity_bytes"]
    share = min(1.0, used / most) if most else 0.0
    cells = "█" * round(share * 24)
    figures = f"{show_bytes(used)} of {show_bytes(most)}" if most else show_bytes(used)
    return _text(name), Text(cells.ljust(24, "░")), _text(figures)


def _quality(quality: Row) -> Text:
    """Return a line on the codec in use, its measured cost, and a measurement's progress."""
    exact = "exact" if quality["measured"] else "exact, not packed yet"
    words = [exact if quality["exact"] else f"codec {quality['name']}", quality["progress"]]
    lossy = [x["kl"] for x in quality["rows"] if x["in_use"]]
    if not quality["measured"]:
        words[1:1] = [] if quality["exact"] else ["not measured on this model"]
        words += ["in idle moments"] if quality["progress"] else []
    elif lossy and quality["bound"]:
        words.insert(1, f"measured: KL {max(lossy):.4f} of at most {quality['bound']['kl']:g}")
    return _text(" · ".join(filter(None, words)))


def _cells(row: Row, moment: float) -> tuple[object, ...]:
    name = f"{row['tenant']}/{row['id']}" if "tenant" in row else row["id"]
    title = f"{row['title']} {name[-7:]}" if row.get("title") else name
    places = {"active": "answering", "idle": "hot", "cold": row["tier"] or "cold"}
    source, reason = row["last_source"] or "", row["last_reason"] or ""
    if source == "miss":
        source = "missed"
    elif source == "first":  # a session's first turn has no KV to reuse, so no reason is shown
        reason = ""
    where = _text(places.get(row["state"], row["state"]), STYLES.get(row["state"], ""))
    return (
        f"{'  ' if row['parent'] else ''}{title}{' (pinned)' if row['pinned'] else ''}",
        row["client"] or "",
        where,
        f"{source.removeprefix('cold-')} {reason}".strip(),
        row["tokens"],
        "" if row["bytes"] is None else show_bytes(row["bytes"]),
        f"{row['ratio']:.1f}x" if row["ratio"] else "",
        "" if row["idle_since"] is None else _since(row["idle_since"], moment),
        f"{row['saved_tokens']} tok" if row["saved_s"] is None else _seconds(row["saved_s"]),
        row["turns"],
    )


def _since(moment: float, now: float) -> str:
    return show_duration(float(round(max(0.0, now - moment))))


def _seconds(value: float | None) -> str:
    return "" if value is None else show_duration(round(value, 1))
