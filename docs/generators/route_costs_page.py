"""``docs/reference/route-costs.md``: what each route takes of a key's limits, and its bounds."""

from __future__ import annotations

from typing import Final

import msgspec

from docs.generators.tables import code, page, table
from engines.config import SPARE_PLACE
from engines.openai.requests import (
    MAX_ANSWERS,
    MAX_EMBEDDED_TOKENS,
    MAX_INPUTS,
    MAX_PARTS,
    ChatRequest,
)
from engines.openai.schemas import schema_count
from gateway.app import ROUTES
from gateway.config import GatewayConfig
from gateway.edge import bodies, connections, protocol
from gateway.edge.key_limits import ROUTE_COSTS, Work
from gateway.relay import answer, question
from gateway.stored import objects, stored
from kvstore.config import StoreConfig
from launch.settings.units import show_bytes
from scheduler.config import SchedulerConfig
from scheduler.sessions import PLACES_ELSEWHERE

# Questions of the gateway to an engine (``engines.wire``), by the verb's tag; each has a deadline.
VERBS: Final[dict[str, str]] = {
    "hello": "the gateway, once for each connection, with the engine's token",
    "demote": "a user's request or a sweep, one at a time for each session",
    "prefetch": "a user's request, one at a time for each session; the engine bounds its restores",
    "pin": "a user's request; never refused, since pinned blobs stay within each tier's budget",
    "unpin": "a user's request",
    "forget": "a user's request or a sweep, one at a time for each session",
    "sessions": "the gateway, once for each connection, in pages of bounded bytes",
    "stats": "the gateway, at a fixed pace",
    "adopt": "the gateway, after a calibration",
    "measure": "an admin; one measurement runs at a time, in idle steps",
    "limit_tenants": "the gateway, at a fixed pace, if tenants have limits of bytes",
}
INTRODUCTION = """
For those who set limits for keys, or want to know what one request can cost the server.

A request is charged to its caller's key once, before its body is read. The column *requests* is
what it takes of the limit `requests_per_minute`. A request that *computes* also takes one of
`concurrent_requests` until its answer has ended, and waits while the key owes tokens. Beyond a
limit the answer is 429 with `retry-after`. Keys have no limits until you set some; the bounds below
always hold. Bodies count in the memory for all bodies as their bytes arrive.
"""
SETTINGS: Final = """
Names with a dot are settings, with their defaults in brackets; the other figures are constants.
"""


def route_costs_page() -> str:
    """Write the page. A route's function names its cost."""
    rows = []
    for module in ROUTES:
        for route in module.router.routes:
            cost = ROUTE_COSTS[route.endpoint.__name__]
            requests = f"{cost.requests:g}" if cost.requests else ""
            methods = ", ".join(sorted(route.methods))
            at = code(f"{methods} {route.path.replace(':path', '')}")
            rows.append((at, requests, "yes" if cost.computes else "", cost.work.name.lower()))
    works = [(x.name.lower(), x.value) for x in Work]
    return page(
        "What requests cost",
        INTRODUCTION,
        table(("route", "requests", "computes", "work"), sorted(rows, key=_path)),
        "## What bounds the work",
        table(("work", "bound"), works),
        "## What one request may take",
        SETTINGS,
        table(("what", "bound", "file"), [(x, y, _files(z)) for x, y, z in _bounds()]),
        "## Verbs to the engine",
        table(("verb", "asked by"), [(code(x), by) for x, by in VERBS.items()]),
    )


