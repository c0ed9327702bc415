"""Associative recall as text: letters are bound to digits and asked for, again and again.

    =a3 binds a to 3; ?a3 asks for a, and 3 is the answer

Every symbol is one token. Between a binding and its question lie as many others as it comes to, so
a model that answers has kept all bindings; nothing else of the text can be predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

KEYS: Final = "abcdefghijklmnop"
VALUES: Final = "0123456789ABCDEF"
BIND, ASK = "=", "?"
ALPHABET: Final = BIND + ASK + KEYS + VALUES
ITEM: Final = 3  # symbols of a binding, and of a question with its answer
ASKED: Final = 0.5  # share of questions while there is something to bind


def recall_text(seed: int, num_items: int) -> str:
    """Make a text of so many bindings and questions; the same seed gives the same text."""
    rng = random.Random(seed)
    known: dict[str, str] = {}
    unbound = rng.sample(KEYS, len(KEYS))
    items = []
    for _ in range(num_items):
        if known and (not unbound or rng.random() < ASKED):
            key = rng.choice(list(known))
            items.append(ASK + key + known[key])
        else:
            key = unbound.pop()
            known[key] = rng.choice(VALUES)
            items.append(BIND + key + known[key])
    return "".join(items)


def recall_batch(rng: np.random.Generator, batch: int, num_tokens: int) -> np.ndarray:
    """Draw texts as ids, int32 (batch, num_tokens): an id is a symbol's place in ``ALPHABET``."""
    texts = [recall_text(int(x), -(-num_tokens // ITEM)) for x in rng.integers(0, 1 << 62, batch)]
    ids = [[ALPHABET.index(x) for x in text[:num_tokens]] for text in texts]
    return np.array(ids, np.int32)


def answer_places(ids: Sequence[int] | np.ndarray) -> list[int]:
    """List the places of answers in a text that begins with an item."""
    ask = ALPHABET.index(ASK)
    return [i + ITEM - 1 for i in range(0, len(ids) - ITEM + 1, ITEM) if ids[i] == ask]
