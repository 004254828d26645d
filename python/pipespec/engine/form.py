"""Form: one way to call a model, or parts of one; the forms that run its own modules; and whether another form gives what they give, on probes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.models import description, families
from pipespec.models.compat import hidden_of
from pipespec.models.families import NotReadable
from pipespec.models.layout import FULL, SLIDING, CacheLayout, takes_mask_per_type
from pipespec.models.parts import ModelParts, inputs_of, keys_of
from pipespec.models.properties import text_config
from pipespec.models.quantized import formats_of

if TYPE_CHECKING:
    from pipespec.engine.recurrent import LayerStates


class Form:
    """One way to call a model. It returns the logits of the last ``keep`` columns, and the cache grows.

    Attributes:
        token: Stands for a form that has copied or moved weights, and keeps nothing of them alive; None: all forms of its class compute the same.
        repeats_bits: Whether the bits of a column depend on nothing but its text: not on the other columns and rows of its forward.
    """

    token: object = None
    repeats_bits: bool = False

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        raise NotImplementedError

    def is_current(self) -> bool:
        """Whether what the form has copied is still the model's, as far as the beginning of a call compares it."""
        return True

    def was_current(self) -> bool:
        """Whether it was since :meth:`is_current`, by all values. A form that was not current once never is again."""
        return True


class PartsForm(Form):
    """One way to call parts of a model.

    Attributes:
        parts: those that run.
        dtype: of the hidden states that it takes and returns.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype) -> None:
        self.parts, self.dtype = parts, dtype

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        """Run all parts. Without an embedding, ``tokens`` are hidden states; without a head, hidden states are returned."""
        hidden = tokens.to(self.dtype) if self.parts.embed is None else self.embed(tokens)
        features, lengths, embedded = cache.features, cache.lengths, hidden
        if self.parts.layers:
            more = {} if self.parts.per_layer is None else {"tokens": tokens}
            hidden, streams = self.run_layers(hidden, cache, () if features is None else features.layers, **more)
            if features is not None:
                last = len(self.parts.layers)
                if last in streams and self.parts.embed is not None and self.parts.norm is not None:
                    # As in transformers' hidden_states.
                    streams[last] = self.parts.norm(streams[last])
                features.record(lengths, {0: embedded, **streams})
        if self.parts.head is None:
            return hidden[:, hidden.shape[1] - keep :]
        return self.logits(hidden, keep)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``tokens [rows, q]``. Returns ``[rows, q, H]``."""
        raise NotImplementedError

    def run_layers(
        self,
        hidden: torch.Tensor,
        cache: RowCache,
        features: Collection[int] = (),
        *,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers.

        Args:
            hidden: ``[rows, q, H]``; is not changed.
            cache: of these layers alone; it grows by ``q``.
            features: indices in transformers' ``hidden_states`` (k + 1 after layer k). Those of other layers do not matter.
            tokens: int64 ``[rows, q]``, whose embeddings ``hidden`` are; for layers with inputs of their own.

        Returns:
            The hidden states after the last layer, and by index those of ``features``, each ``[rows, q, H]``.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits ``[rows, keep, vocabulary]`` of the last columns of ``hidden [rows, q, H]``."""
        raise NotImplementedError


class WholeModel(Form):
    """``model(...)``, for any model. The explicit mask replaces transformers', which assumes one length for all rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Weak, because the choices must not keep models alive.
        self.model = weakref.ref(model)

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        model = self.model()
        assert model is not None
        q = tokens.shape[1]
        # With equal lengths, attentions without a 4-D mask (flash) are right without one.
        mask: Any = None
        if cache.ragged or mask_kind(model.config) is not MaskKind.NONE:
            windows = set(cache.windows)
            if windows == {None} or cache.uses_device_lengths:
                mask = cache.mask(q)
            elif takes_mask_per_type(getattr(model, model.base_model_prefix, model)):
                window = next(window for window in cache.windows if window is not None)
                mask = {FULL: cache.mask(q), SLIDING: cache.mask(q, window=window)}
            else:
                mask = cache.mask(q, window=cache.windows[0])
        # logits_to_keep=0 would compute all of them.
        features, lengths = cache.features, cache.first_positions
        more = {} if features is None else {"output_hidden_states": True}
        if getattr(text_config(model.config), "output_router_logits", False):
            more["output_router_logits"] = (
                False  # they are for a loss of training, which takes masks of the tokens alone
            )
        found = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=cache.positions(q),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),
            **more,
        )
        if features is not None:
            features.record(lengths, dict(enumerate(found.hidden_states or ())))
        logits: torch.Tensor = found.logits
        return logits[:, logits.shape[1] - keep :]


class _OffsetCache:
    """A cache of some layers, addressed by their indices in the whole model."""

    def __init__(self, cache: RowCache, first: int) -> None:
        self._cache, self._first = cache, first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(keys, values, layer - self._first)

    def recurrent(self, layer: int, q: int) -> AbstractContextManager[LayerStates]:
        return self._cache.recurrent(layer - self._first, q)


