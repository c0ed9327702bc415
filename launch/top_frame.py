"""One frame of ``thermocline top``, drawn from a snapshot of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.printing import one_line
from launch.settings.units import show_bytes, show_duration

Row = Mapping[str, Any]
FILTERS: Final[Mapping[str, Callable[[Row], bool]]] = {
    "all": lambda row: row.get("kind") != "task",
    "awake": lambda row: row.get("state") in ("active", "idle", "waking"),
    "asleep": lambda row: row.get("state") in ("cold", "saving", "hibernating"),
    "pinned": lambda row: bool(row.get("pinned")),
    "tasks": lambda row: row.get("kind") == "task",  # titles and the like, of programs
}
BAR_CELLS: Final = 24
END_CHARACTERS: Final = 6  # of an id
LEAST_RATIO: Final = 1.05  # of bytes in bf16: less is not packed
MOST_REQUESTS: Final = 6
STYLES: Final = {
    "active": "bold green",
    "idle": "green",
    "saving": "blue",
    "hibernating": "blue",
    "cold": "cyan",
    "waking": "yellow",
    "away": "red",  # with an engine that is not there
}
KINDS: Final = {"restored": "restored", "hot": "hot", "missed": "missed", "first": "first turns"}
MOST_TENANTS: Final = 5
TENANTS: Final = ("tenant", "sessions", "running", "waiting", "tokens/h", "share", "waited")
REQUESTS: Final = ("request", "session", "client", "prompt", "answered", "since")
LEAST_NAME: Final = 16  # characters of a session's name that are seen in any case
GAP: Final = 2  # between two columns


def part(said: Row, name: str) -> Row:
    """One of ``server``, ``now``, ``memory`` and ``quality``; empty while it is not known."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def objects(rows: object) -> list[dict[str, Any]]:
    """The rows of a field that should be a list of them."""
    return [x for x in rows if isinstance(x, dict)] if isinstance(rows, list) else []


def number(value: object) -> float:
    """A field as a number; 0 for null and for anything else that is none."""
    return float(value) if isinstance(value, int | float) else 0.0


def _recent(row: Row) -> float:
    """Served ones first, then those that were used last."""
    idle = row.get("idle_since")
    return float("-inf") if idle is None else -number(idle)


ORDERS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "recent": _recent,
    "tokens": lambda row: -number(row.get("tokens")),
    "bytes": lambda row: -number(row.get("bytes")),
    "saved": lambda row: -number(row.get("saved_tokens")),
    "turns": lambda row: -number(row.get("turns")),
    "id": lambda row: str(row.get("id")),
}


def chosen(said: Row, order: str, kept: str) -> list[Row]:
    """The rows that are to be seen, in their order."""
    return sorted(filter(FILTERS[kept], objects(said.get("sessions"))), key=ORDERS[order])


class Column(NamedTuple):
    """A column of the table of sessions."""

    name: str
    side: Literal["left", "right"]
    goes: int = 0  # its place in the order in which columns are left out; 0 = never


COLUMNS: Final = (
    Column("session", "left"),
    Column("client", "left", 4),
    Column("where", "left"),
    Column("tokens", "right", 6),
    Column("size", "right"),
    Column("vs bf16", "right", 5),
    Column("quiet", "right"),
    Column("pin", "left", 1),
    Column("last turn", "left", 7),
    Column("saved", "right", 2),
    Column("turns", "right", 3),
)