def _bounds() -> list[tuple[str, str, str]]:
    """Return rows: what is bounded, the bound, and the files that enforce it."""
    gateway, turns, store = GatewayConfig(), SchedulerConfig(), StoreConfig()
    queued = f"`store.save_queue_bytes` ({show_bytes(store.save_queue_bytes)})"
    at_once = f"`engine.max_batch` + {SPARE_PLACE} sequences at once"
    return [
        (
            "connections",
            f"{connections.MAX_CONNECTIONS:,}, or as many as the limit of open files allows;"
            f" {gateway.max_connections_per_address} from one address",
            "gateway/edge/connections.py",
        ),
        (
            "the head of a request",
            f"{show_bytes(protocol.MAX_HEADER_BYTES)}, {protocol.MAX_FIELDS} fields,"
            f" {protocol.HEAD_TIMEOUT_S:g} s",
            "gateway/edge/protocol.py",
        ),
        (
            "its body",
            f"`gateway.max_body_bytes` ({show_bytes(gateway.max_body_bytes)}), unpacked;"
            f" {bodies.MAX_WEIGHT:,} values, where a list counts as four and an object as eight;"
            f" {gateway.body_timeout_s:g} s",
            "gateway/request/body.py engines/http.py gateway/edge/bodies.py",
        ),
        (
            "all bodies together, with the stored objects that requests continue",
            f"{show_bytes(gateway.max_bodies_bytes)}, three quarters of it for one tenant",
            "gateway/config.py gateway/edge/bodies.py",
        ),
        (
            "fields of a chat",
            f"{_longest('messages'):,} messages, {MAX_PARTS:,} parts in all,"
            f" {_longest('tools')} tools, {_largest('n')} answers;"
            f" {MAX_ANSWERS} answers of a text completion",
            "engines/openai/requests.py",
        ),
        (
            "embeddings",
            f"{MAX_INPUTS:,} inputs of {MAX_EMBEDDED_TOKENS:,} tokens together",
            "engines/openai/requests.py",
        ),
        (
            "turns in line",
            f"{turns.max_waiting}, for {turns.max_wait_s:g} s; `scheduler.max_running` run at once"
            f" (as many as the engine computes together; {PLACES_ELSEWHERE} on an engine given by"
            " its URL)",
            "scheduler/config.py scheduler/admission.py",
        ),
        (
            "the time of an answer",
            f"{gateway.request_timeout_s:,g} s; {question.QUESTION_S:g} s for a question about"
            " tokens",
            "gateway/config.py gateway/relay/turn_response.py gateway/relay/question.py",
        ),
        (
            "a client that stops reading",
            f"{gateway.client_stall_s:g} s; {show_bytes(answer.MAX_HELD_BYTES)} of an incomplete"
            f" event are kept, {show_bytes(answer.MAX_EVENT_BYTES)} of one that is translated",
            "gateway/config.py gateway/relay/passthrough.py gateway/relay/answer.py",
        ),
        (
            "live KV on mlx",
            f"`engine.hot_bytes` for all requests together; {at_once}",
            "engines/mlx_worker/batch/admission.py",
        ),
        (
            "live KV on vLLM",
            f"vLLM's blocks; {at_once} (`--max-num-seqs`)",
            "engines/vllm_plugin/process/command.py",
        ),
        (
            "restores",
            f"{store.restore_deadline_s:g} s; on mlx a few at once (`NUM_RESTORES`), on vLLM as"
            f" many packed bytes as {queued}",
            "kvstore/config.py engines/mlx_worker/sessions/cold_sessions.py"
            " engines/vllm_plugin/scheduler/restores.py",
        ),
        (
            "saves that wait",
            f"{queued} of live KV",
            "kvstore/store/save_queue.py",
        ),
        (
            "schemas of a grammar",
            f"{show_bytes(schema_count.MAX_BYTES)}, {schema_count.MAX_PROPERTIES:,} properties,"
            f" {schema_count.MAX_DEPTH} levels, and more",
            "engines/openai/schemas/schema_count.py",
        ),
        (
            "a grammar",
            "seconds of a core, and memory: while it is tried (`MAX_CPU_S`, `MAX_GROWTH_BYTES`),"
            " and while an answer is written (`MAX_LEXER_STATES`, `MAX_MASK_S`, `MAX_MASKS_S`)",
            "engines/host/grammar_trial.py engines/host/grammar.py",
        ),
        (
            "stored objects of a tenant",
            f"`gateway.stored_bytes` ({show_bytes(gateway.stored_bytes)}), `gateway.stored_days`"
            f" ({gateway.stored_days:g}); {objects.MAX_ITEMS:,} items in one;"
            f" {stored.THREADS_PER_TENANT} threads, {stored.MAX_WAITING} waiting requests",
            "gateway/config.py gateway/stored/objects.py gateway/stored/stored.py",
        ),
    ]


def _files(names: str) -> str:
    return ", ".join(code(x) for x in names.split())


def _longest(field: str) -> int:
    """Return the length of the longest list that a field of a chat may have."""
    return int(_schema(field)["maxItems"])


def _largest(field: str) -> int:
    return int(_schema(field)["maximum"])


def _schema(field: str) -> dict[str, int]:
    found = msgspec.json.schema(ChatRequest)["$defs"]["ChatRequest"]["properties"][field]
    return next((x for x in found.get("anyOf", ()) if x != {"type": "null"}), found)


def _path(row: tuple[str, ...]) -> tuple[str, str]:
    method, _, path = row[0].strip("`").partition(" ")
    return path, method
