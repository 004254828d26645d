"""Families of models, and where the weights are that the native decoder takes.

A family is added by a row in :data:`FAMILIES`, which says where the parts of its layers are and how they differ from LLaMA's. Whether the decoder computes what
the model computes is not assumed from the row: :mod:`pipespec.engine.form` compares the outputs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from pipespec.models import experts, recurrent
from pipespec.models.devices import not_whole_reason
from pipespec.models.layout import CacheLayout, UnsupportedLayers, configuration_read
from pipespec.models.parts import ModelParts
from pipespec.models.properties import has_dropout, has_hooks, has_own_forward
from pipespec.models.quantized import Int8Linear, QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from pipespec_kernels.decoder import DecoderShape, LayerWeights
from pipespec_kernels.experts import Routing
from pipespec_kernels.formats import QuantizedMatrix

DTYPES = frozenset((torch.float32, torch.bfloat16))
"""Dtypes of models that the native decoder packs."""

_NUMBERS = (
    "scaling", "variance_epsilon", "eps", "attention_scaling", "full_attention_attention_scaling", "sliding_attention_attention_scaling",
    "use_rope", "sliding_window", "is_sliding", "attn_logit_softcapping", "use_parallel_residual", "residual_multiplier", "embedding_multiplier", "logit_scale",
    *experts.NUMBERS,
)  # fmt: skip
"""Attributes of modules that the decoder takes over."""

_CLASSES = (
    "ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "RMSNorm", "LayerNorm", "LayerNormPerHead", "LayerNorm1P", "RotaryEmbedding",
    "TextRotaryEmbedding", "TextScaledWordEmbedding", *experts.CLASSES, *recurrent.CLASSES,
)  # fmt: skip
"""Ends of the names of the classes of a family. It may lack some."""

BEFORE = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
"""Where the norms of a layer are, by their names in :class:`LayerWeights`: in front of attention and feed-forward."""

BEHIND = {"o_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
"""Likewise, behind them."""

AROUND = BEHIND | {"input_norm": "input_layernorm", "post_norm": "pre_feedforward_layernorm"}
"""Likewise, in front of them and behind them."""


class NotReadable(Exception):
    """The native decoder cannot take a model. The message says why, as a phrase without a subject of its own."""


@dataclass(frozen=True)
class Family:
    """A type of models that the tests run.

    Attributes:
        model_type: transformers' name, also of the module in ``transformers.models`` where the family has a native form.
        prefix: of the names of the classes, for models whose weights the native decoder takes; None for others.
        in_stages: whether the forward is embedding, layers with a rotary embedding, norm, head, and nothing in between but ``numbers``, so that it can be cut.
        source: name of the module of the classes where it is not ``model_type``.
        norms: attributes of a layer by the names of the norms in :class:`LayerWeights`. A norm that is None is not there.
        norm_offset: added to the weights of the norms.
        matrices: attributes of attention and feed-forward that are not ``NAME_proj``, by the names of the matrices in :class:`LayerWeights`.
        is_parallel: a layer without a norm in front of its feed-forward adds attention and feed-forward of the same hidden states.
        rotates: whether an attention rotates queries and keys; None: all do.
        rotates_pairs: neighbours are rotated, not the halves of a head.
        norms_rotated: the norms of queries and keys come after the rotation.
        query_factors: what queries are multiplied by, from the configuration and their positions.
        scales_embedding: the module of the token embedding multiplies by a factor.
        numbers: constants of :class:`DecoderShape` from the configuration.
        routing: how experts are chosen, by their router; None: there are none.
        gates_attention: half of the rows of the queries are gates of what the attention gives. The other layers have a gated delta net.
    """

    model_type: str
    prefix: str | None = None
    in_stages: bool = True
    source: str | None = None
    norms: Mapping[str, str] = field(default_factory=BEFORE.copy)
    norm_offset: float = 0.0
    matrices: Mapping[str, str] = field(default_factory=dict)
    is_parallel: bool = False
    rotates: Callable[[Any], bool] | None = None
    rotates_pairs: bool = False
    norms_rotated: bool = False
    query_factors: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    scales_embedding: bool = False
    numbers: Mapping[str, Callable[[Any], float | None]] = field(default_factory=dict)
    routing: Callable[[Any], Routing] | None = None
    gates_attention: bool = False

    @property
    def module(self) -> str:
        """The module of the classes."""
        name = self.source or self.model_type
        return f"transformers.models.{name}.modeling_{name}"

    @functools.cached_property
    def classes(self) -> tuple[frozenset[type], frozenset[type]]:
        """The family's own classes, and those of all modules of such a model."""
        assert self.prefix is not None
        source = sys.modules[self.module]
        own = frozenset(vars(source)[name] for part in _CLASSES if (name := f"{self.prefix}{part}") in vars(source))
        # Dropout that does something is excluded.
        common = (nn.Linear, nn.Conv1d, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.Dropout)
        return own, own.union(
            common, (Int8Linear, QuantizedLinear, QuantizedEmbedding, QuantizedExperts), _activations()
        )

    def numbers_of(self, config: Any) -> dict[str, float]:
        """The constants of :attr:`numbers` for a configuration; None there stands for 0."""
        return {name: float(number(config) or 0.0) for name, number in self.numbers.items()}

    def matrices_of(self, part: Any, names: Sequence[str]) -> dict[str, Any]:
        """The linear modules of an attention or a feed-forward, by their names in :class:`LayerWeights`. It may lack some."""
        found = {name: getattr(part, self.matrices.get(name, f"{name}_proj"), None) for name in names}
        return {name: linear for name, linear in found.items() if linear is not None}


