"""Recurrent layers with a state per column: gated delta nets (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them.

transformers' module updates its states once per forward, after the last column. Here the projections and the convolution run for all columns
at once, and the recurrence column by column, so that the states after each column can be kept. A prefill, whose columns stay, runs the chunked
form of the model's own module between the states that are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from pipespec.config import WIDTH
from pipespec.models.compat import chunked_delta_rule
from pipespec.models.layout import STATES, StateLayout
from pipespec.models.parts import ModelParts
from pipespec.models.properties import has_hooks, has_own_forward, not_whole_reason

_MODULES = ("linear_attn", "conv")
"""Attributes of a decoder layer that hold the recurrent module."""

_CLASSES = frozenset(
    ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Lfm2ShortConv", "Lfm2MoeShortConv")
)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-2}
"""Largest deviation from the outputs of the model's own module on the probe, relative to the largest output."""


class LayerStates:
    """The states of one recurrent layer during a forward.

    Args:
        ring: in which a forward has begun.
        index: of the layer, among the recurrent ones.

    Attributes:
        columns: columns, counted from 1, whose states :meth:`store` takes, ascending.
        stepwise: whether the recurrence runs column by column, as plain decoding does, and not in chunks.
    """

    def __init__(self, ring: StateRing, index: int) -> None:
        self._ring, self._parts = ring, (ring.inputs[index], ring.states[index])
        self.columns, self.stepwise = tuple(ring.places), ring.stepwise

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before the forward.

        Returns:
            The last inputs of the convolution ``[rows, channels, taps]`` in the model's dtype, and float32
            ``[rows, heads, key_dim, value_dim]``.
        """
        inputs, state = self._parts
        return inputs[self._ring.begins], state[self._ring.begins]

    def store(self, column: int, inputs: torch.Tensor, state: torch.Tensor) -> None:
        """Keep the states after the first ``column`` columns, one of :attr:`columns`. Shapes as for :meth:`load`."""
        slots, rows = self._ring.places[column]
        for part, new in zip(self._parts, (inputs, state), strict=True):
            part[slots, rows] = new[rows].to(part.dtype)


class StateRing:
    """States of the recurrent layers of a cache, at several lengths of each row.

    The states of a row that holds ``n`` tokens lie in slot ``n % slots``. A forward reads one slot and writes one for each column that may be
    rolled back to. A rollback changes nothing but the length that the next forward reads from. The states at length 0 are zeros.

    The number of slots grows: with the widest step, and by a rollback that finds its states overwritten. That costs one recomputation and an
    allocation.

    Args:
        layout: sizes.
        rows: number of sequences.
        dtype: of the model.
        device: of the states.

    Attributes:
        inputs: of the convolutions, ``[layers, slots, rows, channels, taps]``.
        states: float32 ``[layers, slots, rows, heads, key_dim, value_dim]``.
        begins: slots and rows of the states before the forward that has begun.
        places: by column of this forward, counted from 1, slots and rows of the states that it stores.
        stepwise: see :class:`LayerStates`.
    """

    def __init__(self, layout: StateLayout, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self._dtype, self._device = layout, dtype, device
        self._allocate(STATES, rows)
        self.stepwise = False

    def _allocate(self, slots: int, rows: int) -> None:
        layout, count = self.layout, len(self.layout.layers)
        # Not inference tensors, which could not be written outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            inputs = torch.zeros(
                (count, slots, rows, layout.channels, layout.taps), dtype=self._dtype, device=self._device
            )
            states = torch.zeros(
                (count, slots, rows, layout.heads, layout.key_dim, layout.value_dim),
                dtype=torch.float32,
                device=self._device,
            )
        self.inputs, self.states = inputs, states
        # Per slot and row the length whose states it has; -1: none.
        self._held = np.full((slots, rows), -1, dtype=np.int64)
        # Per row, by length: states that no later forward overwrites.
        self._marks: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(rows)]

    @property
    def slots(self) -> int:
        """States per row and layer that there is room for."""
        return self._held.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        marked = sum(part.nbytes for marks in self._marks for states in marks.values() for part in states)
        return self.inputs.nbytes + self.states.nbytes + marked

    # ---- lengths

    def restorable(self, lengths: Sequence[int]) -> list[int]:
        """Per row the largest length, up to that of ``lengths``, whose states are there. 0 always is."""
        return [self.restorable_row(row, n) for row, n in enumerate(lengths)]

    def restorable_row(self, row: int, length: int) -> int:
        """:meth:`restorable` of one row."""
        held = self._held[:, row]
        return max(0, int(held[held <= length].max(initial=-1)))

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the states beyond ``lengths``."""
        self._held[self._held > np.asarray(lengths)] = -1
        for marks, length in zip(self._marks, lengths, strict=True):
            for n in [n for n in marks if n > length]:
                del marks[n]

    def reserve(self, slots: int) -> None:
        """Grow to ``slots`` states, if there are fewer, and keep those that are there."""
        if slots <= self.slots:
            return
        inputs, states, held, marks = self.inputs, self.states, self._held, self._marks
        self._allocate(1 << (slots - 1).bit_length(), held.shape[1])
        self._marks = marks
        slot, row = np.nonzero(held >= 0)
        lengths = held[slot, row]
        to = lengths % self.slots
        self._held[to, row] = lengths
        with torch.inference_mode(False), torch.no_grad():
            self.inputs[:, to, row] = inputs[:, slot, row]
            self.states[:, to, row] = states[:, slot, row]

    # ---- the states of one row, for texts that are kept

    def mark(self, row: int, length: int) -> None:
        """Keep the states of a row at ``length``, which are there, until it is truncated to less."""
        self._marks[row][length] = self._at(row, length)

    def recoverable(self, row: int, length: int) -> int:
        """The largest length up to ``length`` whose states are there or marked."""
        found = [self.restorable_row(row, length), *(n for n in self._marks[row] if n <= length)]
        return max(found)

    def take_row(self, row: int, other: StateRing, other_row: int, length: int) -> None:
        """Hold the states of another ring's row, or of this one's, at ``length``, one of :meth:`recoverable`."""
        if other is not self:
            self._held[:, row] = -1
            self._marks[row] = {n: states for n, states in other._marks[other_row].items() if n <= length}
        if length == 0:
            return
        slot, states = length % self.slots, other._at(other_row, length)
        with torch.inference_mode(False), torch.no_grad():
            for part, held in zip((self.inputs, self.states), states, strict=True):
                part[:, slot, row] = held
        self._held[slot, row] = length

    def _at(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the states of a row in all layers, those of the convolutions first."""
        if length in self._marks[row]:
            return self._marks[row][length]
        slot = length % self.slots
        assert self._held[slot, row] == length
        with torch.inference_mode(False), torch.no_grad():
            return self.inputs[:, slot, row].clone(), self.states[:, slot, row].clone()

    # ---- a forward

    def begin(self, lengths: Sequence[int], q: int, keep: Sequence[int] | None) -> None:
        """Begin a forward of ``q`` columns.

        Args:
            lengths: tokens per row before it.
            q: columns.
            keep: per row, the length that the row will be truncated to, whose states alone are kept; a row without new tokens keeps those it
                has. None: those of each column, up to :data:`pipespec.config.WIDTH` columns, else of the last one.

        Raises:
            RuntimeError: the states of a row at its length are not there.
        """
        at, rows = np.asarray(lengths, dtype=np.int64), np.arange(len(lengths))
        keeps_all = keep is None and q <= WIDTH
        self.stepwise = keeps_all or q == 1
        if keeps_all:
            self.reserve(q + 1)
        empty = np.flatnonzero((at == 0) & (self._held[0] != 0))
        if len(empty):
            self._held[0, empty] = 0
            self.inputs[:, 0, empty] = 0
            self.states[:, 0, empty] = 0
        missing = np.flatnonzero(self._held[at % self.slots, rows] != at)
        if len(missing):
            row = int(missing[0])
            raise RuntimeError(
                f"the recurrent states of row {row} at {lengths[row]} tokens are no longer there: truncate to what restorable() returns, and "
                "feed the tokens after that again"
            )
        if keeps_all:
            stored = dict.fromkeys(range(1, q + 1), rows)
        else:
            counts = np.full(len(at), q) if keep is None else np.asarray(keep, dtype=np.int64) - at
            stored = {int(c): np.flatnonzero(counts == c) for c in np.unique(counts) if 0 < c <= q}
        self.begins, self.places, self._new = self._on_device(at % self.slots, rows), {}, []
        for column, which in stored.items():
            length = at[which] + column
            slot = length % self.slots
            # An interrupted forward leaves these slots with states of no length.
            self._held[slot, which] = -1
            self._new.append((slot, which, length))
            self.places[column] = self._on_device(slot, which)

    def _on_device(self, slots: np.ndarray, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(slots).to(self._device), torch.from_numpy(rows).to(self._device)

    def layer(self, layer: int) -> LayerStates:
        """The states of layer ``layer`` of the model, in the forward that has begun."""
        return LayerStates(self, self.layout.layers.index(layer))

    def table(self, q: int) -> list[list[int]]:
        """Per row, the slot of the states before the forward of ``q`` columns that has begun, and those that its columns are stored in; -1: none."""
        slots = np.full((self._held.shape[1], q + 1), -1, dtype=np.int64)
        slots[:, 0] = self.begins[0].numpy()
        for column, (to, rows) in self.places.items():
            slots[rows.numpy(), column] = to.numpy()
        found: list[list[int]] = slots.tolist()
        return found

    def end(self) -> None:
        """End the forward: what it has stored counts."""
        for slot, rows, length in self._new:
            self._held[slot, rows] = length
        self._new = []

    # ---- the rest of a cache

    def export(self, lengths: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer copies of the states at ``lengths``, which must be there. Shapes as for :meth:`LayerStates.load`."""
        self.begin(lengths, 1, keep=lengths)
        return [self.layer(layer).load() for layer in self.layout.layers]

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], lengths: Sequence[int]) -> None:
        """Hold the states of :meth:`export` at ``lengths``, and no others."""
        self._held[:] = -1
        self._marks = [{} for _ in lengths]
        at, rows = np.asarray(lengths, dtype=np.int64), np.arange(len(lengths))
        with torch.inference_mode(False), torch.no_grad():
            for i, (inputs, state) in enumerate(states):
                self.inputs[i, at % self.slots, rows] = inputs.to(self._device)
                self.states[i, at % self.slots, rows] = state.to(self._device)
        self._held[at % self.slots, rows] = at


