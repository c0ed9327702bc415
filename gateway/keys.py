"""API keys, the tenants that they belong to with their salts, and the file that admins can change.

A key is 32 random bytes, so storing one plain SHA-256 of it is enough. What a caller sends is
compared with every known key in constant time. A tenant's salt is derived from the server's secret:
it enters every chunk key of that tenant, is never revealed, and no client can choose it.

The file is replaced as a whole (0600), so a crash leaves the old list or the new one. A line that
added by hand meanwhile is safe, too: the file is read again before each change.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from engines.base import SessionRef
from engines.headers import MAX_WEIGHT
from engines.openai.requests import InvalidRequest
from gateway.config import GatewayConfig

KEY_PREFIX = "tc-"
ANONYMOUS = "local"
WEIGHT = "weight"  # a word of a key's line, beside its limits
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})((?:\s+[a-z_]+=[0-9]{1,12})*)")


class BadKeyLine(Exception):
    """A line of the key list cannot be read. The message never quotes the line."""


class Limits(NamedTuple):
    """The limits of one key; 0 = any number. ``sessions`` are its tenant's."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    sessions: int = 0


class Tenant(NamedTuple):
    """A caller's name, and the salt that enters every key of its cold data; its key's limits."""

    name: str
    salt: bytes
    key_id: str = ""  # distinguishes keys of one tenant; no secret
    limits: Limits | None = None  # None: the usual ones
    admin: bool = False  # may see and manage all tenants' sessions
    weight: int = 1  # of its share of the engine; the largest that one of its keys has

    def session(self, id: str) -> SessionRef:
        """Name a session of this tenant, known or new."""
        return SessionRef(tenant=self.name, id=id, salt=self.salt)


class _Key(NamedTuple):
    digest: bytes
    tenant: str
    limits: Limits | None
    weight: int
    admin: bool = False


class KeyFacts(NamedTuple):
    """A key as it may be shown: the key itself cannot be made of it."""

    id: str
    tenant: str
    limits: Limits | None  # None: the usual ones
    admin: bool


def key_facts(line: str) -> KeyFacts:
    """Show the key of a line. Raises ``BadKeyLine``."""
    return _facts(_the_key(line))


def facts_of(lines: Iterable[str], *, admin: bool = False) -> list[KeyFacts]:
    """Show the keys of lines. Raises ``BadKeyLine``."""
    return [_facts(key) for key in _parse(lines, admin=admin)]


def _facts(key: _Key) -> KeyFacts:
    return KeyFacts(_id_of(key), key.tenant, key.limits, key.admin)