def _llama_4_factors(config: Any, positions: torch.Tensor) -> torch.Tensor:
    """Of queries at positions int64 ``[n]``: they grow with the logarithm of the position, as in LLaMA 4."""
    rope = config.rope_parameters
    passed = torch.floor(positions / rope["original_max_position_embeddings"])
    factors: torch.Tensor = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + passed)
    return factors


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen2"),
        Family("qwen3", "Qwen3"),
        Family("phi3", "Phi3"),
        Family("gemma", "Gemma", norm_offset=1.0, scales_embedding=True),
        Family(
            "gemma2", "Gemma2", norms=AROUND, norm_offset=1.0, scales_embedding=True,
            numbers={"softcap": lambda c: c.attn_logit_softcapping, "logit_softcap": lambda c: c.final_logit_softcapping},
        ),
        Family(
            "gemma3_text", "Gemma3", source="gemma3", norms=AROUND, norm_offset=1.0, scales_embedding=True,
            numbers={"logit_softcap": lambda c: c.final_logit_softcapping},
        ),
        Family("ministral", "Ministral"),
        Family("ministral3", "Ministral3", query_factors=_llama_4_factors),
        Family("arcee", "Arcee"),
        Family("seed_oss", "SeedOss"),
        Family("ernie4_5", "Ernie4_5", rotates_pairs=True),
        Family("hunyuan_v1_dense", "HunYuanDenseV1", norms_rotated=True),
        Family("nemotron", "Nemotron", norm_offset=1.0),
        Family("smollm3", "SmolLM3", rotates=lambda attn: bool(attn.use_rope)),
        Family("olmo2", "Olmo2", norms=BEHIND),
        Family("olmo3", "Olmo3", norms=BEHIND),
        Family("exaone4", "Exaone4", norms=BEHIND, rotates=lambda attn: attn.sliding_window is None or attn.is_sliding),
        Family(
            "glm4", "Glm4", rotates_pairs=True,
            norms=BEFORE | {"o_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"},
        ),
        Family("starcoder2", "Starcoder2", matrices={"up": "c_fc", "down": "c_proj"}),
        Family("stablelm", "StableLm", is_parallel=True),
        Family(
            "cohere", "Cohere", is_parallel=True, rotates_pairs=True, numbers={"logit_scale": lambda c: c.logit_scale},
        ),
        Family(
            "cohere2", "Cohere2", is_parallel=True, rotates_pairs=True, rotates=lambda attn: attn.sliding_window is not None,
            numbers={"logit_scale": lambda c: c.logit_scale},
        ),
        Family(
            "granite", "Granite",
            numbers={"embedding_scale": lambda c: c.embedding_multiplier, "logit_scale": lambda c: 1 / c.logits_scaling},
        ),
        Family("mixtral", "Mixtral", routing=experts.softmax),
        Family("phimoe", "Phimoe", routing=experts.sparse_mixer),
        Family("qwen2_moe", "Qwen2Moe", routing=experts.softmax),
        Family("qwen3_moe", "Qwen3Moe", routing=experts.softmax),
        Family("gpt_oss", "GptOss", routing=experts.softmax),
        Family(
            "granitemoe", "GraniteMoe", routing=experts.softmax,
            numbers={"embedding_scale": lambda c: c.embedding_multiplier, "logit_scale": lambda c: 1 / c.logits_scaling},
        ),
        Family("deepseek_v3"),
        Family("dots1", "Dots1", routing=experts.by_sigmoids),
        Family("qwen3_next", "Qwen3Next", norm_offset=1.0, routing=experts.softmax, gates_attention=True),
        Family("qwen3_5_text", "Qwen3_5", source="qwen3_5", norm_offset=1.0, gates_attention=True),
        Family(
            "qwen3_5_moe_text", "Qwen3_5Moe", source="qwen3_5_moe", norm_offset=1.0, routing=experts.softmax,
            gates_attention=True,
        ),
        Family(
            "lfm2", "Lfm2", in_stages=False, norms={"input_norm": "operator_norm", "post_norm": "ffn_norm"},
            matrices={"o": "out_proj", "gate": "w1", "up": "w3", "down": "w2"},
        ),
        Family("deepseek_v2", in_stages=False),
        Family("minicpm3", in_stages=False),
    )
}  # fmt: skip
"""The families, by their ``model_type``: the one list of them. A model of another type is checked on a copy on the meta device."""

