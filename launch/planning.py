"""From settings to a plan: finds the model, understands its cache, reads the context lengths."""

from __future__ import annotations

from launch.cache_shape import NotUnderstood
from launch.effective import Effective
from launch.errors import LaunchError, UsageError
from launch.families import cache_shape, max_context
from launch.model import find_model
from launch.plan import Plan, live_dtype, make_plan

MOST_TOKENS = 1 << 24
USUAL = (2048, 8192, 32768)


def plan_of(effective: Effective, contexts: str | None) -> Plan:
    """``contexts``: numbers of tokens, separated by commas; None = usual ones.

    Raises:
        UsageError: not such numbers, or no model.
        LaunchError: the model's cache is not understood; says why.
    """
    settings = effective.settings
    model = find_model(settings.engine.model, effective.folders.cache)
    content = model.config()
    lengths = _lengths(contexts, max_context(content))
    try:
        shape = cache_shape(content)
    except NotUnderstood as error:
        raise LaunchError(f"{model.name} cannot be planned: {error}") from error
    return make_plan(
        settings.engine.served_model_name or model.name,
        content,
        shape,
        live_dtype(settings.engine, content, effective.widens),
        lengths,
        settings.engine.hot_bytes,
        settings.store,
    )


def _lengths(text: str | None, longest: int | None) -> list[int]:
    limit = longest or MOST_TOKENS
    if text is None:
        return [length for length in USUAL if length <= limit] or [limit]
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--context {text}: write numbers of tokens, such as 2048,8192") from None
    for length in lengths:
        if not 0 < length <= limit:
            raise UsageError(f"--context {length}: this model takes 1 to {limit} tokens")
    return lengths
