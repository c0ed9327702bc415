"""GET, POST and DELETE /admin/keys: makes, lists and revokes API keys of the running server.

A key is shown once, when it is made; a list has ids and limits, never a hash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import InvalidRequest
from gateway.access.key_list import KeyListFixed
from gateway.admin.answers import answer, for_admin
from gateway.body import read_json_body
from gateway.errors import Failure, Refused
from gateway.keys import BadKeyLine, KeyFacts, Limits, generate_key, key_facts

router = APIRouter()
log = logging.getLogger("thermocline.admin")
T = TypeVar("T")


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a new key: whose it is, and its limits (0 = any number)."""

    tenant: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    sessions: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    redis_bytes: int | None = None


@router.get("/admin/keys")
async def list_keys(request: Request) -> Response:
    """List the API keys by their ids, with their limits."""
    gateway = for_admin(request)
    facts = await _changed(gateway.keys.facts)
    return answer({"object": "list", "data": [_shown(x, where) for x, where in facts]})


@router.post("/admin/keys")
async def make_key(request: Request) -> Response:
    """Make an API key; this answer is the only one that shows it."""
    gateway = for_admin(request)
    body = await read_json_body(request, gateway.config)
    try:
        wanted = msgspec.json.decode(body or b"{}", type=NewKey)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is {{'tenant': NAME}}: {error}.", "tenant") from error
    try:
        key, line = generate_key(wanted.tenant)
        line += _words(wanted)
        made = key_facts(line)
    except BadKeyLine as error:
        raise InvalidRequest(
            "'tenant' has up to 64 letters, digits, '.', '_' and '-' and begins with a letter or"
            " digit; limits are numbers from 0 on.",
            "tenant",
        ) from error
    await _changed(lambda: gateway.keys.add(line))
    log.info("a key of tenant %s was made: %s", made.tenant, made.id)
    return answer({**_shown(made, "file"), "key": key}, 201)


@router.delete("/admin/keys/{key_id}")
async def revoke_key(request: Request) -> Response:
    """Revoke an API key, for the next request on."""
    gateway, key_id = for_admin(request), str(request.path_params["key_id"])
    if not await _changed(lambda: gateway.keys.revoke(key_id)):
        raise InvalidRequest("There is no such key.", "key_id", "key_not_found", 404)
    log.info("a key was revoked: %s", key_id)
    return answer({"id": key_id, "object": "key.deleted", "deleted": True})


async def _changed(change: Callable[[], T]) -> T:
    """Do something to the list, beside the event loop: it reads and writes a file.

    Raises:
        Refused: 409, the list cannot be changed so.
    """
    try:
        return await asyncio.to_thread(change)
    except KeyListFixed as error:
        raise Refused(Failure(409, str(error), None, "keys_fixed")) from error
    except BadKeyLine as error:
        raise Refused(Failure(409, f"Nothing was changed: {error}.", None, "bad_key")) from error
    except (OSError, UnicodeDecodeError) as error:
        message = f"The file of API keys cannot be read or written: {error}. Nothing was changed."
        raise Refused(Failure(503, message, None, "key_file")) from error


def _words(wanted: NewKey) -> str:
    given = {name: getattr(wanted, name) for name in Limits._fields}
    return "".join(f" {name}={number}" for name, number in given.items() if number is not None)


def _shown(facts: KeyFacts, where: str) -> dict[str, object]:
    return {
        "object": "key",
        "id": facts.id,
        "tenant": facts.tenant,
        "admin": facts.admin,
        "limits": facts.limits._asdict() if facts.limits else None,
        "kept_in": where,
    }
