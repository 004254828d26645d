"""forward(): the one place where pipespec calls a model, in the cheapest way that gives bit-identical logits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from pipespec.compat import MaskKind, mask_kind

if TYPE_CHECKING:
    from pipespec.cache import RowCache


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


class _Llama:
    """What both walks share: the parts of a ``LlamaForCausalLM``, and the rotary table."""

    def __init__(self, model: PreTrainedModel, signature: tuple[Any, ...]) -> None:
        self.signature = signature
        base = model.model
        self.layers = list(base.layers[: model.config.num_hidden_layers])
        self.embed, self.norm, self.rotary, self.head = base.embed_tokens, base.norm, base.rotary_emb, model.lm_head
        # These types compute the angles of a position from that position alone, the others look at the longest one.
        self.tabled = self.rotary.rope_type in ("default", "linear", "llama3", "yarn")
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines, [1, positions, head_dim]

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


class _Walk(_Llama):
    """HuggingFace's own layer modules, called one after the other.

    Saves what ``LlamaForCausalLM.forward`` and ``LlamaModel.forward`` do around them: the decorators that merge
    defaults and capture outputs, the construction of the mask, and the rotary angles (a table instead of sines of the
    same positions).
    """

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        q = tokens.shape[1]
        mask = cache.mask(q)
        positions = cache.positions(q)
        hidden = self.embed(tokens)
        angles = self.angles(hidden, cache, q)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=angles,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        hidden = self.norm(hidden)
        logits: torch.Tensor = self.head(hidden[:, q - keep :])
        return logits


class _Flat(_Llama):
    """The arithmetic of the layer modules in a straight line, on two-dimensional hidden states.

    Same operations on the same numbers in the same order of rounding, with fewer calls: no module dispatch, no kernels
    that only move data (``rotate_half`` is a product into the other half, its sign folded into the sines; queries and
    keys are rotated together), results in place, scalars as tensors. Only for plain LLaMA layers without biases, under
    sdpa.
    """

    def __init__(self, model: PreTrainedModel, signature: tuple[Any, ...]) -> None:
        super().__init__(model, signature)
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        first = self.layers[0].self_attn
        self.head_dim, self.scale = first.head_dim, first.scaling
        self.hidden = config.hidden_size
        self.attend = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
        self.embedding = self.embed.weight.detach()
        self.unembedding = self.head.weight.detach().t()
        # An operation with a 0-d tensor takes half the time of one with a Python number.
        scalar = functools.partial(torch.tensor, dtype=torch.float32, device=self.embedding.device)

        def norm(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return module.weight.detach(), scalar(module.variance_epsilon)

        self.steps = []
        for layer in self.layers:
            attn, mlp = layer.self_attn, layer.mlp
            linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            act = functools.partial(F.silu, inplace=True) if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
            norms = (norm(layer.input_layernorm), norm(layer.post_attention_layernorm))
            self.steps.append((attn, act, *norms, *(linear.weight.detach().t() for linear in linears)))
        self.last_norm = norm(self.norm)

    def signed(self, sin: torch.Tensor) -> torch.Tensor:
        half = sin.shape[-1] // 2
        return torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def normed(self, x: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``LlamaRMSNorm`` of ``x [n, d]``: in fp32 whatever the dtype, as there."""
        weight, eps = norm
        wide = x.to(torch.float32)
        wide = wide * (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return wide.to(x.dtype).mul_(weight)

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        rows, q = tokens.shape
        n, heads, kv_heads, dim = rows * q, self.heads, self.kv_heads, self.head_dim
        depth, half, scale, ragged = len(self.steps), dim // 2, self.scale, cache.ragged
        mm, mul, normed, sdpa = torch.mm, torch.mul, self.normed, F.scaled_dot_product_attention
        mask = cache.mask(q)
        causal = mask is None and q > 1
        hidden = F.embedding(tokens.reshape(-1), self.embedding)  # [n, d]
        cos, sin = self.angles(hidden, cache, q)
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
            hidden.add_(mm(out.reshape(n, heads * dim), w_o))
            x = normed(hidden, norm2)
            hidden.add_(mm(act(mm(x, w_gate)).mul_(mm(x, w_up)), w_down))
        cache.close()
        hidden = normed(hidden, self.last_norm)
        if keep != q:
            hidden = hidden.view(rows, q, self.hidden)[:, q - keep :].reshape(rows * keep, self.hidden)
        return mm(hidden, self.unembedding).view(rows, keep, self.unembedding.shape[1])


# On a CPU, calls cost nothing beside the products of a model with more parameters, and probing one takes long.
_WALK_UP_TO = 300_000_000

_callers: weakref.WeakKeyDictionary[PreTrainedModel, _Ordinary | _Walk | _Flat] = weakref.WeakKeyDictionary()


def _signature(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """What a walk relies on, to notice that it has changed; None where the model is not one to walk.

    Not one to walk: any other class than ``LlamaForCausalLM``, parts that are replaced (adapters, quantised layers,
    kernels), hooked (offloading, several devices), compiled or in training, and attention other than sdpa and eager.
    """
    if type(model) is not LlamaForCausalLM or mask_kind(model.config) is MaskKind.NONE or model.training:
        return None
    base = model.model
    seen: list[Any] = [model.config._attn_implementation]
    modules: list[tuple[nn.Module, type]] = [
        (model, LlamaForCausalLM),
        (base, modeling_llama.LlamaModel),
        (base.embed_tokens, nn.Embedding),
        (base.norm, modeling_llama.LlamaRMSNorm),
        (base.rotary_emb, modeling_llama.LlamaRotaryEmbedding),
        (model.lm_head, nn.Linear),
    ]
    for layer in base.layers:
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
    seen.append(base.rotary_emb.inv_freq.data_ptr())
    return tuple(seen)


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
    candidates: list[Callable[[], _Walk | _Flat]] = [lambda: _Walk(model, signature)]
    attn, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    if mask_kind(model.config) is MaskKind.SDPA and attn.q_proj.bias is None and mlp.up_proj.bias is None:
        candidates.insert(0, lambda: _Flat(model, signature))
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
