"""The parts of packed rows by name, as views."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import Corrupt
from thermocline.packed import Packed
from thermocline.padded import padded_layout


def row_arrays(codec: RowCodec, packed: Packed) -> dict[str, np.ndarray]:
    """Returns the first tokens, scales and codes of rows of one side; none of a whole run."""
    if sum(bool(x) for y in packed.layout.layers for x in (y.head_dim, y.value_dim)) != 1:
        return {}
    wide = padded_layout(codec, packed.layout)
    plan = plan_payload(codec.rows, wide, packed.num_tokens, packed.first_token)
    payload = np.frombuffer(packed.payload, np.uint8)
    if len(payload) < plan.nbytes:
        raise Corrupt(f"payload of {len(payload)} bytes, at least {plan.nbytes} expected")
    (slot,) = (slot for slot in plan.slots if slot.dim)
    shape = (slot.num_heads, slot.num_tokens)
    return {
        "first_tokens": slot.sinks(payload),
        "scales": slot.scales(payload).reshape(shape),
        "codes": slot.packed(payload).reshape(*shape, slot.row_nbytes),
    }
