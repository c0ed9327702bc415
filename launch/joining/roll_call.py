"""Asks a Redis which engines are on it, and whether they agree with these settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.errors import TierUnavailable
from kvstore.membership import among, compared
from kvstore.roster import EntrySeal, Facts
from kvstore.stats import Difference
from kvstore.tiers.seal import read_secret
from launch.errors import LaunchError
from launch.joining.invitation import SEED_VARIABLE
from launch.serve.secret import secret_path
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import masked

DEADLINE_S: Final = 3.0


class RollCall(NamedTuple):
    """Names the engines that are there."""

    alike: int  # engines that have the same secret
    differing: tuple[Difference, ...]


def roll_call(effective: EffectiveSettings, environ: Mapping[str, str]) -> RollCall:
    """Look at the engines on the Redis of these settings; nothing is written there.

    Raises:
        LaunchError: redis-py is missing, the server does not answer, or the secret cannot be read.
    """
    try:
        from kvstore.roster import Roster
        from kvstore.tiers.redis_server.link import RedisLink
    except ImportError as error:
        raise LaunchError(str(error)) from error
    store = effective.settings.store
    try:
        link = RedisLink(store.redis_url, DEADLINE_S)
        path = Path(store.secret_file).expanduser() if store.secret_file else None
        own = path or secret_path(effective.folders.data)
        secret = read_secret(own) if path or own.exists() else b""
    except ValueError as error:
        raise LaunchError(str(error)) from error
    try:
        entries = Roster(link, EntrySeal(secret)).look()
    except TierUnavailable as error:
        raise LaunchError(f"{masked('', store.redis_url)} does not answer: {error}") from error
    finally:
        link.close()
    # Only an engine knows which model it will serve: there is no model of this name.
    here = Facts(model="", fingerprint="", encrypt=store.encrypt)
    members = compared(here, entries)
    theirs = {x.facts.hash_seed for x in entries if x.facts is not None and x.facts.part}
    seed = environ.get(SEED_VARIABLE, "")
    differing = [*members.differing, *among(entries)]
    if effective.engine_kind == "vllm" and theirs - {seed}:
        words = f"engines of vLLM on this Redis have another {SEED_VARIABLE}; set it alike"
        differing.append(Difference("seed", len(theirs - {seed}), words))
    return RollCall(sum(x.facts is not None for x in entries), tuple(differing))
