"""Recurrent layers with a state per column: gated delta nets (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them.

transformers' module updates its states once per forward, behind the last column. Here the projections and the convolution run for all columns
at once, and the recurrence column by column, so that the states after each column can be kept. A prefill, whose columns stay, runs the chunked
form of the model's own module between the states that are kept.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from pipespec.engine.states import LayerStates, StateRing
from pipespec.models.compat import chunked_delta_rule
from pipespec.models.devices import not_whole_reason
from pipespec.models.layout import StateLayout
from pipespec.models.parts import ModelParts
from pipespec.models.properties import has_hooks, has_own_forward

_MODULE = "linear_attn"
"""Attribute of a decoder layer that holds the recurrent module."""

_CLASSES = frozenset(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"))

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-2}
"""Largest deviation from the outputs of the model's own module on the probe, relative to the largest output."""


_probed: WeakSet[nn.Module] = WeakSet()
"""The model's modules whose outputs have been compared: SPD makes its layers anew in each call."""


class GatedDeltaNet(nn.Module):
    """A gated delta net of transformers with the weights and sub-modules of its own, and a state per column.

    Args:
        own: the model's module.

    Raises:
        ValueError: on a probe, its outputs differ from the module's own.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self._act = ACT2FN[own.activation]
        if own not in _probed:
            self._probe()
            _probed.add(own)

    def forward(self, hidden_states: torch.Tensor, cache_params: Any, **kwargs: Any) -> torch.Tensor:
        """Run ``hidden_states [rows, q, H]``. ``cache_params``: a :class:`pipespec.engine.cache.RowCache`. Others are ignored: rows have no padding."""
        with cache_params.recurrent(self.own.layer_idx, hidden_states.shape[1]) as states:
            return self._run(hidden_states, states)

    def _run(self, hidden: torch.Tensor, states: LayerStates) -> torch.Tensor:
        own, (rows, q, _) = self.own, hidden.shape
        mixed, z, b, a = self._project(hidden)
        before, state = states.load()
        taps = before.shape[2]
        inputs = torch.cat([before, mixed.transpose(1, 2)], -1)
        x = self._convolved(inputs, q).transpose(1, 2)
        query, key, value = x.split((own.key_dim, own.key_dim, own.value_dim), -1)
        query, key = (y.reshape(rows, q, own.num_k_heads, own.head_k_dim) for y in (query, key))
        value = value.reshape(rows, q, own.num_v_heads, own.head_v_dim)
        if own.num_v_heads != own.num_k_heads:
            query, key = (y.repeat_interleave(own.num_v_heads // own.num_k_heads, 2) for y in (query, key))
        beta = b.sigmoid()
        decay = -own.A_log.float().exp() * F.softplus(a.float() + own.dt_bias)
        out = []
        if states.stepwise:
            steps = _Steps(query, key, value, decay, beta)
            for i in range(q):
                state, column = steps(state, i)
                if i + 1 in states.columns:
                    states.store(i + 1, inputs[:, :, i + 1 : i + 1 + taps], state)
                out.append(column[:, None])
        else:
            begin, rule = 0, chunked_delta_rule(own)
            for end in sorted({*states.columns, q}):
                part = (y[:, begin:end] for y in (query, key, value))
                columns, state = rule(
                    *part,
                    g=decay[:, begin:end],
                    beta=beta[:, begin:end],
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                if end in states.columns:
                    states.store(end, inputs[:, :, end : end + taps], state)
                out.append(columns)
                begin = end
        y = own.norm(torch.cat(out, 1).to(hidden.dtype).reshape(-1, own.head_v_dim), z.reshape(-1, own.head_v_dim))
        result: torch.Tensor = own.out_proj(y.reshape(rows, q, -1))
        return result

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the convolution ``[rows, q, channels]``, the gate, and the numbers for beta and decay ``[rows, q, heads]``."""
        own = self.own
        if hasattr(own, "in_proj_qkvz"):
            query, key, value, z, b, a = own.fix_query_key_value_ordering(
                own.in_proj_qkvz(hidden), own.in_proj_ba(hidden)
            )
            return torch.cat([x.flatten(2) for x in (query, key, value)], -1), z, b, a
        return own.in_proj_qkv(hidden), own.in_proj_z(hidden), own.in_proj_b(hidden), own.in_proj_a(hidden)

    def _convolved(self, inputs: torch.Tensor, q: int) -> torch.Tensor:
        """The causal convolution of ``inputs [rows, channels, taps + q]``, and its activation: ``[rows, channels, q]``.

        As a sum of products in float32, so that the bits of a column do not depend on the number of columns.
        """
        conv = self.own.conv1d
        weight, wide = conv.weight.float(), inputs.float()
        out = wide[:, :, :q] * weight[:, 0, :1]
        for tap in range(1, weight.shape[2]):
            out = out + wide[:, :, tap : tap + q] * weight[:, 0, tap : tap + 1]
        if conv.bias is not None:
            out = out + conv.bias.float()[:, None]
        activated: torch.Tensor = self._act(out.to(inputs.dtype))
        return activated

    def _probe(self) -> None:
        own = self.own
        weight = own.out_proj.weight
        if weight.is_meta or not weight.is_floating_point():
            return
        noise = torch.randn((1, 6, own.hidden_size), generator=torch.Generator().manual_seed(0), device="cpu")
        hidden = noise.to(weight.device, own.dt_bias.dtype)
        layout = StateLayout(
            (0,), own.conv_dim, own.conv_kernel_size - 1, own.num_v_heads, own.head_k_dim, own.head_v_dim
        )
        ring = StateRing(layout, 1, hidden.dtype, hidden.device)
        with torch.inference_mode():
            expected = own(hidden).float()
            for keep in (None, [4]):  # column by column, and in chunks
                ring.begin([0], hidden.shape[1], keep)
                error = (self._run(hidden, ring.layer(0)).float() - expected).abs().amax()
                # Not a number compares false.
                if not bool(error <= TOLERANCE.get(hidden.dtype, 0) * expected.abs().amax()):
                    raise ValueError(
                        f"the recurrent layers of this model ({type(own).__name__}) compute something else than a gated delta net as of "
                        f"transformers 5.0 to 5.23: outputs differ by {float(error):.2g} on a probe; use one of these versions"
                    )