class Tenants:
    """All tenants that may call. Without any key there is one, ``ANONYMOUS``."""

    def __init__(
        self, secret: bytes, key_lines: Iterable[str] = (), admin_lines: Iterable[str] = ()
    ) -> None:
        """
        Args:
            secret: at least 16 random bytes that stay the same over restarts.
            admin_lines: keys of the same form that see and manage all tenants.

        Raises:
            BadKeyLine: with the number of the line.
        """
        if len(secret) < 16:
            raise ValueError("the server's secret needs at least 16 bytes")
        self._secret = secret
        self._keys = _parse(key_lines)
        self._admin_keys = _parse(admin_lines, admin=True)

    def replace(self, key_lines: Iterable[str], admin_lines: Iterable[str] = ()) -> None:
        """Take other keys from now on, all at once; turns that run go on.

        Raises:
            BadKeyLine: one cannot be read, or the last key would go, so that none were needed any
                more, or the first would come. The keys are as before.
        """
        keys, admin_keys = _parse(key_lines), _parse(admin_lines, admin=True)
        if bool(keys) != bool(self._keys):
            raise BadKeyLine(
                "whether API keys are needed cannot change while the server runs: start it again"
            )
        self._keys, self._admin_keys = keys, admin_keys

    @property
    def open_to_all(self) -> bool:
        """True if no key is needed, except for the admins' routes."""
        return not self._keys

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def num_admin_keys(self) -> int:
        return len(self._admin_keys)

    def holds(self, caller: Tenant) -> bool:
        """Say whether the key by which a caller was known still gives it the same rights."""
        if not caller.key_id:
            return self.open_to_all or caller.admin
        known = (caller.key_id, caller.name, caller.admin)
        keys = (*self._keys, *self._admin_keys)
        return any((_id_of(x), x.tenant, x.admin) == known for x in keys)

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> Tenant:
        """Find the tenant whose key an ``Authorization`` header or an ``X-API-Key`` header holds.

        Raises:
            InvalidRequest: 401, no key, an unknown one, or two that differ: whose request it is
                must not be guessed.
        """
        anonymous = Tenant(ANONYMOUS, self.salt_of(ANONYMOUS))
        keys = (*self._keys, *self._admin_keys)  # another thread may replace them meanwhile
        if not keys:
            return anonymous
        scheme, _, bearer = (authorization or "").partition(" ")
        bearer = bearer.strip() if scheme.lower() == "bearer" else ""
        key = bearer or (x_api_key or "").strip()
        if not key and self.open_to_all:
            return anonymous
        if not key:
            raise _unauthorised("No API key was sent. Send it as: Authorization: Bearer KEY.")
        if x_api_key and x_api_key.strip() != key:
            raise _unauthorised("Authorization and X-API-Key hold different keys: send one.")
        shown = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: _Key | None = None
        # Always all of them, so that the time reveals nothing.
        for key_line in keys:
            if hmac.compare_digest(key_line.digest, shown):
                found = key_line
        if found is None and self.open_to_all:  # clients often send some word where none is needed
            return anonymous
        if found is None:
            raise _unauthorised("The API key is not valid here.")
        salt = self.salt_of(found.tenant)
        weight = max(x.weight for x in keys if x.tenant == found.tenant)
        return Tenant(found.tenant, salt, _id_of(found), found.limits, found.admin, weight)

    def operator(self) -> Tenant:
        """Return who may open the admins' socket: an admin without a key."""
        return Tenant(ANONYMOUS, self.salt_of(ANONYMOUS), admin=True)

    def salt_of(self, name: str) -> bytes:
        """Derive a tenant's salt, 32 bytes, from the server's secret."""
        return self.key_of(name, b"salt")

    def key_of(self, name: str, purpose: bytes) -> bytes:
        """Derive a key of a tenant, 32 bytes; no purpose may be the beginning of another."""
        return hmac.digest(self._secret, purpose + name.encode(), "sha256")


