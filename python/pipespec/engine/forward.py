"""The calls of a model (:func:`forward`) or of parts of one (:class:`ModelSection`), each in the fastest form that passed its check."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.fused import FusedForm, fused_form, fused_signature
from pipespec.engine.native import NATIVE, Form, NativeForm, PartsForm, native_form, native_signature, probe_cache
from pipespec.engine.recurrent import recurrent_signature, with_states
from pipespec.engine.states import LayerStates
from pipespec.models.compat import library_columns
from pipespec.models.derived import has_int8
from pipespec.models.devices import input_device
from pipespec.models.families import NotReadable, packed_bytes
from pipespec.models.layout import CacheLayout, takes_mask_per_type
from pipespec.models.parts import ModelParts
from pipespec.models.properties import has_hooks, has_own_forward


def forward(
    model: PreTrainedModel, tokens: torch.Tensor, cache: RowCache, *, keep: int, native: bool = True
) -> torch.Tensor:
    """Feed tokens at the cache's lengths.

    LLaMA-like models on the CPU run in the native form, after its logits were compared with the model's own, see
    :mod:`pipespec.engine.native`. Otherwise, for ``LlamaForCausalLM`` a loop over the layers runs instead of ``LlamaForCausalLM.forward``, which
    on small models spends more than half of its time outside of matrix products: see ``_LayerLoop`` and ``_FlatLoop``. A loop is used only
    after it gave bit-identical logits on this model. The layers of a model with recurrent layers are called one by one, see
    :mod:`pipespec.engine.recurrent`. Every other model is called as a whole, with an explicit mask and positions. The form is
    chosen when the cache is empty, so weights, attention and hooks may change between sequences and not within one; see :func:`recheck`.

    Args:
        model: in eval mode.
        tokens: int32 or int64 ``[rows, q]``.
        cache: of this model; it grows by ``q`` in every row. The caller truncates it to the columns that count.
        keep: compute logits of the last ``keep`` columns, 0 to ``q``.
        native: False: only forms with the bits of the model's own forward.

    Returns:
        Logits ``[rows, keep, vocabulary]`` in the model's dtype: an inference tensor, to be changed in place under ``torch.inference_mode``
        only.

    Raises:
        ValueError: a ``keep`` or a number of rows that does not fit, or a cache that is full.
    """
    rows, q = tokens.shape
    if not 0 <= keep <= q or q < 1:
        raise ValueError(f"keep={keep} of {q} columns")
    if rows != cache.rows:
        raise ValueError(f"{rows} rows of tokens for a RowCache of {cache.rows} rows")
    if _unusual(cache) is not None:
        call: Form = _fused(model, cache) or _WholeModel(model)
    else:
        if cache.get_seq_length() == 0:
            recheck(model, native=native)
        forms = _callers.get(model, {})
        call = forms[native] if native in forms else _choose(model, cache, native)
    if torch.is_inference_mode_enabled():
        return call(tokens, cache, keep)
    with torch.inference_mode():
        return call(tokens, cache, keep)


def wide_columns(model: PreTrainedModel, cache: RowCache, most: int, *, native: bool = True) -> int | None:
    """From how many columns on a forward over part of a prompt belongs to the model's own modules; None: :func:`forward` runs all up to ``most``.

    It depends on the model, its dtype and the processor: where oneDNN has instructions for a dtype that the native form computes in float32, wide products
    are several times faster there. So one machine reads one prompt by the same forwards in each schedule, batch and call.
    """
    wide = library_columns(cache.dtype)
    if wide is None or most < wide or native_form_of(model, cache, native=native) is None or has_int8(model):
        return None
    return wide


def forward_row(model: PreTrainedModel, tokens: torch.Tensor, cache: RowCache, row: int, keep: int = 0) -> torch.Tensor:
    """Cache part of the prompt of one row by the model's own modules, apart from the other rows, whose lengths would change its bits.

    Args:
        model: as for :func:`forward`.
        tokens: ``[1, q]``.
        cache: of this model; the row grows by ``q``.
        row: its index.
        keep: for how many of the last columns logits are computed.

    Returns:
        ``[1, keep, V]``.
    """
    with torch.inference_mode():
        if cache.rows == 1:
            return _WholeModel(model)(tokens, cache, keep)
        with cache.row_alone(row, tokens.shape[1]) as alone:
            return _WholeModel(model)(tokens, alone, keep)


def native_form_of(model: PreTrainedModel, cache: RowCache, *, native: bool = True) -> NativeForm | None:
    """The native form in which :func:`forward` runs a model over this cache now; None: it runs in another one.

    Between this call and the next forward over an empty cache the model must not change.
    """
    if not native or _unusual(cache) is not None:
        return None
    if cache.get_seq_length() == 0:
        recheck(model)
    form = _callers.get(model, {}).get(True) or _choose(model, cache, True)
    return form if isinstance(form, NativeForm) else None


def recheck(model: PreTrainedModel, *, native: bool = True) -> None:
    """Let the next :func:`forward` choose the form again if the model has changed. Where the cache is empty, it does so by itself.

    This takes a fraction of a millisecond for 12 layers: once per sequence.
    """
    forms = _callers.get(model, {})
    form = forms.get(native)
    if form is not None and not (form.identity == _identify(model, native) and form.is_current()):
        del forms[native]


def release(model: PreTrainedModel) -> None:
    """Free what the forms of a model have copied. The next forward chooses again."""
    _callers.pop(model, None)
    _fused_choices.pop(model, None)


def choose_fused(model: PreTrainedModel, *, exact: bool = False) -> FusedForm | None:
    """Choose the form of the forwards over static caches: the fused one, or None for the model's modules. Not within a capture.

    The form is kept until the model changes. Its caches are to be added before their first forward.

    Args:
        model: in eval mode.
        exact: as for :class:`pipespec.engine.fused.FusedForm`. A model may have both forms, each with caches of its own.
    """
    choice, form, reason = _fused_choice(model, exact), None, ""
    identity: Any
    try:
        identity = fused_signature(model)
    except NotReadable as error:
        identity = reason = str(error)
    if choice.identity != identity:
        # The old form may hold weights that nothing else does.
        choice = _NO_CHOICE
        choices = _fused_choices.setdefault(model, {})
        choices.pop(exact, None)
        if not reason:
            try:
                form = fused_form(model, _WholeModel(model), exact=exact)
            except NotReadable as error:
                reason = str(error)
            now = fused_signature(model)
            if now != identity:
                # The merge has moved weights. Other forms hold them where they were.
                identity = now
                _callers.pop(model, None)
        choice = choices[exact] = _FusedChoice(identity, form, reason)
    return choice.form


def _fused(model: PreTrainedModel, cache: RowCache) -> FusedForm | None:
    """The fused form that takes this cache now, if one was chosen."""
    if torch.is_autocast_enabled(cache.device.type):
        return None
    forms = (choice.form for choice in _fused_choices.get(model, {}).values())
    return next((form for form in forms if form is not None and form.takes(cache)), None)


def _fused_choice(model: PreTrainedModel, exact: bool) -> _FusedChoice:
    return _fused_choices.get(model, {}).get(exact, _NO_CHOICE)


def described(model: PreTrainedModel, cache: RowCache, *, native: bool = True) -> str:
    """The form that :func:`forward` uses now: ``"native"``, ``"fused"`` (in the exact form with the rows of its products), or ``"transformers: "``
    and the reason. Empty before the first."""
    fused = _fused(model, cache)
    if fused is not None:
        return fused.name
    reason = _unusual(cache)
    if cache.is_static and reason != _AUTOCAST:
        reason = (_fused_choice(model, False).reason if native else "native=False") or reason
    if reason is None:
        form = _callers.get(model, {}).get(native)
        if form is None:
            return ""
        reason = form.reason
    return NATIVE if reason is None else f"transformers: {reason}"


def not_native(model: PreTrainedModel) -> str | None:
    """Why the next sequence of a model will not run in the native form; None if it will. This call chooses the form, which packs the weights."""
    like = RowCache.for_model(model, 1, 16)
    reason = _unusual(like)
    if reason is not None:
        return reason
    recheck(model)
    return (_callers.get(model, {}).get(True) or _choose(model, like, True)).reason


def not_exact(model: PreTrainedModel) -> str | None:
    """Why captured steps of a model cannot run in the exact form; None if they can. This call chooses the form, which merges weights."""
    if torch.is_autocast_enabled(input_device(model).type):
        return _AUTOCAST
    choose_fused(model, exact=True)
    return _fused_choice(model, True).reason or None


def _unusual(cache: RowCache) -> str | None:
    """Why a forward calls the model as a whole, whatever the model is: autocast changes what modules do, and only modules read device lengths."""
    if cache.is_recurrent:
        # Its form calls the modules of the layers in any case.
        return None
    if torch.is_autocast_enabled(cache.device.type):
        return _AUTOCAST
    return "the lengths are on the device" if cache.uses_device_lengths else None


class _Identity(NamedTuple):
    """What the form of a model, or of parts of one, depends on, so that a change is noticed.

    Attributes:
        reason: why there is no native form; None where there may be one.
        seen: that of :func:`pipespec.engine.native.native_signature`, or with a reason ``_signature``.
    """

    reason: str | None
    seen: tuple[Any, ...] | None


class _WholeModel(Form):
    """``model(...)``, for any model. The explicit mask replaces transformers', which assumes one length for all rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Weak, because _callers must not keep models alive.
        self.model = weakref.ref(model)
        self._masks_by_type = takes_mask_per_type(getattr(model, model.base_model_prefix, model))

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
            else:
                mask = cache.masks_by_type(q) if self._masks_by_type else cache.mask(q, window=cache.windows[0])
        # logits_to_keep=0 would compute all of them.
        logits: torch.Tensor = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=cache.positions(q),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),
        ).logits
        return logits[:, logits.shape[1] - keep :]