NATIVE_CLASSES = {f"{family.prefix}ForCausalLM": family for family in FAMILIES.values() if family.prefix is not None}
"""Those with a native form, by the name of the model's class."""

IN_STAGES = tuple(family.model_type for family in FAMILIES.values() if family.in_stages)
"""Model types that can be cut into layer stages."""


def embedded(parts: ModelParts, tokens: torch.Tensor) -> torch.Tensor:
    """What the first layer reads of ``tokens [rows, q]``: ``[rows, q, H]``. Some models multiply outside of the embedding's module."""
    hidden: torch.Tensor = parts.embed(tokens)
    scale = _numbers(parts).get("embedding_scale")
    return hidden if scale is None else hidden * scale


def scaled(parts: ModelParts, logits: torch.Tensor) -> torch.Tensor:
    """The model's logits of what its head gives."""
    numbers = _numbers(parts)
    logits = logits * numbers.get("logit_scale", 1.0)
    cap = numbers.get("logit_softcap")
    return cap * torch.tanh(logits / cap) if cap else logits


def _numbers(parts: ModelParts) -> dict[str, float]:
    family = FAMILIES.get(parts.config.model_type)
    return {} if family is None else family.numbers_of(parts.config)


@functools.cache
def _activations() -> dict[type, str]:
    """The native decoder's activations by the classes of transformers."""
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
    return {type(ACT2FN[theirs]): ours for theirs, ours in names.items()}


def family_of(model: PreTrainedModel | ModelParts) -> Family:
    """The family of a model, or of parts of one. Raises :class:`NotReadable` for a class or a type outside of the table."""
    if isinstance(model, ModelParts):
        model_type = model.config.model_type
        found = FAMILIES.get(model_type)
        if found is None or found.prefix is None:
            raise NotReadable(f"model_type {model_type!r} has no native form")
        return found
    kind = type(model)
    family = NATIVE_CLASSES.get(kind.__name__)
    if family is None or kind.__module__ != family.module:
        raise NotReadable(f"{kind.__name__} has no native form")
    return family


