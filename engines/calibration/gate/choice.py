"""Chooses the codec that may serve a model, by the model's measurements.

Every engine chooses at its start, and again whenever something was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from engines.calibration.gate.rules import preferred, refusal
from engines.calibration.orders import FALLBACKS
from kvstore.blobs.packer import RAW, StoreCodecs
from kvstore.codecs.base import Codec
from kvstore.codecs.catalogue import USUAL_STATES
from kvstore.codecs.names import EXACT, JOIN, OWN, USUAL, first_part, for_session, must_learn
from kvstore.codecs.presets import canonical_name, codec_by_name, open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.codecs.session_codec import SessionCodec, open_session_codec
from kvstore.codecs.stacks.fused import for_sizes_alone
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import KVLayout, StateLayout

_OVERRULE: Final = "accept the loss with store.accept_loss = true"


@dataclass(frozen=True)
class Choice:
    """A codec that may serve, and the reason for it."""

    name: str  # the preset's name
    codec: Codec  # the codec for rows
    why: str  # the reason in one sentence, with the figures
    rows: tuple[Quality, ...] = ()  # measurements of this codec on this model, by context
    compared: tuple[Quality, ...] = ()  # measurements of all codecs whose times were compared
    unmeasured: bool = False  # a measurement may lead to another choice
    session: SessionCodec | None = None  # the codec for whole sessions; None = states are exact
    profile: Profile | None = None  # the arrays that the preset has learned of the model

    @property
    def is_exact(self) -> bool:
        """True if sessions are stored without loss."""
        return self.codec.exact and (self.session is None or self.session.exact)

    @property
    def id(self) -> str:
        """The id of the codec that was measured, for rows and states together."""
        return self.codec.id if self.session is None else self.session.id

    @functools.cached_property
    def codecs(self) -> StoreCodecs:
        """The codecs that a store packs with, and others that it may read."""
        if self.is_exact:
            return StoreCodecs(self.codec)
        session = self.session if self.session is not None and not self.session.exact else None
        return StoreCodecs(self.codec, session, readable=(RAW,), profile=self.profile)


def choose(
    name: str,
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile | None,
    unmeasurable: str = "",
    states: StateLayout | None = None,
) -> Choice:
    """Return the choice of a codec: the named one if it may serve this model, else an exact one.

    Args:
        name: a preset's name, or ``auto``: the densest within the bound that restores quickly.
        config: the bound, and whether the operator accepts the loss.
        profile: the model's learned arrays and measurements; None = there are none.
        unmeasurable: why a calibration could not measure this model; "" if it could.
        states: the layout of the model's states; None if it has none.

    Raises:
        CodecRefused: the named codec must not serve; the message has the figures.
        UnknownCodec: there is no codec of that name, or it cannot pack this layout.
    """
    if isinstance(layout, PackedLayout):
        return _packed(name, config, layout, profile)
    kinds = (False, False)  # whether states have windows, and matrices
    if states is not None:
        kinds = (states.windows is not None, states.has_matrices)
    if not layout.layers and not any(kinds):
        return exact("this model has no KV that a codec could pack")
    model = _Model(config, layout, profile, unmeasurable, states)
    return (
        _auto(model) if name == AUTO else _named(for_session(canonical_name(name), *kinds), model)
    )


def _packed(
    name: str, config: StoreConfig, layout: PackedLayout, profile: Profile | None
) -> Choice:
    """Return the choice for a live cache that is packed itself, and is stored in that form.

    There is no exact codec to fall back on: a codec that is unmeasured or loses too much is
    refused, unless ``store.accept_loss`` is set.
    """
    from kvstore.codecs.rows.packed_codec import packed_codec

    name = f"tq{layout.num_bits}" if name == AUTO else name
    codec = packed_codec(codec_by_name(name), layout)
    codec.check(layout)
    rows = _rows(profile, name, codec.id)
    why, own = f"live KV is packed with it; {_figures(name, rows)}", profile and profile.only(name)
    choice = Choice(name, codec, why, tuple(rows), profile=own)
    refused = refusal(rows, name, config.max_kl) if rows else f"{name} was not measured"
    if refused and not config.accept_loss:
        raise CodecRefused(
            f"engine.hot_codec: {refused}; leave it empty, {_OVERRULE}, or measure the model"
            " first: thermocline calibrate"
        )
    return replace(choice, why=f"the loss was accepted: {refused}") if refused else choice


@dataclass(frozen=True)
class _Model:
    """The arguments of ``choose``."""

    config: StoreConfig
    layout: KVLayout
    profile: Profile | None
    unmeasurable: str
    states: StateLayout | None

    @property
    def first(self) -> str:
        """The preset that must have been measured for the model to count as measured."""
        if self.states is None:
            return USUAL
        has_rows = bool(self.layout.layers or self.states.windows)
        rows = USUAL if has_rows else EXACT
        return f"{rows}{JOIN}{USUAL_STATES}" if self.states.has_matrices else rows


def _auto(model: _Model) -> Choice:
    """Return the choice for ``auto``; its reason names the denser presets out of bounds, too."""
    max_kl, profile, first = model.config.max_kl, model.profile, model.first
    measured = {x: rows for x in _by_density(profile) if (rows := _measured(x, model))}
    refused = {x: why for x, rows in measured.items() if (why := refusal(rows, x, max_kl, profile))}
    good = {x: rows for x, rows in measured.items() if x not in refused}
    # A fallback may keep a bound that was looser when the model was measured.
    untried = first_part(first) == USUAL and not set(FALLBACKS) <= set(map(first_part, measured))
    unmeasured = (first not in measured or (untried and not good)) and not model.unmeasurable
    missing = "" if first in measured else f"{first} was not measured on this model yet"
    if model.unmeasurable:
        missing = f"no codec can be measured here: {model.unmeasurable}"
    if not good:
        words = "; ".join(filter(None, [missing, *refused.values()]))
        return exact(words, unmeasured=unmeasured)
    name, reason = preferred(good, model.config.restore_share)
    found = _opened(name, model)
    assert found is not None  # it was measured
    passed = [y for x, y in refused.items() if x == first or _bits(measured[x]) < _bits(good[name])]
    words = "; ".join(filter(None, [found.why, reason, missing, *passed]))
    compared = tuple(x for rows in measured.values() for x in rows)
    return replace(found, why=words, unmeasured=unmeasured, compared=compared)


def _bits(rows: Sequence[Quality]) -> float:
    return rows[-1].bits_per_element


def _named(name: str, model: _Model) -> Choice:
    choice, config = _opened(name, model), model.config
    if choice is not None:
        if choice.is_exact:
            return replace(choice, why=f"{name} loses nothing")
        refused = f"{name} was not measured"
        if choice.rows:
            refused = refusal(choice.rows, name, config.max_kl, model.profile)
        if config.accept_loss:
            return replace(choice, why=f"the loss was accepted: {refused or choice.why}")
        if choice.rows and refused:
            raise CodecRefused(f"{refused}; choose another codec, or {_OVERRULE}")
        if choice.rows:
            return choice
    if model.unmeasurable:
        remedy = f"use raw, or {_OVERRULE}" if choice else "use raw"
        raise CodecRefused(
            f"codec {name} cannot be measured on this model: {model.unmeasurable}; {remedy}"
        )
    if not config.calibrate:
        lacks = "has yet to learn this model, or to learn it again since an upgrade;"
        if choice is not None:
            lacks = f"was not measured on this model; {_OVERRULE}, or"
        raise CodecRefused(f"codec {name} {lacks} run: thermocline calibrate")
    return exact(f"{name} was not measured on this model yet", unmeasured=True)


def exact(why: str, *, unmeasured: bool = False) -> Choice:
    """Return the choice of the exact codec, which needs no measurement."""
    return Choice(EXACT, codec_by_name(EXACT), why, unmeasured=unmeasured)


def _measured(name: str, model: _Model) -> tuple[Quality, ...]:
    """Return a preset's measurements; () if it was not measured, or cannot pack this model."""
    try:
        with for_sizes_alone():  # a preset that is not chosen compiles nothing
            choice = _opened(name, model, serves=False)
    except UnknownCodec:
        return ()
    return choice.rows if choice is not None else ()


