"""A model that does not exist, and a profile of it: keys and values as real ones behave.

A few hidden causes per token drive all layers and heads, channels differ in size, keys are turned
by RoPE, and tokens differ in size.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.floats import narrow
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import CALIBRATED, LEARNABLE
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.shapes import DType, KVLayer, KVLayout, KVPair, Rope

ROPE = Rope(tuple(10_000.0 ** (-k / 8) for k in range(8)))
NUM_CAUSES = 12
FINGERPRINT = "no model"


def model_layout(dtype: DType = "bfloat16") -> KVLayout:
    return KVLayout(dtype, (KVLayer(2, 16, 16),) * 3)


def ropes_of(layout: KVLayout) -> tuple[Rope, ...]:
    return (ROPE,) * len(layout.layers)


def model_run(
    layout: KVLayout, num_tokens: int, seed: int = 0, first_token: int = 0
) -> list[KVPair]:
    model, text = np.random.default_rng(7), np.random.default_rng(seed)
    causes = text.standard_normal((num_tokens, NUM_CAUSES))
    sizes = np.exp2(text.standard_normal((num_tokens, 1)))
    run = layout.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        heads, _, dim = array.shape
        mixing = model.standard_normal((heads, NUM_CAUSES, dim)) * model.lognormal(0, 1, dim)
        own = text.standard_normal((heads, num_tokens, dim)) / 4
        mean = 3 * model.standard_normal((heads, 1, dim))
        values = (mean + sizes * (causes @ mixing / 3 + own)).astype(np.float32)
        array[:] = values if layout.dtype == "float32" else narrow(values, layout.dtype)
    return turned(run, layout, first_token)


def turned(run: list[KVPair], layout: KVLayout, first_token: int) -> list[KVPair]:
    """Turns the keys by RoPE, in place."""
    for shape in stack_shapes(Scope("head"), layout):
        stack = shape.gather(run, 0, layout.dtype)
        stack = UnRope(shape, ropes_of(layout)).backward(stack, first_token, None)
        shape.scatter(stack, run, 0, layout.dtype)
    return run


def model_profile(dtype: DType = "bfloat16") -> Profile:
    """A profile of all presets, of other types of ours alone; read-only, since tests share it."""
    return _learned(dtype)


@functools.cache
def _learned(dtype: DType) -> Profile:
    layout = model_layout(dtype)
    texts = [model_run(layout, 300, seed=seed) for seed in range(100, 104)]
    samples = Samples(layout, ropes_of(layout), texts, model_metrics(layout))
    return learn_profile(samples, FINGERPRINT, LEARNABLE if dtype == "bfloat16" else CALIBRATED)


def model_metrics(layout: KVLayout) -> list[np.ndarray]:
    """Heads differ in how much their errors matter, and so do directions within a head."""
    rng = np.random.default_rng(3)
    dims = [d for x in layout.layers for d in (x.head_dim, x.value_dim) for _ in range(2)]
    looks = [rng.lognormal(0, 0.5) * rng.standard_normal((3 * d, d)) for d in dims]
    return [(x.T @ x / len(x)).astype(np.float32) for x in looks]
