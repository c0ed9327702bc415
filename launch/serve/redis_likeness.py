"""Compares what a server's engine would store with the data on its Redis, without the engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.likeness import WORDS, StoredAs, differences, there
from kvstore.session import CHUNK_TOKENS
from kvstore.tiers.seal import read_secret
from launch.calibrate.profile_notes import noted_fingerprint
from launch.errors import LaunchError
from launch.model.find import find_model
from launch.serve.keys import secret_path
from launch.serve.sharing import redis_link
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import masked

SEED_VARIABLE = "PYTHONHASHSEED"


def differences_from_redis(
    effective: EffectiveSettings, environ: Mapping[str, str], deadline_s: float
) -> list[str]:
    """Say in sentences what keeps this server from the data on its Redis, with the remedies.

    The fingerprint is that of the last time the model was served here; before that it is not
    compared, and neither is the chunk size of an engine that stores whole blocks.

    Raises:
        UsageError: ``store.redis_url`` is no address of a Redis.
        LaunchError: redis-py is missing, the server does not answer, or the secret cannot be read.
    """
    settings, store = effective.settings, effective.settings.store
    is_vllm = effective.engine_kind == "vllm"
    model = find_model(settings.engine.model, effective.folders.cache)
    own = StoredAs(
        model=settings.engine.served_model_name or model.name,
        part="rank 0" if is_vllm else "",
        fingerprint=noted_fingerprint(effective),
        chunk_tokens=CHUNK_TOKENS,
        encrypt=store.encrypt,
        hash_seed=environ.get(SEED_VARIABLE, "") if is_vllm else "",
    )
    unknown = {"chunks"} if is_vllm else set()
    if not own.fingerprint:
        unknown.add("fingerprint")
    try:
        with closing(redis_link(store, deadline_s)) as link:
            value = there(link.run, own.key)
    except TierUnavailable as error:
        raise LaunchError(f"{masked('', store.redis_url)} does not answer: {error}") from error
    if value is None:
        return []
    found = differences(own.value(_secret(effective)), value)
    return [WORDS[x] for x in found if x not in unknown]


def _secret(effective: EffectiveSettings) -> bytes:
    """Read the secret; one that is still to be made differs from any that is there."""
    given = effective.settings.store.secret_file
    path = Path(given).expanduser() if given else secret_path(effective.folders.data)
    if not given and not path.exists():
        return b""
    try:
        return read_secret(path)
    except ValueError as error:
        raise LaunchError(str(error)) from error
