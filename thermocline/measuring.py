"""Learns a model for methods that need it, and measures methods on it as the server's gate does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.names import CALIBRATED, is_learned
from kvstore.codecs.presets import canonical_name
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.errors import UnknownCodec
from thermocline.method import Method
from thermocline.progress import reporter

if TYPE_CHECKING:
    from engines.calibration.measuring.trials import AnyCodec
    from kvstore.codecs.learning.samples import Samples


def learn(samples: Samples, *names: str) -> Profile:
    """Return what some methods learned of a model; takes seconds, or minutes for ``max``.

    ``samples``: what ``thermocline.mlx.capture`` returned, or a ``Samples`` made of other arrays.
    ``names``: methods that learn a model; without any, all of Thermocline's own.

    Raises:
        UnknownCodec: there is no such method, or it learns nothing.
        ValueError: ``samples`` is not a ``Samples``, or a text has at most four tokens: methods
            keep the first four in 16 bits, so there is nothing to learn from.
    """
    from kvstore.codecs.calibrated import learn_profile
    from kvstore.codecs.learning.samples import Samples

    if not isinstance(samples, Samples):
        raise ValueError(
            f"samples are a {type(samples).__name__}; thermocline.Samples are wanted, as"
            " thermocline.mlx.capture(model, texts) returns them"
        )

    wanted = [canonical_name(name) for name in names] or list(CALIBRATED)
    for name in wanted:
        if not is_learned(name):
            raise UnknownCodec(f"codec {name!r} learns nothing of a model")
    if any(text[0][0].shape[1] <= NUM_SINKS for text in samples.texts if text):
        raise ValueError(f"a text to learn from needs more than {NUM_SINKS} tokens")
    return learn_profile(samples, "", wanted)


def judge(
    model: Any,
    names: Iterable[str | Method],
    tokens: Sequence[Sequence[int]],
    *,
    context: int = 512,
    num_scored: int = 128,
    profile: Profile | None = None,
    encode: Callable[[str], list[int]] | None = None,
    progress: bool | None = None,
) -> list[Quality]:
    """Measure the loss of methods on a model, as the server's gate does.

    The KV of each text's first ``context`` tokens is packed and restored chunk by chunk. The next
    ``num_scored`` tokens are then predicted twice, from the restored and from the exact KV.

    Args:
        model: a model of mlx_lm, or an ``engines.calibration.instrument.Instrument``.
        names: names of methods, or ``Method`` objects.
        tokens: the token ids of some texts, at least ``context + num_scored`` for each.
        profile: what ``learn`` returned, for methods that learn a model; it should not have
            learned from these texts.
        encode: the tokenizer's function. If given, a reasoning chain is hidden in each text as one
            more case, and the answers are scored, too (``chain_kl``, ``chain_top1``).
        progress: whether to write progress and figures to stderr; None = only on a terminal.

    Returns:
        A row for each method, in the order of ``names``: bits per value, KL in nats, perplexity,
        the share of positions with the same most likely token, errors of K and V.

    Raises:
        UnknownCodec: there is no such method, or it cannot pack this model.
        ValueError: a text is too short, the model's cache cannot be packed, or ``model`` is
            neither a model of mlx_lm nor an instrument.
    """
    from engines.calibration.measuring.cases import Case, chain_cases
    from engines.calibration.measuring.measure import Judge

    if not tokens or min(map(len, tokens)) < context + num_scored:
        raise ValueError(f"texts of {context + num_scored} tokens or more are wanted")
    end = context + num_scored
    cases = [
        Case(f"text {number}", tuple(text[:context]), tuple(text[context:end]))
        for number, text in enumerate(tokens)
    ]
    if encode is not None:
        cases += chain_cases(tokens, encode, context, len(tokens), num_scored)
    instrument, say = _instrument_of(model), reporter("judge", progress)
    say("opening methods; one that is used for the first time is compiled")
    codecs = _codecs(instrument, names, profile)
    return Judge(instrument, cases, say).rows(codecs)


def _instrument_of(model: Any) -> Any:
    if hasattr(model, "log_probs"):
        return model
    if not hasattr(model, "layers"):
        raise ValueError(f"a {type(model).__name__} is no model of mlx_lm, and no instrument")
    from thermocline.mlx import instrument

    return instrument(model)


def _codecs(
    instrument: Any, names: Iterable[str | Method], profile: Profile | None
) -> dict[str, AnyCodec]:
    from engines.calibration.calibrate import codecs_to_measure

    profile = profile or Profile(instrument.fingerprint, instrument.layout, (), {})
    found: dict[str, AnyCodec] = {}
    for each in names:
        if isinstance(each, Method):
            each.codec.check(instrument.layout)
            found[each.id] = each.codec
            continue
        found |= codecs_to_measure(instrument, [canonical_name(each)], profile)
    return found
