"""The list of replicas that gateways read, as a deployment of Serve; replicas announce themselves.

An announcement is valid for ``LEASE_S``, so that a replica that hangs or was killed drops off the
list. For the same time after its own start the directory serves no list, since some replicas may
not have announced themselves yet; gateways continue with the list that they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hmac import compare_digest
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engines.pool.listed_pool import MAX_REPLICAS, ListedReplica, Listing, list_token
from kvstore.tiers.seal import read_secret

LEASE_S: Final = 8.0
ANNOUNCE_S: Final = 2.0
NAME: Final = "Replicas"  # the deployment's name


class ReplicaDirectory:
    """Lists the replicas that have announced themselves within ``LEASE_S``."""

    def __init__(
        self, secret_file: str, clock: Callable[[], float] = time.monotonic, **servers: object
    ) -> None:
        """``servers``: the replicas' deployments; named here so that the application has them."""
        self._expected = f"Bearer {list_token(read_secret(Path(secret_file)))}".encode()
        self._clock = clock
        self._began = clock()
        self._replicas: dict[str, tuple[float, ListedReplica]] = {}

    async def announce(self, announcement: dict[str, object]) -> None:
        """Record a replica as alive; only replicas call this, through Serve's handles."""
        replica = msgspec.convert(announcement, ListedReplica)
        self._drop_old()
        if replica.name in self._replicas or len(self._replicas) < MAX_REPLICAS:
            self._replicas[replica.name] = self._clock() + LEASE_S, replica

    def _drop_old(self) -> None:
        now = self._clock()
        self._replicas = {k: v for k, v in self._replicas.items() if v[0] > now}

    async def __call__(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not compare_digest(given, self._expected):
            return JSONResponse({"error": {"message": "The bearer token is wrong."}}, 401)
        if self._clock() - self._began < LEASE_S:
            words = "The list is not complete yet; ask again in a few seconds."
            return JSONResponse({"error": {"message": words}}, 503)
        self._drop_old()
        listing = Listing([replica for _, replica in self._replicas.values()])
        return Response(msgspec.json.encode(listing), media_type="application/json")
