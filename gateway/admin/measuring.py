"""POST /admin/measure: has the engine measure its codecs on this model, in its idle moments."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.answers import answer, for_admin
from gateway.body import read_json_body
from gateway.context import model_asked
from gateway.errors import Failure, Refused

router = APIRouter()


@router.post("/admin/measure")
async def measure(request: Request) -> Response:
    """Begin to measure what each codec costs this model; the events show how far it is."""
    gateway = for_admin(request)
    await read_json_body(request, gateway.config)
    model = model_asked(request) or gateway.models.default
    if not model.served.can_measure:
        message = "This engine cannot measure on request. Run `thermocline calibrate` instead."
        raise Refused(Failure(409, message, None, "cannot_measure"))
    codec = await model.engine.measure()
    return answer({"object": "measurement", "progress": codec.progress, "codec": codec.name}, 202)
