"""Derivatives of one layer's attention by stored K and V, written out by hand.

Values of the forward pass determine how a layer's addition to the residual stream depends on stored
K and V: no model has to be differentiated, and one layer at a time is enough. With scores s, shares
a = softmax(s), outputs o_i = sum_j a_ij v_j and a cotangent c_i of each output:

    gv_j = sum_i a_ij c_i
    gs_ij = a_ij (c_i . v_j - sum_l a_il c_i . v_l)
    gk_j = scale sum_i gs_ij q_i

summed over the query heads of a KV head. If scores are capped, s' = cap tanh(s / cap), gs has the
additional factor 1 - (s' / cap)^2. A sink is a score without a value: it takes its share of a, and
everything else is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.shapes import KVPair

HIDDEN: Final = np.float32(-1e30)  # the score of a token that a query does not see


@dataclass(frozen=True, eq=False)
class Attention:
    """The parameters of a layer's attention, besides its queries, K and V.

    Attributes:
        scale: the factor of scores.
        window: the number of tokens that a query sees, its own included; 0 = all.
        soft_cap: scores are limited to plus and minus this; 0 = they are not.
        sinks: fp32 (query heads,), one score without a value for each head; None = no sinks.
        slopes: fp32 (query heads,): a score falls by its slope per token of distance (ALiBi).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: np.ndarray | None = None
    slopes: np.ndarray | None = None


def outputs(
    how: Attention, queries: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return the outputs of the last tokens, fp32 (query heads, queries, value dim).

    Args:
        queries: fp32 (query heads, queries, dim), of the last tokens.
        keys: fp32 (KV heads, tokens, dim), as they are stored.
        values: fp32 (KV heads, tokens, value dim).
    """
    group, parts = len(queries) // len(keys), []
    for head, (k, v) in enumerate(zip(keys, values, strict=True)):
        own = slice(head * group, (head + 1) * group)
        parts.append(_shares(how, queries[own], k, own)[0] @ v)
    return np.concatenate(parts)


def gradients(
    how: Attention,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    cotangents: np.ndarray,
    num_known: int,
) -> KVPair:
    """Return the gradients of ``outputs``, times cotangents, by the first ``num_known`` K and V.

    Args:
        cotangents: fp32 (draws, query heads, queries, value dim).

    Returns:
        Two arrays, fp32 (draws, KV heads, num_known, dim); see ``outputs`` for other arguments.
    """
    num_draws, group = len(cotangents), len(queries) // len(keys)
    by_keys = np.zeros((num_draws, len(keys), num_known, keys.shape[2]), np.float32)
    by_values = np.zeros((num_draws, len(keys), num_known, values.shape[2]), np.float32)
    for head, (k, v) in enumerate(zip(keys, values, strict=True)):
        own = slice(head * group, (head + 1) * group)
        shares, slope = _shares(how, queries[own], k, own)
        turned = shares[..., :num_known].swapaxes(1, 2)
        for draw, given in enumerate(cotangents[:, own]):
            by_values[draw, head] = np.matmul(turned, given).sum(0)
            by_scores = given @ v.T
            by_scores -= np.einsum("gqt,gqt->gq", shares, by_scores)[..., None]
            by_scores *= shares
            if slope is not None:
                by_scores *= slope
            known = by_scores[..., :num_known].swapaxes(1, 2)
            by_keys[draw, head] = np.matmul(known, queries[own]).sum(0)
    by_keys *= np.float32(how.scale)
    return by_keys, by_values


def _shares(
    how: Attention, queries: np.ndarray, keys: np.ndarray, heads: slice
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return shares, fp32 (heads, queries, tokens), and the derivatives of capping scores."""
    num_queries, num_tokens = queries.shape[1], len(keys)
    scores = np.matmul(queries, keys.T)
    scores *= np.float32(how.scale)
    slope = None
    if how.soft_cap:
        capped = np.tanh(scores / np.float32(how.soft_cap))
        scores, slope = capped * np.float32(how.soft_cap), 1 - capped * capped
    at = np.arange(num_tokens - num_queries, num_tokens)[:, None]
    distance = at - np.arange(num_tokens)
    if how.slopes is not None:
        scores -= how.slopes[heads, None, None].astype(np.float32) * distance.astype(np.float32)
    unseen = distance < 0
    if how.window:
        unseen |= distance >= how.window
    scores[:, unseen] = HIDDEN
    most = scores.max(-1, keepdims=True)
    if how.sinks is not None:
        sinks = how.sinks[heads, None, None].astype(np.float32)
        most = np.maximum(most, sinks)
    scores -= most
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    if how.sinks is not None:
        total += np.exp(sinks - most)
    scores /= total
    return scores, slope