class _LlamaLoop(PartsForm):
    """What both loops share: a table of RoPE.

    Args:
        parts: those that run.
        tabled: False calls the rotary embedding in each forward, as the model does.
    """

    def __init__(self, parts: ModelParts, tabled: bool = True) -> None:
        super().__init__(parts, parts.dtype)
        self.rotary = parts.rotary
        # RoPE of these types depends on the position alone. The others depend on the longest position of a forward, too.
        self.tabled = tabled and getattr(parts.rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines, each ``[1, positions, head_dim]``."""

    def rope(self, hidden: torch.Tensor, cache: RowCache, q: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the fed columns, ``[1 or rows, q, head_dim]``, from the model's own rotary embedding."""
        if not self.tabled:
            cos, sin = self.rotary(hidden, position_ids=cache.positions(q))
            return cos, self.signed(sin)
        if self.table is None or self.table[0].shape[1] < cache.capacity:
            everywhere = torch.arange(cache.capacity, device=hidden.device)[None]
            cos, sin = self.rotary(hidden, position_ids=everywhere)
            self.table = cos, self.signed(sin)
        cos, sin = self.table
        if cache.ragged:
            positions = cache.positions(q)
            return cos[0][positions], sin[0][positions]
        begin = cache.get_seq_length()
        return cos.narrow(1, begin, q), sin.narrow(1, begin, q)

    def ropes(self, hidden: torch.Tensor, cache: RowCache, q: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`rope` per layer. Some models have one per type of layer."""
        parts = self.parts
        if not hasattr(self.rotary, "layer_types"):
            return [self.rope(hidden, cache, q)] * len(parts.layers)
        types = parts.config.layer_types[parts.first : parts.first + len(parts.layers)]
        positions = cache.positions(q)
        made = {kind: self.rotary(hidden, positions, kind) for kind in dict.fromkeys(types)}
        return [made[kind] for kind in types]

    def signed(self, sin: torch.Tensor) -> torch.Tensor:
        """The sines in the form that the loop uses."""
        return sin


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


class _LayerLoop(_LlamaLoop):
    """transformers' own layer modules, called one after the other.

    Saves what ``LlamaForCausalLM.forward`` and ``LlamaModel.forward`` do around them: decorators that merge defaults and capture outputs, the
    construction of the mask, and RoPE (a table instead of sines of the same positions). Recurrent layers keep their states per column.
    """

    def __init__(self, parts: ModelParts, tabled: bool = True) -> None:
        super().__init__(parts, tabled)
        self._layers = [with_states(layer) for layer in parts.layers]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.parts.embed(tokens)
        return hidden

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        q, first = hidden.shape[1], self.parts.first
        streams: dict[int, torch.Tensor] = {}
        masks = cache.masks(q)
        positions = cache.positions(q)
        ropes = self.ropes(hidden, cache, q)
        own = _OffsetCache(cache, first) if first else cache
        for i, (layer, mask, rope) in enumerate(zip(self._layers, masks, ropes, strict=True), first + 1):
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=rope,
                position_ids=positions,
                past_key_values=own,
                use_cache=True,
            )
            if i in features:
                streams[i] = hidden
        return hidden, streams

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        logits: torch.Tensor = self.parts.head(self.parts.norm(hidden)[:, hidden.shape[1] - keep :])
        return logits


class _FlatLoop(_LlamaLoop):
    """The arithmetic of the layer modules without the modules, on two-dimensional hidden states.

    The same operations on the same numbers in the same order of rounding, with fewer calls: no module dispatch, and no kernels that only move
    data. ``rotate_half`` becomes a product into the other half, its sign folded into the sines. Queries and keys are rotated together.
    Results are written in place, and scalars are tensors. Only for plain LLaMA layers without biases, under sdpa.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.attend = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

        def norm(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # An operation with a 0-d tensor takes half the time of one with a Python number.
            eps = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=module.weight.device)
            return module.weight.detach(), eps

        self.steps = []
        for layer in parts.layers:
            attn, mlp = layer.self_attn, layer.mlp
            self.head_dim, self.scale = attn.head_dim, attn.scaling
            linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            act = functools.partial(F.silu, inplace=True) if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
            norms = (norm(layer.input_layernorm), norm(layer.post_attention_layernorm))
            self.steps.append((attn, act, *norms, *(linear.weight.detach().t() for linear in linears)))
        if parts.embed is not None:
            self.embedding = parts.embed.weight.detach()
        if parts.head is not None:
            self.last_norm = norm(parts.norm)
            self.unembedding = parts.head.weight.detach().t()

    def signed(self, sin: torch.Tensor) -> torch.Tensor:
        half = sin.shape[-1] // 2
        return torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def normed(self, x: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``LlamaRMSNorm`` of ``x [n, d]``: in fp32 whatever the dtype, as there."""
        weight, eps = norm
        wide = x.to(torch.float32)
        wide = wide * (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return wide.to(x.dtype).mul_(weight)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embedding)

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        rows, q, width = hidden.shape
        streams: dict[int, torch.Tensor] = {}
        n, heads, kv_heads, dim = rows * q, self.heads, self.kv_heads, self.head_dim
        depth, half, scale, ragged = len(self.steps), dim // 2, self.scale, cache.ragged
        mm, mul, normed, sdpa = torch.mm, torch.mul, self.normed, F.scaled_dot_product_attention
        mask = cache.mask(q)
        causal = mask is None and q > 1
        cos, sin = self.rope(hidden, cache, q)
        hidden = hidden.reshape(n, width)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [1 or rows, q, 1, head_dim]
        sin_low, sin_high = sin.split(half, -1)
        new, used = cache.open(q, columns_first=True)
        # Queries and keys of a layer lie side by side, so that one rotation serves both. All layers use the same buffers.
        both = hidden.new_empty((n, (heads + kv_heads) * dim))
        into_q, into_k = both.split((heads * dim, kv_heads * dim), 1)
        states = both.view(rows, q, heads + kv_heads, dim)
        low, high = states.split(half, -1)
        rotated, turned = torch.empty_like(states), torch.empty_like(states)
        turned_low, turned_high = turned.split(half, -1)
        queries, keys = rotated.split((heads, kv_heads), 2)  # [rows, q, heads or kv_heads, head_dim]
        queries = queries.transpose(1, 2)
        for i, (attn, act, norm1, norm2, w_q, w_k, w_v, w_o, w_gate, w_up, w_down) in enumerate(self.steps):
            x = normed(hidden, norm1)
            mm(x, w_q, out=into_q)
            mm(x, w_k, out=into_k)
            values = mm(x, w_v).view(rows, q, kv_heads, dim)
            mul(states, cos, out=rotated)
            mul(high, sin_low, out=turned_low)
            mul(low, sin_high, out=turned_high)
            rotated.add_(turned)
            if ragged:
                cache.scatter(keys, values, i)
            else:
                new[i].copy_(keys)
                new[depth + i].copy_(values)
            if heads == kv_heads:
                out = sdpa(queries, used[i], used[depth + i], mask, 0.0, causal, scale=scale).transpose(1, 2)
            else:
                # How heads are grouped differs by version and device.
                out = self.attend(attn, queries, used[i], used[depth + i], mask, scaling=scale)[0]
            # Not in place: the first hidden states are the caller's.
            hidden = hidden + mm(out.reshape(n, heads * dim), w_o)
            x = normed(hidden, norm2)
            hidden.add_(mm(act(mm(x, w_gate)).mul_(mm(x, w_up)), w_down))
            if self.parts.first + i + 1 in features:
                streams[self.parts.first + i + 1] = hidden.view(rows, q, width)
        cache.close()
        return hidden.view(rows, q, width), streams

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        rows, q, width = hidden.shape
        x = self.normed(hidden.reshape(rows * q, width), self.last_norm)
        if keep != q:
            x = x.view(rows, q, width)[:, q - keep :].reshape(rows * keep, width)
        return torch.mm(x, self.unembedding).view(rows, keep, self.unembedding.shape[1])


# On a CPU the products of a larger model dominate, and probing it takes long.
_LOOP_UP_TO = 300_000_000

_callers: weakref.WeakKeyDictionary[PreTrainedModel, dict[bool, Form]] = weakref.WeakKeyDictionary()
"""Per model its forms, by ``native``. All pipelines on a model share them."""

_AUTOCAST = "autocast"


class _FusedChoice(NamedTuple):
    """What :func:`choose_fused` has chosen for a model.

    Attributes:
        identity: of :func:`pipespec.engine.fused.fused_signature`, or why the model has none. A change of it is a reason to choose again.
        form: the form, or None.
        reason: why there is no form, else empty.
    """

    identity: tuple[Any, ...] | str | None
    form: FusedForm | None
    reason: str


_NO_CHOICE = _FusedChoice(None, None, "")
_fused_choices: weakref.WeakKeyDictionary[PreTrainedModel, dict[bool, _FusedChoice]] = weakref.WeakKeyDictionary()
"""Per model its choices, by ``exact``."""


def _identify(model: PreTrainedModel | ModelParts, native: bool) -> _Identity:
    try:
        if not native:
            raise NotReadable("native=False")
        return _Identity(None, native_signature(model))
    except NotReadable as error:
        return _Identity(str(error), _signature(model))


def _signature(model: PreTrainedModel | ModelParts) -> tuple[Any, ...] | None:
    """What a loop depends on, so that a change is noticed; None for models and parts that cannot be looped over.

    Models of every class but ``LlamaForCausalLM``, and those with excluded parts.
    """
    if isinstance(model, ModelParts):
        return _signature_of_parts(model)
    if CacheLayout.of(model.config).states is not None:
        return recurrent_signature(ModelParts.of(model))
    if type(model) is not LlamaForCausalLM or model.training:
        return None
    wholes: list[tuple[nn.Module, type]] = [(model, LlamaForCausalLM), (model.model, modeling_llama.LlamaModel)]
    if any(type(module) is not expected or has_own_forward(module) or has_hooks(module) for module, expected in wholes):
        return None
    return _signature_of_parts(ModelParts.of(model))


def _signature_of_parts(parts: ModelParts) -> tuple[Any, ...] | None:
    """:func:`_signature` of parts; None for parts that cannot be looped over.

    Those are parts of another architecture; parts that are replaced (adapters, quantised layers, kernels), hooked (offloading, several
    devices), compiled or in training; and parts with attention other than sdpa and eager.
    """
    recurrent = recurrent_signature(parts)
    if recurrent is not None:
        return recurrent
    if mask_kind(parts.config) is MaskKind.NONE:
        return None
    seen: list[Any] = [parts.config._attn_implementation]
    ends: list[tuple[nn.Module | None, type]] = [
        (parts.embed, nn.Embedding),
        (parts.norm, modeling_llama.LlamaRMSNorm),
        (parts.rotary, modeling_llama.LlamaRotaryEmbedding),
        (parts.head, nn.Linear),
    ]
    modules: list[tuple[nn.Module, type]] = [(module, expected) for module, expected in ends if module is not None]
    for layer in parts.layers:
        if type(layer) is not modeling_llama.LlamaDecoderLayer or layer.training:
            return None
        attn, mlp = layer.self_attn, layer.mlp
        modules += [
            (layer, modeling_llama.LlamaDecoderLayer),
            (attn, modeling_llama.LlamaAttention),
            (mlp, modeling_llama.LlamaMLP),
            (layer.input_layernorm, modeling_llama.LlamaRMSNorm),
            (layer.post_attention_layernorm, modeling_llama.LlamaRMSNorm),
            *((getattr(attn, name), nn.Linear) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *((getattr(mlp, name), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")),
        ]
    for module, expected in modules:
        if type(module) is not expected or has_own_forward(module) or has_hooks(module):
            return None
        for parameter in module._parameters.values():
            if parameter is not None:
                # Quantised and sharded parameters have classes of their own.
                if type(parameter) is not nn.Parameter:
                    return None
                seen.append((parameter.data_ptr(), parameter.dtype))
    if parts.rotary is not None:
        seen.append(parts.rotary.inv_freq.data_ptr())
    return tuple(seen)


def _plain(parts: ModelParts) -> bool:
    """Whether ``_FlatLoop`` has the arithmetic: sdpa, no biases."""
    linears = [(layer.self_attn.q_proj, layer.mlp.up_proj) for layer in parts.layers[:1]]
    biased = any(linear.bias is not None for pair in linears for linear in pair)
    return mask_kind(parts.config) is MaskKind.SDPA and not biased and getattr(parts.head, "bias", None) is None


def _choose(model: PreTrainedModel, cache: RowCache, native: bool) -> Form:
    """Choose the form of a model, and keep it for the next forwards."""
    identity = _identify(model, native)
    reason, form = identity.reason, None
    with torch.inference_mode():
        if reason is None:
            try:
                form = native_form(model, lambda texts: model(input_ids=texts, use_cache=False).logits, cache.nbytes)
            except NotReadable as error:
                reason = str(error)
        chosen: Form = form or (
            _LayerLoop(ModelParts.of(model)) if cache.is_recurrent else _with_the_same_bits(model, cache)
        )
    chosen.identity, chosen.reason = identity, reason
    _callers.setdefault(model, {})[native] = chosen
    return chosen


def _with_the_same_bits(model: PreTrainedModel, cache: RowCache) -> Form:
    """The fastest form that gives bit for bit the logits of ``model(...)`` on a few probes."""
    ordinary = _WholeModel(model)
    if _signature(model) is None or (model.device.type == "cpu" and model.num_parameters() > _LOOP_UP_TO):
        return ordinary
    parts = ModelParts.of(model)
    candidates: list[Callable[[], _LlamaLoop]] = [lambda: _LayerLoop(parts)]
    if _plain(parts):
        candidates.insert(0, lambda: _FlatLoop(parts))
    expected = _probe(ordinary, model, cache)
    for candidate in candidates:
        call = candidate()
        if all(torch.equal(a, b) for a, b in zip(_probe(call, model, cache), expected, strict=True)):
            return call
    return ordinary


def _probe(call: Form, model: PreTrainedModel, like: RowCache) -> list[torch.Tensor]:
    """Logits of a prefill, a block and a single token, with equal and with different lengths."""
    scratch = RowCache(model.config, 2, 16, dtype=like.dtype, device=like.device)
    ids = (torch.arange(2 * 16, device=like.device).view(2, 16) * 7919 + 11) % model.config.vocab_size
    logits = [call(ids[:, :6], scratch, 2), call(ids[:, 6:9], scratch, 3), call(ids[:, 9:10], scratch, 1)]
    scratch.truncate([10, 7])
    return [*logits, call(ids[:, 10:13], scratch, 2), call(ids[:, 13:14], scratch, 1)]


def stream_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of hidden states between the sections of a model of ``dtype``: on the CPU at least float32, as within the native form."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


_NOTHING = nullcontext()


def _inference() -> AbstractContextManager[None]:
    """Inference mode. Where it is on, entering it again costs more than the rest of a small call."""
    return _NOTHING if torch.is_inference_mode_enabled() else torch.inference_mode()


class ModelSection:
    """Parts of a model, called in the native form or in the fastest form that gives bit for bit what their own modules give.

    The parts are modules of any LLaMA-like model. Their form is chosen as :func:`forward` chooses that of a whole model, in :func:`open_sections`,
    when a sequence begins. Hidden states have the dtype of :func:`stream_dtype`. Results are inference tensors, and arguments are not changed.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self._refused: _Identity | None = None
        self._use(_LayerLoop(parts, tabled=False))

    def _use(self, call: PartsForm) -> None:
        self._modules, self._call = _LayerLoop(self.parts, tabled=False), call
        self.stream_dtype = stream_dtype(self.parts.dtype, self.parts.device)

    def identify(self, native: bool) -> _Identity:
        """What the form depends on now, with the reason why it is not native, as far as that shows without packing the weights."""
        identity, refused = _identify(self.parts, native), self._refused
        if refused is not None and identity.reason is None and identity.seen == refused.seen:
            return refused
        return identity

    def pack(self, identity: _Identity, beside: int) -> str | None:
        """Use the native form.

        Args:
            identity: of :meth:`identify`, without a reason.
            beside: bytes that are to be allocated beside the packed copy.

        Returns:
            Why there is no native form; None if there is.
        """
        if self._call.identity == identity and self._call.is_current():
            return None
        self._use(_LayerLoop(self.parts, tabled=False))  # before another copy is made
        try:
            with torch.inference_mode():
                form = native_form(self.parts, self._own, beside)
        except NotReadable as error:
            self._refused = identity._replace(reason=str(error))
            return str(error)
        form.identity = identity
        self._use(form)
        return None

    def unpack(self) -> None:
        """Use a form with the bits of the parts' own modules, and free a packed copy."""
        identity, form = self.identify(native=False), self._call
        if form.identity != identity:
            with torch.inference_mode():
                form = self._with_the_same_bits()
            form.identity = identity
        self._use(form)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed ``tokens [rows, q]``. Returns ``[rows, q, H]``."""
        with _inference():
            return self._form(tokens).embed(tokens).to(self.stream_dtype)

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers on ``hidden [rows, q, H]``, see :meth:`PartsForm.run_layers`. ``cache`` is one of ``parts.cache_config()``."""
        with _inference():
            form = self._form(hidden, cache)
            hidden, streams = form.run_layers(hidden.to(form.dtype), cache, features)
            return hidden.to(self.stream_dtype), {k: stream.to(self.stream_dtype) for k, stream in streams.items()}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm and head of ``hidden [rows, q, H]``. Returns ``[rows, q, vocabulary]``."""
        with _inference():
            form = self._form(hidden)
            return form.logits(hidden.to(form.dtype), hidden.shape[1])

    def _form(self, given: torch.Tensor, cache: RowCache | None = None) -> PartsForm:
        # Autocast changes what the modules do. The loops do not read lengths on the device.
        on_device = cache is not None and cache.uses_device_lengths
        return self._modules if on_device or torch.is_autocast_enabled(given.device.type) else self._call

    def _own(self, given: torch.Tensor) -> torch.Tensor:
        """Outputs of the parts' own modules for all columns."""
        # Parts without layers do not read the cache.
        return self._modules(given, probe_cache(self.parts), given.shape[1])

    def _with_the_same_bits(self) -> PartsForm:
        parts, modules = self.parts, _LayerLoop(self.parts, tabled=False)
        size = sum(p.numel() for layer in parts.layers for p in layer.parameters())
        large = parts.device.type == "cpu" and size > _LOOP_UP_TO
        if recurrent_signature(parts) is not None:
            return modules
        if _signature_of_parts(parts) is None or not _plain(parts) or large:
            return modules
        flat = _FlatLoop(parts)
        expected, got = _probe_parts(modules), _probe_parts(flat)
        return flat if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) else modules


def open_sections(sections: Sequence[ModelSection], *, native: bool = True, beside: int = 0) -> str:
    """Choose the forms of sections that run one after the other: all native, or none, so that a cut does not change the text.

    Args:
        sections: of one model.
        native: False: only forms with the bits of the model's own modules.
        beside: bytes that are to be allocated beside the packed copies, for caches.

    Returns:
        The form, as :func:`described`.
    """
    identities = [section.identify(native) for section in sections]
    reason = next((identity.reason for identity in identities if identity.reason is not None), None)
    sizes = [packed_bytes(section.parts) for section in sections]
    for i, (section, identity) in enumerate(zip(sections, identities, strict=True)):
        if reason is None:
            reason = section.pack(identity, sum(sizes[i + 1 :], beside))
    if reason is None:
        return NATIVE
    for section in sections:
        section.unpack()
    return f"transformers: {reason}"


def _probe_parts(call: PartsForm) -> list[torch.Tensor]:
    """Outputs of a prefill, a block and a single token, with equal and with different lengths."""
    parts, out = call.parts, []
    width = parts.config.hidden_size
    values = torch.randn((2, 16, width), generator=torch.Generator().manual_seed(0), device="cpu")
    values = values.to(parts.device, parts.dtype)
    if parts.embed is not None:
        ids = (torch.arange(2 * 16, device=parts.device).view(2, 16) * 7919 + 11) % parts.config.vocab_size
        values = call.embed(ids)
        out.append(values)
    if parts.layers:
        scratch = RowCache(parts.cache_config(), 2, 16, dtype=parts.dtype, device=parts.device)
        runs = [(0, 6), (6, 9), (9, 10), (10, 13), (13, 14)]
        for begin, end in runs:
            if begin == 10:
                scratch.truncate([10, 7])
            out.append(call.run_layers(values[:, begin:end], scratch)[0])
    if parts.head is not None:
        out += [call.logits(values[:, :6], 2), call.logits(values[:1, :1], 1), call.logits(values[:, :1], 1)]
    return out
