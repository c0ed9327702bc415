"""A profile of a model, learned from the KV of some texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from engines.calibration.corpus import Text
from engines.calibration.instrument import Instrument
from engines.calibration.turning import check_turning
from kvstore.codecs.fit import fit_profile
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples

logger = logging.getLogger(__name__)

LEAST_WINDOW = 64  # tokens; a text that leaves fewer behind the last window is cut there


def learn(
    instrument: Instrument,
    texts: Sequence[Text],
    presets: Sequence[str],
    num_windows: int,
    window_tokens: int,
) -> Profile:
    """What ``presets`` have to know, from ``num_windows`` windows dealt out over ``texts``.

    Raises:
        ValueError: no text, or a model that turns its keys in a way that is not understood.
    """
    windows = list(deal(texts, instrument, num_windows, window_tokens))
    if not windows:
        raise ValueError(f"no text to learn from has {LEAST_WINDOW} tokens")
    ropes = instrument.ropes
    check_turning(instrument, ropes)
    runs = []
    for number, window in enumerate(windows, 1):
        runs.append(instrument.prefill(window))
        logger.info("read %d of %d windows to learn from", number, len(windows))
    samples = Samples(instrument.layout, ropes, runs)
    profile = fit_profile(samples, instrument.fingerprint, presets)
    logger.info("learned %s", ", ".join(f"{name} ({id})" for name, id in profile.ids.items()))
    return profile


def deal(
    texts: Sequence[Text], instrument: Instrument, num_windows: int, window_tokens: int
) -> Iterator[list[int]]:
    """The first window of every text, then the second of every text, and so on: many kinds of
    text teach more than much of one."""
    tokens = [instrument.encode(text.content) for text in texts]
    longest = max(map(len, tokens), default=0)
    dealt = 0
    for first in range(0, longest, window_tokens):
        for text in tokens:
            window = text[first : first + window_tokens]
            if len(window) >= LEAST_WINDOW and dealt < num_windows:
                dealt += 1
                yield window
