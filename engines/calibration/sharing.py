"""Whether an engine shares profiles with others: those of its secret, on its Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from engines.calibration.gate.served_codecs import ServedCodecs
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.measure import OnProgress
from engines.config import CalibrationOrder
from kvstore.config import StoreConfig
from kvstore.tiers.seal import read_secret


class Sharing(Protocol):
    """Shares profiles with other engines. ``take_over`` is for the measuring thread."""

    def take_over(
        self,
        instrument: Instrument,
        order: CalibrationOrder,
        on_progress: OnProgress,
        *,
        learned_on: bool,
    ) -> bool:
        """Save a profile that another engine published as ours; False: none is to be had.

        Args:
            order: of the measurement that would be carried out instead.
            learned_on: only one that was learned from more texts.

        Raises what ``on_progress`` and the instrument raise.
        """

    def publish(self) -> bool:
        """Publish our profile; False: another engine's, which has other tables, was there before.

        True as well if nothing could be published.
        """

    def close(self) -> None: ...


class NoSharing:
    """Implements ``Sharing`` for an engine without a Redis, or without a secret."""

    def take_over(
        self,
        instrument: Instrument,
        order: CalibrationOrder,
        on_progress: OnProgress,
        *,
        learned_on: bool,
    ) -> bool:
        return False

    def publish(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""


NO_SHARING: Final = NoSharing()


def open_sharing(config: StoreConfig, codecs: ServedCodecs, data: Path) -> Sharing:
    """Share profiles with the engines on the store's Redis that have its secret, if it has both.

    Args:
        codecs: of the engine.
        data: the folder of profiles.

    Raises ``ValueError``: the secret cannot be read, or ``redis_url`` is no URL.
    """
    if not (config.redis_url and config.redis_bytes and config.secret_file):
        return NO_SHARING
    from engines.calibration.fleet_profiles import FleetProfiles  # redis-py is an extra
    from kvstore.published.publication import PublishedNames
    from kvstore.published.shelf import Shelf
    from kvstore.tiers.redis_server.link import RedisLink

    secret = read_secret(Path(config.secret_file))
    names = PublishedNames(secret, codecs.fingerprint, codecs.layout)
    shelf = Shelf(RedisLink(config.redis_url, config.redis_deadline_s), names)
    return FleetProfiles(shelf, codecs, config, data)
