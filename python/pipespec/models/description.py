"""A model as the native decoder takes it: constants and weights of its layers, read from transformers' modules by the row of its family."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.models import compat
from pipespec.models.families import (
    BEFORE,
    Family,
    NotReadable,
    activations,
    attention_of,
    family_of,
    feed_forward_of,
    is_opaque,
    layout_of,
    outer_embedding_scale,
    windows_of,
)
from pipespec.models.mixers import ALPHA, copied_bytes, experts_of, halves_of_heads, is_latent, latent_of, recurrent_of
from pipespec.models.parts import ModelParts, PerLayer, keys_of
from pipespec.models.properties import rotary_changes_at
from pipespec.models.quantized import HeldMatrix, Int8Linear, QuantizedLinear
from pipespec_kernels.decoder import DecoderShape, LayerSizes, LayerWeights, PerLayerInputs
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.recurrent import Recurrent
from pipespec_kernels.tiles import TiledMatrix


@dataclass(frozen=True)
class ReadModel:
    """The parts of a model as the native decoder takes them. The tensors are the model's own.

    Attributes:
        shape: of the decoder. Without layers, the sizes in layers are 1; where they differ, they are the largest.
        layers: weights per layer.
        windows: per layer, the number of last positions that a column sees, its own included; None: all.
        embedding: ``[vocabulary, hidden]``, or None.
        norm: weight of the last norm, or None.
        norm_bias: its bias, or None.
        head: ``[vocabulary, hidden]``, or None.
        head_bias: ``[vocabulary]``, or None.
        head_scale: ``[vocabulary]`` of a head in int8, or None.
        rotary: the model's rotary embedding; None without layers.
        rotations: what each of the rotations of :attr:`LayerWeights.rope` is called in calls of ``rotary``; None: it is the only one.
        rotary_dims: elements of a head that each of them rotates.
        per_layer: what makes inputs of each layer; None: there are none.
        query_factors: what queries are multiplied by, from their positions int64 ``[n]``; None: nothing.
        beyond_llama: what the model has that LLaMA has not, as a list in words; None: nothing.
    """

    shape: DecoderShape
    layers: tuple[LayerWeights, ...]
    windows: tuple[int | None, ...]
    embedding: Any
    norm: Any
    norm_bias: torch.Tensor | None
    head: Any
    head_bias: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotary: Any
    rotations: tuple[str | None, ...]
    rotary_dims: tuple[int, ...]
    per_layer: PerLayerInputs | None
    query_factors: Callable[[torch.Tensor], torch.Tensor] | None
    beyond_llama: str | None


def read(model: PreTrainedModel | ModelParts, *, matrices: bool = True) -> ReadModel:
    """Read the parts of a model that :func:`identity` accepts. ``matrices``: False: without layers and head, whose modules may be opaque.

    Raises:
        NotReadable: RoPE that depends on the length of the text, layers that differ in more than their weights, or attributes that are not
            where they are expected (another version of transformers).
    """
    try:
        return _read(model if isinstance(model, ModelParts) else ModelParts.of(model), family_of(model), matrices)
    except (AttributeError, StopIteration) as error:
        raise NotReadable(f"its modules have other attributes than expected ({error})") from error


def _read(parts: ModelParts, family: Family, matrices: bool) -> ReadModel:
    config, head, embed = parts.config, parts.head if matrices else None, parts.embed
    of_head = {} if head is None else _of_linear(head, "head")
    ends = [matrix_of(end) for end in (head, embed) if end is not None]
    kind, eps = _kind_of_norms(parts, family)
    numbers: dict[str, Any] = family.numbers_of(config)
    numbers["embedding_scale"] = embedding_scale(embed) * (outer_embedding_scale(parts) or 1.0)
    if (divisor := numbers.pop("logit_divisor", None)) is not None:
        numbers["logit_scale"] = 1 / divisor
    rotations, sizes = _rotations(parts), _layer_sizes(parts, family)
    if (inputs := parts.per_layer) is not None:
        numbers |= {
            "per_layer": inputs.size,
            "per_layer_scale": embedding_scale(inputs.embed),
            "per_layer_in_scale": inputs.in_scale,
            "per_layer_sum_scale": inputs.sum_scale,
        }
    shape = DecoderShape(
        hidden=config.hidden_size,
        vocabulary=ends[0].shape[0] if ends else 1,
        eps=eps,
        norm=kind,
        norm_offset=family.norm_offset,
        rotates_pairs=family.rotates_pairs,
        norms_rotated=family.norms_rotated,
        **numbers,
        **_largest(sizes),
        **_of_all_layers(parts, family),
    )
    ropes, read = _ropes(parts, family, rotations), keys_of([*map(attention_of, parts.layers)])
    return ReadModel(
        shape,
        tuple(
            LayerWeights(**_layer(layer, shape, family, own) | {"rope": rope, "keys_of": of, "sizes": own})
            for layer, own, rope, of in zip(parts.layers, sizes, ropes, read, strict=True)
            if matrices
        ),
        windows_of(parts),
        None if embed is None else matrix_of(embed),
        None if parts.norm is None else parts.norm.weight.detach(),
        _bias_of(parts.norm),
        of_head.get("head"),
        of_head.get("head_bias"),
        of_head.get("head_scale"),
        parts.rotary,
        rotations,
        tuple(_rotary_dim(parts, kind) for kind in rotations),
        None if inputs is None or not matrices else _per_layer(inputs, len(parts.layers)),
        None if family.query_factors is None else functools.partial(family.query_factors, config),
        _beyond_llama(parts, shape, family),
    )


_BEYOND = {
    "norm": "layer norms",
    "rotates_pairs": "RoPE of neighbouring elements",
    "norms_rotated": "norms of heads after RoPE",
    "is_parallel": "attention and feed-forward in parallel",
    "softcap": "capped scores of attention",
    "residual_scale": "a factor of what they add",
    "logit_scale": "a factor of the logits",
    "logit_softcap": "capped logits",
}
"""Constants of :class:`DecoderShape` that a model without its parts has at their defaults."""


def _beyond_llama(parts: ModelParts, shape: DecoderShape, family: Family) -> str | None:
    found = [what for name, what in _BEYOND.items() if getattr(shape, name) != getattr(DecoderShape, name)]
    found += ["norms behind attention and feed-forward"] if family.norms.keys() != BEFORE.keys() else []
    read = keys_of([*map(attention_of, parts.layers)])
    found += ["keys and values of other layers"] if any(of is not None for of in read) else []
    found += ["layers of several sizes"] if len(set(_layer_sizes(parts, family))) > 1 else []
    found += ["inputs of each layer"] if parts.per_layer is not None else []
    found += ["factors of what layers give"] if any(hasattr(layer, "layer_scalar") for layer in parts.layers) else []
    found += ["layers without RoPE"] if family.rotates is not None else []
    found += ["RoPE that depends on the length of the text"] if rotary_changes_at(parts.rotary) is not None else []
    found += ["several kinds of RoPE"] if len(_rotations(parts)) > 1 else []
    found += ["factors of queries"] if family.query_factors is not None else []
    is_gated = all(family.matrices_of(feed_forward_of(layer), ("gate", "gate_up")) for layer in parts.layers)
    found += ["experts"] if family.routing is not None else [] if is_gated else ["a feed-forward without a gate"]
    found += ["gates of the attention"] if family.gates_attention else []
    attentions = [attention_of(layer) for layer in parts.layers]
    found += ["sinks"] if any(hasattr(attention, "sinks") for attention in attentions) else []
    found += ["recurrent layers"] if None in attentions else []
    found += ["latents in place of keys and values"] if shape.latent else []
    return ", ".join(found) or None


_HEAD_NORMS = {
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
    "v_norm": ("v_norm",),
}
"""Attributes of attentions with norms of queries, keys and values."""


def _norms_of(layer: Any, family: Family) -> dict[str, Any]:
    """The norms of a layer that are there, by their names in :class:`LayerWeights`."""
    places = {name: (layer, at) for name, at in family.norms.items()}
    for name, names in _HEAD_NORMS.items():
        attn = attention_of(layer)
        places[name] = attn, next((at for at in names if hasattr(attn, at)), name)
    found = {name: getattr(of, at, None) for name, (of, at) in places.items()}
    return {name: norm for name, norm in found.items() if norm is not None}


def _kind_of_norms(parts: ModelParts, family: Family) -> tuple[str, float]:
    """``norm`` and ``eps`` of a :class:`DecoderShape`."""
    norms = [norm for layer in parts.layers for norm in _norms_of(layer, family).values()]
    norms += [] if parts.per_layer is None else [parts.per_layer.norm]
    norms = [each for norm in norms for each in getattr(norm, "norms", (norm,))]
    kinds = {
        (
            "layer" if "LayerNorm" in type(norm).__name__ else "rms",
            float(getattr(norm, "variance_epsilon", None) or norm.eps),
        )
        for norm in (*norms, parts.norm)
        if norm is not None
    }
    if len(kinds) > 1:
        raise NotReadable("its norms differ in more than their weights")
    return kinds.pop() if kinds else ("rms", 0.0)


def embedding_scale(embed: Any) -> float:
    """What the module of a token embedding multiplies by, in its dtype."""
    if isinstance(embed, HeldMatrix):
        return 1.0 if embed.form.scale is None else embed.form.scale
    # Any other module may have an attribute of this name, which its forward does not read.
    if not type(embed).__name__.endswith("ScaledWordEmbedding"):
        return 1.0
    return float(embed.embed_scale.to(embed.weight.dtype))


def _rotations(parts: ModelParts) -> tuple[str | None, ...]:
    types = getattr(parts.rotary, "layer_types", None)
    return (None,) if types is None else tuple(types)


def _kind_of_rope(parts: ModelParts, i: int) -> str | None:
    """What the rotation of layer ``i`` of some parts is called; None: there is one for all."""
    return None if _rotations(parts) == (None,) else parts.config.layer_types[parts.first + i]


def _rotary_dim(parts: ModelParts, kind: str | None) -> int:
    """Elements of a head that a rotation rotates."""
    if parts.rotary is None:
        return 0
    return 2 * int(getattr(parts.rotary, "inv_freq" if kind is None else f"{kind}_inv_freq").numel())


def _ropes(parts: ModelParts, family: Family, rotations: Sequence[str | None]) -> list[int | None]:
    """The rotation of each layer, see :class:`LayerWeights`."""
    return [
        rotations.index(_kind_of_rope(parts, i)) if family.rotates is None or family.rotates(layer.self_attn) else None
        for i, layer in enumerate(parts.layers)
    ]


def _per_layer(of: PerLayer, layers: int) -> PerLayerInputs:
    """What makes the inputs of the first layers of a model."""
    rows = _of_rows(of.projection, ["matrix"], [layers * of.size])
    embedding: Any = matrix_of(of.embed)
    return PerLayerInputs(embedding, rows["matrix"], of.norm.weight.detach(), rows["matrix_scale"])


def _bias_of(module: Any) -> torch.Tensor | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else bias.detach()


def _layer_sizes(parts: ModelParts, family: Family) -> list[LayerSizes]:
    """The sizes of each layer."""
    layout, config, sizes = layout_of(parts), parts.config, []
    attentions = [attention_of(layer) for layer in parts.layers]
    # A part may have recurrent layers alone.
    is_recurrent = all(attn is None for attn in attentions)
    usual = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads if is_recurrent else 0
    for i, (layer, attn, of) in enumerate(zip(parts.layers, attentions, keys_of(attentions), strict=True)):
        # Not always that of the configuration, which some models adjust. Experts have their own, and of opaque modules it is not known.
        down = family.matrices_of(feed_forward_of(layer), ("down",)).get("down")
        inner = 0 if down is None or is_opaque(down) else int(down.in_features)
        size = usual if attn is None else _head_dim(attn)
        heads = 0 if attn is None else layout.sizes(parts.first + (i if of is None else of)).heads
        if layout.own is None and not layout.is_latent:
            heads = config.num_key_value_heads
        sizes.append(LayerSizes(inner, heads, size, _rotary_dim(parts, _kind_of_rope(parts, i))))
    known = _largest(sizes)
    return [LayerSizes(*(own or largest for own, largest in zip(each, known.values(), strict=True))) for each in sizes]


def _largest(sizes: Sequence[LayerSizes]) -> dict[str, Any]:
    """The largest of the sizes of layers, as a :class:`DecoderShape` has them; where there are no layers, or none says a size, 1."""
    found = {name: max((getattr(own, name) for own in sizes), default=0) for name in LayerSizes._fields}
    return {name: size or int(name != "rotary_dim") for name, size in found.items()}


def _of_all_layers(parts: ModelParts, family: Family) -> dict[str, Any]:
    """What a :class:`DecoderShape` says of the layers beside their sizes, which must be the same in all of them."""
    config, rotary = parts.config, parts.rotary
    if not parts.layers:
        return {"heads": 1, "scale": 1.0}
    types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    for kind in types:
        if kind not in ("default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic"):
            raise NotReadable(f"its RoPE is of type {kind}")
    attentions = [attn for attn in map(attention_of, parts.layers) if attn is not None]
    if not all(attn.is_causal for attn in attentions):
        raise NotReadable("its attention is not causal")
    if any(map(is_latent, attentions)) and not compat.caches_latents(config.model_type):
        raise NotReadable("this version of transformers keeps the keys and values of its latents; install a newer one")
    scales = {attn.scaling for attn in attentions} or {1.0}
    ranks = {getattr(attn, "kv_lora_rank", 0) for attn in attentions} or {0}
    kinds = {
        (
            family.activation or _activation(feed_forward_of(layer)),
            float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))),
            family.is_parallel and "post_norm" not in _norms_of(layer, family),
        )
        for layer in parts.layers
    }
    if any(len(found) > 1 for found in (kinds, scales, ranks)):
        raise NotReadable("its layers differ in more than their weights and sizes")
    activation, residual_scale, is_parallel = kinds.pop()
    return {
        "heads": config.num_attention_heads,
        "latent": ranks.pop(),
        "scale": scales.pop(),
        "activation": activation,
        "residual_scale": residual_scale,
        "is_parallel": is_parallel,
    }


def _head_dim(attention: Any) -> int:
    """The size of a key. Of latents it is what a cache holds."""
    if is_latent(attention):
        return int(attention.kv_lora_rank + attention.qk_rope_head_dim)
    return int(attention.head_dim)


def _activation(mlp: Any) -> str:
    mlp = getattr(mlp, "experts", mlp)
    if getattr(mlp, "alpha", None) == ALPHA:
        return "quick_gelu"
    module = next(getattr(mlp, name) for name in ("activation_fn", "act_fn", "act") if hasattr(mlp, name))
    name = activations().get(type(module))
    if name is None:
        raise NotReadable(f"its activation is {type(module).__name__}")
    return name


def _layer(layer: Any, shape: DecoderShape, family: Family, sizes: LayerSizes) -> dict[str, Any]:
    """Weights of a :class:`LayerWeights`."""
    attn, absent = attention_of(layer), ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")
    weights: dict[str, Any] = dict.fromkeys(absent) | _matrices(layer, shape, family, sizes)
    weights |= _of_per_layer(layer, shape)
    if family.routing is not None:
        weights["experts"] = experts_of(feed_forward_of(layer), family.routing, matrix_of)
    for name, norm in _norms_of(layer, family).items():
        weights[name] = _weight_of(norm, sizes.head_dim)
        if (bias := _bias_of(norm)) is not None:
            weights[f"{name}_bias"] = bias
    if (sinks := getattr(attn, "sinks", None)) is not None:
        weights["sinks"] = sinks.detach()
    if is_latent(attn):
        weights |= {"latent": latent_of(attn, matrix_of), "q": None, "q_bias": None}
    if attn is None:
        weights["recurrent"] = _recurrent(layer)
    elif family.gates_attention:
        for name in ("q", "q_bias") if weights["q_bias"] is not None else ("q",):
            weights[name], weights[name.replace("q", "q_gate")] = halves_of_heads(weights[name], sizes.head_dim)
    if (norm := getattr(layer, "hidden_norm", None)) is not None:
        # A draft head's first layer reads embeddings beside the hidden states, which have the second norm.
        weights |= {"side_norm": weights["input_norm"], "adds_to_norm": layer.norm_before_residual}
        weights["input_norm"] = norm.weight.detach()
    return weights


def _matrices(layer: Any, shape: DecoderShape, family: Family, sizes: LayerSizes) -> dict[str, Any]:
    """The matrices of a layer's attention and feed-forward."""
    weights: dict[str, Any] = {}
    heads = [n * sizes.head_dim for n in (shape.heads, sizes.kv_heads, sizes.kv_heads)]
    for part, whole, names, rows in (
        (attention_of(layer), "qkv", ("q", "k", "v", "o"), heads),
        (feed_forward_of(layer), "gate_up", ("gate", "up", "down"), [sizes.intermediate] * 2),
    ):
        for name, linear in family.matrices_of(part, (whole, *names)).items():
            weights |= _of_rows(linear, names[:-1], rows) if name == whole else _of_linear(linear, name)
    if getattr(attention_of(layer), "use_alternative_attention", False):
        # Values are keys before their norm and their rotation.
        weights |= {f"v{end}": weights.get(f"k{end}") for end in ("", "_bias", "_scale")}
    return weights