def frame(
    said: Row,
    *,
    order: str = "recent",
    kept: str = "all",
    most_rows: int = 50,
    trouble: str = "",
    keys: bool = False,
    now: float | None = None,
    width: int = 100,
) -> RenderableType:
    """One frame.

    Args:
        most_rows: sessions that are shown.
        width: of the terminal, in columns.
        trouble: what is wrong with the connection, in words.
        keys: say which keys there are.
        now: Unix time; None = now.
    """
    if not said:
        return Text(trouble or "waiting for the server", style="dim")
    moment = time.time() if now is None else now
    rows = chosen(said, order, kept)
    parts: list[RenderableType] = [_head(said, moment), _now(said)]
    if times := _first_token(part(said, "now")):
        parts.append(_text(times))
    parts.append(_memory(said))
    if part(said, "quality").get("name"):
        parts.append(_quality(said))
    if trouble:
        parts.append(_text(trouble, "red"))
    requests = objects(part(said, "now").get("requests"))
    if requests:
        parts += [Text(), _requests(requests, moment)]
    tenants = objects(said.get("tenants"))
    if len(tenants) > 1:
        parts += [Text(), _tenants(tenants)]
    parts += [Text(), _sessions(rows[:most_rows], moment, _has_tenants(rows), width)]
    count = int(number(said.get("num_sessions"))) or len(rows)
    words = f"{min(len(rows), most_rows)} of {_sessions_of(count)}, {kept}, by {order}"
    if keys:
        words += "    q quit   s sort   f filter"
    parts.append(_text(words, "dim"))
    return Group(*parts)


def _sessions_of(count: int) -> str:
    return "1 session" if count == 1 else f"{count:,} sessions"


def _text(words: str, style: str = "") -> Text:
    """Words of a server: control characters in them have no effect."""
    return Text(one_line(words), style=style)


def _head(said: Row, moment: float) -> Text:
    server = part(said, "server")
    state = "ready" if server.get("ready") else str(server.get("trouble") or "not ready")
    if server.get("draining"):
        state = "shutting down"
    whose = server.get("tenant")
    words = [
        f"{server.get('model') or 'no model yet'} on {server.get('engine') or 'no engine yet'}",
        f"thermocline {server.get('version')}",
        state,
        f"up {_since(server.get('started_at'), moment)}",
        "all tenants" if whose is None else f"tenant {whose}",
    ]
    return _text(" · ".join(words), "bold")


def _now(said: Row) -> Text:
    now = part(said, "now")
    words = [
        f"{int(number(now.get('running')))} running, {int(number(now.get('waiting')))} waiting",
        f"prompts {number(now.get('prompt_tokens_per_s')):.0f} tok/s",
        f"answers {number(now.get('answer_tokens_per_s')):.0f} tok/s",
        _saved_today(now),
    ]
    if now.get("memory_available_bytes") is not None:
        words.append(f"memory free {show_bytes(number(now['memory_available_bytes']))}")
    return _text(" · ".join(words))


def _saved_today(now: Row) -> str:
    tokens = f"{int(number(now.get('saved_tokens_today'))):,} tokens"
    if now.get("saved_s_today") is None:  # the speed of prefill is not known yet
        return f"saved today {tokens} of prefill"
    return f"saved today {_seconds(now['saved_s_today'])} of prefill ({tokens})"


def _first_token(now: Row) -> str:
    """Say how soon returns begin to be answered, against first turns."""
    times = now.get("first_token")
    kinds = times if isinstance(times, dict) else {}
    words = [
        f"{name} {_seconds(kinds[kind].get('p50_s'))} (p95 {_seconds(kinds[kind].get('p95_s'))})"
        for kind, name in KINDS.items()
        if isinstance(kinds.get(kind), dict)
    ]
    return f"first token: {' · '.join(words)}" if words else ""


def _tenants(tenants: Sequence[Row]) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        counts = (row.get(x) for x in ("sessions", "running", "waiting", "tokens_last_hour"))
        waited, share = row.get("wait_p95_s"), row.get("share")
        return (
            str(row.get("name")),
            *(str(int(number(x))) for x in counts),
            "" if share is None else f"{100 * number(share):.0f} %",
            "" if waited is None else _seconds(waited),
        )

    return _listing(TENANTS, TENANTS[1:], [cells(x) for x in tenants], MOST_TENANTS)