_probed: WeakSet[nn.Module] = WeakSet()
"""The model's modules whose outputs have been compared: SPD makes new layers in each call."""


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
        x = self._act(_convolved(own.conv1d, inputs, q)).transpose(1, 2)
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

    def _probe(self) -> None:
        own = self.own
        weight = getattr(own.out_proj, "weight", own.dt_bias)  # a matrix in blocks is no weight
        if weight.is_meta or not weight.is_floating_point():
            return
        noise = torch.randn((1, 6, own.hidden_size), generator=torch.Generator().manual_seed(0), device="cpu")
        hidden = noise.to(weight.device, own.dt_bias.dtype)
        layout = StateLayout((0,), own.conv_dim, own.conv_kernel_size, own.num_v_heads, own.head_k_dim, own.head_v_dim)
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


class ShortConvolution(nn.Module):
    """A short convolution of LFM2 with the weights and sub-modules of its own, and a state per column. ``own``: the model's module."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any, **kwargs: Any) -> torch.Tensor:
        """As :meth:`GatedDeltaNet.forward`."""
        own, q = self.own, hidden_states.shape[1]
        with past_key_values.recurrent(own.layer_idx, q) as states:
            factor, gate, x = own.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
            before, none = states.load()
            inputs = torch.cat([before, factor * x], -1)
            for column in states.columns:
                states.store(column, inputs[:, :, column : column + before.shape[2]], none)
            result: torch.Tensor = own.out_proj((gate * _convolved(own.conv, inputs, q)).transpose(1, 2))
        return result


def _convolved(conv: Any, inputs: torch.Tensor, q: int) -> torch.Tensor:
    """The causal convolution of ``inputs [rows, channels, taps + q]``, whose first one it does not read: ``[rows, channels, q]``.

    As a sum of products in float32, so that the bits of a column do not depend on the number of columns.
    """
    weight, wide = conv.weight.float(), inputs[:, :, 1:].float()
    out = wide[:, :, :q] * weight[:, 0, :1]
    for tap in range(1, weight.shape[2]):
        out = out + wide[:, :, tap : tap + q] * weight[:, 0, tap : tap + 1]
    if conv.bias is not None:
        out = out + conv.bias.float()[:, None]
    return out.to(inputs.dtype)


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
    name = _name_in(layer)
    if name is None:
        return layer
    own = layer._modules[name]
    twin = copy.copy(layer)
    twin._modules = dict(layer._modules)
    twin._modules[name] = ShortConvolution(own) if name == "conv" else GatedDeltaNet(own)
    return twin


def _name_in(layer: Any) -> str | None:
    """The attribute of a layer that holds its recurrent module; None: it has none."""
    return next((name for name in _MODULES if layer._modules.get(name) is not None), None)


def recurrent_signature(parts: ModelParts) -> tuple[Any, ...] | None:
    """What the layers of :func:`with_states` depend on, so that a change is noticed; None for parts without recurrent layers."""
    if all(_name_in(layer) is None for layer in parts.layers):
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
        name = _name_in(layer)
        if name is None:
            continue
        own = layer._modules[name]
        if type(own).__name__ not in _CLASSES or not type(own).__module__.startswith("transformers.models."):
            return f"model.layers.{i}.{name} is a {type(own).__name__}, and no recurrent module of transformers that is known here"
        for module in (layer, own):
            if has_own_forward(module) or has_hooks(module):
                return f"a recurrent layer (model.layers.{i}) has hooks or a forward of its own, which a state per column would pass by; remove them"
    return None
