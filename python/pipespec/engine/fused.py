"""The fused form of a model's forward over a static cache: the operations of :mod:`pipespec_kernels.ops` between the model's own matrix products.

For steps that are captured in a CUDA graph. A layer takes 9 launches (two norms with the residual sums, RoPE with the append to the cache, attention,
the activation, four products), where transformers' modules take 40. The weights are the model's own, without a copy: those of one input are merged,
see :mod:`pipespec.models.merging`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.native import Form, check_outputs, probe, probe_cache, probe_inputs
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.merging import check_separate, merge, merged
from pipespec.models.parts import ModelParts
from pipespec_kernels import ops
from pipespec_kernels.decoder import LayerWeights

FUSED = "fused"
"""The value in the report for a stage in this form."""


_numbers = itertools.count(1)


class _Matrix(NamedTuple):
    """A matrix and its bias, each in one part, or in several that :meth:`__call__` copies into one: before the merge, for the check alone."""

    weight: tuple[torch.Tensor, ...]
    bias: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> _Matrix:
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(biases):
            raise NotReadable("of the matrices of one input some have biases and some have none")
        whole, whole_bias = merged(weights), merged(given) if given else None
        return cls(tuple(weights) if whole is None else (whole,), tuple(given) if whole_bias is None else (whole_bias,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None for parts in self)
        assert weight is not None
        return F.linear(x, weight, bias)


class _Layer(NamedTuple):
    weights: LayerWeights
    qkv: _Matrix
    gate_up: _Matrix

    @classmethod
    def of(cls, weights: LayerWeights) -> _Layer:
        w = weights
        return cls(
            w,
            _Matrix.of((w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias)),
            _Matrix.of((w.gate, w.up), (w.gate_bias, w.up_bias)),
        )


class _Fixed(NamedTuple):
    """What a form has for a cache, at fixed addresses: graphs read and write it.

    Attributes:
        cos: Cosines ``[capacity, rotary_dim]``.
        sin: Likewise.
        workspace: Of attention.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    workspace: torch.Tensor


class FusedForm(Form):
    """A model's forward over static caches. :meth:`add_cache` comes before the first forward over a cache.

    Args:
        model: one that :func:`pipespec.models.families.identity` accepts.

    Attributes:
        number: differs for each form. A graph that has captured one form reads its tables.

    Raises:
        NotReadable: a part of the model has no operation here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.number = next(_numbers)
        self._read = read = families.read(model)
        self._layers = [_Layer.of(weights) for weights in read.layers]
        self._norm: dict[str, Any] = {"eps": read.shape.eps, "one_plus_weight": read.shape.norm_offset == 1.0}
        # The second norm of a layer, then the first norm of the next one: each sums and normalises what comes before it.
        self._next_norms = [*(layer.input_norm for layer in read.layers[1:]), read.norm]
        self._fixed: weakref.WeakKeyDictionary[RowCache, _Fixed] = weakref.WeakKeyDictionary()

    def add_cache(self, cache: RowCache) -> None:
        """Compute RoPE for all positions of a cache, from the model's own rotary embedding, and allocate the work space of attention."""
        if cache in self._fixed:
            return
        with torch.inference_mode(False), torch.no_grad():
            like = torch.empty(0, dtype=cache.dtype, device=cache.device)
            cos, sin = self._read.rotary(like, position_ids=torch.arange(cache.capacity, device=cache.device)[None])
            workspace = torch.zeros(2 * cache.rows * self._read.shape.kv_heads, dtype=torch.int32, device=cache.device)
            self._fixed[cache] = _Fixed(cos[0].contiguous(), sin[0].contiguous(), workspace)

    def takes(self, cache: RowCache) -> bool:
        """Whether a forward over this cache can run now."""
        return cache in self._fixed and not cache.is_displaced

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        read, (cos, sin, workspace) = self._read, self._fixed[cache]
        shape, depth = read.shape, len(read.layers)
        rows, q = tokens.shape
        hidden: torch.Tensor = F.embedding(tokens, read.embedding) if read.scaled is None else read.scaled(tokens)
        _, stored = cache.open(q)
        lengths = cache.device_lengths
        x, _ = ops.add_rms_norm(hidden, None, read.layers[0].input_norm, **self._norm)
        for i, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            weights, storage = layer.weights, (stored[i], stored[depth + i])
            heads = layer.qkv(x).view(rows, q, -1, shape.head_dim).transpose(1, 2)
            queries, keys, values = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
            norms = {"q_norm": weights.q_norm, "k_norm": weights.k_norm, **self._norm}
            queries = ops.rope_append(queries, keys, values, cos, sin, *storage, lengths, **norms)
            out = ops.verify_attention(queries, *storage, lengths, scale=shape.scale, workspace=workspace)
            out = F.linear(out.transpose(1, 2).reshape(rows, q, -1), weights.o, weights.o_bias)
            x, hidden = ops.add_rms_norm(out, hidden, weights.post_norm, **self._norm)
            mixed = F.linear(
                ops.silu_mul(layer.gate_up(x), activation=shape.activation), weights.down, weights.down_bias
            )
            x, hidden = ops.add_rms_norm(mixed, hidden, next_norm, **self._norm)
        cache.close()
        return F.linear(x[:, q - keep :], read.head, read.head_bias)


def fused_signature(model: PreTrainedModel) -> tuple[Any, ...]:
    """What the fused form of a model depends on. Raises :class:`NotReadable`, with the reason, where it has none."""
    if model.config._attn_implementation != ATTENTION:
        raise NotReadable(f"its attention is {model.config._attn_implementation!r}")
    return families.identity(model, packed=False)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def fused_form(model: PreTrainedModel, modules: Form) -> FusedForm:
    """The fused form of a model, after its logits agreed with those of the model's own modules, see :func:`check_outputs`.

    It merges the weights of the model, see :mod:`pipespec.models.merging`.

    Args:
        model: one that has a :func:`fused_signature`.
        modules: calls the model as a whole.

    Raises:
        NotReadable: a part of the model has no operation here, the logits do not agree, or its weights cannot be merged.
    """
    _check(model, modules)
    groups = families.of_one_input(model)
    check_separate(model, groups)
    # No form may hold the weights of before the merge.
    merge(groups)
    return FusedForm(model)


def _check(model: PreTrainedModel, modules: Form) -> None:
    """Raise :class:`NotReadable` unless the logits agree. The form of the check has the operations and the sums of the later one."""
    form, parts = FusedForm(model), ModelParts.of(model)
    texts = probe_inputs(parts)

    def logits(call: Form) -> torch.Tensor:
        cache = probe_cache(parts, static=True)
        form.add_cache(cache)
        return probe(call, cache, texts)

    # Autocast holds for this call alone, and the form serves later ones.
    with torch.inference_mode(), _without_autocast(model.device.type):
        own = logits(modules)
        try:
            ours = logits(form)
        except (TypeError, ValueError) as error:
            raise NotReadable(f"an operation does not take it: {error}") from error
        check_outputs(parts, texts, own, ours)