def _of_per_layer(layer: Any, shape: DecoderShape) -> dict[str, Any]:
    """What a layer does after its feed-forward: its matrices of per-layer inputs, and a factor."""
    weights: dict[str, Any] = {}
    if shape.per_layer:
        weights |= _of_linear(layer.per_layer_input_gate, "per_layer_gate", has_bias=False)
        weights |= _of_linear(layer.per_layer_projection, "per_layer_out", has_bias=False)
    if (scale := getattr(layer, "layer_scalar", None)) is not None:
        weights["output_scale"] = scale.detach()
    return weights


def _weight_of(norm: Any, size: int) -> torch.Tensor:
    """The weights of a norm; of several of heads those of all; ones of ``size`` where it has none."""
    if (own := getattr(norm, "norms", None)) is not None:
        return torch.stack([each.weight.detach() for each in own])
    if not getattr(norm, "with_scale", True):
        return torch.ones(size, device="cpu")
    weight: torch.Tensor = norm.weight.detach()
    return weight


def _recurrent(layer: Any) -> Recurrent | None:
    net = getattr(layer, "linear_attn", None)
    if net is not None and net.activation not in ("silu", "swish"):
        raise NotReadable(f"the activation of its gated delta nets is {net.activation}")
    return recurrent_of(layer, matrix_of)


