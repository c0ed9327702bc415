"""``docs/reference/route-costs.md``: what each route takes of a key's limits, and its bounds."""

from __future__ import annotations

from typing import Final

from docs.generators.tables import code, page, table
from gateway.app import ROUTES
from gateway.edge.key_limits import ROUTE_COSTS, Work

# Questions of the gateway to an engine (``engines.wire``), by the verb's tag; each has a deadline.
VERBS: Final[dict[str, str]] = {
    "hello": "once for each connection, by its holder of the token",
    "demote": "a user's request or a sweep, one at a time for each session",
    "prefetch": "a user's request, one at a time for each session; the engine bounds its restores",
    "pin": "a user's request; the engine bounds the pinned bytes",
    "unpin": "a user's request",
    "forget": "a user's request or a sweep, one at a time for each session",
    "sessions": "the gateway's own, once for each connection, in pages of bounded bytes",
    "stats": "the gateway's own, at a fixed pace",
    "adopt": "the gateway's own, after a calibration",
    "measure": "an admin's; one measurement runs at a time, in idle steps",
    "limit_tenants": "the gateway's own, at a fixed pace, where tenants have limits of bytes",
}
INTRODUCTION = """
A request is charged to its caller's key once, before its body is read. *Requests* are those of
its limit `requests_per_minute`; what *computes* also takes one of `concurrent_requests` until its
answer has ended, and waits while the key owes tokens. Beyond a limit the answer is 429 with
`retry-after`. Bodies count in the budget of all bodies as their bytes come. Limits of keys are off
until they are set; the bounds of the work below always hold.
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
        "## Verbs to the engine",
        table(("verb", "asked by"), [(code(x), by) for x, by in VERBS.items()]),
    )


def _path(row: tuple[str, ...]) -> tuple[str, str]:
    method, _, path = row[0].strip("`").partition(" ")
    return path, method
