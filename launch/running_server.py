"""Asks a running server what it serves, and how it packs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engines.wire import CodecReport
from launch.errors import LaunchError
from launch.machine.server_address import server_address

if TYPE_CHECKING:
    from launch.remote import Address


def ask_server(environ: Mapping[str, str]) -> str:
    """Return one line on the server of ours that commands ask; "" if there is none."""
    from launch.remote import Address  # pulls in the HTTP client

    address = Address(server_address(environ), environ.get("THERMOCLINE_API_KEY", ""))
    try:
        status, content = asyncio.run(_answer(address))
    except LaunchError:  # no one answers
        return ""
    if status == 401:
        return f"{address.base} answers, and wants a key (THERMOCLINE_API_KEY)"
    try:
        found = msgspec.convert(content, _Answer)
    except msgspec.ValidationError:  # a server of another kind
        return ""
    if found.codec is None:
        return f"{address.base} answers, and its engine is away"
    why = found.codec.progress or found.codec.why
    return f"{address.base} packs sessions with {found.codec.name}: {why}"


class _Answer(msgspec.Struct):
    """The part of a list of sessions that says how they are packed."""

    object: Literal["list"]
    codec: CodecReport | None


async def _answer(address: Address) -> tuple[int, Any]:
    import aiohttp

    async with aiohttp.ClientSession() as http:
        return await address.get(http, "/v1/sessions?limit=1")
