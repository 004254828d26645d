"""The native form of a model's forward: one call into C++ per step, on packed copies of the weights.

A model of :data:`pipespec.models.families.NATIVE_CLASSES` on the CPU, or parts of one, take this form after their outputs were compared with those of
the model's own modules. The native sums are independent of the number of rows and columns, so a text does not depend on batch, drafts, schedule or
cuts into parts, in bfloat16 either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.form import Form, PartsForm
from pipespec.engine.values import Checksums
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec.models.quantized import formats_of, has_blocks, packed_copies_dropped, pages_released
from pipespec_kernels.decoder import NativeDecoder
from pipespec_kernels.env import host_memory

TOLERANCE = 1e-5
"""Largest deviation of float32 logits on the probes, relative to the largest logit: some ten times what another order of summation makes."""

BY_CHANCE = {False: 1.5, True: 16.0}
"""The ratio of the errors of two forwards that round equally often, but not in the same places; and (True) in float32, where sums are accumulated in the
dtype of the result, so that the order of a sum matters, too. SmolLM2-135M shows a ratio of 6; a form that is wrong by 1e-5 would show more than 100. In 16 bits the ratio
of two such forwards spreads by 9 %, since a library may choose other kernels for merged matrices; a form whose attention, activation or norms are wrong by
2 % shows 1.6 or more."""

STEPS = 0.1
"""Largest deviation of what a layer with matrices in blocks adds, relative to its norm, where inputs are rounded to the next step: ten times what real models show."""

_ROWS = 8192
"""Rows of the head that the reference computes at a time."""


class NativeForm(PartsForm):
    """A model, or parts of one, packed for the native decoder. Hidden states are float32.

    Args:
        model: one that :func:`pipespec.models.families.identity` accepts.
        beside: bytes that are to be allocated beside the packed weights, for caches and other parts.

    Raises:
        NotReadable: the decoder cannot take the model, or the copy would take more than half of the free memory.
    """

    def __init__(self, model: PreTrainedModel | ModelParts, beside: int) -> None:
        parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
        super().__init__(parts, torch.float32)
        read = families.read(model)
        need, (total, free) = families.packed_bytes(parts) + beside, host_memory()
        # The other half is for caches that grow, and for the rest of the machine.
        if total and need > free // 2:
            raise NotReadable(
                f"there is no room for a packed copy ({need >> 20} MiB with its cache, {free >> 20} are free)"
            )
        try:
            with pages_released(parts):
                self.decoder = NativeDecoder(
                    read.shape,
                    read.layers,
                    windows=read.windows,
                    embedding=read.embedding,
                    norm=read.norm,
                    head=read.head,
                    head_bias=read.head_bias,
                    head_scale=read.head_scale,
                )
        except (ValueError, TypeError) as error:
            raise NotReadable(f"the decoder does not take it: {error}") from error
        self._scaled, self._rotary = read.scaled, read.rotary
        # One call runs all parts.
        self._steps = parts.embed is not None and parts.head is not None and read.scaled is None
        self._checksums = Checksums([tensor for _, m in parts.named_modules() for tensor in _tensors_of(m)])
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines, float32 ``[positions, rotary_dim]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.decoder.nbytes

    def is_current(self) -> bool:
        # The versions of the weights are part of the identity. This is for changes that go past them.
        return self._checksums.agree()

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        began = time.perf_counter()
        if self._steps and cache.features is None:
            storage = cache.open_storage(tokens.shape[1])
            outputs = self.decoder.step(tokens, *storage, *self._rope(cache.capacity), keep=keep)
            cache.close()
        else:
            outputs = super().__call__(tokens, cache, keep)
        self._checksums.spend(time.perf_counter() - began)
        return outputs

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._scaled is None:
            return self.decoder.embed(tokens)
        hidden: torch.Tensor = self._scaled(tokens).float()
        return hidden

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        first, count = self.parts.first, self.decoder.num_layers
        storage, rope = cache.open_storage(hidden.shape[1]), self._rope(cache.capacity)
        begin, streams = 0, {}
        # One call up to each feature, and one up to the end.
        for end in sorted({count, *(index - first for index in features if 0 < index - first <= count)}):
            hidden = self.decoder.run_layers(hidden, *storage, *rope, begin=begin, end=end)
            if first + end in features:
                streams[first + end] = hidden
            begin = end
        cache.close()
        return hidden, streams

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        columns = hidden.shape[1]
        return self.decoder.logits(hidden if keep == columns else hidden[:, columns - keep :])

    def _rope(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table for at least ``capacity`` positions, from the model's own rotary embedding."""
        table = self._table
        if table is None or table[0].shape[0] < capacity:
            like, positions = torch.empty(0, dtype=torch.float32, device="cpu"), torch.arange(capacity, device="cpu")
            cos, sin = self._rotary(like, position_ids=positions[None])
            self._table = table = cos[0].contiguous(), sin[0].contiguous()
        return table


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def native_form(
    model: PreTrainedModel | ModelParts, own: Callable[[torch.Tensor], torch.Tensor], beside: int = 0
) -> NativeForm:
    """Pack a model or parts of one, and compare the outputs with those of the model's own modules, see :func:`check_outputs`.

    Args:
        model: a known one, see :func:`pipespec.engine.known.identify`.
        own: calls the model's own modules on the inputs of the probes. Returns the outputs of all columns.
        beside: as for :class:`NativeForm`.

    Raises:
        NotReadable: the decoder cannot take the model, or the outputs do not agree.
    """
    form = NativeForm(model, beside)
    given = probe_inputs(form.parts)
    if has_blocks(form.parts):
        with packed_copies_dropped(), pages_released(form.parts):
            check_parts(form, given)
        return form
    check_outputs(form.parts, given, probed(own(given)), probe(form, probe_cache(form.parts), given))
    return form


