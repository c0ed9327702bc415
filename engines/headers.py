"""The HTTP headers between the gateway and an engine: each is written and read here.

Request headers, which only the gateway may set: three name the session, one limits how long the
request may wait, and one is the weight of its tenant's share of the engine. For vLLM fields of the
body name the session. Response headers: where the KV of the prompt came from, which is passed on to
the client, and the prompt's length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import quote, unquote

from engines.openai.errors import InvalidRequest
from kvstore.session import SessionRef, TierName

TENANT_HEADER: Final = "x-thermocline-tenant"
SESSION_HEADER: Final = "x-thermocline-session"  # percent-encoded UTF-8
SALT_HEADER: Final = "x-thermocline-salt"  # hex
PATIENCE_HEADER: Final = "x-thermocline-patience"  # seconds, see ``patience_from``
WEIGHT_HEADER: Final = "x-thermocline-weight"  # see ``weight_from``
CACHE_HEADER: Final = "x-thermocline-cache"  # see ``CacheOutcome``
PROMPT_HEADER: Final = "x-thermocline-prompt"  # tokens of the prompt; for the gateway only

MAX_WEIGHT: Final = 1_000_000
CacheSource: TypeAlias = Literal["hot", "cold-ram", "cold-disk", "cold-redis", "miss"]
# The source that is reported for each tier.
COLD_SOURCES: Final[Mapping[TierName, CacheSource]] = {
    "ram": "cold-ram",
    "disk": "cold-disk",
    "redis": "cold-redis",
}
_OUTCOME: Final = re.compile(
    r"(?P<source>hot|cold-(?:ram|disk|redis)|miss)"
    r"(?:; tokens=(?P<tokens>\d{1,18}))?(?:; reason=(?P<reason>[a-z-]+))?"
)
PARAMS_FIELD: Final = "thermocline"


@dataclass(frozen=True)
class CacheOutcome:
    """The source of the KV that a prompt reused, and the reason why it was not more.

    ``reason`` is one of ``kvstore.session.MissReason``; None if nothing was missed.
    """

    source: CacheSource
    cached_tokens: int
    reason: str | None = None

    def header(self) -> str:
        """The value of ``CACHE_HEADER``, like ``cold-ram; tokens=7; reason=diverged``."""
        text = f"{self.source}; tokens={self.cached_tokens}"
        return f"{text}; reason={self.reason}" if self.reason else text

    @classmethod
    def parse(cls, text: str) -> CacheOutcome | None:
        """Read a value of ``CACHE_HEADER``; None if it is empty or not of that form."""
        found = _OUTCOME.fullmatch(text)
        if found is None:
            return None
        source = cast(CacheSource, found["source"])
        return cls(source, int(found["tokens"] or 0), found["reason"])


def session_headers(session: SessionRef) -> dict[str, str]:
    """The request headers that name a turn's session to an engine."""
    return {
        TENANT_HEADER: session.tenant,
        SESSION_HEADER: quote(session.id, safe=""),
        SALT_HEADER: session.salt.hex(),
    }


def session_from(headers: Mapping[str, str]) -> SessionRef | None:
    """Read what ``session_headers`` wrote; None for a request that belongs to no session.

    Args:
        headers: of the request; their names are looked up in lower case.

    Raises:
        InvalidRequest: the salt is not hexadecimal.
    """
    session_id = unquote(headers.get(SESSION_HEADER, ""))
    if not session_id:
        return None
    try:
        salt = bytes.fromhex(headers.get(SALT_HEADER, ""))
    except ValueError as error:
        raise InvalidRequest(f"The header {SALT_HEADER} is not hexadecimal.") from error
    return SessionRef(headers.get(TENANT_HEADER, ""), session_id, salt)


def patience_header(seconds: float) -> dict[str, str]:
    """The request header that says how long a turn may wait in the engine's own line."""
    return {PATIENCE_HEADER: f"{max(0.0, seconds):.3f}"}


def patience_from(headers: Mapping[str, str]) -> float | None:
    """Read what ``patience_header`` wrote, in seconds; None if there is no such header.

    Raises:
        InvalidRequest: it is no number.
    """
    said = headers.get(PATIENCE_HEADER)
    if said is None:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", said):
        raise InvalidRequest(f"The header {PATIENCE_HEADER} is no number of seconds.")
    return float(said)


def weight_header(weight: int) -> dict[str, str]:
    """The request header that names the weight of a tenant's share."""
    return {WEIGHT_HEADER: str(weight)}


def payer_headers(tenant: str, weight: int) -> dict[str, str]:
    """The request headers that name the caller to an engine, where there is no session."""
    return {TENANT_HEADER: tenant, **weight_header(weight)}


def weight_from(headers: Mapping[str, str]) -> int:
    """Read what ``weight_header`` wrote; 1 if there is no such header.

    Raises:
        InvalidRequest: it is no whole number from 1 to a million.
    """
    said = headers.get(WEIGHT_HEADER, "1")
    if not re.fullmatch(r"[0-9]{1,7}", said) or not 1 <= int(said) <= MAX_WEIGHT:
        raise InvalidRequest(f"The header {WEIGHT_HEADER} is no weight from 1 to {MAX_WEIGHT}.")
    return int(said)


def with_session(body: Mapping[str, object], session: SessionRef) -> dict[str, object]:
    """Return the client's body with our tenant and session; its own values are overwritten."""
    names = {"tenant": session.tenant, "session": session.id}
    return {**body, "cache_salt": session.salt.hex(), "kv_transfer_params": {PARAMS_FIELD: names}}
