"""The fused form of a model's forward over a static cache: the operations of :mod:`pipespec_kernels.ops` between the model's own matrix products.

For steps that are captured in a CUDA graph. A layer takes 13 launches (two norms with the residual sums, RoPE with the append to the cache, attention
in two, the activation, seven products), where transformers' modules take 40. The weights are the model's own, without a copy.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.native import Form, check_outputs, probe, probe_cache, probe_inputs
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec_kernels import ops

FUSED = "fused"
"""The value in the report for a stage in this form."""


_numbers = itertools.count(1)


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
        if any(layer.gate_bias is not None or layer.up_bias is not None for layer in read.layers):
            raise NotReadable("its MLP has biases")
        self._norm: dict[str, Any] = {"eps": read.shape.eps, "one_plus_weight": read.shape.norm_offset == 1.0}
        # The second norm of a layer, then the first norm of the next one: each sums and normalises what comes before it.
        self._next_norms = [*(layer.input_norm for layer in read.layers[1:]), read.norm]
        self._tables: weakref.WeakKeyDictionary[RowCache, tuple[torch.Tensor, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        """Per cache cosines and sines, ``[capacity, rotary_dim]``, at fixed addresses: graphs read them."""

    def add_cache(self, cache: RowCache) -> None:
        """Compute RoPE for all positions of a cache, from the model's own rotary embedding."""
        if cache in self._tables:
            return
        with torch.inference_mode(False), torch.no_grad():
            like = torch.empty(0, dtype=cache.dtype, device=cache.device)
            cos, sin = self._read.rotary(like, position_ids=torch.arange(cache.capacity, device=cache.device)[None])
            self._tables[cache] = cos[0].contiguous(), sin[0].contiguous()

    def takes(self, cache: RowCache) -> bool:
        """Whether a forward over this cache can run now."""
        return cache in self._tables and not cache.is_displaced

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        read, (cos, sin) = self._read, self._tables[cache]
        shape, depth = read.shape, len(read.layers)
        rows, q = tokens.shape
        hidden: torch.Tensor = F.embedding(tokens, read.embedding) if read.scaled is None else read.scaled(tokens)
        _, stored = cache.open(q)
        lengths = cache.device_lengths
        x, _ = ops.add_rms_norm(hidden, None, read.layers[0].input_norm, **self._norm)
        for i, (layer, next_norm) in enumerate(zip(read.layers, self._next_norms, strict=True)):
            queries, keys, values = (
                F.linear(x, weight, bias).view(rows, q, -1, shape.head_dim).transpose(1, 2)
                for weight, bias in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
            )
            storage = stored[i], stored[depth + i]
            norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, **self._norm}
            queries = ops.rope_append(queries, keys, values, cos, sin, *storage, lengths, **norms)
            out = ops.verify_attention(queries, *storage, lengths, scale=shape.scale)
            out = F.linear(out.transpose(1, 2).reshape(rows, q, -1), layer.o, layer.o_bias)
            x, hidden = ops.add_rms_norm(out, hidden, layer.post_norm, **self._norm)
            gate_up = x.new_empty((rows * q, 2 * shape.intermediate))
            for weight, half in zip((layer.gate, layer.up), gate_up.chunk(2, 1), strict=True):
                torch.mm(x.view(rows * q, -1), weight.t(), out=half)
            mixed = ops.silu_mul(gate_up.view(rows, q, -1), activation=shape.activation)
            x, hidden = ops.add_rms_norm(F.linear(mixed, layer.down, layer.down_bias), hidden, next_norm, **self._norm)
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

    Args:
        model: one that has a :func:`fused_signature`.
        modules: calls the model as a whole.

    Raises:
        NotReadable: a part of the model has no operation here, or the logits do not agree.
    """
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
    return form
