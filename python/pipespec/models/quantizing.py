"""Models whose matrices are quantised when they are loaded: out of another model, with which they share every parameter that they do not change.

These are the same ``nn.Parameter`` objects in modules of their own. So whatever moves a weight (shared memory, merged matrices, ``.to()``) moves it for
both models, and no weight exists twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.properties import base_layer, is_adapted, not_whole_reason, quantisation
from pipespec.models.quantized import (
    INT8,
    Int8Linear,
    JoinedLinear,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    has_blocks,
    untie,
)
from pipespec.models.tiled import TiledEmbedding, TiledExperts, TiledLinear, on_gpu
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, format_of, quantize

_SMALLEST = min(form.block for form in FORMATS.values())

_INSTEAD = {"q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Where blocks of 256 do not fill a row."""


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's modules and configuration that has the same parameters and buffers.

    Raises:
        ValueError: the model is split, offloaded or sharded, and hooks or processes would have to follow.
    """
    if (why := not_whole_reason(model)) is not None:
        raise ValueError(
            f"a draft is made out of a model that is whole on one device, and this {type(model).__name__} is not: {why}"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    draft = copy.deepcopy(model, memo)
    # attach() sets it on the instance.
    draft.__dict__.pop("generate", None)
    return draft.eval()


def quantized(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A model with the matrices of another one in blocks, adapters merged; what is in blocks already stays so. Head and embedding are in 6 bits at least, as llama.cpp has them.

    On the CPU all else becomes float32, in which the model then computes; so do matrices whose rows no blocks fill. On a GPU all else keeps the model's dtype, see
    :func:`pipespec.models.tiled.on_gpu`.

    Args:
        model: whole; is not changed.
        name: one of :data:`pipespec.config.WEIGHT_FORMATS`.

    Raises:
        ValueError: it is quantised already or split, blocks fill the rows of none of its matrices, or one has weights that no block holds.
    """
    is_whole = not any(type(module) in (nn.Linear, nn.Embedding) for module in model.modules())
    in_blocks = has_blocks(model) and (is_whole or name == INT8)
    has_int8 = any(type(module) is Int8Linear for module in model.modules())
    method = "in blocks" if in_blocks else INT8 if has_int8 else quantisation(model)
    if method is not None:
        raise ValueError(f"weights={name!r}: the {type(model).__name__} is quantised already ({method})")
    made, is_on_cpu = sharing(model), model.device.type in ("cpu", "meta")
    if name == INT8:
        with torch.no_grad():
            replace_linear(made, lambda _, linear: Int8Linear.of(linear))
        untie(made)
        return made.eval() if is_on_cpu else on_gpu(made.eval(), model.device, model.dtype)
    head, embedding = made.get_output_embeddings(), made.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    with torch.no_grad():
        put_in_blocks(made, name, head)
        if not has_blocks(made):
            raise ValueError(
                f"weights={name!r}: blocks of {_SMALLEST} weights fill the rows of no matrix of the {type(model).__name__}"
            )
        if isinstance(embedding, nn.Embedding) and embedding.embedding_dim % _SMALLEST == 0:
            new: Any = made.get_output_embeddings()
            matrix = new.matrix if tied else _quantized(embedding.weight, name, "the embedding", is_end=True)
            made.set_input_embeddings(QuantizedEmbedding(matrix, getattr(embedding, "scalar_embed_scale", None)))
        for at, other in list(made.named_modules()):
            # Of per-layer inputs, which may be half of the model.
            if isinstance(other, nn.Embedding) and other is not embedding and other.embedding_dim % _SMALLEST == 0:
                matrix = _quantized(other.weight, name, at, is_end=True)
                made.set_submodule(at, QuantizedEmbedding(matrix, getattr(other, "scalar_embed_scale", None)))
        if is_on_cpu:
            rest_in_float32(made)
    if is_on_cpu:
        made.config.dtype = torch.float32
    untie(made)
    return made.eval() if is_on_cpu else on_gpu(made.eval(), model.device, model.dtype)


def replace_linear(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Replace the linear modules, given by their names, with adapters merged: their low-rank matrices would lose more than the layer's."""
    within: tuple[str, ...] = ()
    for at, module in list(model.named_modules()):
        if at.startswith(within):
            continue
        own: Any = module
        if is_adapted(module):
            within += (f"{at}.",)
            own = base_layer(module) if type(module.base_layer) is nn.Linear else None
        if type(own) is nn.Linear:
            model.set_submodule(at, make(at, own))


def put_in_blocks(model: nn.Module, name: str, head: nn.Module | None) -> None:
    """Replace the linear modules whose rows blocks fill. ``head``: the one that gives the logits."""

    def made(at: str, linear: nn.Linear) -> nn.Module:
        # What makes keys and values of latents is applied to queries and outputs, as floats.
        if linear.in_features % _SMALLEST or at.endswith("kv_b_proj"):
            return linear
        is_end = head is not None and model.get_submodule(at) is head
        matrix = _quantized(linear.weight, name, at, is_end=is_end)
        bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        return QuantizedLinear(matrix, bias)

    replace_linear(model, made)


def rest_in_float32(model: nn.Module) -> None:
    """Cast the parameters that are left, in which the model then computes."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype is not torch.float32:
                module._parameters[leaf] = nn.Parameter(parameter.detach().float(), requires_grad=False)


def _quantized(weight: torch.Tensor, name: str, at: str, *, is_end: bool) -> QuantizedMatrix:
    """A matrix in the format that fits it."""
    columns = weight.shape[1]
    if is_end and format_of(name).bytes_per_weight < FORMATS["q6_k"].bytes_per_weight:
        name = "q6_k"
    if columns % format_of(name).block:
        name = _INSTEAD.get(name, name)
    try:
        return quantize(weight, name)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error


_HELD = (
    Int8Linear,
    QuantizedLinear,
    QuantizedEmbedding,
    QuantizedExperts,
    TiledLinear,
    TiledEmbedding,
    TiledExperts,
    JoinedLinear,
)
"""Modules that the class of a model does not make."""


def held_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By their names, copies of the modules in int8 or in blocks on the meta device, which can be pickled. They have no hooks, and the ``forward`` of their class."""
    found: dict[str, nn.Module] = {}
    within: tuple[str, ...] = ()  # joined matrices and experts hold their parts
    for name, module in model.named_modules():
        if isinstance(module, _HELD) and not name.startswith(within):
            memo: dict[int, Any] = {id(own): _on_meta(own) for own in (*module.parameters(), *module.buffers())}
            spaces = [space for part in module.modules() for at, space in vars(part).items() if "_hooks" in at]
            memo |= {id(hooks): type(hooks)() for hooks in spaces if isinstance(hooks, dict)}
            found[name] = copied = copy.deepcopy(module, memo)
            for part in map(vars, copied.modules()):
                part.pop("forward", None)
                if "source" in part:
                    part["source"] = None  # a mapped file
            within += (f"{name}.",)
    return found


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def skeleton(kind: type[PreTrainedModel], config: Any, held: Mapping[str, nn.Module]) -> PreTrainedModel:
    """A model on the meta device with :func:`held_modules` of another one."""
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    for name, module in held.items():
        model.set_submodule(name, module)
    return model
