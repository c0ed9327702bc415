"""The rotation of keys beside latents, read off vLLM's own modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from engines.vllm_plugin.measuring.ropes import ropes_of
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.shapes import KVLayer, KVLayout

pytestmark = pytest.mark.vllm

DIM, TOKENS = 64, 300
BESIDE = {"of_latents": True, "must_be_found": False}
YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("parameters", [PLAIN, YARN])
@pytest.mark.parametrize("halves", [True, False])
def test_keys_beside_latents_are_equal_once_they_are_rotated_back(parameters, halves):
    layer = nn.Module()
    with set_current_vllm_config(VllmConfig()):
        layer.rotary_emb = get_rope(
            DIM, max_position=4096, is_neox_style=halves, rope_parameters=parameters
        )
        model = nn.Module()
        model.layer = layer
        (rope,) = ropes_of(model, ["layer.attn"], [DIM], **BESIDE)
        key = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(1))
        keys = key.expand(TOKENS, 1, DIM).contiguous()
        _, rotated = layer.rotary_emb(torch.arange(TOKENS), keys.clone(), keys.clone())
    assert rope.side == "values" and rope.interleaved is not halves
    layout = KVLayout("float32", (KVLayer(1, 16, DIM),))
    (shape,) = (x for x in stack_shapes(Scope("head"), layout) if x.width == DIM)
    plain, _ = UnRope(shape, (rope,)).forward(rotated.numpy().reshape(1, TOKENS, DIM).copy(), 0)
    assert np.abs(rotated.numpy()[:, 0] - rotated.numpy()[0, 0]).max() > 1
    assert np.abs(plain - plain[:, :1]).max() < 5e-3


def test_a_model_without_a_rotation_has_none() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    assert ropes_of(model, ["layer.attn"], [DIM], **BESIDE) == (None,)
