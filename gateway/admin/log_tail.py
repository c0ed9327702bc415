"""GET /admin/log: the last lines of the server's log."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import InvalidRequest
from gateway.admin.answers import answer, for_admin

router = APIRouter()
USUAL_LINES = 200
MOST_LINES = 2000


@router.get("/admin/log")
async def show_log(request: Request) -> Response:
    """Show the last lines of the log; ``after`` is the number of the last one that is known."""
    gateway = for_admin(request)
    after = _number(request, "after", 0, 1 << 53)
    limit = _number(request, "limit", USUAL_LINES, MOST_LINES)
    lines = gateway.log_ring.lines(after, limit) if limit else []
    return answer({"object": "list", "data": lines, "last": lines[-1].n if lines else after})


def _number(request: Request, name: str, usual: int, most: int) -> int:
    given = request.query_params.get(name, str(usual))
    if not given.isdecimal() or len(given) > 16 or int(given) > most:
        raise InvalidRequest(f"'{name}' is a number from 0 to {most}.", name)
    return int(given)