def check_outputs(parts: ModelParts, given: torch.Tensor, own: torch.Tensor, ours: torch.Tensor) -> None:
    """Compare the outputs of a form on the probes, logits or hidden states, with those of the model's own modules.

    In float32 no number may differ by more than :data:`TOLERANCE` of the largest. Where it does, and in 16 bits, both are compared with a computation in
    the next wider dtype, and the form's root mean square error must not be larger by more than :data:`BY_CHANCE`: deep models with large hidden states
    amplify the rounding of both.

    Args:
        parts: what has run.
        given: of :func:`probe_inputs`.
        own: outputs of the model's own modules, ``[12, ...]`` as from :func:`probe`.
        ours: likewise, of the form.

    Raises:
        NotReadable: the outputs do not agree.
    """
    if ours.dtype == own.dtype and torch.equal(ours, own):
        return
    if own.dtype == torch.float32 and bool((ours - own).abs().amax() <= TOLERANCE * own.abs().amax()):
        return
    wider = torch.float64 if own.dtype == torch.float32 else torch.float32
    exact = probed(_in_wider(parts, given, wider))
    error, allowed = ((outputs.to(wider) - exact).square().mean().sqrt() for outputs in (ours, own))
    allowed = BY_CHANCE[own.dtype == torch.float32] * allowed
    # Not a number compares false.
    if not bool(error <= allowed):
        what = "hidden states" if parts.head is None else "logits"
        raise NotReadable(
            f"its {what} differ from the model's own by {float(error):.2g}, more than {float(allowed):.2g}"
        )


def check_parts(form: NativeForm, given: torch.Tensor) -> None:
    """Compare a form with matrices in blocks with the model's own modules, part by part on the same inputs, and with itself in other calls.

    The modules multiply with the same bits. But inputs are rounded to 8 bits, so that a difference in the last bit may become one of a whole step: a
    column with such a one may differ by :data:`STEPS`. At least one in ten has none, and differs by :data:`TOLERANCE` at most. Of layers with the same
    formats one is compared, and the last one.

    Args:
        form: what is compared.
        given: of :func:`probe_inputs`.

    Raises:
        NotReadable: a part does not agree, or the form's bits depend on the columns of a call.
    """
    parts, columns = form.parts, given.shape[1]
    hidden = given.float()
    if parts.embed is not None:
        hidden = form.embed(given)
        _check_part("embedding", hidden, parts.embed(given).float())
    if parts.layers:
        positions = torch.arange(columns, device=given.device)[None]
        mask = torch.full((columns, columns), -torch.inf, dtype=hidden.dtype, device=given.device).triu(1)[None, None]
        rope = parts.rotary(hidden, position_ids=positions)
        first, count = parts.first, len(parts.layers)
        last, streams = form.run_layers(hidden, probe_cache(parts), range(first + 1, first + count + 1))
        formats = [formats_of(layer) for layer in parts.layers]
        for i in {formats.index(found) for found in formats} | {count - 1}:
            before = hidden if i == 0 else streams[first + i]
            own = parts.layers[i](before, attention_mask=mask, position_ids=positions, position_embeddings=rope)
            _check_part(f"layer {first + i}", streams[first + i + 1] - before, own - before)
        hidden = last
    if parts.head is not None:
        logits = form.logits(hidden, columns)
        _check_part("head", logits.float(), parts.head(parts.norm(hidden)).float())
        hidden = logits
    if not torch.equal(probe(form, probe_cache(parts), given), probed(hidden)):
        raise NotReadable("its bits depend on the columns of a call")


