"""Families of models, and where the weights are that the native decoder takes.

A family is added by a row in :data:`FAMILIES`. It may have a native form where its layers have LLaMA's parts. Whether the decoder computes what the model computes is not
assumed from the classes: :mod:`pipespec.engine.form` compares the outputs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from pipespec.models.devices import not_whole_reason
from pipespec.models.layout import CacheLayout, UnsupportedLayers, configuration_read
from pipespec.models.parts import ModelParts
from pipespec.models.properties import has_dropout, has_hooks, has_own_forward
from pipespec.models.quantized import Int8Linear, QuantizedEmbedding, QuantizedLinear
from pipespec_kernels.decoder import DecoderShape, LayerWeights
from pipespec_kernels.formats import QuantizedMatrix

DTYPES = frozenset((torch.float32, torch.bfloat16))
"""Dtypes of models that the native decoder packs."""

_NUMBERS = ("scaling", "variance_epsilon", "eps", "attention_scaling")
"""Attributes of modules that the decoder takes over."""


class NotReadable(Exception):
    """The native decoder cannot take a model. The message says why, as a phrase without a subject of its own."""


@dataclass(frozen=True)
class Family:
    """A type of models that the tests run.

    Attributes:
        model_type: transformers' name, also of the module in ``transformers.models`` where the family has a native form.
        prefix: of the names of the classes, for models with LLaMA's parts, whose weights the native decoder takes; None for others.
        in_stages: whether the forward is embedding, layers with a rotary embedding, norm, head, and nothing in between, so that it can be cut.
        merged: whether queries, keys and values are one matrix, and gate and up another, as in Phi-3.
        norm_offset: added to the weights of the norms.
        embedding: the class of the token embedding where it is not ``nn.Embedding``.
    """

    model_type: str
    prefix: str | None = None
    in_stages: bool = True
    merged: bool = False
    norm_offset: float = 0.0
    embedding: str | None = None

    @property
    def module(self) -> str:
        """The module of the classes."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @functools.cached_property
    def classes(self) -> tuple[frozenset[type], frozenset[type]]:
        """The family's own classes, and those of all modules of such a model."""
        assert self.prefix is not None
        source = sys.modules[self.module]
        parts = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
        own = frozenset(getattr(source, f"{self.prefix}{part}") for part in parts)
        # Dropout that does something is excluded.
        common = (nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout, Int8Linear, QuantizedLinear, QuantizedEmbedding)
        return own, own.union(common, _activations(), [getattr(source, self.embedding or "", nn.Embedding)])


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "Llama"),
        Family("mistral", "Mistral"),
        Family("qwen2", "Qwen2"),
        Family("qwen3", "Qwen3"),
        Family("phi3", "Phi3", merged=True),
        Family("gemma", "Gemma", norm_offset=1.0, embedding="GemmaTextScaledWordEmbedding"),
        Family("gemma3_text", norm_offset=1.0),
        Family("ministral"),
        Family("mixtral"),
        Family("phimoe"),
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family("olmo2"),
        Family("olmo3"),
        Family("smollm3"),
        Family("starcoder2"),
        Family("stablelm"),
        Family("exaone4"),
        Family("glm4"),
        Family("gpt_oss"),
        Family("deepseek_v3"),
        Family("dots1"),
        Family("qwen3_next"),
        Family("qwen3_5_text"),
        Family("qwen3_5_moe_text"),
        Family("cohere2", in_stages=False),
        Family("deepseek_v2", in_stages=False),
        Family("gemma2", in_stages=False, norm_offset=1.0),
        Family("granite", in_stages=False),
        Family("minicpm3", in_stages=False),
    )
}
"""The families, by their ``model_type``: the one list of them. A model of another type is checked on a copy on the meta device."""

NATIVE_CLASSES = {f"{family.prefix}ForCausalLM": family for family in FAMILIES.values() if family.prefix is not None}
"""Those with a native form, by the name of the model's class."""

IN_STAGES = tuple(family.model_type for family in FAMILIES.values() if family.in_stages)
"""Model types that can be cut into layer stages."""


