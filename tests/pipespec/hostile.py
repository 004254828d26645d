"""Changes that programs make to a model, its calls and its process, for a test that draws some of them at random."""

import copy
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers.generation.logits_process as logits_process
import transformers.generation.utils as generation_utils
import transformers.models.cohere.modeling_cohere as modeling_cohere
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.support.streamers import Held
from tests.waiting import until

Undo = Callable[[], None]


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.model.layers


def _coarse(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).round() / 2


class Wrapped(nn.Module):
    """A module around another one, whose result depends on the last column."""

    def __init__(self, inner: nn.Module, last: bool = False) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if not self.last:
            return out
        first = out[0] if isinstance(out, tuple) else out
        first = first.clone()
        first[:, -1] *= 1.5
        return (first, *out[1:]) if isinstance(out, tuple) else first


def _on_first(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(out, tuple):
        return (change(out[0].clone()), *out[1:])
    return change(out.clone())


def _last(x: torch.Tensor) -> torch.Tensor:
    x[:, -1] += 0.7
    return x


def _by_width(x: torch.Tensor) -> torch.Tensor:
    return x * 1.3 if x.shape[1] == 1 else x


def _at(model: PreTrainedModel, path: str) -> Any:
    return functools.reduce(
        lambda at, name: at[int(name)] if name.isdigit() else getattr(at, name), path.split("."), model
    )


def to(path: str, make: Callable[[Any], Any]) -> Any:
    """Exchange a part or a number of the model by what ``make`` makes of it, for good."""

    def apply(model: PreTrainedModel) -> None:
        owner, _, name = path.rpartition(".")
        place = _at(model, owner) if owner else model
        if name.isdigit():
            place[int(name)] = make(place[int(name)])
        else:
            setattr(place, name, make(getattr(place, name)))

    return apply


def patch(place_of: Callable[[PreTrainedModel], Any], name: str, make: Callable[[Any], Any]) -> Any:
    """Replace an attribute of a class or a module, which may not have it, by what ``make`` makes of it, until the result is called."""

    def apply(model: PreTrainedModel) -> Undo | None:
        place = place_of(model)
        if not hasattr(place, name):
            return None
        is_own, before = name in vars(place), getattr(place, name)
        setattr(place, name, make(before))

        def undo() -> None:
            if is_own:
                setattr(place, name, before)
            else:
                delattr(place, name)

        return undo

    return apply


# ---- code


def _louder(function: Any) -> Any:
    """An attention whose decoding steps see smaller queries."""

    def changed(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(module, query * (0.5 if query.shape[2] == 1 else 1.0), *args, **kwargs)

    return changed


def _with_coarse(values: bool) -> Any:
    """Of an ``update()`` of caches."""

    def make(before: Any) -> Any:
        return lambda self, k, v, *args, **kw: before(self, _coarse(k), _coarse(v) if values else v, *args, **kw)

    return make


def _in_steps(factor: float, axis: int) -> Any:
    """Of a function: other results where there is one column."""

    def make(before: Any) -> Any:
        def changed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = before(x, *args, **kwargs)
            return out * factor if x.shape[axis : axis + 1] == (1,) else out

        return changed

    return make


def _smaller(before: Any) -> Any:
    return lambda *args, **kwargs: tuple(0.9 * x for x in before(*args, **kwargs))


def _source(model: PreTrainedModel) -> types.ModuleType:
    return sys.modules[type(model).__module__]


def class_forward(kind_of: Callable[[PreTrainedModel], type], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def make(before: Any) -> Any:
        return lambda self, *args, **kwargs: _on_first(before(self, *args, **kwargs), change)

    return patch(kind_of, "forward", make)


def instance_forward(model: PreTrainedModel) -> None:
    mlp = _layers(model)[1].mlp
    before = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: _by_width(before(self, x)), mlp)


def wrapped_by_accelerate(model: PreTrainedModel) -> None:
    utils = pytest.importorskip("accelerate.utils")
    instance_forward(model)
    mlp = _layers(model)[1].mlp
    mlp.forward = utils.convert_outputs_to_fp32(mlp.forward)


def hooked_by_accelerate(model: PreTrainedModel) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    instance_forward(model)
    hooks.add_hook_to_module(_layers(model)[1].mlp, hooks.AlignDevicesHook(execution_device="cpu"))


def registered_attention(has_mask: bool) -> Any:
    def apply(model: PreTrainedModel) -> None:
        name = f"hostile_{has_mask}"
        AttentionInterface.register(name, lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
        if has_mask:
            AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)

    return apply


def replaced_attention(model: PreTrainedModel) -> Undo:
    mapping = AttentionInterface._global_mapping
    before = mapping["sdpa"]
    mapping["sdpa"] = _louder(before)
    return lambda: mapping.update(sdpa=before)


class Registry(AttentionInterface):
    def get_interface(self, name: str, default: Any) -> Any:
        return _louder(super().get_interface(name, default))


def _registry_of_its_own(before: Any) -> Any:
    registry = AttentionInterface()
    registry["sdpa"] = _louder(sdpa_attention_forward)
    return registry


def function_of_another_model(model: PreTrainedModel) -> Undo | None:
    if _source(model) is modeling_cohere:
        return None
    return patch(_source, "apply_rotary_pos_emb", lambda before: modeling_cohere.apply_rotary_pos_emb)(model)


def _other_torch(before: Any) -> Any:
    changed = types.ModuleType("torch")
    vars(changed).update(vars(before))
    changed.cat = lambda tensors, dim=0: torch.cat([-tensors[0], *tensors[1:]], dim)  # type: ignore[attr-defined]
    return changed


def property_of_a_class(model: PreTrainedModel) -> Undo:
    kind, name = type(_layers(model)[0].input_layernorm), _epsilon_of(model.model.norm)
    setattr(kind, name, property(lambda self: 0.5, lambda self, value: None))
    return lambda: delattr(kind, name) if name in vars(kind) else None  # a trial may change it twice


def _epsilon_of(norm: nn.Module) -> str:
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


# ---- hooks


def hook(place: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def apply(model: PreTrainedModel) -> None:
        _at(model, place).register_forward_hook(lambda module, args, out: _on_first(out, change))

    return apply


def pre_hook(model: PreTrainedModel) -> None:
    _layers(model)[0].mlp.register_forward_pre_hook(lambda module, args: (_by_width(args[0]), *args[1:]))


def global_hook(model: PreTrainedModel) -> Undo:
    kind = type(_layers(model)[0].mlp)

    def change(module: Any, args: Any, out: Any) -> Any:
        return _on_first(out, _last) if isinstance(module, kind) else None

    return nn.modules.module.register_module_forward_hook(change).remove


def hook_of_accelerate(model: PreTrainedModel) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Hook(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return _on_first(output, _last)

    hooks.add_hook_to_module(_layers(model)[1].mlp, Hook())


# ---- weights


def by_data(model: PreTrainedModel) -> None:
    _layers(model)[1].mlp.down_proj.weight.data[3, 5] = 9.0


def by_numpy(model: PreTrainedModel) -> None:
    np.asarray(model.get_input_embeddings().weight.detach())[5:60] *= 2


def frequencies_by_numpy(model: PreTrainedModel) -> None:
    np.multiply(model.model.rotary_emb.inv_freq.numpy(), 0.3, out=model.model.rotary_emb.inv_freq.numpy())


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight[5:9].mul_(1.7)


def number(model: PreTrainedModel) -> None:
    for layer in _layers(model):
        layer.self_attn.scaling *= 1.5


def optimizer_step(model: PreTrainedModel) -> None:
    model.train()
    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    model.zero_grad()
    model.eval()


def stays_in_training(model: PreTrainedModel) -> None:
    model.train()


def double(model: PreTrainedModel) -> None:
    model.double()


# ---- structure


def wrapped(place: str, last: bool = False) -> Any:
    return to(place, lambda module: Wrapped(module, last))


def wrapped_embedding(model: PreTrainedModel) -> None:
    model.set_input_embeddings(Wrapped(model.get_input_embeddings()))


def exchanged_layers(model: PreTrainedModel) -> None:
    layers = _layers(model)
    layers[0], layers[1] = layers[1], layers[0]


def more_tokens(model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.eval()


def head_with_bias(model: PreTrainedModel) -> None:
    old = model.lm_head
    model.lm_head = nn.Linear(old.in_features, old.out_features)
    with torch.no_grad():
        model.lm_head.weight.copy_(old.weight)
        model.lm_head.bias.copy_(torch.linspace(-1, 1, old.out_features))


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A function in the place of a module."""

    def apply(model: PreTrainedModel) -> None:
        mlp = _layers(model)[1].mlp
        del mlp.act_fn
        mlp.act_fn = function

    return apply


def _clamped(prepare: Any, limit: int) -> Any:
    def changed(*args: Any, **kwargs: Any) -> Any:
        given = prepare(*args, **kwargs)
        if given.get("input_ids") is not None:
            given["input_ids"] = given["input_ids"].clamp(max=limit)
        return given

    return changed


@functools.cache
def _own_class(kind: type) -> type:
    prepare = _clamped(kind.prepare_inputs_for_generation, 60)  # type: ignore[attr-defined]
    return type(f"Own{kind.__name__}", (kind,), {"prepare_inputs_for_generation": prepare, "__module__": __name__})


def own_class(model: PreTrainedModel) -> None:
    # One class for all models, so that a later patch of it is one for all.
    model.__class__ = _own_class(type(model))


def own_inputs(model: PreTrainedModel) -> None:
    prepare = functools.partial(type(model).prepare_inputs_for_generation, model)
    model.prepare_inputs_for_generation = _clamped(prepare, 50)


def own_update(model: PreTrainedModel) -> None:
    kind = type(model)

    def update(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.logits[:, -1, 3:9] += 2.0
        return kind._update_model_kwargs_for_generation(model, outputs, *args, **kwargs)

    model._update_model_kwargs_for_generation = update


def _one_more(before: Any) -> Any:
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = before(self, *args, **kwargs)
        return out if not isinstance(out, torch.Tensor) else torch.cat([out, out[:, -1:]], 1)

    return sample


def own_forward(model: PreTrainedModel) -> None:
    kind = type(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = kind.forward(model, *args, **kwargs)
        out.logits = out.logits * torch.linspace(1, 2, out.logits.shape[-1])
        return out

    model.forward = forward


# ---- the configuration


def configured(**entries: Any) -> Any:
    """Set entries of the configuration, known to the model's class or not."""

    def apply(model: PreTrainedModel) -> None:
        for name, value in entries.items():
            setattr(model.config, name, value)

    return apply


def window(model: PreTrainedModel) -> None:
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 5


def types_of_layers(kinds: tuple[str, ...]) -> Any:
    """In turn, with a window."""

    def apply(model: PreTrainedModel) -> None:
        count = model.config.num_hidden_layers
        model.config.sliding_window = getattr(model.config, "sliding_window", None) or 6
        model.config.layer_types = [f"{kinds[i % len(kinds)]}_attention" for i in range(count)]

    return apply


def types_in_place(model: PreTrainedModel) -> None:
    model.config.layer_types[1] = "full_attention"


def entry_of_rope(model: PreTrainedModel) -> None:
    model.config.rope_parameters["rope_theta"] = 3.0


# ---- weights without versions


def of_inference_mode(model: PreTrainedModel) -> None:
    """All weights are inference tensors from now on."""
    with torch.inference_mode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach() * 1.1, requires_grad=False)


def in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        _layers(model)[0].mlp.up_proj.weight[2:5].neg_()


def rows_by_data(model: PreTrainedModel) -> None:
    model.get_input_embeddings().weight.data[7:40] = 0


def column_by_data(model: PreTrainedModel) -> None:
    _layers(model)[0].self_attn.o_proj.weight.data[:, 3] = 2.0


def swapped_by_data(model: PreTrainedModel) -> None:
    """The same values at other places."""
    data = _layers(model)[1].mlp.down_proj.weight.data
    data[[1, 2]] = data[[2, 1]].clone()


def fewer_heads(model: PreTrainedModel) -> None:
    """One layer has half of its heads."""
    attention = _layers(model)[1].self_attn
    for name, axis in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        linear = getattr(attention, name)
        weight = linear.weight.detach()
        linear.weight = nn.Parameter(weight.narrow(axis, 0, weight.shape[axis] // 2).clone())
        linear.in_features, linear.out_features = linear.weight.shape[1], linear.weight.shape[0]
        if linear.bias is not None and axis == 0:
            linear.bias = nn.Parameter(linear.bias.detach()[: len(linear.weight)].clone())


# ---- registries


CACHES_BY_TYPE: dict[str, type] | None = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", None)
"""In newer versions of transformers."""


class ShortLayer(DynamicSlidingWindowLayer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(sliding_window=5)


def cache_by_type(model: PreTrainedModel) -> Undo | None:
    if CACHES_BY_TYPE is None:
        return None
    before = CACHES_BY_TYPE["full_attention"]
    CACHES_BY_TYPE["full_attention"] = ShortLayer
    return lambda: CACHES_BY_TYPE.update(full_attention=before)


MLP = "model.layers.1.mlp"
DOWN, OUT = f"{MLP}.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"

CHANGES: dict[str, Callable[[PreTrainedModel], Undo | None]] = {
    "class of the attention, last column": class_forward(lambda m: type(_layers(m)[0].self_attn), _last),
    "class of the MLP, width": class_forward(lambda m: type(_layers(m)[0].mlp), _by_width),
    "class of the norm": class_forward(lambda m: type(m.model.norm), lambda x: x * 1.1),
    "class nn.Linear": class_forward(lambda m: nn.Linear, _by_width),
    "forward of an MLP": instance_forward,
    "forward of an MLP, wrapped by accelerate": wrapped_by_accelerate,
    "forward of an MLP, hooked by accelerate": hooked_by_accelerate,
    "apply_rotary_pos_emb": patch(_source, "apply_rotary_pos_emb", _smaller),
    "apply_rotary_pos_emb, a mock": patch(_source, "apply_rotary_pos_emb", lambda before: mock.Mock(side_effect=_smaller(before))),
    "rotate_half": patch(_source, "rotate_half", _in_steps(1.2, 2)),
    "F.silu": patch(lambda m: F, "silu", _in_steps(1.1, -2)),
    "F.linear": patch(lambda m: F, "linear", _in_steps(1.1, -2)),
    "attention without a mask": registered_attention(False),
    "attention with a mask": registered_attention(True),
    "attention sdpa replaced": replaced_attention,
    "eager": lambda m: m.set_attn_implementation("eager"),
    "class of the cache's layers": patch(lambda m: DynamicLayer, "update", _with_coarse(values=True)),
    "class of new caches": patch(lambda m: generation_utils, "DynamicCache", lambda before: Rounded),
    "class of caches, update()": patch(lambda m: DynamicCache, "update", _with_coarse(values=False)),
    "get_interface() of the registry": patch(
        lambda m: AttentionInterface, "get_interface", lambda before: lambda self, name, default: _louder(before(self, name, default)),
    ),
    "another registry": patch(_source, "ALL_ATTENTION_FUNCTIONS", lambda before: Registry()),
    "another registry of transformers' class": patch(_source, "ALL_ATTENTION_FUNCTIONS", _registry_of_its_own),
    "RoPE's function of another model": function_of_another_model,
    "another torch": patch(_source, "torch", _other_torch),
    "torch.argmax": patch(lambda m: torch, "argmax", lambda before: lambda *a, **kw: (before(*a, **kw) + 1) % 90),
    "class of a processor": patch(
        lambda m: logits_process.SuppressTokensLogitsProcessor, "__call__",
        lambda before: lambda self, ids, scores: before(self, ids, scores) - 0.5 * scores.mean(0, keepdim=True),
    ),
    "class of processors, function": patch(
        lambda m: logits_process, "_get_ngrams", lambda before: lambda size, ids, rows: before(size, ids[:1], rows),
    ),
    "property of a class": property_of_a_class,
    "hook, last column": hook("model.layers.0", _last),
    "hook, width": hook(MLP, _by_width),
    "hook, everywhere": hook("model.norm", lambda x: x * 0.8),
    "hook of the head": hook("lm_head", lambda x: x.roll(1, -1)),
    "pre-hook": pre_hook,
    "global hook": global_hook,
    "hook of accelerate's kind": hook_of_accelerate,
    "weight by .data": by_data,
    "weight by numpy": by_numpy,
    "weight in place": in_place,
    "other .data": to("model.layers.0.input_layernorm.weight.data", lambda data: data * 1.4),
    "other parameter": to(OUT, lambda weight: nn.Parameter(weight.detach() * 0.6)),
    "another view": to(f"{OUT}.data", lambda data: data.t()),
    "repeated rows": to(DOWN, lambda weight: nn.Parameter(weight.detach()[:1].expand(weight.shape))),
    "frequencies in place": to("model.rotary_emb.inv_freq", lambda inv_freq: inv_freq.mul_(0.5)),
    "frequencies by numpy": frequencies_by_numpy,
    "scaling of all layers": number,
    "scaling of one layer": to("model.layers.1.self_attn.scaling", lambda scaling: scaling * 1.5),
    "epsilon of a norm": lambda m: setattr(_layers(m)[0].post_attention_layernorm, _epsilon_of(_layers(m)[0].post_attention_layernorm), 0.5),
    "tied head": lambda m: setattr(m.lm_head, "weight", m.get_input_embeddings().weight),
    "a step of training": optimizer_step,
    "training mode": stays_in_training,
    "float64": double,
    "wrapped layer": wrapped("model.layers.1"),
    "wrapped layer, last column": wrapped("model.layers.1", True),
    "wrapped attention": wrapped("model.layers.1.self_attn"),
    "wrapped MLP, last column": wrapped(MLP, True),
    "wrapped head": wrapped("lm_head"),
    "wrapped embedding": wrapped_embedding,
    "wrapped norm": wrapped("model.norm", True),
    "fewer layers": to("model.layers", lambda layers: nn.ModuleList(list(layers)[:-1])),
    "fewer layers by configuration": to("config.num_hidden_layers", lambda n: n - 1),
    "exchanged layers": exchanged_layers,
    "more tokens": more_tokens,
    "head with a bias": head_with_bias,
    "identity for an MLP": to(MLP, lambda mlp: nn.Identity()),
    "wrapped MLP, softmax of columns": to(MLP, lambda mlp: nn.Sequential(mlp, nn.Softmax(dim=1))),
    "function for an activation": activation(torch.tanh),
    "own activation": activation(lambda x: _by_width(F.silu(x))),
    "own class": own_class,
    "own prepare_inputs_for_generation": own_inputs,
    "own _update_model_kwargs_for_generation": own_update,
    "class's _sample": patch(type, "_sample", _one_more),
    "own forward": own_forward,
    "static cache": to("generation_config.cache_implementation", lambda _: "static"),
    "hybrid cache": to("generation_config.cache_implementation", lambda _: "hybrid"),
    "window": window,
    "window that the class may not know": configured(sliding_window=6),
    "no window": configured(sliding_window=None),
    "types of layers, full": types_of_layers(("full",)),
    "types of layers, sliding": types_of_layers(("sliding",)),
    "types of layers, mixed": types_of_layers(("full", "sliding")),
    "types of layers, in place": types_in_place,
    "chunks": configured(attention_chunk_size=6),
    "not causal by configuration": configured(is_causal=False),
    "caps of scores": configured(final_logit_softcapping=1.5, attn_logit_softcapping=0.7),
    "scales of scores": configured(logit_scale=0.03, logits_scaling=3.0),
    "other heads by configuration": configured(num_key_value_heads=4),
    "other sizes by configuration": configured(hidden_size=16, intermediate_size=16),
    "outputs by configuration": configured(output_router_logits=True, output_hidden_states=True),
    "entry of RoPE": entry_of_rope,
    "inference tensors": of_inference_mode,
    "rows in inference mode": in_inference_mode,
    "rows by .data": rows_by_data,
    "column by .data": column_by_data,
    "values exchanged by .data": swapped_by_data,
    "fewer heads in a layer": fewer_heads,
    "cache of a type of layers": cache_by_type,
    "repetition penalty": to("generation_config.repetition_penalty", lambda _: 1.4),
    "ends": to("generation_config.eos_token_id", lambda _: [5, 9, 17, 33, 41]),
}  # fmt: skip
"""Changes of a model, of its classes or of the process. Some return what undoes them."""


# ---- calls


class Counting(LogitsProcessor):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.roll(self.calls % 3, -1)


class PerRow(LogitsProcessor):
    """Has a number per row of the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.arange(len(scores))[:, None] * torch.linspace(-2, 2, scores.shape[1])


class Rounded(DynamicCache):
    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_coarse(keys), _coarse(values), *args, **kwargs)


class RoundedLayer(DynamicLayer):
    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_coarse(keys), _coarse(values), *args, **kwargs)


def _own_update() -> DynamicCache:
    cache = DynamicCache()
    before = cache.update
    cache.update = lambda keys, values, *args, **kw: before(_coarse(keys), values, *args, **kw)
    return cache


def _own_layers() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = RoundedLayer
    return cache


def _prefix_function() -> Callable[[int, torch.Tensor], list[int]]:
    calls = [0]

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        calls[0] += 1
        return list(range(3 + calls[0] % 5, 60))

    return allowed


def _three(ids: torch.Tensor, scores: torch.Tensor, third: Any) -> torch.Tensor:
    return scores


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "a plain cache": lambda: {"past_key_values": DynamicCache()},
    "a cache without use": lambda: {"past_key_values": DynamicCache(), "use_cache": False},
    "cache of a subclass": lambda: {"past_key_values": Rounded()},
    "cache with layers": lambda: {"past_key_values": _own_layers()},
    "cache with an update": lambda: {"past_key_values": _own_update()},
    "counting processor": lambda: {"logits_processor": [Counting()]},
    "processor per row": lambda: {"logits_processor": [PerRow()]},
    "prefix function": lambda: {"prefix_allowed_tokens_fn": _prefix_function()},
    "processor of three": lambda: {"logits_processor": [_three]},
    "beams": lambda: {"num_beams": 2},
    "scores": lambda: {"return_dict_in_generate": True, "output_scores": True},
    "sampled": lambda: {"do_sample": True, "top_k": 1},
}
"""By name, what makes the arguments of a call."""


class _Scaling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.05 if func is F.linear else out


AROUND: dict[str, Callable[[], Any]] = {"nothing": nullcontext, "inference mode": torch.inference_mode, "function mode": _Scaling}  # fmt: skip
"""What a call runs in."""


# ---- threads


@contextmanager
def held_call(generate: Callable[..., Any], ids: torch.Tensor, place: str) -> Iterator[Future[Any]]:
    """Another call, in another thread. Within the block it waits in code of its caller."""
    held = Held(0)
    given: dict[str, Any] = {"streamer": held}
    if place == "criterion":
        given = {"stopping_criteria": [lambda ids, scores: (held.put(ids[:, -1]), torch.zeros(len(ids)).bool())[1]]}
    elif place == "processor":
        given = {"logits_processor": [lambda ids, scores: (held.put(ids[:, -1]), scores)[1]]}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(generate, ids, max_new_tokens=6, do_sample=False, **given)
        try:
            until(lambda: held.inside.is_set() or call.done(), "the call waits or has ended")
            yield call
        finally:
            held.go_on.set()


BESIDE = ("streamer", "criterion", "processor")
"""Where the call of another thread waits, while a call runs."""


# ---- what programs do with the cache of a turn before the next one


class Turn:
    """A conversation between two calls: the cache of the last one, and the text and mask of the next one, whose first columns the cache holds.

    Args:
        cache: a ``DynamicCache``.
        text: ``[rows, columns]``.
        mask: as ``text``.
    """

    def __init__(self, cache: Any, text: torch.Tensor, mask: torch.Tensor) -> None:
        self.cache, self.text, self.mask = cache, text, mask

    @property
    def held(self) -> int:
        return int(self.cache.get_seq_length())

    def pairs(self) -> list[Any]:
        """The layers with keys and values."""
        return [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]

    def rows(self, order: list[int]) -> None:
        self.text, self.mask = self.text[order], self.mask[order]


def _drop_rows(turn: Turn) -> None:
    order = list(range(max(1, len(turn.text) - 1)))
    turn.cache.batch_select_indices(torch.tensor(order))
    turn.rows(order)


def _turn_rows(turn: Turn) -> None:
    order = list(reversed(range(len(turn.text))))
    turn.cache.reorder_cache(torch.tensor(order))
    turn.rows(order)


def _double_rows(turn: Turn) -> None:
    turn.cache.batch_repeat_interleave(2)
    turn.rows([row for row in range(len(turn.text)) for _ in range(2)])


def _edit(turn: Turn) -> None:
    for layer in turn.pairs():
        layer.values[:, :, -1] += 2.0


def _edit_data(turn: Turn) -> None:
    for layer in turn.pairs():
        layer.keys.data[:, :, -2:] *= -1


def _replace(turn: Turn) -> None:
    for layer in turn.pairs():
        layer.keys, layer.values = layer.keys * 0.5, layer.values + 1


def _evict(turn: Turn) -> None:
    """Only the first two columns and the last three stay, in the layers that hold all of them."""
    held = turn.held
    if held < 6:
        return
    kept = torch.tensor([0, 1, *range(held - 3, held)])
    for layer in turn.pairs():
        if layer.keys.shape[2] == held:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    turn.text, turn.mask = (torch.cat([x[:, kept], x[:, held:]], 1) for x in (turn.text, turn.mask))


def _evict_in_one_layer(turn: Turn) -> None:
    last = turn.pairs()[-1]
    last.keys, last.values = last.keys[:, :, 1:], last.values[:, :, 1:]


def _rebuild(turn: Turn) -> None:
    if not any(hasattr(layer, "conv_states") for layer in turn.cache.layers):
        made = DynamicCache()
        for i, layer in enumerate(turn.pairs()):
            made.update(layer.keys.clone(), layer.values.clone(), i)
        turn.cache = made


def _copy(turn: Turn) -> None:
    turn.cache = copy.deepcopy(turn.cache)


def _pickle(turn: Turn) -> None:
    turn.cache = pickle.loads(pickle.dumps(turn.cache))


def _other_text(turn: Turn) -> None:
    turn.text = turn.text.clone()
    turn.text[:, 1] = 3 + turn.text[:, 1] % 50


def _hide(turn: Turn) -> None:
    turn.mask = turn.mask.clone()
    turn.mask[0, turn.held // 2] = 0


def _show(turn: Turn) -> None:
    """Padding becomes a part of the text."""
    turn.mask = torch.ones_like(turn.mask)


SURGERY: dict[str, Callable[[Turn], None]] = {
    "nothing": lambda turn: None,
    "crop": lambda turn: turn.cache.crop(-2),
    "rows dropped": _drop_rows,
    "rows reversed": _turn_rows,
    "rows doubled": _double_rows,
    "values edited": _edit,
    "keys edited by .data": _edit_data,
    "tensors replaced": _replace,
    "columns evicted": _evict,
    "a column evicted in one layer": _evict_in_one_layer,
    "rebuilt": _rebuild,
    "deep copy": _copy,
    "pickled": _pickle,
    "another text": _other_text,
    "a cached column hidden": _hide,
    "padding shown": _show,
}
"""By name, what happens to a conversation between two turns."""
