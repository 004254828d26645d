"""The one place where pipespec calls a model (forward) or parts of one (Section): in the cheapest way that gives bit-identical results."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from pipespec.cache import RowCache
from pipespec.compat import MaskKind, mask_kind

See = Callable[[int, torch.Tensor], None]
"""Told the residual stream ``[rows, q, H]`` behind each layer, and its HuggingFace index: k + 1 behind layer k."""


def forward(model: PreTrainedModel, tokens: torch.Tensor, cache: RowCache, *, keep: int) -> torch.Tensor:
    """Feed ``tokens [rows, q]`` (int32 or int64) at the cache's lengths; logits of the last columns.

    Returns ``[rows, keep, vocabulary]``. ``cache`` grows by ``q`` in every
    row (truncate it to what counts). ``keep`` is between 0 and ``q``; 0 computes no logits. The logits have the model's
    dtype and are an inference tensor: change them in place under ``torch.inference_mode`` only.

    For ``LlamaForCausalLM`` the layers are walked here instead of by ``LlamaForCausalLM.forward``, which on small
    models spends more than half of its time outside of matrix products: see ``_Walk`` and ``_Flat``. A walk is used
    only after it has given bit-identical logits on this model; every other model is called in the ordinary way, with an
    explicit mask and positions. What a model is (weights in other places, attention, hooks) is looked at when the cache
    is empty, so it may change between sequences and not within one.

    ValueError for a ``keep`` or a number of rows that does not fit, and where the cache's capacity does not suffice.
    """
    rows, q = tokens.shape
    if not 0 <= keep <= q or q < 1:
        raise ValueError(f"keep={keep} of {q} columns")
    if rows != cache.rows:
        raise ValueError(f"{rows} rows of tokens for a RowCache of {cache.rows} rows")
    call: _Ordinary | _Walk | _Flat | None = _callers.get(model)
    # Autocast changes what the modules do, for as long as it lasts; lengths on the device are not for the walks.
    if torch.is_autocast_enabled(tokens.device.type) or cache.by_rows:
        call = _Ordinary(model, None)
    # A look at all the weights takes a fraction of a millisecond for 12 layers: once per sequence, when it begins.
    elif call is None or (cache.get_seq_length() == 0 and call.signature != _signature(model)):
        call = _callers[model] = _choose(model, cache)
    if torch.is_inference_mode_enabled():
        return call(tokens, cache, keep)
    with torch.inference_mode():
        return call(tokens, cache, keep)


class _Ordinary:
    """``model(...)``, for any model. An explicit mask short-circuits HuggingFace's, which knows one length only."""

    def __init__(self, model: PreTrainedModel, signature: tuple[Any, ...] | None) -> None:
        self.model = weakref.ref(model)  # weak, for the callers are kept in a dictionary that must not keep the models
        self.signature = signature

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        model = self.model()
        assert model is not None
        q = tokens.shape[1]
        # Where rows are level, other attentions (flash) do what is right without a mask.
        masked = cache.ragged or mask_kind(model.config) is not MaskKind.NONE
        logits: torch.Tensor = model(
            input_ids=tokens,
            attention_mask=cache.mask(q) if masked else None,
            position_ids=cache.positions(q),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),  # 0 would mean all
        ).logits
        return logits[:, logits.shape[1] - keep :]


