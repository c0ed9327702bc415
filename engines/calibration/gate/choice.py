"""Chooses the codec that may serve a model, by the model's measurements.

Every engine chooses at its start, and again whenever something was measured.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engines.calibration.first_order import FALLBACKS
from engines.calibration.gate.rules import Bound, beyond_measured, preferred, refusal
from kvstore.codecs.base import Codec
from kvstore.codecs.catalogue import USUAL_STATES
from kvstore.codecs.names import EXACT, JOIN, OWN, USUAL, first_part, for_session, must_learn
from kvstore.codecs.presets import canonical_name, codec_by_name, open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.session import TIER_NAMES, TierName
from kvstore.shapes import KVLayout, StateLayout

if TYPE_CHECKING:
    from kvstore.codecs.session_codec import SessionCodec

logger = logging.getLogger(__name__)

_OVERRULE: Final = "accept the loss with store.accept_loss = true"


@dataclass(frozen=True)
class Choice:
    """A codec that may serve, and the reason for it."""

    name: str  # of the preset
    codec: Codec  # of rows
    why: str  # one sentence, with the figures
    rows: tuple[Quality, ...] = ()  # of this very codec on this model, shortest context first
    unmeasured: bool = False  # a calibration may lead to another choice
    session: SessionCodec | None = None  # how states are packed beside it; None = they are exact

    @property
    def is_exact(self) -> bool:
        """True if nothing of a session is lost."""
        return self.codec.exact and (self.session is None or self.session.exact)

    @property
    def id(self) -> str:
        """The id of the codec that was measured: of rows and states together."""
        return self.codec.id if self.session is None else self.session.id


@dataclass(frozen=True)
class _Offer:
    """A preset that was measured, without its codec: all of them at once would take memory."""

    name: str
    why: str
    rows: tuple[Quality, ...]


@dataclass(frozen=True)
class _Offers:
    """The presets that ``auto`` chooses among, for every tier."""

    good: Mapping[str, _Offer]  # measured, and within the bound
    refused: Mapping[str, _Offer]  # measured, and out of it; ``why`` says how far
    unmeasured: bool
    missing: str  # why there is no row of ``first``; "" if there is one
    first: str = USUAL  # without a row of it a model counts as not measured yet


def choose_tiers(
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile | None,
    unmeasurable: str = "",
    states: StateLayout | None = None,
) -> dict[TierName, Choice]:
    """The codec of each tier: that of its own setting, or else of ``store.codec``.

    For arguments and errors see ``choose``. Where ``auto`` decides, the fastest tier that is in use
    may get another codec than the slower ones. Tiers that pack rows by the same codec pack windows
    and states alike, too: as the fastest of them does, or exactly.
    """
    names: dict[TierName, str] = {
        "ram": _written(config.codec),
        "disk": _written(config.disk_codec or config.codec),
        "redis": _written(config.redis_codec or config.codec),
    }
    auto = AUTO in names.values() and _has_choice(layout, states)
    model = _Model(layout, profile, unmeasurable, states)
    offers = _offers(config, model) if auto else None

    opened = functools.cache(functools.partial(_opened, model=model))

    @functools.cache  # a codec that several tiers have is made once
    def choice(name: str, fastest: bool) -> Choice:
        if name == AUTO and offers is not None:
            return _from(offers, config, opened, fastest=fastest)
        return choose(name, config, layout, profile, unmeasurable, states)

    quick = fastest_tiers(config)
    return _alike({x: choice(name, name == AUTO and x in quick) for x, name in names.items()})


def _written(name: str) -> str:
    """Return a setting's name as measured rows have it."""
    return name if name == AUTO else canonical_name(name)


def _alike(choices: Mapping[TierName, Choice]) -> dict[TierName, Choice]:
    """Give tiers with the same codec of rows the same way of windows and states.

    Exactly, if one of them wants them so.
    """
    same: dict[str, Choice] = {}
    for choice in choices.values():
        known = same.setdefault(choice.codec.id, choice)
        if choice.is_exact and not known.is_exact:
            same[choice.codec.id] = choice
    found: dict[TierName, Choice] = {}
    for tier, choice in choices.items():
        other = same[choice.codec.id]
        found[tier] = choice if choice.id == other.id else other
        if found[tier] is not choice:
            logger.warning("%s is packed as another tier is: %s, not %s", tier, other.id, choice.id)
    return found


def fastest_tiers(config: StoreConfig) -> tuple[TierName, ...]:
    """The fastest tier in use, and any faster tiers that are off."""
    first = next(iter(tiers_in_use(config)), TIER_NAMES[-1])
    return TIER_NAMES[: TIER_NAMES.index(first) + 1]


