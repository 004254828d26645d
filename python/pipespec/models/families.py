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

from pipespec.models import compat
from pipespec.models.layout import CacheLayout, UnsupportedLayers, configuration_read
from pipespec.models.mixers import by_sigmoids, by_sigmoids_of_all, by_softmax, by_softmax_of_groups, by_sparse_mixer
from pipespec.models.parts import ModelParts
from pipespec.models.properties import changing_buffers, has_dropout, has_hooks, has_own_forward, not_whole_reason
from pipespec.models.quantized import (
    HeldMatrix,
    Int8Linear,
    JoinedLinear,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    StackedLinear,
    is_tiled,
)
from pipespec_kernels.experts import Routing
from pipespec_kernels.tiles import BAND

DTYPES = frozenset((torch.float32, torch.bfloat16))
"""Dtypes of models that the native decoder packs."""

_FOR_CPU = frozenset((Int8Linear, QuantizedLinear, QuantizedEmbedding, QuantizedExperts, StackedLinear, JoinedLinear))
"""Modules of pipespec's own which a copy for the CPU takes. The operations for a GPU take those in tiles."""

_OF_CONFIGURATION = ("embedding_multiplier", "logit_scale")
"""Attributes of modules that the decoder takes from the configuration, where the modules have them from."""

_NUMBERS = (
    "scaling", "variance_epsilon", "eps", "attention_scaling", "full_attention_attention_scaling", "sliding_attention_attention_scaling",
    "use_rope", "sliding_window", "is_sliding", "attn_logit_softcapping", "use_parallel_residual", "residual_multiplier", *_OF_CONFIGURATION,
    "residual_scale",
    # experts
    "top_k", "norm_topk_prob", "routed_scaling_factor", "num_group", "topk_group", "topk_method", "router_jitter_noise", "limit", "alpha", "has_bias", "has_gate",
    "has_post_expert_norm", "use_expert_bias", "is_transposed", "is_concatenated",
    # latents and recurrent layers
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "activation",
    # inputs of each layer, keys of others
    "is_kv_shared_layer", "store_full_length_kv", "layer_type", "use_alternative_attention", "with_scale", "hidden_size_per_layer_input",
    "per_layer_input_scale", "per_layer_model_projection_scale",
)  # fmt: skip
"""Attributes of modules that the decoder takes over."""

