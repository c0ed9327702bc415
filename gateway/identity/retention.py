"""How long a request asks its session to be kept, by whichever field its dialect has for it.

A time is what its client asks for at least; it is never more than a place in the order in which
sessions are given up, and budgets go first.
"""

from __future__ import annotations

import re

from engines.openai.requests import Json

MAX_RETAIN_S = 24 * 3600.0
_TTL = re.compile(r"([0-9]{1,6})([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(ttl: object) -> float:
    """Read a time like ``"30m"``, in seconds; 0.0 for what is none. At most ``MAX_RETAIN_S``."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if found is None:
        return 0.0
    return min(int(found[1]) * _SECONDS[found[2]], MAX_RETAIN_S)


def asked_seconds(raw: Json) -> float:
    """Read how long a chat's body asks to keep it: OpenAI's ``prompt_cache_options``, in seconds.

    ``prompt_cache_retention`` names a time that must not be exceeded, so it asks for nothing here.
    """
    options = raw.get("prompt_cache_options")
    return seconds_of(options.get("ttl")) if isinstance(options, dict) else 0.0