def _memory(said: Row) -> Table:
    memory = part(said, "memory")
    table = Table.grid(padding=(0, 2))
    hot = memory.get("hot")
    if isinstance(hot, dict):
        idle = f"{show_bytes(number(hot.get('idle_bytes')))} of idle sessions"
        if measuring := number(hot.get("measuring_bytes")):
            idle += f", {show_bytes(measuring)} for measuring the model"
        table.add_row(*_bar("hot", hot, number(hot.get("high_water"))), _text(idle, "dim"))
    for tier in objects(memory.get("tiers")):
        notes = [_codec(tier.get("codec")), _sessions_of(int(number(tier.get("sessions"))))]
        if not tier.get("available", True):
            notes.append("not available")
        row = _bar(str(tier.get("name")), tier)
        table.add_row(*row, _text(", ".join(x for x in notes if x), "dim"))
    packed, plain = number(memory.get("cold_bytes")), number(memory.get("bf16_bytes"))
    if packed and plain >= LEAST_RATIO * packed:
        words = f"{show_bytes(packed)} packed, {show_bytes(plain)} in bf16: {plain / packed:.1f}x"
        table.add_row(_text("asleep"), _text(""), _text(words), _text(""))
    elif packed:
        table.add_row(_text("asleep"), _text(""), _text(f"{show_bytes(packed)}, exact"), _text(""))
    return table


def _quality(said: Row) -> Text:
    """The gate's verdict: the codec, what it was measured to cost, and how far a measurement is."""
    quality = part(said, "quality")
    words = [f"codec {quality.get('name')}"]
    in_use = [x for x in objects(quality.get("rows")) if x.get("in_use")]
    if quality.get("exact"):
        words = ["exact" if quality.get("measured") else "exact, not packed yet"]
    elif not quality.get("measured"):
        words.append("not measured on this model")
    elif in_use:
        bound = quality.get("bound")
        most = f" of at most {number(bound.get('kl')):g}" if isinstance(bound, dict) else ""
        words.append(f"measured: KL {max(number(x.get('kl')) for x in in_use):.4f}{most}")
    if quality.get("progress"):
        following = f", then {quality['expected']}" if quality.get("expected") else ""
        words.append(f"{quality['progress']}{following}")
        if quality.get("measured") is False:
            words.append("in idle moments")
    return _text(" · ".join(words))


def _bar(name: str, tier: Mapping[str, Any], mark: float = 0.0) -> tuple[Text, Text, Text]:
    """The name, the bar with its mark, and the figures of a place for KV."""
    used, most = number(tier.get("bytes")), number(tier.get("capacity_bytes"))
    share = max(0.0, min(1.0, used / most)) if most else 0.0
    full = round(share * BAR_CELLS)
    cells = ["█"] * full + ["░"] * (BAR_CELLS - full)
    if 0 < mark < 1:
        cells[min(BAR_CELLS - 1, int(mark * BAR_CELLS))] = "┃"
    style = "red" if share > 0.95 else "yellow" if mark and share > mark else "green"
    figures = f"{show_bytes(used)} of {show_bytes(most)}" if most else show_bytes(used)
    return _text(name), Text("".join(cells), style=style), _text(figures)


def _requests(requests: Sequence[Row], moment: float) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        answered, since = number(row.get("answered_tokens")), _since(row.get("started_at"), moment)
        who = (str(row.get("session") or ""), str(row.get("client") or ""))
        return (str(row.get("phase")), *who, _progress(row), str(int(answered)), since)

    right = ("answered", "since")
    return _listing(REQUESTS, right, [cells(x) for x in requests], MOST_REQUESTS)


def _progress(row: Row) -> str:
    source = str(row.get("source") or "")
    if row.get("prompt_tokens") is None:
        return source
    prompt, done = int(number(row["prompt_tokens"])), row.get("prefilled_tokens")
    words = f"{prompt} tokens" if done is None else f"{int(number(done))} of {prompt} tokens"
    return f"{words} {source}".strip()