def identity(model: PreTrainedModel | ModelParts, *, packed: bool = True) -> tuple[Any, ...]:
    """What a form of a model depends on: where each weight is, the numbers in the modules, and what their calls read in the configuration.

    Args:
        model: the model, or parts of one.
        packed: the form copies the weights, for the CPU: their versions count, too. A change that goes past the version counters (through
            ``.data``) does not show, see :mod:`pipespec.engine.native`.

    Raises:
        NotReadable: for a packed copy, the model is not on the CPU in float32 or bfloat16; it is on several devices or in training with dropout; a
            module is not of its family's classes (an adapter, a quantised layer), has hooks or a forward of its own; a parameter has a class of its
            own. Without a copy, :func:`opaque` modules may have other classes, and weights of any class.
    """
    try:
        return _identity(model, packed)
    except NotReadable as error:
        why = None if isinstance(model, ModelParts) else not_whole_reason(model)
        raise NotReadable(why or str(error)) from error


def _identity(model: PreTrainedModel | ModelParts, packed: bool) -> tuple[Any, ...]:
    # First, as most models that are not taken lie on a GPU.
    if packed and model.device.type != "cpu":
        raise NotReadable(f"it is on {model.device}")
    own, classes = family_of(model).classes
    inside = set() if packed else {id(part) for linear in opaque(model) for part in linear.modules()}
    seen: list[Any] = []
    dtypes = set()
    for name, module in model.named_modules():
        kind, where = type(module), name or "the model"
        seen.append((name, kind))
        if id(module) in inside:
            seen += state_of(module)
        elif kind not in classes or (not packed and kind in (Int8Linear, QuantizedLinear, QuantizedEmbedding)):
            raise NotReadable(f"{where} is of class {kind.__name__}")
        if (why := _changed(module)) is not None:
            raise NotReadable(f"{where} {why}")
        for parameter in () if id(module) in inside else module._parameters.values():
            if parameter is None:
                continue
            # Quantised and sharded parameters have classes of their own.
            if type(parameter) is not nn.Parameter or parameter.device != model.device:
                raise NotReadable(f"a weight of {where} is of class {type(parameter).__name__} on {parameter.device}")
            dtypes.add(parameter.dtype)
            # Inference tensors have no version.
            has_version = packed and not parameter.is_inference()
            seen.append((*_place(parameter), parameter._version if has_version else 0))
        seen += [_place(buffer) for buffer in module._buffers.values() if buffer is not None]
        if kind in own or kind is nn.LayerNorm:
            seen += map(vars(module).get, _NUMBERS)
    taken = DTYPES if packed else DTYPES | {torch.float16}
    if len(dtypes) != 1 or not dtypes <= taken:
        raise NotReadable(f"its weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}")
    windows = _windows_of(model if isinstance(model, ModelParts) else ModelParts.of(model))
    return (*dtypes, *seen, *windows, *configuration_read(model.config, own))


def _changed(module: nn.Module) -> str | None:
    """What an instance has that its class has not, as a phrase without a subject."""
    if has_own_forward(module):
        return "has a forward of its own"
    if has_hooks(module):
        return "has hooks or is compiled"
    return "is in training mode with dropout" if module.training and has_dropout(module) else None


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def state_of(module: nn.Module) -> Iterator[Any]:
    """What the operations of a module's call depend on, beside its children and the values of its tensors: its numbers and names, and where its
    tensors lie. Of other objects the identity."""
    stack: list[Any] = [vars(module)]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield _place(value)
            # A tensor of another class may consist of tensors.
            stack += [] if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) else [vars(value)]
        elif isinstance(value, dict):
            stack += itertools.chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple)):
            stack += value
        else:
            yield value if isinstance(value, (int, float, str)) else id(value)


