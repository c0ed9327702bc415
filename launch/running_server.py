"""Asks the server that runs on this machine what it serves, and how it packs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from launch.errors import LaunchError
from launch.machine.server_address import address_here


def ask_server(environ: Mapping[str, str]) -> str:
    """Return one line on the server that runs here; "" if none answers.

    Raises ``LaunchError`` where it refuses the question.
    """
    from launch.remote import Address  # pulls in the HTTP client

    address = Address(address_here(environ), environ.get("THERMOCLINE_API_KEY", ""))
    found = asyncio.run(_answers(address))
    if not found:
        return ""
    models, sessions = found
    names = ", ".join(str(x["id"]) for x in models["data"])
    codec = sessions.get("codec") or {"name": "nothing", "why": "its engine is away"}
    why = codec.get("progress") or codec["why"]
    return f"{address.base} serves {names}, and packs with {codec['name']}: {why}"


async def _answers(address: Any) -> list[dict[str, Any]]:
    import aiohttp

    found = []
    async with aiohttp.ClientSession() as http:
        for path in ("/v1/models", "/v1/sessions?limit=1"):
            try:
                status, content = await address.get(http, path)
            except LaunchError:
                return []
            if status != 200 or not isinstance(content, dict):
                raise address.refused(status, content)
            found.append(content)
    return found
