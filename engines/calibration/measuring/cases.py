"""The cases of a measurement: a prefix, whose KV is packed and unpacked, and tokens after it.

In a *text* case the text goes on; a *needle* case ends in a question whose answer stands in the
prefix and nowhere else; in a case of *chains* (``chains.py``) there are questions whose answers
need several passages of the prefix.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engines.calibration.corpus import Text
from engines.calibration.measuring.prefixes import common_length
from engines.config import DEPTHS

Encode = Callable[[str], list[int]]

_PLACES = ("vault", "archive", "garage", "library", "tower", "harbour", "cellar", "station")


@dataclass(frozen=True)
class Case:
    """A prefix and the tokens after it, whose log-probabilities are compared."""

    name: str
    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    num_answer: int = 0  # for a needle: so many tokens at the end of ``rest`` are the answer
    # For chains: by kind of problem the places in ``rest`` of the tokens that are answers.
    answers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_needle(self) -> bool:
        return self.num_answer > 0

    @property
    def is_text(self) -> bool:
        return not (self.is_needle or self.is_chains)

    @property
    def is_chains(self) -> bool:
        return bool(self.answers)


def text_cases(
    texts: Sequence[Text], encode: Encode, context: int, num_scored: int
) -> Iterator[Case]:
    """A case for each text that has ``context + num_scored`` tokens."""
    for text in texts:
        tokens = encode(text.content)
        if len(tokens) >= context + num_scored:
            end = context + num_scored
            yield Case(text.name, tuple(tokens[:context]), tuple(tokens[context:end]))


def needle_cases(
    texts: Sequence[Text], encode: Encode, context: int, depths: Sequence[float] = DEPTHS
) -> Iterator[Case]:
    """Cases with a pass key at each depth, using the texts that are long enough in turn.

    The same texts and depths give the same cases.
    """
    rng = random.Random(1)
    hays = [tokens for text in texts if len(tokens := encode(text.content)) >= context]
    for i, depth in enumerate(depths if hays else ()):
        place, code = _PLACES[i % len(_PLACES)], str(rng.randrange(10_000, 99_999))
        fact = encode(f"\n\nImportant: the secret passkey of the {place} is {code}.\n\n")
        hay = hays[i % len(hays)][: context - len(fact)]
        at = int(len(hay) * depth)
        question = f"\n\nRemember: the secret passkey of the {place} is "
        # A tokenizer may join the question's last blank with the first digit.
        asked, rest = encode(question), encode(question + code)
        yield Case(
            f"needle at {depth:.0%}",
            (*hay[:at], *fact, *hay[at:]),
            tuple(rest),
            len(rest) - common_length(asked, rest),
        )


def in_reading_order(cases: Iterable[Case]) -> list[Case]:
    """Sort cases so that those with a common beginning are neighbours and share its prefill."""
    return sorted(cases, key=lambda case: case.prefix)
