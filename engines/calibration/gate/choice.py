"""Chooses the codec that may serve a model, by what was measured of it.

Every engine chooses at its start, and again whenever something was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from engines.calibration.gate.bound import Bound, refusal
from kvstore.codecs.base import Codec
from kvstore.codecs.names import EXACT, LEARNABLE, OWN
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.shapes import KVLayout

FIRST: Final = "dense3"  # ``auto`` takes it wherever it keeps the bound
_OVERRULE: Final = "accept the loss with store.accept_loss = true"


@dataclass(frozen=True)
class Choice:
    """A codec that may serve, and the reason for it."""

    name: str  # of the preset
    codec: Codec
    why: str  # one sentence, with the figures
    rows: tuple[Quality, ...] = ()  # of this very codec on this model, shortest context first
    unmeasured: bool = False  # a calibration may lead to another choice


def choose(
    name: str,
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile | None,
    unmeasurable: str = "",
) -> Choice:
    """The codec of that name, or ``auto``, if it may serve this model, else an exact one.

    Args:
        config: the bound, and what the operator accepts.
        profile: what was learned of the model and measured on it; None = nothing.
        unmeasurable: why a calibration could tell nothing of this model; "" if it could.

    Raises:
        CodecRefused: the named codec must not serve; the message has the figures.
        UnknownCodec: there is no codec of that name, or it cannot pack this layout.
    """
    if isinstance(layout, PackedLayout):
        return _packed(name, config, layout, profile)
    if not layout.layers:
        return exact("this model keeps nothing that a codec could pack")
    if name == AUTO:
        return _auto(Bound(kl=config.max_kl), layout, profile, unmeasurable)
    return _named(name, config, layout, profile, unmeasurable)


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
    rows = _rows(profile, name, codec)
    choice = Choice(name, codec, f"live KV is packed so; {_figures(name, rows)}", tuple(rows))
    refused = _refusal(choice, Bound(kl=config.max_kl)) if rows else f"{name} was not measured"
    if refused and not config.accept_loss:
        raise CodecRefused(
            f"engine.hot_codec: {refused}; leave it empty, {_OVERRULE}, or measure the model"
            " first: thermocline calibrate"
        )
    return replace(choice, why=f"the loss was accepted: {refused}") if refused else choice


def _auto(bound: Bound, layout: KVLayout, profile: Profile | None, unmeasurable: str) -> Choice:
    first = _measured(FIRST, layout, profile)
    if first is not None and not _refusal(first, bound):
        return first
    why = _refusal(first, bound) if first else f"{FIRST} was not measured on this model yet"
    if unmeasurable:
        why = f"no codec can be measured here: {unmeasurable}"
    unmeasured = first is None and not unmeasurable
    for name in _by_density(profile):
        other = _measured(name, layout, profile)
        if other is not None and not _refusal(other, bound):
            words = f"{why}; of those within the bound the densest is {other.why}"
            return replace(other, why=words, unmeasured=unmeasured)
    return exact(why, unmeasured=unmeasured)


def _named(
    name: str,
    config: StoreConfig,
    layout: KVLayout,
    profile: Profile | None,
    unmeasurable: str,
) -> Choice:
    choice, bound = _opened(name, layout, profile), Bound(kl=config.max_kl)
    if choice is not None and choice.codec.exact:
        return replace(choice, why=f"{name} loses nothing")
    refused = _refusal(choice, bound) if choice and choice.rows else f"{name} was not measured"
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


def _measured(name: str, layout: KVLayout, profile: Profile | None) -> Choice | None:
    """The choice of a preset that was measured; None if it was not, or cannot pack this model."""
    try:
        choice = _opened(name, layout, profile)
    except UnknownCodec:
        return None
    return choice if choice is not None and choice.rows else None


def _opened(name: str, layout: KVLayout, profile: Profile | None) -> Choice | None:
    """The choice of a preset; None if it has yet to learn the model, or to learn it again.

    Raises ``UnknownCodec`` for any other preset that does not exist or cannot pack this model.
    """
    own = None if profile is None else profile.only(name)
    try:
        codec = open_codec(name, own)
        codec.check(layout)
    except UnknownCodec:
        if name in LEARNABLE:
            return None
        raise
    rows = _rows(own, name, codec)
    return Choice(name, codec, _figures(name, rows), tuple(rows))


def _rows(profile: Profile | None, name: str, codec: Codec) -> list[Quality]:
    """The rows that were measured with this very codec, short contexts first."""
    known = profile.rows if profile else ()
    rows = [x for x in known if x.preset == name and x.codec_id == codec.id]
    return sorted(rows, key=lambda x: x.context)


def _refusal(choice: Choice, bound: Bound) -> str:
    return refusal(choice.rows, choice.name, bound)


def _by_density(profile: Profile | None) -> list[str]:
    """Our own presets that were measured, the densest first.

    Methods of the literature have to be named: ``auto`` never takes one.
    """
    bits = {x.preset: x.bits_per_element for x in (profile.rows if profile else ())}
    return sorted((name for name in OWN if name in bits), key=bits.__getitem__)


def _figures(name: str, rows: list[Quality]) -> str:
    return f"{name}: " + ", ".join(
        f"KL {x.kl:.4f} at {x.context} tokens, {x.bits_per_element:.2f} bits per value"
        for x in rows
    )
