"""Two servers of the fake engine with one secret, one list of keys and one Redis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.keys import generate_key
from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask
from tests.redis_server import RedisServer


class Pair:
    """The servers; ``tenants``: the limits of each tenant's key, as in a key list."""

    def __init__(self, folder: Path, redis: RedisServer, tenants: Mapping[str, str]) -> None:
        self.redis = redis
        self.keys = {}
        lines = []
        for name, limits in tenants.items():
            self.keys[name], line = generate_key(name)
            lines.append(f"{line} {limits}\n")
        (folder / "keys").write_text("".join(lines))
        (folder / "secret").write_bytes(b"s" * 32)
        more = ["--api-keys", str(folder / "keys"), "--redis", redis.url, "--set"]
        more.append(f"store.secret_file={folder / 'secret'}")
        homes = [folder / "one", folder / "two"]
        for home in homes:
            home.mkdir()
        self.servers = [Server(home, *more) for home in homes]

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


def listed(pair: Pair, name: str, i: int) -> dict[str, Any]:
    """What the server lists for that tenant."""
    found: dict[str, Any] = ask(pair.servers[i], "/v1/sessions", **pair.headers(name))[2]
    return found