def tiers_in_use(config: StoreConfig) -> tuple[TierName, ...]:
    """The tiers that have room, the fastest first."""
    room: dict[TierName, bool] = {
        "ram": config.ram_bytes > 0,
        "disk": config.disk_bytes > 0,
        "redis": bool(config.redis_url),
    }
    return tuple(tier for tier, has_room in room.items() if has_room)


def choose(
    name: str,
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile | None,
    unmeasurable: str = "",
    states: StateLayout | None = None,
) -> Choice:
    """The codec of that name, if it may serve this model, else an exact one.

    ``auto`` is the choice for the fastest tier.

    Args:
        config: the bound, and whether the operator accepts the loss.
        profile: the model's learned arrays and measurements; None = there are none.
        unmeasurable: why a calibration could not measure this model; "" if it could.
        states: what the model keeps besides rows of every token, if whole sessions were measured.

    Raises:
        CodecRefused: the named codec must not serve; the message has the figures.
        UnknownCodec: there is no codec of that name, or it cannot pack this layout.
    """
    if isinstance(layout, PackedLayout):
        return _packed(name, config, layout, profile)
    if not _has_choice(layout, states):
        return exact("this model keeps nothing that a codec could pack")
    model = _Model(layout, profile, unmeasurable, states)
    if name == AUTO:
        return _from(_offers(config, model), config, lambda x: _opened(x, model), fastest=True)
    name = for_session(name, *_kinds(states))
    return _named(name, config, model)


def _packed(
    name: str, config: StoreConfig, layout: PackedLayout, profile: Profile | None
) -> Choice:
    """The choice for a live cache that is packed itself, and sleeps in that form only.

    No exact codec can serve until it was measured: it keeps the bound, or is refused.
    """
    from kvstore.codecs.rows.packed_codec import packed_codec

    name = f"tq{layout.num_bits}" if name == AUTO else name
    codec = packed_codec(codec_by_name(name), layout)
    codec.check(layout)
    rows = _rows(profile, name, codec.id)
    choice = Choice(name, codec, f"live KV is packed so; {_figures(name, rows)}", tuple(rows))
    refused = _refusal(choice, Bound(kl=config.max_kl)) if rows else f"{name} was not measured"
    if refused and not config.accept_loss:
        raise CodecRefused(
            f"engine.hot_codec: {refused}; leave it empty, {_OVERRULE}, or measure the model"
            " first: thermocline calibrate"
        )
    return replace(choice, why=f"the loss was accepted: {refused}") if refused else choice


def _kinds(states: StateLayout | None) -> tuple[bool, bool]:
    """Say whether there are windows, and whether there are matrices."""
    return (False, False) if states is None else (states.windows is not None, states.has_matrices)


def _has_choice(layout: KVLayout, states: StateLayout | None) -> bool:
    has_states = states is not None and (states.windows is not None or states.has_matrices)
    return (bool(layout.layers) or has_states) and not isinstance(layout, PackedLayout)


@dataclass(frozen=True)
class _Model:
    """Holds what is known of the model; see ``choose``."""

    layout: KVLayout
    profile: Profile | None
    unmeasurable: str
    states: StateLayout | None

    @property
    def first(self) -> str:
        """The preset without a row of which the model counts as not measured yet."""
        if self.states is None:
            return USUAL
        has_rows = bool(self.layout.layers or self.states.windows)
        rows = USUAL if has_rows else EXACT
        return f"{rows}{JOIN}{USUAL_STATES}" if self.states.has_matrices else rows


def _offers(config: StoreConfig, model: _Model) -> _Offers:
    bound, unmeasurable = Bound(kl=config.max_kl), model.unmeasurable
    choices = (_measured(name, model) for name in _by_density(model.profile))
    measured = {x.name: x for x in choices if x is not None}
    refused = {
        name: replace(x, why=why)
        for name, x in measured.items()
        if (why := _refusal(x, bound) or beyond_measured(name, model.profile))
    }
    first = model.first
    missing = "" if first in measured else f"{first} was not measured on this model yet"
    good = {name: x for name, x in measured.items() if name not in refused}
    # A fallback may keep a bound that was looser when the model was measured.
    untried = first_part(first) == USUAL and not set(FALLBACKS) <= set(map(first_part, measured))
    if unmeasurable:
        missing = f"no codec can be measured here: {unmeasurable}"
    return _Offers(
        good=good,
        refused=refused,
        unmeasured=(first not in measured or (untried and not good)) and not unmeasurable,
        missing=missing,
        first=first,
    )