def _opened(name: str, model: _Model, *, serves: bool = True) -> Choice | None:
    """Return the choice of a preset; None if the preset must first learn the model, maybe again.

    ``serves``: the codec may be used for long, so its arrays are copied out of the profile's file.
    Raises ``UnknownCodec`` for any other preset that does not exist or cannot pack this model.
    """
    own = None if model.profile is None else model.profile.only(name)
    own = own.in_memory() if own is not None and serves else own
    session = None
    try:
        if model.states is not None:
            session = open_session_codec(name, own, model.states)
            session.check(model.layout, model.states)
        codec = session.kv if session is not None else open_codec(name, own)
        codec.check(model.layout)
    except UnknownCodec:
        if must_learn(name):
            return None
        raise
    choice = Choice(name, codec, "", session=session, profile=own)
    rows = _rows(own, name, choice.id)
    return replace(choice, why=_figures(name, rows), rows=tuple(rows))


def _rows(profile: Profile | None, name: str, codec_id: str) -> list[Quality]:
    """Return the measurements of a preset with this codec id, by context, the shortest first."""
    known = profile.rows if profile else ()
    rows = [x for x in known if x.preset == name and x.codec_id == codec_id]
    return sorted(rows, key=lambda x: x.context)


def _by_density(profile: Profile | None) -> list[str]:
    """Return the names of our own measured presets, the densest first.

    ``auto`` never chooses a published method; only the settings can name one.
    """
    bits = {x.preset: x.bits_per_element for x in (profile.rows if profile else ())}
    return sorted((name for name in bits if first_part(name) in OWN), key=bits.__getitem__)


def _figures(name: str, rows: Sequence[Quality]) -> str:
    words = f"{name}: " + ", ".join(map(_figures_of, rows))
    if all(x.chain_tokens for x in rows):
        return words
    return f"{words}; not measured on reasoning chains; for that run: thermocline calibrate"


def _figures_of(row: Quality) -> str:
    chains = "" if row.chain_kl is None else f" (of chains {row.chain_kl:.4f})"
    size = f"{row.bits_per_element:.2f} bits per value"
    return f"KL {row.kl:.4f} at {row.context} tokens{chains}, {size}"