def products_of(model: PreTrainedModel | ModelParts) -> Iterator[tuple[Any, ...]]:
    """The linear modules of a model, layer by layer and then the head. Those of one input come together."""
    parts, family = model if isinstance(model, ModelParts) else ModelParts.of(model), family_of(model)
    for layer in parts.layers:
        for part, names in (
            (_attention(layer), ("qkv", "q", "k", "v", "o")),
            (_feed_forward(layer), ("gate_up", "gate", "up", "down")),
        ):
            linears = [*family.matrices_of(part, names).values()]
            # Neither experts nor recurrent parts have any.
            yield tuple(linears[:-1])
            yield tuple(linears[-1:])
    yield (parts.head,)


def is_opaque(linear: Any) -> bool:
    """Whether a module in the place of a linear one multiplies in a way of its own: quantised, or with an adapter."""
    own = type(linear) in (nn.Linear, Int8Linear, QuantizedLinear)
    return not own or any(type(p) is not nn.Parameter for p in linear._parameters.values() if p is not None)


def is_opaque_linear(module: Any) -> bool:
    """Whether a module, wherever it is, stands for a linear one and :func:`is_opaque`."""
    return isinstance(getattr(module, "in_features", None), int) and is_opaque(module)


def opaque(model: PreTrainedModel | ModelParts) -> list[Any]:
    """The linear modules of a model of which only the call is known, see :func:`is_opaque`."""
    return [linear for linears in products_of(model) for linear in linears if is_opaque(linear)]


