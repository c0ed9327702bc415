"""The profiles that engines of one secret share over their Redis, as one engine sees them.

The engine that measured a model first publishes its profile. Another one that is about to measure
it looks first, tries that profile for itself, and packs by it. If anything is wrong with it, the
engine measures for itself, and the log says why. Nothing is replaced that is whole: of two engines
that learn at once, the later one takes over what the other published.

The verdict on a profile is that of the engine that measured it: many texts, needles and chains.
What may differ here is the engine. So of the held-out texts those two are taken whose cost there
was nearest to the mean, and they have to cost no more here.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from engines.calibration.corpus import Text, held_out_texts
from engines.calibration.gate.choice import Choice
from engines.calibration.gate.profiles import make_folder, profile_path, save
from engines.calibration.gate.rules import Bound, was_learned_on
from engines.calibration.gate.served_codecs import ServedCodecs
from engines.calibration.instrument import Instrument
from engines.calibration.measuring.cases import text_cases
from engines.calibration.measuring.measure import OnProgress, measure
from engines.calibration.measuring.trials import AnyCodec
from engines.config import CalibrationOrder
from kvstore.codecs.names import first_part
from kvstore.codecs.profile import BEFORE, OF_STATES, OF_WINDOWS, UNFINISHED, Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig
from kvstore.errors import CodecRefused, Corrupt, Mismatch, TierUnavailable, UnknownCodec
from kvstore.published import MAX_BYTES, Publication, PublishedNames, Shelf, Stage, described
from kvstore.session import TierName
from kvstore.tiers.seal import read_secret
from kvstore.workers import Periodic

NUM_TEXTS: Final = 2
MOST: Final = 1.5  # times the loss of these texts there, where that is above the bound
logger = logging.getLogger(__name__)
KEEP_EVERY_S: Final = 900.0
ROOM: Final = MAX_BYTES - (8 << 20)  # for arrays; the rest is for the header and the padding
STAGES: Final[tuple[Stage, ...]] = ("further", "first")  # the better one first


def fault(
    instrument: Instrument,
    choices: Sequence[Choice],
    order: CalibrationOrder,
    bound: Bound,
    on_progress: OnProgress,
) -> str:
    """Say what is wrong with codecs that were chosen by another engine's figures; "" if nothing is.

    Args:
        choices: with the figures by text; those that lose nothing are not looked at.
        order: of a measurement of our own: the longest context, the tokens that are scored.
        on_progress: called with the progress; may raise, to end it.
    """
    lossy = [x for x in choices if not x.is_exact]
    if not lossy:
        return ""
    fitting = [x for x in lossy[0].rows if x.context <= max(order.contexts) and x.texts]
    if not fitting:
        return f"it was measured with contexts that are longer than {max(order.contexts)} tokens"
    context = fitting[-1].context
    texts = _usual_texts(fitting[-1])
    cases = list(text_cases(texts, instrument.encode, context, order.num_scored))
    if not cases:
        return "none of the texts that it was measured with is there"
    codecs: dict[str, AnyCodec] = {x.name: x.session or x.codec for x in lossy}
    folder = Path(order.data_path) / "profiles" if order.data_path else None
    rows = measure(
        instrument,
        codecs,
        cases,
        order.chunk_tokens,
        on_progress=lambda words: on_progress(f"trying a profile of another engine, {words}"),
        folder=folder,
        num_threads=order.num_threads,
    )
    published = {x.name: x.rows for x in lossy}
    faults = (difference(x, published[x.preset], bound) for x in rows)
    return next(filter(None, faults), "")


def _usual_texts(row: Quality) -> list[Text]:
    """The texts that cost about as much as all texts did, the nearest first."""
    known = {x.name: x for x in held_out_texts()}
    named = sorted(row.texts, key=lambda x: abs(x.kl - row.kl))
    return [known[x.text] for x in named if x.text in known][:NUM_TEXTS]


def difference(found: Quality, published: Sequence[Quality], bound: Bound) -> str:
    """Compare with the same texts there: two texts alone may cost more than the mean of all."""
    names = {x.text for x in found.texts}
    there = [
        x for row in published if row.context == found.context for x in row.texts if x.text in names
    ]
    most_kl, most_changed = bound.kl, 1 - bound.top1
    if there:
        most_kl = max(most_kl, MOST * fmean(x.kl for x in there))
        most_changed = max(most_changed, MOST * fmean(1 - x.top1 for x in there))
    words = f"{found.preset} at {found.context} tokens"
    if not found.kl <= most_kl:
        return f"{words} has a KL of {found.kl:.4f} here, above {most_kl:.4f}"
    if not 1 - found.top1 <= most_changed + 1e-9:
        least = 1 - most_changed
        return f"{words} keeps {found.top1:.1%} of the most likely tokens here, under {least:.1%}"
    return ""


class _Seen(NamedTuple):
    """Holds a publication that was compared with our profile: that need not be done again.

    Attributes:
        stamp: of our file.
        are_alike: no preset has learned one thing there and another here.
    """

    stamp: tuple[int, int]
    stage: Stage
    there: Publication
    are_alike: bool


class FleetProfiles:
    """Shares profiles over Redis. A thread of its own keeps the publication there.

    Args:
        shelf: owned by this object.
        codecs: of the engine; they know its model, its settings and its own profile.
        data: the folder of profiles.
        machine: named to others as the place where a profile was learned; "" = the host's name.
    """

    def __init__(
        self, shelf: Shelf, codecs: ServedCodecs, config: StoreConfig, data: Path, machine: str = ""
    ) -> None:
        self._shelf = shelf
        self._codecs = codecs
        self._bound = Bound(kl=config.max_kl)
        self._accepts_loss = config.accept_loss
        self._data = data
        self._machine = machine or platform.node() or "another machine"
        self._lock = threading.Lock()
        # What may be written over: the digest that was said of it; b"" = it was not to be read.
        self._damaged: dict[Stage, bytes] = {}
        self._refused: set[bytes] = set()  # digests of publications that did not pass
        self._seen: _Seen | None = None
        self._keeper = Periodic(self._keep, KEEP_EVERY_S, "thermocline-profiles", at_once=True)

    def take_over(
        self,
        instrument: Instrument,
        order: CalibrationOrder,
        on_progress: OnProgress,
        *,
        learned_on: bool,
    ) -> bool:
        """Save a profile that another engine published as ours; False: none is to be had.

        Called on the measuring thread. Raises what ``on_progress`` and the instrument raise.

        Args:
            order: of the measurement that would be carried out instead.
            learned_on: only one that was learned from more texts.
        """
        return any(
            self._taken_over(x, instrument, order, on_progress)
            for x in STAGES[: 1 if learned_on else 2]
        )

    def _taken_over(
        self, stage: Stage, instrument: Instrument, order: CalibrationOrder, on_progress: OnProgress
    ) -> bool:
        fetched = profile_path(self._data, instrument.fingerprint).with_suffix(".fetched")
        found: Publication | None = None
        try:
            found = self._shelf.look(stage)
            if found is None or found.digest in self._refused:
                return False
            make_folder(self._data)
            self._shelf.fetch(stage, found, fetched)
            profile = load_profile(fetched, mapped=True)
            if reason := self._fault(profile, instrument, order, on_progress):
                self._refuse(found, reason)
                return False
            save(profile, self._data, found.by)
            logger.info("packs by the profile that %s has published", found.by)
            return True
        except (Corrupt, Mismatch) as error:
            self._damaged[stage] = found.digest if found is not None else b""
            logger.warning("the profile that another engine published is damaged: %s", error)
        except (TierUnavailable, OSError) as error:
            logger.info("no profile of another engine is to be had: %s", error)
        finally:
            fetched.unlink(missing_ok=True)
        return False

    def _refuse(self, found: Publication, reason: str) -> None:
        self._refused.add(found.digest)
        logger.warning(
            "the profile that %s has published does not serve here: %s", found.by, reason
        )

    def _fault(
        self,
        profile: Profile,
        instrument: Instrument,
        order: CalibrationOrder,
        on_progress: OnProgress,
    ) -> str:
        if not self._codecs.is_of_this_model(profile):
            return "it is of another model"
        try:
            choices = self._codecs.choices_by(profile)
        except (CodecRefused, UnknownCodec) as error:
            return str(error)
        if any(x.unmeasured for x in choices.values()):
            return "it has not what the settings ask for"
        if self._accepts_loss:
            return ""
        return fault(instrument, _different(choices), order, self._bound, on_progress)

    def publish(self) -> bool:
        """Publish our profile; False: another engine's, which has other tables, was there before.

        True as well if nothing could be published.
        """
        with self._lock:
            try:
                return self._published()
            except FileNotFoundError:
                return True  # nothing was measured yet
            except (TierUnavailable, OSError) as error:
                logger.info("the profile is not published now: %s", error)
            except ValueError as error:
                logger.info("the profile is not published: %s", error)
            return True

    def _published(self) -> bool:
        stamp = self._stamp()
        seen = self._seen
        if seen is not None and seen.stamp == stamp and self._is_still_there(seen):
            return seen.are_alike
        profile, choices = self._codecs.profile(), self._codecs.choices
        if profile is None or any(x.unmeasured for x in choices.values()):
            return True
        public = _public(profile, choices)
        stage: Stage = "further" if was_learned_on(profile) else "first"
        for _ in range(2):  # another engine may have been first
            there = self._there(stage)
            if there is not None and there.digest in self._refused:
                return True
            is_damaged = self._is_damaged(stage, there)
            if there is not None and not is_damaged:
                are_alike = _are_alike(there, public)
                self._seen = _Seen(stamp, stage, there, are_alike)
                if not are_alike or self._shelf.refresh(stage, there):
                    return are_alike
                is_damaged = True  # a part of it is gone
            if self._put(stage, public, anew=is_damaged):
                return True
        return True

    def _is_still_there(self, seen: _Seen) -> bool:
        """Say whether the same is published, and keep it, if it is like ours."""
        if self._there(seen.stage) != seen.there:
            return False
        return not seen.are_alike or self._shelf.refresh(seen.stage, seen.there)

    def _stamp(self) -> tuple[int, int]:
        """Say which profile lies in our file: it changes with each that is saved."""
        found = profile_path(self._data, self._codecs.fingerprint).stat()
        return found.st_ino, found.st_mtime_ns

    def _is_damaged(self, stage: Stage, there: Publication | None) -> bool:
        """Say whether this publication was found damaged, and was not replaced since."""
        return self._damaged.get(stage) == (there.digest if there is not None else b"")

    def _there(self, stage: Stage) -> Publication | None:
        """Look up the publication; None also if it is damaged, and then it is written over."""
        try:
            return self._shelf.look(stage)
        except Corrupt:
            self._damaged[stage] = b""
            return None

    def _put(self, stage: Stage, public: Profile, *, anew: bool) -> bool:
        path = profile_path(self._data, public.fingerprint).with_suffix(
            f".public.{os.getpid()}{UNFINISHED}"
        )
        try:
            public.save(path)

            own = described(path, self._machine, dict(public.ids))
            done = self._shelf.publish(stage, own, path, anew=anew)
        finally:
            path.unlink(missing_ok=True)
        if done:
            self._damaged.pop(stage, None)
            logger.info("published the profile for other engines: %d KiB", own.nbytes >> 10)
        return done

    def _keep(self) -> None:
        """Have what is published last, and publish what is not, or not any more."""
        self.publish()

    def close(self) -> None:
        self._shelf.close()  # first: a round that waits for the server then ends
        self._keeper.close()


def _different(choices: Mapping[TierName, Choice]) -> list[Choice]:
    """The choices without repetition."""
    return list({x.id: x for x in choices.values()}.values())


def _are_alike(there: Publication, own: Profile) -> bool:
    """Say whether no preset has learned one thing there and another here."""
    return all(own.ids[x] == id for x, id in there.ids.items() if x in own.ids)


def _public(profile: Profile, choices: Mapping[TierName, Choice]) -> Profile:
    """Take from a profile what others need: not what presets had learned before.

    Of a large one that is only what the tiers are packed by.
    """
    learned = {k: x for k, x in profile.learned.items() if not k.startswith(BEFORE)}
    if sum(x.nbytes for arrays in learned.values() for x in arrays.values()) > ROOM:
        used = {first_part(x.name) for x in choices.values()}
        wanted = {OF_STATES, *used, *(x + OF_WINDOWS for x in used)}
        learned = {k: x for k, x in learned.items() if k in wanted}
    rows = tuple(x for x in profile.rows if not x.preset.startswith(BEFORE))
    return replace(profile, learned=learned, rows=rows)


def open_sharing(config: StoreConfig, codecs: ServedCodecs, data: Path) -> FleetProfiles | None:
    """Share profiles with the engines on the store's Redis that have its secret, if it has both.

    Args:
        codecs: of the engine.
        data: the folder of profiles.

    Raises ``ValueError``: the secret cannot be read, or ``redis_url`` is no URL.
    """
    if not (config.redis_url and config.secret_file):
        return None
    from kvstore.tiers.redis_server.link import RedisLink

    secret = read_secret(Path(config.secret_file))
    names = PublishedNames(secret, codecs.fingerprint, codecs.layout)
    shelf = Shelf(RedisLink(config.redis_url, config.redis_deadline_s), names)
    return FleetProfiles(shelf, codecs, config, data)
