"""Keeps the results of an unfinished measurement in two files beside the profiles.

``FINGERPRINT.ORDER.learned`` is a profile without figures: what presets have learned. Lines of JSON
in ``FINGERPRINT.ORDER.cases`` are the results of single cases. A measurement that was interrupted
goes on from there, under the same order and the same arithmetic only. Neither is ever served from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from engines.calibration.gate.profiles import make_folder
from engines.calibration.measuring.metrics import CaseResult
from engines.config import CalibrationOrder
from kvstore.codecs.calibrated import ARITHMETIC
from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Corrupt, Mismatch

logger = logging.getLogger(__name__)


class Unfinished:
    """The two files of one measurement; none of them has to exist. Belongs to one thread."""

    def __init__(self, stem: Path) -> None:
        """``stem``: the files' path without what follows the last dot."""
        self._learned = stem.with_name(f"{stem.name}.learned")
        self._cases = stem.with_name(f"{stem.name}.cases")

    @classmethod
    def of(cls, order: CalibrationOrder, fingerprint: str) -> Unfinished:
        """The files of this order for the model. Raises ``OSError`` if none can be written."""
        digest = blake2b(msgspec.json.encode((ARITHMETIC, order)), digest_size=6).hexdigest()
        make_folder(Path(order.data_path))
        return cls(Path(order.data_path) / "profiles" / f"{fingerprint}.{digest}")

    def learned(self) -> Profile | None:
        """The profile as it was then; None if there is none, or it is damaged."""
        try:
            return load_profile(self._learned, mapped=True)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt, Mismatch) as error:
            logger.info("what was learned is learned again: %s", error)
            return None

    def keep_learned(self, profile: Profile) -> Profile:
        """Write the profile as learned so far, and return it as it lies in the file.

        It then takes no memory of its own. A full disk only costs the resumption.
        """
        try:
            profile.save(self._learned)
        except OSError as error:
            logger.info("what was learned so far cannot be kept: %s", error)
            return profile
        return self.learned() or profile

    def results(self) -> list[CaseResult]:
        """The results of all cases that were measured; a line that was cut off is none."""
        found = []
        try:
            lines = self._cases.read_bytes().split(b"\n")
        except OSError:
            return []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=CaseResult))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found

    def keep_results(self, results: Iterable[CaseResult]) -> None:
        """Add the results of a case."""
        lines = b"".join(b"\n" + msgspec.json.encode(x) for x in results)
        try:
            with self._cases.open("ab") as file:
                file.write(lines + b"\n")
        except OSError as error:
            logger.info("the results so far cannot be kept: %s", error)

    def remove(self) -> None:
        """Remove both files, and those of other orders for this model."""
        fingerprint = self._learned.name.partition(".")[0]
        for suffix in ("learned", "cases"):
            for path in self._learned.parent.glob(f"{fingerprint}.*.{suffix}*"):
                path.unlink(missing_ok=True)
