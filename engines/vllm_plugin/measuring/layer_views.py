"""Records queries and the residual stream of each attention layer in a step of vLLM.

It uses forward hooks, which run when the model's modules are called. A compiled model calls none of
its modules, and a CUDA graph runs no Python at all, so an observed step runs without both: its
forward context requests that (``run_eagerly``). Hooks are set before such a step and removed after
it, both on the thread that runs the model, so they do not affect other steps. Products with
projections are computed on that thread, too: a layer's CPU kernel keeps its intermediate values in
itself and in memory that all layers share, and two threads in it crash the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import RowParallelLinear

from engines.calibration.instrument import NUM_DRAWS, LayerNotice, NotObservable
from engines.calibration.measuring.metrics import widened
from kvstore.codecs.learning import attention
from kvstore.shapes import KVLayout, KVPair, KVRun

SMALLEST_OUTPUT: Final = 1e-20  # a factor cannot be derived from a smaller output
# The most relative error between the keys in blocks and the observed ones; that of another prompt's
# keys is far above 1.
MOST_ERROR: Final = 1e-2


@dataclass
class SeenLayer:
    """The modules of one layer, and the observations in one step, on the model's device.

    Attributes:
        block: the module whose input is the residual stream.
        sizes: fp32 (tokens,), the size of the residual stream.
        queries: (tokens, query heads * dim), after norms and RoPE; ``keys`` alike.
        output: the output of the attention, (tokens, query heads * value dim).
        cotangents: gradients, with respect to ``output``, of random projections of the layer's
            addition to the stream, divided by the size of the stream; fp32 (draws, tokens, query
            heads * value dim).
    """

    block: nn.Module
    attention: Attention
    projection: RowParallelLinear
    sizes: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    output: torch.Tensor | None = None
    cotangents: torch.Tensor | None = None

    def see_block(
        self, num_tokens: int, block: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Note the size of the stream; some models pass its last addition as a separate tensor."""
        parts = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
        parts = [x for x in parts if x.is_floating_point() and x.ndim == 2]
        if parts and len(parts[0]) >= num_tokens:
            stream = sum(x[:num_tokens].float() for x in parts if x.shape == parts[0].shape)
            assert isinstance(stream, torch.Tensor)
            self.sizes = stream.square().mean(-1).sqrt()

    def see_attention(
        self,
        num_tokens: int,
        layer: nn.Module,
        given: tuple[Any, ...],
        named: Mapping[str, Any],
        output: torch.Tensor,
    ) -> None:
        """Note queries, keys and outputs."""
        queries, keys = (*given, *(named[x] for x in ("query", "key") if x in named))[:2]
        if keys is not None and len(queries) >= num_tokens:
            self.queries, self.keys = queries[:num_tokens].clone(), keys[:num_tokens].clone()
            self.output = output[:num_tokens].clone()

    def see_projection(
        self, num_tokens: int, seed: int, module: RowParallelLinear, given: tuple[torch.Tensor, ...]
    ) -> None:
        """Draw random projections of the layer's addition to the stream, as ``cotangents``."""
        if len(given[0]) < num_tokens or self.sizes is None:
            return
        generator = torch.Generator(device="cpu").manual_seed(seed)
        weights = projection_weights(module)
        shape = (NUM_DRAWS, num_tokens, weights.shape[1])
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32).to(weights.device)
        found = (drawn / self.sizes[:, None].clamp_min(SMALLEST_OUTPUT)) @ weights.T
        if (gates := _gates(self.output, given[0][:num_tokens])) is not None:
            found *= gates
        self.cotangents = found

    def read_queries(self, pair: KVPair) -> np.ndarray:
        """The queries, fp32 (query heads, tokens, dim). ``pair``: K and V of the observed prompt.

        Raises ``NotObservable``: another step was observed, or none.
        """
        if self.sizes is None or self.queries is None or self.keys is None:
            raise NotObservable(
                "vLLM ran the step as a graph, or other requests beside it, and showed no queries"
            )
        own = _by_head(self.keys, self.attention.num_kv_heads)
        stored = pair[0][:, -own.shape[1] :]
        if np.abs(own - stored).max() > MOST_ERROR * np.abs(stored).max():
            raise NotObservable("another request was seen than the one that was measured")
        return _by_head(self.queries, self.attention.num_heads)

    def read_cotangents(self) -> np.ndarray:
        """The ``cotangents``, fp32 (draws, query heads, tokens, value dim).

        Raises ``NotObservable``: none were drawn.
        """
        if self.cotangents is None:
            raise NotObservable("the output projection of a layer was not seen")
        found, layer = self.cotangents, self.attention
        by_head = found.reshape(*found.shape[:2], layer.num_heads, layer.head_size_v)
        return np.ascontiguousarray(by_head.transpose(1, 2).cpu().numpy())

    def read_outputs(self) -> np.ndarray:
        """The ``output``, fp32 (query heads, tokens, value dim); for tests."""
        assert self.output is not None
        return _by_head(self.output, self.attention.num_heads)

    @property
    def kind(self) -> attention.Attention:
        """The way in which the layer attends."""
        impl: Any = self.attention.impl
        return attention.Attention(
            float(impl.scale),
            int(self.attention.sliding_window or 0),
            float(getattr(impl, "logits_soft_cap", None) or 0.0),
            _array(getattr(impl, "sinks", None)),
            _array(getattr(impl, "alibi_slopes", None)),
        )


