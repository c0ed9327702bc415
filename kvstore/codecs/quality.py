"""The measured cost of a preset on a model: a row of the table, and of the model's profile."""

from __future__ import annotations

import msgspec


class TextQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost of a preset on one text, or on the answers to one kind of problem.

    It shows whether one kind of text suffers more than others.
    """

    text: str
    kl: float
    perplexity_change_pct: float
    top1: float


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost of one preset at one context length.

    All figures are finite, since JSON has no other numbers. None means that a figure was not
    measured, as in a profile of an earlier release.
    """

    preset: str
    codec_id: str = ""  # the id of the measured codec; "" = not recorded
    context: int  # tokens whose KV was packed and unpacked by the codec
    bits_per_element: float  # headers, scales and unquantised rows included
    perplexity_change_pct: float
    kl: float  # nats, mean over all scored positions, from the exact cache to the unpacked one
    top1: float  # share of positions with the same most likely token
    needle_found: int
    needle_total: int  # needles that are found with the exact cache
    cos_k: float
    cos_v: float
    error_k: float = 0.0  # mean squared error, relative to the mean square
    error_v: float = 0.0
    # The error of K and V together, relative to the least possible error for a white Gaussian
    # source at these bits. Below 0: K and V can be packed better than such a source. None: there
    # is no error.
    gaussian_gap_db: float | None = None
    texts: tuple[TextQuality, ...] = ()
    # Root mean square of the change (packed less exact) in the probability of the text's token.
    delta_p: float | None = None
    # The same figures on the answers to reasoning chains whose facts were packed by the codec.
    chain_tokens: int = 0  # number of scored tokens; 0 = no chains were measured
    chain_kl: float | None = None
    chain_top1: float | None = None
    chain_delta_p: float | None = None
    chains: tuple[TextQuality, ...] = ()  # by kind of problem
    # Seconds for 1,000 tokens of this context on the measuring machine, in its fastest run.
    prefill_s: float | None = None
    restore_s: float | None = None  # to unpack them, with the threads of a cold store
    # The share of these times in which a thread was ready to run but other work had the processor.
    # None: not measured.
    waited: float | None = None
    timed_on: str = ""  # the processors, see ``kvstore.workers.processors``; "" = not recorded
    # Measured on only some of the cases, which decided with a margin; the others are still to come.
    is_early: bool = False

    @property
    def restore_share(self) -> float | None:
        """The time to unpack, relative to a prefill of the same tokens; None if not timed."""
        if self.prefill_s is None or self.restore_s is None:
            return None
        return self.restore_s / max(self.prefill_s, 1e-9)


def short_row(row: Quality) -> Quality:
    """Return a row without the figures of single texts and kinds of problem."""
    return msgspec.structs.replace(row, texts=(), chains=())
