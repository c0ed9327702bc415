"""How many tokens one step of a measurement feeds, by the model's size alone.

No clock is asked: tokens that are fed in other steps have KV that is rounded otherwise, and two
servers of one model would learn two profiles, and not find each other's sessions.

Every step reads all weights, so long ones are cheaper by the token; but a request that arrives may
have to wait for one. The figures below give a quarter of a second to a second on usual machines.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import get_total_parameters

CPU_WORK: Final = 10**10  # tokens of a step times parameters
GPU_WORK: Final = 10**12
SMALLEST: Final = 8
LARGEST: Final = 512


def step_tokens(num_parameters: int, *, on_gpu: bool) -> int:
    """Return the tokens of a step, a power of two."""
    wanted = (GPU_WORK if on_gpu else CPU_WORK) // max(num_parameters, 1)
    return max(SMALLEST, min(LARGEST, 1 << max(wanted.bit_length() - 1, 0)))


def step_tokens_of(model: Any) -> int:
    """Return the tokens of a step of this model, on the device that computes it."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    count: int = get_total_parameters(model)  # type: ignore[no-untyped-call]
    return step_tokens(count, on_gpu=on_gpu)