class _Steps:
    """The recurrence of the gated delta rule, one column at a time, in float32 (Yang et al., arXiv 2412.06464, equation 10).

    The operations and their order are those of transformers' ``torch_recurrent_gated_delta_rule``, which plain decoding runs.

    Args:
        query: ``[rows, q, heads, key_dim]``, as ``key``.
        key: as ``query``.
        value: ``[rows, q, heads, value_dim]``.
        decay: ``[rows, q, heads]``, logarithms.
        beta: ``[rows, q, heads]``.
    """

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> None:
        query, key = (
            x.float() * torch.rsqrt((x.float() * x.float()).sum(-1, keepdim=True) + 1e-6) for x in (query, key)
        )
        self._query = (query / query.shape[-1] ** 0.5)[..., None]
        self._key, self._value = key[..., None], value.float()
        self._decay, self._beta = decay.float().exp()[..., None, None], beta.float()[..., None]

    def __call__(self, state: torch.Tensor, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The state ``[rows, heads, key_dim, value_dim]`` after a column, and its output ``[rows, heads, value_dim]``."""
        key = self._key[:, column]
        state = state * self._decay[:, column]
        delta = (self._value[:, column] - (state * key).sum(-2)) * self._beta[:, column]
        state = state + key * delta[..., None, :]
        return state, (state * self._query[:, column]).sum(-2)


def with_states(layer: Any) -> Any:
    """A decoder layer whose recurrent module keeps a state per column. The layer itself stays as it is; one without such a module is returned.

    All other modules, and all weights, are the layer's own.
    """
    own = layer._modules.get(_MODULE)
    if own is None:
        return layer
    twin = copy.copy(layer)
    twin._modules = dict(layer._modules)
    twin._modules[_MODULE] = GatedDeltaNet(own)
    return twin


def recurrent_signature(parts: ModelParts) -> tuple[Any, ...] | None:
    """What the layers of :func:`with_states` depend on, so that a change is noticed; None for parts without recurrent layers."""
    if all(layer._modules.get(_MODULE) is None for layer in parts.layers):
        return None
    modules = (module for layer in parts.layers for module in (layer, *layer._modules.values()))
    return (*map(id, (parts.embed, parts.norm, parts.head)), *map(id, modules))


def recurrent_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the recurrent layers of a model cannot keep a state per column; None if they can.

    Args:
        model: one whose layout has states.

    Returns:
        A sentence without an end.
    """
    why = not_whole_reason(model)
    if why is not None:
        return (
            f"it has recurrent layers, whose states are kept on one device, by this process, and {why}; load it whole"
        )
    if any(has_own_forward(module) or has_hooks(module) for module in (model, model.base_model)):
        return "it has recurrent layers, so its layers are called one by one, and its own hooks or forward would not run; remove them"
    for i, layer in enumerate(ModelParts.of(model).layers):
        own = layer._modules.get(_MODULE)
        if own is None:
            continue
        if type(own).__name__ not in _CLASSES or not type(own).__module__.startswith("transformers.models."):
            return f"model.layers.{i}.{_MODULE} is a {type(own).__name__}, and not a gated delta net of transformers"
        for module in (layer, own):
            if has_own_forward(module) or has_hooks(module):
                return f"a recurrent layer (model.layers.{i}) has hooks or a forward of its own, which a state per column would pass by; remove them"
    return None