def _of_linear(linear: Any, name: str, *, has_bias: bool = True) -> dict[str, Any]:
    """A linear module's matrix, bias and scale of int8, as the decoder calls them."""
    bias = None if linear.bias is None else linear.bias.detach()
    scale = linear.scale if isinstance(linear, Int8Linear) else None
    return {name: matrix_of(linear), f"{name}_scale": scale} | ({f"{name}_bias": bias} if has_bias else {})


def _of_rows(linear: Any, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """:func:`_of_linear` of several in one, ``sizes`` rows after another. Such modules have no bias."""
    whole, ends = _of_linear(linear, ""), list(itertools.accumulate(sizes))
    found: dict[str, Any] = {}
    for name, size, end in zip(names, sizes, ends, strict=True):
        rows = slice(end - size, end)
        matrix, scale = whole[""], whole["_scale"]
        found[name] = matrix[rows] if isinstance(matrix, torch.Tensor) else matrix.rows(rows)
        found[f"{name}_scale"] = None if scale is None else scale[rows]
    return found


def matrix_of(module: Any) -> torch.Tensor | QuantizedMatrix | TiledMatrix:
    """The matrix of a linear module or an embedding."""
    found: Any = module.matrix if isinstance(module, HeldMatrix) else module.weight.detach()
    return found


def packed_bytes(model: PreTrainedModel | ModelParts) -> int:
    """Bytes that the copies take: of matrices in blocks, of transposed experts, and of an attention with latents. Other matrices are read where they lie."""
    parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
    modules = [module for _, module in parts.named_modules()]
    blocks = sum(module.blocks.nbytes for module in modules if isinstance(module, QuantizedLinear))
    return blocks + sum(copied_bytes(module) for module in modules)