@dataclass(frozen=True)
class ReadModel:
    """The parts of a model as the native decoder takes them. The tensors are the model's own.

    Attributes:
        shape: of the decoder. Without layers, the sizes in layers are 1.
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
    except AttributeError as error:
        raise NotReadable(f"its modules have other attributes than expected ({error})") from error


def _read(parts: ModelParts, family: Family, matrices: bool) -> ReadModel:
    config, head, embed = parts.config, parts.head if matrices else None, parts.embed
    if family.scales_embedding and type(embed) is nn.Embedding:
        # In transformers 5.0.
        raise NotReadable("its embedding is scaled outside of the embedding's module")
    of_head = {} if head is None else _of_linear(head, "head")
    ends = [matrix_of(end) for end in (head, embed) if end is not None]
    kind, eps = _kind_of_norms(parts, family)
    numbers = {"embedding_scale": _embedding_scale(embed)} | family.numbers_of(config)
    rotations = _rotations(parts)
    shape = DecoderShape(
        hidden=config.hidden_size,
        vocabulary=ends[0].shape[0] if ends else 1,
        eps=eps,
        norm=kind,
        norm_offset=family.norm_offset,
        rotates_pairs=family.rotates_pairs,
        norms_rotated=family.norms_rotated,
        **numbers,
        **_layer_sizes(parts, family, rotations),
    )
    return ReadModel(
        shape,
        tuple(
            _layer(layer, rope, shape, family)
            for layer, rope in zip(parts.layers, _ropes(parts, family, rotations), strict=True)
            if matrices
        ),
        _windows_of(parts),
        None if embed is None else matrix_of(embed),
        None if parts.norm is None else parts.norm.weight.detach(),
        _bias_of(parts.norm),
        of_head.get("head"),
        of_head.get("head_bias"),
        of_head.get("head_scale"),
        parts.rotary,
        rotations,
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
    found += ["layers without RoPE"] if family.rotates is not None else []
    found += ["several kinds of RoPE"] if len(_rotations(parts)) > 1 else []
    found += ["factors of queries"] if family.query_factors is not None else []
    is_gated = all(family.matrices_of(_feed_forward(layer), ("gate", "gate_up")) for layer in parts.layers)
    found += ["experts"] if family.routing is not None else [] if is_gated else ["a feed-forward without a gate"]
    found += ["gates of the attention"] if family.gates_attention else []
    return ", ".join(found) or None


_HEAD_NORMS = {
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}
"""Attributes of attentions with norms of queries and keys."""


def _norms_of(layer: Any, family: Family) -> dict[str, Any]:
    """The norms of a layer that are there, by their names in :class:`LayerWeights`."""
    places = {name: (layer, at) for name, at in family.norms.items()}
    for name, names in _HEAD_NORMS.items():
        attn = _attention(layer)
        places[name] = attn, next((at for at in names if hasattr(attn, at)), name)
    found = {name: getattr(of, at, None) for name, (of, at) in places.items()}
    return {name: norm for name, norm in found.items() if norm is not None}


def _kind_of_norms(parts: ModelParts, family: Family) -> tuple[str, float]:
    """``norm`` and ``eps`` of a :class:`DecoderShape`."""
    norms = [norm for layer in parts.layers for norm in _norms_of(layer, family).values()]
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


def _embedding_scale(embed: Any) -> float:
    """What the module of a token embedding multiplies by, in its dtype."""
    if isinstance(embed, QuantizedEmbedding):
        return 1.0 if embed.form.scale is None else embed.form.scale
    scale = getattr(embed, "embed_scale", None)
    return 1.0 if scale is None else float(scale.to(embed.weight.dtype))


def _rotations(parts: ModelParts) -> tuple[str | None, ...]:
    types = getattr(parts.rotary, "layer_types", None)
    return (None,) if types is None else tuple(types)


def _ropes(parts: ModelParts, family: Family, rotations: Sequence[str | None]) -> list[int | None]:
    """The rotation of each layer, see :class:`LayerWeights`."""
    types = [None] * len(parts.layers)
    if rotations != (None,):
        types = parts.config.layer_types[parts.first : parts.first + len(parts.layers)]
    return [
        rotations.index(kind) if family.rotates is None or family.rotates(layer.self_attn) else None
        for layer, kind in zip(parts.layers, types, strict=True)
    ]


def _bias_of(module: Any) -> torch.Tensor | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else bias.detach()


def _windows_of(parts: ModelParts) -> tuple[int | None, ...]:
    try:
        return CacheLayout.of(parts.config).windows[parts.first : parts.first + len(parts.layers)]
    except UnsupportedLayers as error:
        raise NotReadable(str(error)) from error


def of_one_input(model: PreTrainedModel) -> list[tuple[nn.Parameter, ...]]:
    """Parameters whose rows may be those of one matrix, or of one bias: of queries, keys and values, and of gate and up.

    Args:
        model: one that :func:`read` accepts. Phi-3 has such matrices by itself, so it has no groups. Nor have opaque modules.
    """
    groups = []
    for linears in products_of(model):
        if len(linears) > 1 and not any(map(is_opaque, linears)):
            groups.append(tuple(linear.weight for linear in linears))
            if linears[0].bias is not None:
                groups.append(tuple(linear.bias for linear in linears))
    return groups


def _layer_sizes(parts: ModelParts, family: Family, rotations: Sequence[str | None]) -> dict[str, Any]:
    """What a :class:`DecoderShape` says of the layers."""
    if not parts.layers:
        return {"intermediate": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "rotary_dim": 0, "scale": 1.0}
    config, rotary = parts.config, parts.rotary
    types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    for kind in types:
        if kind not in ("default", "linear", "llama3", "yarn", "proportional"):
            raise NotReadable(f"its RoPE of type {kind} depends on the length of the text")
    attentions = [attn for attn in map(_attention, parts.layers) if attn is not None]
    if not all(attn.is_causal for attn in attentions):
        raise NotReadable("its attention is not causal")
    # A part may have recurrent layers alone.
    heads = {(attn.head_dim, attn.scaling) for attn in attentions} or {(config.head_dim, 1.0)}
    kinds = {
        (
            _activation(_feed_forward(layer)),
            float(getattr(layer, "residual_multiplier", 1.0)),
            family.is_parallel and "post_norm" not in _norms_of(layer, family),
        )
        for layer in parts.layers
    }
    sizes = {getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq").numel() for kind in rotations}
    if len(kinds) > 1 or len(heads) > 1 or len(sizes) > 1:
        raise NotReadable("its layers differ in more than their weights")
    (head_dim, scale), (activation, residual_scale, is_parallel) = heads.pop(), kinds.pop()
    return {
        "intermediate": getattr(config, "intermediate_size", None) or 1,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rotary_dim": 2 * sizes.pop(),
        "scale": scale,
        "activation": activation,
        "residual_scale": residual_scale,
        "is_parallel": is_parallel,
    }


def _attention(layer: Any) -> Any:
    return getattr(layer, "self_attn", None)


def _feed_forward(layer: Any) -> Any:
    return next(getattr(layer, name) for name in ("mlp", "block_sparse_moe", "feed_forward") if hasattr(layer, name))


def _activation(mlp: Any) -> str:
    mlp = getattr(mlp, "experts", mlp)
    if getattr(mlp, "alpha", None) == experts.ALPHA:
        return "quick_gelu"
    module = next((getattr(mlp, name) for name in ("activation_fn", "act_fn", "act") if hasattr(mlp, name)), None)
    if module is None and type(mlp).__name__ == "Lfm2MLP":
        return "silu"  # is called as a function
    name = _activations().get(type(module))
    if name is None:
        raise NotReadable(f"its activation is {type(module).__name__}")
    return name


def _layer(layer: Any, rope: int | None, shape: DecoderShape, family: Family) -> LayerWeights:
    heads = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    attn, absent = _attention(layer), ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")
    weights: dict[str, Any] = dict.fromkeys(absent) | {"rope": rope}
    if family.routing is not None:
        weights["experts"] = experts.experts_of(_feed_forward(layer), family.routing, matrix_of)
    for part, whole, names, sizes in (
        (attn, "qkv", ("q", "k", "v", "o"), heads),
        (_feed_forward(layer), "gate_up", ("gate", "up", "down"), [shape.intermediate] * 2),
    ):
        for name, linear in family.matrices_of(part, (whole, *names)).items():
            weights |= _of_rows(linear, names[:-1], sizes) if name == whole else _of_linear(linear, name)
    for name, norm in _norms_of(layer, family).items():
        own = getattr(norm, "norms", None)
        weights[name] = norm.weight.detach() if own is None else torch.stack([each.weight.detach() for each in own])
        if (bias := _bias_of(norm)) is not None:
            weights[f"{name}_bias"] = bias
    if (sinks := getattr(attn, "sinks", None)) is not None:
        weights["sinks"] = sinks.detach()
    if attn is None:
        weights["recurrent"] = recurrent.recurrent_of(layer, matrix_of)
    elif family.gates_attention:
        for name in ("q", "q_bias") if weights["q_bias"] is not None else ("q",):
            weights[name], weights[name.replace("q", "q_gate")] = recurrent.halves_of_heads(
                weights[name], shape.head_dim
            )
    if (norm := getattr(layer, "hidden_norm", None)) is not None:
        # A draft head's first layer reads embeddings beside the hidden states, which have the second norm.
        weights |= {"side_norm": weights["input_norm"], "adds_to_norm": layer.norm_before_residual}
        weights["input_norm"] = norm.weight.detach()
    return LayerWeights(**weights)


def _of_linear(linear: Any, name: str) -> dict[str, Any]:
    """A linear module's matrix, bias and scale of int8, as the decoder calls them."""
    bias = None if linear.bias is None else linear.bias.detach()
    scale = linear.scale if isinstance(linear, Int8Linear) else None
    return {name: matrix_of(linear), f"{name}_bias": bias, f"{name}_scale": scale}


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


def matrix_of(module: Any) -> torch.Tensor | QuantizedMatrix:
    """The matrix of a linear module or an embedding."""
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
        return module.matrix
    found: torch.Tensor = module.weight.detach()
    return found


def packed_bytes(model: PreTrainedModel | ModelParts) -> int:
    """Bytes that a packed copy takes, at most. A float32 model whose weights are all bfloat16's takes half of it."""
    parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
    # The embedding is not copied, only a head that is tied to it.
    parts = parts._replace(embed=None)
    buffers = (
        m.blocks if isinstance(m, QuantizedLinear) else m.weight
        for _, m in parts.named_modules()
        if isinstance(m, (Int8Linear, QuantizedLinear))
    )
    return sum(buffer.nbytes for buffer in buffers) + sum(parameter.nbytes for parameter in parts.parameters())
