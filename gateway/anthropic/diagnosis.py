"""Answers Anthropic's ``diagnostics``: which part of the prompt changed since an earlier request.

Only hashes are compared, and whether the cache hit is another question: a prompt that goes on where
the earlier one ended may still have been evicted.
"""

from __future__ import annotations

from engines.openai.requests import Json
from gateway.prefixes.outline import change_between
from gateway.prefixes.prefix_watch import Compared


def diagnosis(earlier: Compared | None, now: Compared) -> Json | None:
    """Make ``diagnostics``; None if nothing diverged.

    Args:
        earlier: None if that request is not remembered.
    """
    if earlier is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    change = change_between(earlier.outline, now.outline)
    if change is None:
        return None
    missed = max(0, earlier.prompt_tokens - now.cached_tokens)
    reason = {"type": f"{change.part}_changed", "cache_missed_input_tokens": missed}
    return {"cache_miss_reason": reason}