class Parts(NamedTuple):
    """Parts of a LLaMA that are called one after the other; what is None belongs to somebody else.

    ``config``: the whole model's. ``first``: number of ``layers[0]`` in that model.
    """

    config: Any
    layers: Sequence[Any] = ()
    first: int = 0
    rotary: Any = None
    embed: Any = None
    norm: Any = None
    head: Any = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Parts:
        """All of a ``LlamaForCausalLM``."""
        base = model.model
        layers = list(base.layers[: model.config.num_hidden_layers])
        return cls(model.config, layers, 0, base.rotary_emb, base.embed_tokens, base.norm, model.lm_head)

    def cache_config(self) -> Any:
        """The configuration that a ``RowCache`` for these layers alone needs."""
        config = copy.copy(self.config)
        config.num_hidden_layers = len(self.layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[self.first : self.first + len(self.layers)]
        return config


class _Llama:
    """What both walks share: the parts, and the rotary table.

    ``embedded(tokens)``, ``through(hidden, cache, see)`` and ``scored(hidden, keep)`` are embedding, layers, and norm and head.
    ``tabled``: False asks the rotary embedding anew at each call, as the model does.
    """

    def __init__(self, parts: Parts, signature: tuple[Any, ...] | None, tabled: bool = True) -> None:
        self.parts, self.signature, self.rotary = parts, signature, parts.rotary
        # These types compute the angles of a position from that position alone, the others look at the longest one.
        self.tabled = tabled and getattr(parts.rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines, [1, positions, head_dim]

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        return self.scored(self.through(self.embedded(tokens), cache), keep)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens [rows, q]``; returns ``[rows, q, H]``."""
        raise NotImplementedError

    def through(self, hidden: torch.Tensor, cache: RowCache, see: See | None = None) -> torch.Tensor:
        """``hidden [rows, q, H]``, which stays as it is, through the layers; ``cache`` (of these layers alone) grows by ``q``."""
        raise NotImplementedError

    def scored(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits ``[rows, keep, vocabulary]`` of the last columns of ``hidden [rows, q, H]``."""
        raise NotImplementedError

    def angles(self, hidden: torch.Tensor, cache: RowCache, q: int) -> tuple[torch.Tensor, torch.Tensor]:
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

    def signed(self, sin: torch.Tensor) -> torch.Tensor:
        """The sines as the walk wants them."""
        return sin


class _Own:
    """A cache of some layers as these see it: they go on counting from the whole model's first."""

    def __init__(self, cache: RowCache, first: int) -> None:
        self._cache, self._first = cache, first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(keys, values, layer - self._first)


class _Walk(_Llama):
    """HuggingFace's own layer modules, called one after the other.

    Saves what ``LlamaForCausalLM.forward`` and ``LlamaModel.forward`` do around them: the decorators that merge
    defaults and capture outputs, the construction of the mask, and the rotary angles (a table instead of sines of the
    same positions).
    """

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.parts.embed(tokens)
        return hidden

    def through(self, hidden: torch.Tensor, cache: RowCache, see: See | None = None) -> torch.Tensor:
        q, first = hidden.shape[1], self.parts.first
        mask = cache.mask(q)
        positions = cache.positions(q)
        angles = self.angles(hidden, cache, q)
        own = _Own(cache, first) if first else cache
        for i, layer in enumerate(self.parts.layers, first + 1):
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=angles,
                position_ids=positions,
                past_key_values=own,
                use_cache=True,
            )
            if see is not None:
                see(i, hidden)
        return hidden

    def scored(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        logits: torch.Tensor = self.parts.head(self.parts.norm(hidden)[:, hidden.shape[1] - keep :])
        return logits


class _Flat(_Llama):
    """The arithmetic of the layer modules in a straight line, on two-dimensional hidden states.

    Same operations on the same numbers in the same order of rounding, with fewer calls: no module dispatch, no kernels
    that only move data (``rotate_half`` is a product into the other half, its sign folded into the sines; queries and
    keys are rotated together), results in place, scalars as tensors. Only for plain LLaMA layers without biases, under
    sdpa.
    """

    def __init__(self, parts: Parts, signature: tuple[Any, ...] | None) -> None:
        super().__init__(parts, signature)
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

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embedding)

    def through(self, hidden: torch.Tensor, cache: RowCache, see: See | None = None) -> torch.Tensor:
        rows, q, width = hidden.shape
        n, heads, kv_heads, dim = rows * q, self.heads, self.kv_heads, self.head_dim
        depth, half, scale, ragged = len(self.steps), dim // 2, self.scale, cache.ragged
        mm, mul, normed, sdpa = torch.mm, torch.mul, self.normed, F.scaled_dot_product_attention
        mask = cache.mask(q)
        causal = mask is None and q > 1
        cos, sin = self.angles(hidden, cache, q)
        hidden = hidden.reshape(n, width)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [1 or rows, q, 1, head_dim]
        sin_low, sin_high = sin.split(half, -1)
        new, used = cache.open(q, columns_first=True)
        # Queries and keys of a layer side by side, so that one rotation does for both; the same places in every layer.
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
            else:  # how the heads are grouped differs by version and device
                out = self.attend(attn, queries, used[i], used[depth + i], mask, scaling=scale)[0]
            hidden = hidden + mm(out.reshape(n, heads * dim), w_o)  # not in place: what came in is somebody's stream
            x = normed(hidden, norm2)
            hidden.add_(mm(act(mm(x, w_gate)).mul_(mm(x, w_up)), w_down))
            if see is not None:
                see(self.parts.first + i + 1, hidden.view(rows, q, width))
        cache.close()
        return hidden.view(rows, q, width)

    def scored(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        rows, q, width = hidden.shape
        x = self.normed(hidden.reshape(rows * q, width), self.last_norm)
        if keep != q:
            x = x.view(rows, q, width)[:, q - keep :].reshape(rows * keep, width)
        return torch.mm(x, self.unembedding).view(rows, keep, self.unembedding.shape[1])


# On a CPU, calls cost nothing beside the products of a model with more parameters, and probing one takes long.
_WALK_UP_TO = 300_000_000

_callers: weakref.WeakKeyDictionary[PreTrainedModel, _Ordinary | _Walk | _Flat] = weakref.WeakKeyDictionary()


def _signature(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """What a walk of the whole model relies on, to notice that it has changed; None where the model is not one to walk.

    Not one to walk: any other class than ``LlamaForCausalLM``, and what ``_signature_of_parts`` says.
    """
    if type(model) is not LlamaForCausalLM or model.training:
        return None
    wholes: list[tuple[nn.Module, type]] = [(model, LlamaForCausalLM), (model.model, modeling_llama.LlamaModel)]
    if any(type(module) is not expected or _patched(module) or _hooked(module) for module, expected in wholes):
        return None
    return _signature_of_parts(Parts.of(model))


def _signature_of_parts(parts: Parts) -> tuple[Any, ...] | None:
    """What a walk relies on, to notice that it has changed; None where these are not parts to walk.

    Not to walk: parts of another architecture, or that are replaced (adapters, quantised layers, kernels), hooked (offloading,
    several devices), compiled or in training, and attention other than sdpa and eager.
    """
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
        if type(module) is not expected or _patched(module) or _hooked(module):
            return None
        for parameter in module._parameters.values():
            if parameter is not None:
                if type(parameter) is not nn.Parameter:  # quantised or sharded: has a mind of its own
                    return None
                seen.append((parameter.data_ptr(), parameter.dtype))
    if parts.rotary is not None:
        seen.append(parts.rotary.inv_freq.data_ptr())
    return tuple(seen)


def _plain(parts: Parts) -> bool:
    """Whether ``_Flat`` knows the arithmetic: sdpa, no biases."""
    linears = [(layer.self_attn.q_proj, layer.mlp.up_proj) for layer in parts.layers[:1]]
    biased = any(linear.bias is not None for pair in linears for linear in pair)
    return mask_kind(parts.config) is MaskKind.SDPA and not biased and getattr(parts.head, "bias", None) is None


def _patched(module: nn.Module) -> bool:
    """Whether the instance has a ``forward`` of its own, as accelerate and kernelize give it."""
    own = module.__dict__.get("forward")
    # transformers 5.0 leaves the class's own behind after it has captured hidden states.
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _hooked(module: nn.Module) -> bool:
    if module._forward_pre_hooks or module._compiled_call_impl is not None:
        return True
    # The hooks with which transformers captures hidden states stay installed for ever and do nothing by themselves.
    return any("output_capturing" not in getattr(hook, "__module__", "") for hook in module._forward_hooks.values())


def _choose(model: PreTrainedModel, cache: RowCache) -> _Ordinary | _Walk | _Flat:
    """The fastest way of calling ``model`` that gives bit for bit the logits of ``model(...)`` on a few probes."""
    signature = _signature(model)
    ordinary = _Ordinary(model, signature)
    if signature is None or (model.device.type == "cpu" and model.num_parameters() > _WALK_UP_TO):
        return ordinary
    parts = Parts.of(model)
    candidates: list[Callable[[], _Walk | _Flat]] = [lambda: _Walk(parts, signature)]
    if _plain(parts):
        candidates.insert(0, lambda: _Flat(parts, signature))
    with torch.inference_mode():
        expected = _probe(ordinary, model, cache)
        for candidate in candidates:
            call = candidate()
            if all(torch.equal(a, b) for a, b in zip(_probe(call, model, cache), expected, strict=True)):
                return call
    return ordinary


def _probe(call: _Ordinary | _Walk | _Flat, model: PreTrainedModel, like: RowCache) -> list[torch.Tensor]:
    """Logits of a prefill, a block and a single token; level and ragged."""
    scratch = type(like)(model.config, 2, 16, dtype=like.dtype, device=like.device)
    ids = (torch.arange(2 * 16, device=like.device).view(2, 16) * 7919 + 11) % model.config.vocab_size
    logits = [call(ids[:, :6], scratch, 2), call(ids[:, 6:9], scratch, 3), call(ids[:, 9:10], scratch, 1)]
    scratch.truncate([10, 7])
    return [*logits, call(ids[:, 10:13], scratch, 2), call(ids[:, 13:14], scratch, 1)]


class Section:
    """Some parts of a model, called in the cheapest way that gives bit for bit what its own modules give.

    These are any LLaMA-family modules; plain ones go the way that :func:`forward` goes, after the same kind of probe. What they are is looked
    at in :meth:`open`, when a sequence begins. The results are inference tensors, and what is handed in stays as it is.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._modules = _Walk(parts, None, tabled=False)
        self._call: _Walk | _Flat | None = None

    def open(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Choose the way, if the modules are others than before; ``dtype``, ``device``: theirs."""
        signature = _signature_of_parts(self.parts)
        if self._call is None or self._call.signature != signature:
            self._call = self._choose(signature, dtype, torch.device(device))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens [rows, q]`` to ``[rows, q, H]``."""
        with torch.inference_mode():
            return self._way(tokens).embedded(tokens)

    def through(self, hidden: torch.Tensor, cache: RowCache, see: See | None = None) -> torch.Tensor:
        """``hidden [rows, q, H]`` through the layers, as long; ``cache``, of ``parts.cache_config()``, grows by ``q``."""
        with torch.inference_mode():
            return self._way(hidden, cache).through(hidden, cache, see)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [rows, q, H]`` to ``[rows, q, vocabulary]``."""
        with torch.inference_mode():
            return self._way(hidden).scored(hidden, hidden.shape[1])

    def _way(self, given: torch.Tensor, cache: RowCache | None = None) -> _Walk | _Flat:
        # Autocast changes what the modules do, for as long as it lasts; lengths on the device are not for the walks.
        by_rows = cache is not None and cache.by_rows
        if self._call is None or by_rows or torch.is_autocast_enabled(given.device.type):
            return self._modules
        return self._call

    def _choose(self, signature: tuple[Any, ...] | None, dtype: torch.dtype, device: torch.device) -> _Walk | _Flat:
        parts, modules = self.parts, _Walk(self.parts, signature, tabled=False)
        size = sum(p.numel() for layer in parts.layers for p in layer.parameters())
        if signature is None or not _plain(parts) or (device.type == "cpu" and size > _WALK_UP_TO):
            return modules
        with torch.inference_mode():
            flat = _Flat(parts, signature)
            expected, got = (_probe_parts(call, dtype, device) for call in (modules, flat))
        return flat if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) else modules


def _probe_parts(call: _Walk | _Flat, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """What the parts make of a prefill, a block and a single token; level and ragged."""
    parts, out = call.parts, []
    width = parts.config.hidden_size
    values = torch.randn((2, 16, width), generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
    if parts.embed is not None:
        ids = (torch.arange(2 * 16, device=device).view(2, 16) * 7919 + 11) % parts.config.vocab_size
        values = call.embedded(ids)
        out.append(values)
    if parts.layers:
        scratch = RowCache(parts.cache_config(), 2, 16, dtype=dtype, device=device)
        left = [call.through(values[:, :6], scratch), call.through(values[:, 6:9], scratch)]
        left.append(call.through(values[:, 9:10], scratch))
        scratch.truncate([10, 7])
        out += [*left, call.through(values[:, 10:13], scratch), call.through(values[:, 13:14], scratch)]
    if parts.head is not None:
        out += [call.scored(values[:, :6], 2), call.scored(values[:1, :1], 1), call.scored(values[:, :1], 1)]
    return out