def _from(
    offers: _Offers, config: StoreConfig, opened: Callable[[str], Choice | None], *, fastest: bool
) -> Choice:
    """The choice for a tier; also says which denser presets, and the first, are out of bounds."""
    reasons = [offers.missing, *(x.why for x in offers.refused.values())]
    if not offers.good:
        return exact("; ".join(filter(None, reasons)), unmeasured=offers.unmeasured)
    rows = {name: x.rows for name, x in offers.good.items()}
    name, reason = preferred(rows, config.restore_share, fastest=fastest)
    found = opened(name)
    assert found is not None  # it was measured
    reasons = [offers.missing] + [
        x.why for x in offers.refused.values() if x.name == offers.first or _bits(x) < _bits(found)
    ]
    words = "; ".join(filter(None, [found.why, reason, *reasons]))
    return replace(found, why=words, unmeasured=offers.unmeasured)


def _bits(choice: Choice | _Offer) -> float:
    return choice.rows[-1].bits_per_element


def _named(name: str, config: StoreConfig, model: _Model) -> Choice:
    choice, bound = _opened(name, model), Bound(kl=config.max_kl)
    unmeasurable = model.unmeasurable
    if choice is not None and choice.is_exact:
        return replace(choice, why=f"{name} loses nothing")
    refused = f"{name} was not measured"
    if choice is not None and choice.rows:
        refused = _refusal(choice, bound) or beyond_measured(name, model.profile)
    if choice is not None and config.accept_loss:
        return replace(choice, why=f"the loss was accepted: {refused or choice.why}")
    if choice is not None and choice.rows:
        if refused:
            raise CodecRefused(f"{refused}; choose another codec, or {_OVERRULE}")
        return choice
    if unmeasurable:
        remedy = f"use raw, or {_OVERRULE}" if choice else "use raw"
        raise CodecRefused(
            f"codec {name} cannot be measured on this model: {unmeasurable}; {remedy}"
        )
    if not config.calibrate and choice is None:
        raise CodecRefused(
            f"codec {name} has yet to learn this model, or to learn it again since an upgrade; run:"
            " thermocline calibrate"
        )
    if not config.calibrate:
        raise CodecRefused(
            f"codec {name} was not measured on this model; {_OVERRULE}, or run:"
            " thermocline calibrate"
        )
    return exact(f"{name} was not measured on this model yet", unmeasured=True)


def exact(why: str, *, unmeasured: bool = False) -> Choice:
    """The codec that needs no measurement, and loses nothing."""
    return Choice(EXACT, codec_by_name(EXACT), why, (), unmeasured)


def _measured(name: str, model: _Model) -> _Offer | None:
    """A preset that was measured; None if it was not, or cannot pack this model."""
    try:
        choice = _opened(name, model, serves=False)
    except UnknownCodec:
        return None
    return _Offer(name, choice.why, choice.rows) if choice is not None and choice.rows else None


def _opened(name: str, model: _Model, *, serves: bool = True) -> Choice | None:
    """The choice of a preset; None if it has yet to learn the model, or to learn it again.

    ``serves``: its codec may be used for long, and so has nothing in the profile's file.

    Raises ``UnknownCodec`` for any other preset that does not exist or cannot pack this model.
    """
    own = None if model.profile is None else model.profile.only(name)
    own = own.in_memory() if own is not None and serves else own
    session = None
    try:
        if model.states is not None:
            from kvstore.codecs.session_codec import open_session_codec

            session = open_session_codec(name, own, model.states)
            session.check(model.layout, model.states)
        codec = session.kv if session is not None else open_codec(name, own)
        codec.check(model.layout)
    except UnknownCodec:
        if must_learn(name):
            return None
        raise
    choice = Choice(name, codec, "", session=session)
    rows = _rows(own, name, choice.id)
    return replace(choice, why=_figures(name, rows), rows=tuple(rows))


def _rows(profile: Profile | None, name: str, codec_id: str) -> list[Quality]:
    """The rows that were measured with this very codec, short contexts first."""
    known = profile.rows if profile else ()
    rows = [x for x in known if x.preset == name and x.codec_id == codec_id]
    return sorted(rows, key=lambda x: x.context)


def _refusal(choice: Choice | _Offer, bound: Bound) -> str:
    return refusal(choice.rows, choice.name, bound)


def _by_density(profile: Profile | None) -> list[str]:
    """Our own presets that were measured, the densest first.

    Methods of the literature have to be named: ``auto`` never takes one.
    """
    bits = {x.preset: x.bits_per_element for x in (profile.rows if profile else ())}
    return sorted((name for name in bits if first_part(name) in OWN), key=bits.__getitem__)


def _figures(name: str, rows: Sequence[Quality]) -> str:
    words = f"{name}: " + ", ".join(map(_figures_of, rows))
    if all(x.chain_tokens for x in rows):
        return words
    return f"{words}; never judged by reasoning chains, for that run: thermocline calibrate"


def _figures_of(row: Quality) -> str:
    chains = "" if row.chain_kl is None else f" (of chains {row.chain_kl:.4f})"
    size = f"{row.bits_per_element:.2f} bits per value"
    return f"KL {row.kl:.4f} at {row.context} tokens{chains}, {size}"
