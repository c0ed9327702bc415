"""Computes what sessions of one length take: awake, and asleep in each tier, by codec.

Where the model was not measured yet, sessions are counted with the preset that most models get, and
``Needs.planned`` says so.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from kvstore.codecs.names import USUAL
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.tiers.disk_budget import file_bytes_limit
from launch.errors import LaunchError, UsageError
from launch.families.cache_shape import NotUnderstood
from launch.model.find import find_model
from launch.plan.capacity_plan import ColdPlan, plan_of
from launch.plan.cold_size import chunk_of, expected_choice, first_measurement
from launch.plan.hot_budget import hot_budget_of, served_cache
from launch.settings.effective_settings import EffectiveSettings

MARGIN = 1.02  # blobs of other sizes than planned, sessions that are being written
MIB = 1 << 20
_MAP_STEP = 1 << 16
# Of a session in the store's list: itself, and a name and a key for each of its chunks.
_INDEX_SESSION_BYTES = 1536
_INDEX_BLOB_BYTES = 256


@dataclass(frozen=True)
class Asleep:
    """A sleeping session, the same in every tier."""

    codec: str
    nbytes: int
    planned: bool  # the model was not measured yet
    until_then: int = 0  # bytes while it is not, in the codec that serves meanwhile

    def of(self, meanwhile: bool) -> int:
        """The bytes: as planned, or as long as the model was not measured."""
        return self.until_then if meanwhile and self.planned else self.nbytes


@dataclass(frozen=True)
class Needs:
    """The bytes that sessions of ``context`` tokens take."""

    context: int
    running_bytes: int  # of one while it alone is answered
    idle_bytes: int  # of one that is hot between its turns
    asleep: Asleep

    def hot_bytes(self, num_sessions: int) -> int:
        """The budget in which so many sessions are hot while one of them is answered."""
        return self.running_bytes + max(0, num_sessions - 1) * self.idle_bytes

    def cold_bytes(self, tier: str, num_sessions: int, *, meanwhile: bool = False) -> int:
        """The budget of a tier in which so many sessions sleep, in whole MiB."""
        nbytes = int((num_sessions + 1) * self.asleep.of(meanwhile) * MARGIN)
        if tier == "disk":  # its budget is the size of a file, which is never quite full
            nbytes = file_bytes_limit(nbytes) + 2 * _MAP_STEP
        return -(-nbytes // MIB) * MIB

    def num_hot(self, hot_bytes: int) -> int:
        """The number of sessions that are hot within ``hot_bytes`` while one is answered."""
        left = hot_bytes - self.running_bytes
        return 0 if left < 0 else 1 + left // self.idle_bytes

    def num_asleep(self, tier: str, budget: int, *, meanwhile: bool = False) -> int:
        """The number of sessions for which ``cold_bytes`` stays within ``budget``."""
        most = budget // max(1, self.asleep.of(meanwhile))
        counts = range(1, most + 1)
        return bisect_right(
            counts, budget, key=lambda count: self.cold_bytes(tier, count, meanwhile=meanwhile)
        )


def needs_of(effective: EffectiveSettings, context: int) -> Needs:
    """Count what sessions of ``context`` tokens take with these settings.

    Raises:
        UsageError: the model takes no such context, or the settings cannot be served.
        LaunchError: the model's cache is not understood.
    """
    longest = effective.settings.engine.max_context
    if 0 < longest < context:
        raise UsageError(
            f"sessions of {context} tokens are wanted, and engine.max_context = {longest} allows"
            " less; raise it, or lower capacity.context (--context)"
        )
    (plan,) = plan_of(effective, str(context)).contexts
    content = find_model(effective.settings.engine.model, effective.folders.cache).config()
    hot = hot_budget_of(effective, content, served_cache(effective, content))
    cold = {x.codec: x for x in plan.cold if not x.refused}
    return Needs(
        context, hot.running_bytes(context), hot.idle_bytes(context), _asleep(effective, cold)
    )


def _asleep(effective: EffectiveSettings, cold: dict[str, ColdPlan]) -> Asleep:
    try:
        choice = expected_choice(effective)
    except (CodecRefused, UnknownCodec, NotUnderstood) as error:
        raise UsageError(f"store.codec cannot serve this model: {error}") from error
    planned = first_measurement(effective).will_be and USUAL in cold
    # A codec of whole sessions is listed with its half for states.
    names = [x for x in cold if x == choice.name or x.partition("+")[0] == choice.name]
    if not names:
        raise LaunchError(f"nothing is known of what codec {choice.name} takes of this model")
    now = cold[names[0]].bytes_per_session
    if choice.unmeasured and planned:
        return Asleep(USUAL, cold[USUAL].bytes_per_session, planned=True, until_then=now)
    return Asleep(choice.name, now, planned=False)


def index_bytes(effective: EffectiveSettings, num_sessions: int, context: int) -> int:
    """Bytes of the store's list of so many sessions."""
    num_blobs = context // chunk_of(effective) + 4
    each = _INDEX_SESSION_BYTES + _INDEX_BLOB_BYTES * num_blobs
    return num_sessions * each