class LayerViews:
    """Observes steps with a given number of tokens; vLLM may add padding to them for its graphs.

    Call ``arm`` and ``disarm`` on vLLM's thread.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], num_tokens: int, seed: int = 0
    ) -> None:
        """Find the modules of the attention layers with these names, for steps of ``num_tokens``.

        ``seed``: of the random draws. Raises ``NotObservable``: a layer has an unknown structure.
        """
        self.layers = [_layer(model, name) for name in names]
        self._num_tokens = num_tokens
        self._seed = seed
        self._handles: list[RemovableHandle] = []

    def arm(self) -> None:
        """Set the hooks, unless they are set, and make the step that begins call them."""
        run_eagerly()
        if self._handles:
            return
        for number, layer in enumerate(self.layers):
            block = partial(layer.see_block, self._num_tokens)
            attended = partial(layer.see_attention, self._num_tokens)
            projected = partial(layer.see_projection, self._num_tokens, self._seed + number)
            self._handles += [
                layer.block.register_forward_pre_hook(block, with_kwargs=True),
                layer.attention.register_forward_hook(attended, with_kwargs=True),
                layer.projection.register_forward_pre_hook(projected),
            ]

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def notices(self, run: KVRun, layout: KVLayout, first: int) -> Iterator[LayerNotice]:
        """Yield for each layer the effect of errors in the K and V of the first tokens of ``run``.

        ``run`` ends with the observed tokens. Raises ``NotObservable``: no such step was observed.
        """
        for number, layer in enumerate(self.layers):
            pair = (widened(run[number][0], layout), widened(run[number][1], layout))
            given = layer.read_queries(pair), *pair, layer.read_cotangents()
            found = attention.gradients(layer.kind, *given, first)
            yield LayerNotice(False, number, run[number], found)


def run_eagerly() -> None:
    """Make the step that begins run module by module, also where the model is compiled.

    ``skip_compiled`` is vLLM's own option to bypass ``torch.compile`` for single steps, and vLLM's
    warm-up runs steps without CUDA graphs. The context ends with the step, and both settings with
    it.
    """
    if is_forward_context_available():
        context = get_forward_context()
        context.skip_compiled = True
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE


def _layer(model: nn.Module, name: str) -> SeenLayer:
    layer = model.get_submodule(name)
    path = name.split(".")
    parents = [".".join(path[:end]) for end in range(len(path) - 1, 0, -1)]
    around = model.get_submodule(parents[0])
    if not isinstance(layer, Attention):
        raise NotObservable(f"{name} is not an attention layer of queries, keys and values")
    width = layer.num_heads * layer.head_size_v
    projections = [
        x
        for x in around.children()
        if isinstance(x, RowParallelLinear) and x.input_size_per_partition == width
    ]
    blocks = [
        x
        for x, above in zip(parents, parents[1:], strict=False)
        if isinstance(model.get_submodule(above), nn.ModuleList)
    ]
    if len(projections) != 1 or not blocks:
        raise NotObservable(f"the output projection of {name} is not found")
    return SeenLayer(model.get_submodule(blocks[0]), layer, projections[0])


def projection_weights(projection: RowParallelLinear) -> torch.Tensor:
    """Return the matrix of a projection for the inputs of this rank, fp32 (inputs, outputs).

    The layer multiplies a unit matrix, so its weights may be stored in any form.
    """
    assert projection.quant_method is not None
    device = next(iter(projection.parameters())).device
    inputs = torch.eye(
        projection.input_size_per_partition, dtype=projection.params_dtype, device=device
    )
    return projection.quant_method.apply(projection, inputs, bias=None).float()


def _gates(output: torch.Tensor | None, projected: torch.Tensor) -> torch.Tensor | None:
    """Return the factors between the attention's outputs and the projection's inputs, if any."""
    if output is None or projected.shape != output.shape or torch.equal(output, projected):
        return None
    large = output.abs() > SMALLEST_OUTPUT
    ones = torch.ones_like(output)
    return torch.where(large, projected / torch.where(large, output, ones), ones).float()


def _by_head(rows: torch.Tensor, num_heads: int) -> np.ndarray:
    """Rows of all heads as fp32 (heads, tokens, dim)."""
    heads = rows.reshape(len(rows), num_heads, -1).transpose(0, 1)
    return np.ascontiguousarray(heads.float().cpu().numpy())


def _array(values: Any) -> np.ndarray | None:
    return None if values is None else np.asarray(torch.as_tensor(values).detach().float().cpu())