_CLASSES = (
    "ForCausalLM", "Model", "TextModel", "DecoderLayer", "Attention", "MLP", "RMSNorm", "LayerNorm", "LayerNormPerHead", "LayerNorm1P", "RotaryEmbedding",
    "TextDecoderLayer", "TextAttention", "TextMLP", "TextRotaryEmbedding", "TextScaledWordEmbedding", "ScaledWordEmbedding",
    "Experts", "TopKRouter", "TopkRouter", "SparseMoeBlock", "MoE", "Moe", "GatedDeltaNet", "RMSNormGated", "ShortConv",
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
        lacking: what the native decoder lacks for the others, as a phrase.
        in_stages: whether the forward is embedding, layers with a rotary embedding, norm, head, and nothing in between but ``numbers``, so that it can be cut.
        source: name of the module of the classes where it is not ``model_type``.
        norms: attributes of a layer by the names of the norms in :class:`LayerWeights`. A norm that is None is not there.
        norm_offset: added to the weights of the norms.
        matrices: attributes of attention and feed-forward that are not ``NAME_proj``, by the names of the matrices in :class:`LayerWeights`.
        activation: where the feed-forward calls a function in place of a module.
        is_parallel: a layer without a norm in front of its feed-forward adds attention and feed-forward of the same hidden states.
        rotates: whether an attention rotates queries and keys; None: all do.
        rotates_pairs: neighbours are rotated, not the halves of a head.
        norms_rotated: the norms of queries and keys come after the rotation.
        query_factors: what queries are multiplied by, from the configuration and their positions.
        scales_embedding: the module of the token embedding multiplies by a factor, or in transformers 5.0 the model.
        numbers: constants of :class:`DecoderShape` from the configuration; ``logit_divisor`` is the inverse of a ``logit_scale``.
        routing: how experts are chosen, by their router; None: there are none.
        gates_attention: half of the rows of the queries are gates of what the attention gives. The other layers have a gated delta net.
    """

    model_type: str
    prefix: str | None = None
    lacking: str | None = None
    in_stages: bool = True
    source: str | None = None
    norms: Mapping[str, str] = field(default_factory=BEFORE.copy)
    norm_offset: float = 0.0
    matrices: Mapping[str, str] = field(default_factory=dict)
    activation: str | None = None
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
        return own, own.union(common, _FOR_CPU, activations())

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


_OF_LFM2 = {"input_norm": "operator_norm", "post_norm": "ffn_norm"}
_LINEAR_OF_LFM2 = {"o": "out_proj", "gate": "w1", "up": "w3", "down": "w2"}

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
        Family(
            "gemma4_text", "Gemma4", source="gemma4", in_stages=False, norms=AROUND | {"per_layer_norm": "post_per_layer_input_norm"},
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
            numbers={"embedding_scale": lambda c: c.embedding_multiplier, "logit_divisor": lambda c: c.logits_scaling},
        ),
        Family("mixtral", "Mixtral", routing=by_softmax),
        Family("phimoe", "Phimoe", routing=by_sparse_mixer),
        Family("qwen2_moe", "Qwen2Moe", routing=by_softmax),
        Family("qwen3_moe", "Qwen3Moe", routing=by_softmax),
        Family("gpt_oss", "GptOss", routing=by_softmax),
        Family(
            "granitemoe", "GraniteMoe", routing=by_softmax,
            numbers={"embedding_scale": lambda c: c.embedding_multiplier, "logit_divisor": lambda c: c.logits_scaling},
        ),
        Family("deepseek_v3", "DeepseekV3", routing=by_sigmoids),
        Family("glm4_moe", "Glm4Moe", routing=by_sigmoids),
        Family("dots1", "Dots1", routing=by_sigmoids),
        Family("qwen3_next", "Qwen3Next", norm_offset=1.0, routing=by_softmax, gates_attention=True),
        Family("qwen3_5_text", "Qwen3_5", source="qwen3_5", norm_offset=1.0, gates_attention=True),
        Family(
            "qwen3_5_moe_text", "Qwen3_5Moe", source="qwen3_5_moe", norm_offset=1.0, routing=by_softmax,
            gates_attention=True,
        ),
        Family("lfm2", "Lfm2", in_stages=False, norms=_OF_LFM2, matrices=_LINEAR_OF_LFM2, activation="silu"),
        Family(
            "lfm2_moe", "Lfm2Moe", in_stages=False, norms=_OF_LFM2, matrices=_LINEAR_OF_LFM2, activation="silu",
            routing=by_sigmoids_of_all,
        ),
        Family("deepseek_v2", "DeepseekV2", in_stages=False, rotates_pairs=True, routing=by_softmax_of_groups),
        Family("minicpm3", "MiniCPM3", in_stages=False, numbers={"logit_divisor": lambda c: c.logits_scaling}),
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
    scale = outer_embedding_scale(parts)
    return hidden if scale is None else hidden * scale


def outer_embedding_scale(parts: ModelParts) -> float | None:
    """What the model multiplies the outputs of its token embedding by; None: it has no such factor."""
    family, embed = FAMILIES.get(parts.config.model_type), parts.embed
    if family is None or embed is None:
        return None
    if family.scales_embedding and compat.scales_outside(family.module):
        form = embed.form if isinstance(embed, HeldMatrix) else None
        dtype = embed.weight.dtype if form is None else form.tiled or torch.float32
        return float(torch.tensor(parts.config.hidden_size**0.5, dtype=dtype, device="cpu"))
    return family.numbers_of(parts.config).get("embedding_scale")


def scaled(parts: ModelParts, logits: torch.Tensor) -> torch.Tensor:
    """The model's logits of what its head gives."""
    numbers = _numbers(parts)
    if (scale := numbers.get("logit_scale")) is not None:
        logits = logits * scale
    if (divisor := numbers.get("logit_divisor")) is not None:
        logits = logits / divisor
    cap = numbers.get("logit_softcap")
    return cap * torch.tanh(logits / cap) if cap else logits


def _numbers(parts: ModelParts) -> dict[str, float]:
    family = FAMILIES.get(parts.config.model_type)
    return {} if family is None else family.numbers_of(parts.config)


@functools.cache
def activations() -> dict[type, str]:
    """The native decoder's activations by the classes of transformers."""
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
    return {type(ACT2FN[theirs]): ours for theirs, ours in names.items()}


def family_of(model: PreTrainedModel | ModelParts) -> Family:
    """The family of a model, or of parts of one. Raises :class:`NotReadable` for a class or a type outside of the table."""
    if isinstance(model, ModelParts):
        model_type = model.config.model_type
        found = FAMILIES.get(model_type)
        if found is None or found.prefix is None:
            raise NotReadable(_without_native_form(f"model_type {model_type!r}", found))
        return found
    kind = type(model)
    family = NATIVE_CLASSES.get(kind.__name__)
    if family is None or kind.__module__ != family.module:
        raise NotReadable(_without_native_form(kind.__name__, FAMILIES.get(model.config.model_type)))
    return family


def _without_native_form(what: str, family: Family | None) -> str:
    return f"{what} has no native form" + (f": {family.lacking}" if family is not None and family.lacking else "")


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
        elif kind not in (classes if packed else classes - _FOR_CPU) and (packed or not is_tiled(module)):
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
        changing = changing_buffers(module)
        seen += [_place(buffer) for at, buffer in module._buffers.items() if buffer is not None and at not in changing]
        if kind in own or kind is nn.LayerNorm:
            seen += map(vars(module).get, _NUMBERS)
            _check_numbers(module, where, model.config)
    taken = DTYPES if packed else DTYPES | {torch.float16}
    if len(dtypes) != 1 or not dtypes <= taken:
        raise NotReadable(f"its weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}")
    windows = windows_of(model if isinstance(model, ModelParts) else ModelParts.of(model))
    return (*dtypes, *seen, *windows, *configuration_read(model.config, own))


def _check_numbers(module: nn.Module, where: str, config: Any) -> None:
    for name in _OF_CONFIGURATION:
        own = vars(module).get(name)
        if own is not None and own != (said := getattr(config, name, own)):
            raise NotReadable(f"{where} has a {name} of {own}, and its configuration says {said}")


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


def attention_of(layer: Any) -> Any:
    """The module of a layer's attention."""
    return getattr(layer, "self_attn", None)


def feed_forward_of(layer: Any) -> Any:
    """The module of a layer's feed-forward."""
    return next(getattr(layer, name) for name in ("mlp", "block_sparse_moe", "feed_forward") if hasattr(layer, name))


def products_of(model: PreTrainedModel | ModelParts) -> Iterator[tuple[Any, ...]]:
    """The linear modules of a model, layer by layer and then the head. Those of one input come together."""
    parts, family = model if isinstance(model, ModelParts) else ModelParts.of(model), family_of(model)
    for layer in parts.layers:
        for part, names in (
            (attention_of(layer), ("qkv", "q", "k", "v", "o")),
            (feed_forward_of(layer), ("gate_up", "gate", "up", "down")),
        ):
            linears = [*family.matrices_of(part, names).values()]
            # Neither experts nor recurrent parts have any.
            yield tuple(linears[:-1])
            yield tuple(linears[-1:])
    yield () if parts.head is None else (parts.head,)


def is_opaque(linear: Any) -> bool:
    """Whether a module in the place of a linear one multiplies in a way of its own: quantised, or with an adapter."""
    own = type(linear) in (nn.Linear, Int8Linear, QuantizedLinear, StackedLinear) or is_tiled(linear)
    return not own or any(type(p) is not nn.Parameter for p in linear._parameters.values() if p is not None)


def is_opaque_linear(module: Any) -> bool:
    """Whether a module, wherever it is, stands for a linear one and :func:`is_opaque`."""
    return isinstance(getattr(module, "in_features", None), int) and is_opaque(module)


def opaque(model: PreTrainedModel | ModelParts) -> list[Any]:
    """The linear modules of a model of which only the call is known, see :func:`is_opaque`."""
    return [linear for linears in products_of(model) for linear in linears if is_opaque(linear)]


def layout_of(parts: ModelParts) -> CacheLayout:
    """What the layers of the whole model keep. Raises :class:`NotReadable` for layers that cannot be rolled back."""
    try:
        return CacheLayout.of(parts.config)
    except UnsupportedLayers as error:
        raise NotReadable(str(error)) from error


def windows_of(parts: ModelParts) -> tuple[int | None, ...]:
    """The windows of the layers of parts, see :class:`CacheLayout`."""
    return layout_of(parts).windows[parts.first : parts.first + len(parts.layers)]


def runs(linears: tuple[Any, ...]) -> list[list[Any]]:
    """Linear modules of one input, cut into runs whose matrices one product can take as one: all in numbers, or all in tiles of one format, of which none has a
    part of a band at its end."""
    found: list[list[Any]] = []
    for linear in linears:
        before = found[-1][-1] if found else None
        if before is None or _kind(before) != _kind(linear) or (_kind(linear) and before.out_features % BAND):
            found.append([])
        found[-1].append(linear)
    return found


def _kind(linear: Any) -> str | None:
    """The format of tiles; None: it has numbers."""
    return linear.form.format if is_tiled(linear) else None


def of_one_input(model: PreTrainedModel) -> list[tuple[torch.Tensor, ...]]:
    """Tensors whose rows may be those of one matrix, or of one bias: of queries, keys and values, and of gate and up.

    Args:
        model: one that :func:`read` accepts. Phi-3 has such matrices by itself, so it has no groups. Nor have opaque modules.
    """
    groups: list[tuple[torch.Tensor, ...]] = []
    for linears in products_of(model):
        for run in () if any(map(is_opaque, linears)) else runs(linears):
            if len(run) > 1:
                groups.append(tuple(linear.weight if _kind(linear) is None else linear.tiles for linear in run))
                if run[0].bias is not None:
                    groups.append(tuple(linear.bias for linear in run))
    return groups
