"""How long a request asks its session to be kept, by whichever field its dialect has for it.

A time is the least that its client asks for. It only gives the session a place in the order in
which sessions are given up, and budgets go first.
"""

from __future__ import annotations

import re
from typing import TypeGuard

from engines.openai.requests import Json

MAX_RETAIN_S = 24 * 3600.0
# The priority (0 to 100) of a prompt without a directive; what is below may go sooner.
_NO_DIRECTIVE = 50
_TTL = re.compile(r"([0-9]{1,6})([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(ttl: object) -> float:
    """Read a time like ``"30m"``, in seconds; 0.0 for anything else. At most ``MAX_RETAIN_S``."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if found is None:
        return 0.0
    return min(int(found[1]) * _SECONDS[found[2]], MAX_RETAIN_S)


def asked_seconds(raw: Json) -> float:
    """Read how long a chat's body asks to keep it, in seconds.

    Clients say so in OpenAI's ``prompt_cache_options``, llm-d's router in ``retention_directives``.
    ``prompt_cache_retention`` names a time that must not be exceeded, so it asks for nothing here.
    """
    options, directives = raw.get("prompt_cache_options"), raw.get("retention_directives")
    asked = seconds_of(options.get("ttl")) if isinstance(options, dict) else 0.0
    if not isinstance(directives, list):
        return asked
    return max(asked, *(_directed_seconds(x) for x in directives), 0.0)


def _directed_seconds(directive: object) -> float:
    """Read one of vLLM's proposed ``{start, end, priority, duration}`` (vllm-project/vllm#38514).

    A session is kept whole, so the tokens from ``start`` to ``end`` do not matter. Without a
    ``duration``, in seconds, the priority has no end.
    """
    if not isinstance(directive, dict):
        return 0.0
    priority, seconds = directive.get("priority"), directive.get("duration")
    seconds = MAX_RETAIN_S if seconds is None else seconds
    if not _is_number(priority) or not _is_number(seconds) or priority < _NO_DIRECTIVE:
        return 0.0
    return float(min(max(seconds, 0), MAX_RETAIN_S))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