def _sessions(rows: Sequence[Row], moment: float, with_tenants: bool, width: int) -> Table:
    cells = [_cells(row, moment, with_tenants) for row in rows]
    widths = {x.name: max([len(x.name), *(y[x.name].cell_len for y in cells)]) for x in COLUMNS}
    columns, name = list(COLUMNS), COLUMNS[0].name
    room = width - sum(widths[x.name] + GAP for x in columns[1:])
    for x in sorted((x for x in COLUMNS if x.goes), key=lambda x: x.goes):
        if room >= min(widths[name], LEAST_NAME):
            break
        columns.remove(x)
        room += widths[x.name] + GAP
    table = Table(box=None, pad_edge=False, header_style="dim")
    for x in columns:
        # A name is cut where it has to be: its beginning distinguishes it from others.
        most = max(1, min(widths[name], room)) if x.name == name else widths[x.name]
        table.add_column(x.name, justify=x.side, no_wrap=True, width=most)
    for row in cells:
        table.add_row(*(row[x.name] for x in columns))
    return table


def _cells(row: Row, moment: float, with_tenants: bool) -> dict[str, Text]:
    """One session, by the columns' names."""
    tenant = f"{row.get('tenant')}/" if with_tenants else ""
    state, idle = str(row.get("state")), row.get("idle_since")
    return {
        "session": _text(f"{'  ' if row.get('parent') else ''}{tenant}{_name(row)}"),
        "client": _text(str(row.get("client") or "")),
        "where": _text(_where(row), STYLES.get(state, "")),
        "tokens": _text(str(int(number(row.get("tokens"))))),
        "size": _text(show_bytes(number(row.get("bytes")))),
        "vs bf16": _text(f"{number(row['ratio']):.1f}x" if row.get("ratio") else ""),
        "quiet": _text("" if idle is None else _since(idle, moment)),
        "pin": _text("pin" if row.get("pinned") else ""),
        "last turn": _text(_last_turn(row)),
        "saved": _text(_saved(row)),
        "turns": _text(str(int(number(row.get("turns"))))),
    }


def _name(row: Row) -> str:
    """Its title, where it has one, and the end of its id."""
    id = str(row.get("id"))
    end = id if len(id) <= 2 + END_CHARACTERS else f"…{id[-END_CHARACTERS:]}"
    return f"{row['title']} {end}" if row.get("title") else id


def _saved(row: Row) -> str:
    if row.get("saved_s") is not None:
        return _seconds(row["saved_s"])
    tokens = int(number(row.get("saved_tokens")))
    return f"{tokens} tok" if tokens else ""


def _codec(id: object) -> str:
    """A codec's id, where something is packed."""
    words = str(id or "")
    return "exact" if words.split(".")[0] == "raw" else words


def _where(row: Row) -> str:
    """The fastest place that has the session: hot memory, else the tier of its cold copy."""
    state = str(row.get("state"))
    if state == "active":
        return "answering"
    if state in ("waking", "saving", "hibernating", "away"):
        return state
    return "hot" if state == "idle" else str(row.get("tier") or state)


def _last_turn(row: Row) -> str:
    """Say where its prompt came from; *missed* is said of returns only."""
    source, reason = str(row.get("last_source") or ""), str(row.get("last_reason") or "")
    if source == "miss":
        return "first" if reason == "never-stored" else f"missed {reason}".strip()
    return f"{source.removeprefix('cold-')} {reason}".strip()


def _listing(
    columns: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]], most: int
) -> Table:
    """Make a plain table of the first rows; ``right`` are the columns set to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows[:most]:
        table.add_row(*map(_text, row))
    if len(rows) > most:
        table.add_row(_text(f"and {len(rows) - most} more", "dim"))
    return table


def _has_tenants(rows: Sequence[Row]) -> bool:
    return len({row.get("tenant") for row in rows}) > 1


def _since(moment: object, now: float) -> str:
    return show_duration(float(round(max(0.0, now - number(moment)))))


def _seconds(value: object) -> str:
    return show_duration(round(number(value), 1))