@functools.cache
def _activations() -> dict[type, str]:
    """The native decoder's activations by the classes of transformers."""
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
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
        if kind in own:
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
    parts, fused = model if isinstance(model, ModelParts) else ModelParts.of(model), family_of(model).merged
    for layer in parts.layers:
        attn, mlp = layer.self_attn, layer.mlp
        yield (attn.qkv_proj,) if fused else (attn.q_proj, attn.k_proj, attn.v_proj)
        yield (attn.o_proj,)
        yield (mlp.gate_up_proj,) if fused else (mlp.gate_proj, mlp.up_proj)
        yield (mlp.down_proj,)
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
        head: ``[vocabulary, hidden]``, or None.
        head_bias: ``[vocabulary]``, or None.
        head_scale: ``[vocabulary]`` of a head in int8, or None.
        rotary: the model's rotary embedding; None without layers.
        scaled: the embedding's module where it does more than look up rows; else None.
    """

    shape: DecoderShape
    layers: tuple[LayerWeights, ...]
    windows: tuple[int | None, ...]
    embedding: Any
    norm: Any
    head: Any
    head_bias: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotary: Any
    scaled: nn.Module | None


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
    is_scaled = type(embed) is not nn.Embedding and getattr(getattr(embed, "form", None), "scale", 1.0) is not None
    if embed is not None and family.embedding is not None and not is_scaled:
        # In transformers 5.0.
        raise NotReadable("its embedding is scaled outside of the embedding's module")
    norms = [norm for layer in parts.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    eps = {
        float(getattr(norm, "variance_epsilon", None) or norm.eps) for norm in (*norms, parts.norm) if norm is not None
    }
    if len(eps) > 1:
        raise NotReadable("its norms differ in more than their weights")
    of_head = {} if head is None else _of_linear(head, "head")
    ends = [matrix_of(end) for end in (head, embed) if end is not None]
    shape = DecoderShape(
        hidden=config.hidden_size,
        vocabulary=ends[0].shape[0] if ends else 1,
        eps=eps.pop() if eps else 0.0,
        norm_offset=family.norm_offset,
        **_layer_sizes(parts),
    )
    return ReadModel(
        shape,
        tuple(_layer(layer, shape, family.merged) for layer in parts.layers if matrices),
        _windows_of(parts),
        None if embed is None else matrix_of(embed),
        None if parts.norm is None else parts.norm.weight.detach(),
        of_head.get("head"),
        of_head.get("head_bias"),
        of_head.get("head_scale"),
        parts.rotary,
        embed if is_scaled else None,  # a lookup outside of the decoder
    )


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


def _layer_sizes(parts: ModelParts) -> dict[str, Any]:
    """What a :class:`DecoderShape` says of the layers."""
    if not parts.layers:
        return {"intermediate": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "rotary_dim": 0, "scale": 1.0}
    config, rotary = parts.config, parts.rotary
    if rotary.rope_type not in ("default", "linear", "llama3", "yarn"):
        raise NotReadable(f"its RoPE of type {rotary.rope_type} depends on the length of the text")
    if not all(layer.self_attn.is_causal for layer in parts.layers):
        raise NotReadable("its attention is not causal")
    kinds = {(at.head_dim, at.scaling, _activation(layer.mlp)) for layer in parts.layers for at in [layer.self_attn]}
    if len(kinds) > 1:
        raise NotReadable("its layers differ in more than their weights")
    head_dim, scale, activation = kinds.pop()
    return {
        "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rotary_dim": 2 * rotary.inv_freq.numel(),
        "scale": scale,
        "activation": activation,
    }


def _activation(mlp: Any) -> str:
    module = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    name = _activations().get(type(module))
    if name is None:
        raise NotReadable(f"its activation is {type(module).__name__}")
    return name


def _layer(layer: Any, shape: DecoderShape, is_merged: bool) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    weights: dict[str, Any] = {}
    if is_merged:
        heads = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        weights |= _of_rows(attn.qkv_proj, ("q", "k", "v"), heads)
        weights |= _of_rows(mlp.gate_up_proj, ("gate", "up"), [shape.intermediate] * 2)
    for part, names in ((attn, ("q", "k", "v", "o")), (mlp, ("gate", "up", "down"))):
        for name in names:
            if name not in weights:
                weights |= _of_linear(getattr(part, f"{name}_proj"), name)
    weights |= {name: getattr(attn, name).weight.detach() for name in ("q_norm", "k_norm") if hasattr(attn, name)}
    inputs, norm = layer.input_layernorm.weight.detach(), getattr(layer, "hidden_norm", None)
    if norm is not None:
        # A draft head's first layer reads embeddings beside the hidden states, which have the second norm.
        weights |= {"side_norm": inputs, "adds_to_norm": layer.norm_before_residual}
        inputs = norm.weight.detach()
    return LayerWeights(input_norm=inputs, post_norm=layer.post_attention_layernorm.weight.detach(), **weights)


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
    """Bytes that the packed copy of matrices in blocks takes. Others are read where they lie."""
    parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
    return sum(m.blocks.nbytes for _, m in parts.named_modules() if isinstance(m, QuantizedLinear))