def generate_key(tenant: str) -> tuple[str, str]:
    """Make a new key, to be shown once, and its line for the key list.

    Raises:
        BadKeyLine: ``tenant`` cannot be a tenant's name.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    line = f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}"
    _the_key(line)
    return key, line


def read_key_lines(path: str) -> list[str]:
    """Read a key list. Raises ``OSError`` or ``UnicodeDecodeError``."""
    return Path(path).read_text(encoding="utf-8").splitlines()


def _id_of(key: _Key) -> str:
    return key.digest[:8].hex()


def _the_key(line: str) -> _Key:
    """Read the line of a key; one that holds none raises ``BadKeyLine``, too."""
    for key in _parse([line]):
        return key
    raise BadKeyLine("line 1 of the API keys holds no key")


def _parse(lines: Iterable[str], *, admin: bool = False) -> list[_Key]:
    keys = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise BadKeyLine(
                f"line {number} of the API keys is not 'tenant:sha256': a tenant's name has"
                " letters, digits, '.', '_' and '-', the hash is 64 lower-case hex digits;"
                " a new line is made by: thermocline keys new TENANT"
            )
        words = _words(found[3], number)
        weight = words.pop(WEIGHT, 1)
        if not 1 <= weight <= MAX_WEIGHT:
            raise BadKeyLine(
                f"line {number} of the API keys has weight={weight}; it is from 1 to {MAX_WEIGHT}"
            )
        limits = Limits(**words) if words else None
        keys.append(_Key(bytes.fromhex(found[2]), found[1], limits, weight, admin))
    return keys


def _words(text: str, number: int) -> dict[str, int]:
    """Read ``name=number`` words, which may follow a key: limits and a weight."""
    given = {name: int(value) for name, _, value in (x.partition("=") for x in text.split())}
    known = (*Limits._fields, WEIGHT)
    if unknown := given.keys() - set(known):
        raise BadKeyLine(
            f"line {number} of the API keys has a limit {min(unknown)!r}; there are"
            f" {', '.join(known)}"
        )
    return given


def _unauthorised(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_api_key", status=401)


class KeyListFixed(Exception):
    """The list cannot be changed so; the message gives the reason and the remedy."""


class KeyLines(NamedTuple):
    """All lines, by the rights that they give."""

    usual: list[str]
    admin: list[str]


class KeyList:
    """The keys of a running server, and their file. Runs on any one thread at a time."""

    def __init__(self, tenants: Tenants, config: GatewayConfig) -> None:
        self._tenants = tenants
        self._config = config
        self._changing = threading.Lock()

    def reconfigure(self, config: GatewayConfig) -> None:
        """Take the keys that the settings name now.

        Raises:
            BadKeyLine, OSError, UnicodeDecodeError: all stays as it was.
        """
        with self._changing:
            self._tenants.replace(*lines_of(config))
            self._config = config

    def facts(self) -> list[tuple[KeyFacts, str]]:
        """List the keys, and where each is written: "file" or "settings"."""
        lines = lines_of(self._config)
        in_file = {x.id for x in facts_of(self._file_lines())}
        found = [*facts_of(lines.usual), *facts_of(lines.admin, admin=True)]
        return [(x, "file" if x.id in in_file and not x.admin else "settings") for x in found]

    def add(self, line: str) -> None:
        """Add a line, for the next request on.

        Raises:
            KeyListFixed: there is no file, or no key is needed so far.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            self._write([*self._file_lines(), line])

    def revoke(self, key_id: str) -> bool:
        """Take the line of a key out, for the next request on; return False if there is none.

        Raises:
            KeyListFixed: the key is written in the settings, if only as well, or it is the last.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            lines = self._file_lines()
            kept = [x for x in lines if not any(y.id == key_id for y in facts_of([x]))]
            if self._is_settled(key_id):  # it would open as much as before
                raise KeyListFixed(
                    "This key is written elsewhere than in gateway.api_keys_file. Take its line out"
                    " of the settings or the file of admin keys and send SIGHUP to the server."
                )
            if len(kept) == len(lines):
                return False
            self._write(kept)
            return True

    def _is_settled(self, key_id: str) -> bool:
        """Say whether a key is written anywhere but in the file that admins change."""
        lines = lines_of(msgspec.structs.replace(self._config, api_keys_file=""))
        settled = [*facts_of(lines.usual), *facts_of(lines.admin, admin=True)]
        return any(x.id == key_id for x in settled)

    def _file_lines(self) -> list[str]:
        file = self._config.api_keys_file
        return read_key_lines(file) if file else []

    def _write(self, lines: Sequence[str]) -> None:
        file = self._config.api_keys_file
        if not file:
            raise KeyListFixed("This server has no gateway.api_keys_file to keep keys in.")
        if self._tenants.open_to_all:
            raise KeyListFixed(
                "This server needs no key, and a first one would lock out all who have none. Make"
                " it with `thermocline keys new TENANT --append FILE` and start the server anew."
            )
        usual = [*self._config.api_keys, *lines]
        if not facts_of(usual):
            raise KeyListFixed(
                "This is the last key: without any, none would be needed. Make another one first."
            )
        admin = lines_of(self._config).admin
        Tenants(bytes(16), usual, admin)  # raises before anything is written
        _replace_file(Path(file), lines)
        self._tenants.replace(usual, admin)


def lines_of(config: GatewayConfig) -> KeyLines:
    """Read all lines that the settings name. Raises ``OSError`` or ``UnicodeDecodeError``."""
    usual, admin = list(config.api_keys), list(config.admin_keys)
    if config.api_keys_file:
        usual += read_key_lines(config.api_keys_file)
    if config.admin_keys_file:
        admin += read_key_lines(config.admin_keys_file)
    return KeyLines(usual, admin)


def _replace_file(file: Path, lines: Iterable[str]) -> None:
    """Write a private file whole or not at all; a link is followed to where it points."""
    target = Path(os.path.realpath(file))
    made = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())
        made.replace(target)
    except OSError:
        with suppress(OSError):
            made.unlink()
        raise
