"""Combinations that contain every pair of values, in place of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def in_pairs(*choices: Iterable[Any]) -> list[Any]:
    """Return all combinations; those whose pairs of values occur in others are thorough."""
    left = list(itertools.product(*choices))
    found, seen = [], set[Any]()
    while left:
        chosen = max(left, key=lambda x: len(_pairs(x) - seen))
        if not _pairs(chosen) - seen:
            break
        seen |= _pairs(chosen)
        found.append(chosen)
        left.remove(chosen)
    return [*found, *(pytest.param(*x, marks=pytest.mark.thorough) for x in left)]


def _pairs(values: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(map(repr, values)), 2))