def _check_part(name: str, ours: torch.Tensor, own: torch.Tensor) -> None:
    """Raise :class:`NotReadable` where what a part adds to its inputs differs."""
    error = ((ours - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-30)).flatten()
    best, worst = float(error.quantile(0.1)), float(error.max())
    if not (best <= TOLERANCE and worst <= STEPS):
        raise NotReadable(f"its {name} differs from the model's own by {best:.2g} to {worst:.2g} of its values")


def probe_inputs(parts: ModelParts) -> torch.Tensor:
    """Two texts of 14 columns: tokens, int64 ``[2, 14]``, or without an embedding hidden states ``[2, 14, H]`` in the parts' dtype."""
    if parts.embed is None:
        noise = torch.Generator().manual_seed(0)
        hidden = torch.randn((2, 14, parts.config.hidden_size), generator=noise, dtype=torch.float32, device="cpu")
        return hidden.to(parts.device, parts.dtype)
    return (torch.arange(2 * 14, device=parts.device).view(2, 14) * 7919 + 11) % families.matrix_of(parts.embed).shape[
        0
    ]


def probe_cache(parts: ModelParts, rows: int = 2, *, static: bool = False) -> RowCache:
    """A cache for :func:`probe`. Parts without layers do not write to it."""
    config = parts.cache_config() if parts.layers else parts.config
    return RowCache(config, rows, 16, dtype=parts.dtype, device=parts.device, static=static)


def probed(outputs: torch.Tensor) -> torch.Tensor:
    """The columns ``[12, ...]`` of outputs ``[2, 14, ...]`` that :func:`probe` computes, in its order."""
    rows = [*[0] * 4, *[1] * 4, 0, 1, 0, 1]
    return outputs[rows, [5, 7, 8, 9, 5, 7, 8, 9, 12, 9, 13, 10]]


def probe(form: Form, cache: RowCache, given: torch.Tensor) -> torch.Tensor:
    """Outputs ``[12, ...]`` of a prefill, a block and a single token, with equal and with different lengths. ``cache``: 2 rows, empty."""
    first = [form(given[:, :6], cache, 1), form(given[:, 6:9], cache, 2), form(given[:, 9:10], cache, 1)]
    cache.set_lengths([10, 7])  # parts without layers have not filled it
    uneven = [form(torch.stack([given[0, 10:13], given[1, 7:10]]), cache, 1)]
    uneven.append(form(torch.stack([given[0, 13:14], given[1, 10:11]]), cache, 1))
    return torch.cat([torch.cat(first, 1).flatten(0, 1), torch.cat([x.flatten(0, 1) for x in uneven])])


def _in_wider(parts: ModelParts, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Outputs ``[rows, q, ...]`` of parts, by their own modules on their weights in a wider dtype, one layer at a time."""
    hidden, columns = (given if parts.embed is None else parts.embed(given)).to(dtype), given.shape[1]
    positions = torch.arange(columns, device=given.device)[None]
    mask = torch.full((columns, columns), -torch.inf, dtype=dtype, device=given.device).triu(1)[None, None]
    room: dict[tuple[str, torch.Size], torch.Tensor] = {}
    """Wide weights, by name and shape. The layers take turns in them: fresh memory for each would take longer than their products."""

    def wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        key = name, tensor.shape
        if key not in room:
            room[key] = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return room[key].copy_(tensor)

    def run(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights = {name: wide(name, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        out: torch.Tensor = functional_call(module, weights, args, kwargs)
        return out

    if parts.layers:
        rope = parts.rotary(hidden, position_ids=positions)
    for layer in parts.layers:
        hidden = run(layer, hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
    if parts.head is None:
        return hidden
    hidden, head = run(parts.norm, hidden), parts.head
    if type(head) is not nn.Linear:
        return run(head, hidden)
    logits = torch.cat([F.linear(hidden, wide("head", rows)) for rows in head.weight.split(_ROWS)], -1)
    return logits if head.bias is None else logits + head.bias.to(dtype)