def ropes_of(parts: ModelParts, hidden: torch.Tensor, positions: torch.Tensor) -> list[Any]:
    """Cosines and sines of each layer, which has the rotation of its type where the model has several."""
    rotary, count = parts.rotary, len(parts.layers)
    if not hasattr(rotary, "layer_types"):
        return [rotary(hidden, position_ids=positions)] * count
    types = parts.config.layer_types[parts.first : parts.first + count]
    by_type = {kind: rotary(hidden, positions, kind) for kind in dict.fromkeys(types)}
    return [by_type[kind] for kind in types]


def _masks(parts: ModelParts, columns: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Per layer, the mask ``[1, 1, columns, columns]`` of a text from its beginning on: minus infinity where a column does not see. Recurrent layers have none."""
    at = torch.arange(columns, device=parts.device)
    back = at[:, None] - at
    masks: dict[int | None, torch.Tensor] = {}
    layout, numbers = CacheLayout.of(parts.config), range(parts.first, parts.first + len(parts.layers))
    for window in {layout.windows[i] for i in numbers}:
        hidden = (back < 0) | (back >= (columns if window is None else window))
        masks[window] = torch.zeros((1, 1, columns, columns), dtype=dtype, device=parts.device).masked_fill_(
            hidden, -torch.inf
        )
    recurrent = () if layout.states is None else layout.states.layers
    return [None if i in recurrent else masks[layout.windows[i]] for i in numbers]


class LayerLoop(PartsForm):
    """The layer modules, called one after the other: for parts of a model, and for recurrent layers, which keep their states per column."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts, parts.dtype)
        self._layers = list(parts.layers)
        if CacheLayout.of(parts.config).states is not None:
            from pipespec.engine.recurrent import with_states

            self._layers = list(map(with_states, parts.layers))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return families.embedded(self.parts, tokens)

    def run_layers(
        self,
        hidden: torch.Tensor,
        cache: RowCache,
        features: Collection[int] = (),
        *,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        q, first = hidden.shape[1], self.parts.first
        streams: dict[int, torch.Tensor] = {}
        masks, positions = cache.masks(q), cache.positions(q)
        own, ropes = _OffsetCache(cache, first) if first else cache, ropes_of(self.parts, hidden, positions)
        inputs = inputs_of(self.parts, tokens, hidden)
        for i, (layer, mask, rope, more) in enumerate(zip(self._layers, masks, ropes, inputs, strict=True), first + 1):
            outputs = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=rope,
                position_ids=positions,
                past_key_values=own,
                use_cache=True,
                **more,
            )
            hidden = hidden_of(outputs)
            if i in features:
                streams[i] = hidden
        return hidden, streams

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        return families.scaled(self.parts, self.parts.head(self.parts.norm(hidden)[:, hidden.shape[1] - keep :]))


TOLERANCE = 1e-5
"""Largest deviation of float32 logits on the probes, relative to the largest logit: some ten times what another order of summation makes."""


ERROR_RATIO_16_BITS = 1.5
"""Largest ratio of the errors of two forwards that round equally often, but not in the same places. It spreads by 9 %, since a library may choose other kernels
for merged matrices. A form whose attention, activation or norms are wrong by 2 % shows 1.6 or more."""


ERROR_RATIO_FLOAT32 = 16.0
"""The same in float32, where sums are accumulated in the dtype of the result, so that their order matters, too. SmolLM2-135M shows 6; a form that is wrong by
1e-5 would show more than 100."""


OWN_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest error of the model's own outputs, relative to the exact ones: a hundred times what rounding makes in float32, and ten times in 16 bits. Where it is
larger, the model computes something else than its parts one after the other, and its error is no measure of another form."""


STEPS = 0.1
"""Largest deviation of what a layer with matrices in blocks adds, relative to its norm, where inputs are rounded to the next step: ten times what real models show."""


_ROWS = 8192
"""Rows of the head that the reference computes at a time."""


def check_outputs(parts: ModelParts, given: torch.Tensor, own: torch.Tensor, ours: torch.Tensor) -> None:
    """Compare the outputs of a form on the probes, logits or hidden states, with those of the model's own modules.

    In float32 no number may differ by more than :data:`TOLERANCE` of the largest. Where it does, and in 16 bits, both are compared with a computation in
    the next wider dtype, and the form's root mean square error must not be larger by more than :data:`ERROR_RATIO_16_BITS` or
    :data:`ERROR_RATIO_FLOAT32`: deep models with large hidden states
    amplify the rounding of both.

    Args:
        parts: what has run.
        given: of :func:`probe_inputs`.
        own: outputs of the model's own modules, ``[12, ...]`` as from :func:`probe`.
        ours: likewise, of the form.

    Raises:
        NotReadable: the outputs do not agree, or the model's own with those of the computation in the wider dtype, see :data:`OWN_ERROR`.
    """
    if ours.dtype == own.dtype and torch.equal(ours, own):
        return
    if own.dtype == torch.float32 and bool((ours - own).abs().amax() <= TOLERANCE * own.abs().amax()):
        return
    wider = torch.float64 if own.dtype == torch.float32 else torch.float32
    with _experts_in_turn(parts.config):
        exact = probed(_in_wider(parts, given, wider))
    error, allowed = ((outputs.to(wider) - exact).square().mean().sqrt() for outputs in (ours, own))
    if bool(allowed > OWN_ERROR[own.dtype] * exact.square().mean().sqrt()):
        raise NotReadable(
            f"its own {_what(parts)} differ from those of its layers one after the other by {float(allowed):.2g}"
        )
    allowed = allowed * (ERROR_RATIO_FLOAT32 if own.dtype == torch.float32 else ERROR_RATIO_16_BITS)
    # Not a number compares false.
    if not bool(error <= allowed):
        raise NotReadable(
            f"its {_what(parts)} differ from the model's own by {float(error):.2g}, more than {float(allowed):.2g}"
        )


def _what(parts: ModelParts) -> str:
    return "hidden states" if parts.head is None else "logits"


def check_parts(form: PartsForm, given: torch.Tensor) -> None:
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
        _check_part("embedding", hidden, families.embedded(parts, given).float())
    # Embeddings in blocks lie on steps, and times a norm's weights between two of them, where the last bit decides the rounding: off the steps that is rare.
    noise = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    hidden = hidden * (1 + 1e-3 * noise)
    if parts.layers:
        positions = torch.arange(columns, device=given.device)[None]
        masks, ropes = _masks(parts, columns, hidden.dtype), ropes_of(parts, hidden, positions)
        first, count = parts.first, len(parts.layers)
        indices = range(first + 1, first + count + 1)
        of_form = {} if parts.per_layer is None else {"tokens": given}
        last, streams = form.run_layers(hidden, probe_cache(parts), indices, **of_form)
        formats, more = [formats_of(layer) for layer in parts.layers], inputs_of(parts, given, hidden)
        compared = {formats.index(found) for found in formats} | {count - 1}
        read = keys_of([families.attention_of(layer) for layer in parts.layers])
        for i in sorted(compared | {of for at in compared if (of := read[at]) is not None}):
            before = hidden if i == 0 else streams[first + i]
            own = parts.layers[i](
                before, attention_mask=masks[i], position_ids=positions, position_embeddings=ropes[i], **more[i]
            )
            _check_part(f"layer {first + i}", streams[first + i + 1] - before, hidden_of(own) - before)
        hidden = last
    if parts.head is not None:
        logits = form.logits(hidden, columns)
        _check_part("head", logits.float(), families.scaled(parts, parts.head(parts.norm(hidden))).float())
    # The parts, which agree with the model's, against the one call that runs.
    by_parts = PartsForm.__call__(form, given, probe_cache(parts), columns)
    if not torch.equal(probe(form, probe_cache(parts), given), probed(by_parts)):
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
    return (torch.arange(2 * 14, device=parts.device).view(2, 14) * 7919 + 11) % description.matrix_of(
        parts.embed
    ).shape[0]


def probe_cache(parts: ModelParts, rows: int = 2, *, static: bool = False) -> RowCache:
    """A cache for :func:`probe`, with the keys and values as they are computed. Parts without layers do not write to it."""
    config = parts.cache_config() if parts.layers else copy.copy(parts.config)
    config.kv_dtype = None
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


@contextmanager
def _experts_in_turn(config: Any) -> Iterator[None]:
    """transformers multiplies with one expert after the other, as its products with several take no float64."""
    before = getattr(config, "_experts_implementation", None)
    if before is None:
        yield
        return
    config._experts_implementation = "eager"
    try:
        yield
    finally:
        config._experts_implementation = before


def _in_wider(parts: ModelParts, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Outputs ``[rows, q, ...]`` of parts, by their own modules on their weights in a wider dtype, one layer at a time."""
    hidden, columns = (given if parts.embed is None else families.embedded(parts, given)).to(dtype), given.shape[1]
    positions = torch.arange(columns, device=given.device)[None]
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
        masks, ropes = _masks(parts, columns, dtype), ropes_of(parts, hidden, positions)
        more = inputs_of(parts, given, hidden, run)
        for layer, mask, rope, inputs in zip(parts.layers, masks, ropes, more, strict=True):
            hidden = run(layer, hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope, **inputs)
    if parts.head is None:
        return hidden
    hidden, head = run(parts.norm, hidden), parts.head
    if type(head) is not nn.Linear:
        return families.scaled(parts, run(head, hidden))
    logits = torch.cat([F.linear(hidden, wide("head", rows)) for rows in head.weight.split(_ROWS)], -1)
    return families.scaled(parts, logits if head.bias is None else logits + head.bias.to(dtype))
