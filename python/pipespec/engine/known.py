"""Known models: what a form that bypasses a model's own code depends on, and why there is none. The reasons are here, in
:mod:`pipespec.engine.originals` and in :func:`pipespec.models.families.identity`.

A model is *known* while its code is transformers', torch's, or a package's whose modules compute column by column, and nothing of it is replaced or
hooked. Then a forward of several columns gives what as many forwards of one column give. Every other model is decoded by transformers.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.attention import ATTENTION, MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.originals import BYPASSED, PACKAGES, code_of, forget_code, is_original, is_trusted, package_of
from pipespec.engine.runtime import Identity, forget_records, runtime_of
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.layout import CacheLayout, configuration_read, layout_unsupported_reason
from pipespec.models.parts import ModelParts
from pipespec.models.properties import (
    LayerDevices,
    compute_dtype,
    each_module,
    has_dropout,
    hooks_of,
    tensor_parallel_size,
    text_config,
    without_wrapper,
)
from pipespec.process.threads import Lock
from pipespec_kernels._native import Stamp

NATIVE, FUSED, EXACT, OWN = "native", "fused", "exact", "own"
"""The forms of a model: the native decoder's, the fused operations over static caches, these with row-independent products, and its own modules."""

CAPTURED = "captured"
"""As the form of an identity: what the graphs of a model's modules depend on."""

AUTOCAST = "autocast"
NATIVE_DISABLED = "native=False"


def identify(model: PreTrainedModel | ModelParts, form: str) -> Identity:
    """The identity of a form now. For a whole model, it is read again only if something of the model has changed."""
    if isinstance(model, ModelParts):
        return _identify(model, form)
    identities = _record(model).identities
    if form not in identities:
        identities[form] = _identify(model, form)
    return identities[form]


def _identify(model: PreTrainedModel | ModelParts, form: str) -> Identity:
    if form == CAPTURED:
        modules = list(model.modules())  # type: ignore[union-attr]
        read = configuration_read(model.config, set(map(type, modules)))
        return Identity(None, (*read, *itertools.chain.from_iterable(map(families.state_of, modules))))
    if form == OWN:
        seen = None
        if CacheLayout.of(model.config).states is not None:
            from pipespec.engine.recurrent import recurrent_signature

            seen = recurrent_signature(model if isinstance(model, ModelParts) else ModelParts.of(model))
        return Identity(None, (model.dtype, seen) if isinstance(model, ModelParts) else seen)
    attention = model.config._attn_implementation
    try:
        if (mask_kind(model.config) is MaskKind.NONE) if form == NATIVE else (attention != ATTENTION):
            raise NotReadable(f"its attention is {attention!r}")
        seen = (_refreshed, attention, *families.identity(model, packed=form == NATIVE))
    except NotReadable as error:
        return Identity(str(error))
    except (AttributeError, TypeError, IndexError, KeyError) as error:
        # An unknown module structure.
        return Identity(f"its parts are not where they are expected ({error})")
    reason = None if isinstance(model, ModelParts) else _record(model).reason
    return Identity(reason, None if reason else seen)


def refusal_of_cache(cache: RowCache) -> str | None:
    """Why a forward over a cache calls the model as a whole, whatever the model is: autocast changes what modules do, and only modules read lengths on
    the device."""
    if cache.is_recurrent:
        # Its form calls the modules of the layers in any case.
        return None
    if torch.is_autocast_enabled(cache.device.type):
        return AUTOCAST
    return "the lengths are on the device" if cache.uses_device_lengths else None


# ---- known models

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_TENSORS = (nn.Parameter, torch.Tensor, nn.Buffer)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_GLOBAL_HOOKS = tuple(vars(torch_module)[f"_global{name}"] for name in _HOOKS if f"_global{name}" in vars(torch_module))

_VERSION, _POINTER = operator.attrgetter("_version"), torch.Tensor.data_ptr
_STRIDES, _COUNT = torch.Tensor.stride, torch.Tensor.numel

_REPLACED = BYPASSED - {"generate"}
"""Methods of the class that no attribute of a known model's instance may replace. A learned prompt of peft replaces one."""

_refreshed = 0
"""How often :func:`refresh` was called."""


class Record:
    """What a model was when it was last looked at.

    Args:
        model: the model. The record does not keep it alive.

    Attributes:
        reason: why the model is not known, as a phrase; None if it is.
        identities: by form, those that were read since.
        token: stands for this record, and keeps no weights alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Calls in other threads hold records from before, which need not be that of the runtime.
        self._moves = runtime_of(model).moves
        self.identities: dict[str, Identity] = {}
        self.token = object()
        modules = list(model.modules())
        kinds = frozenset(map(type, modules))
        self._code = code_of(kinds, getattr(model.config, "_attn_implementation", None))
        self.reason = _foreign_reason(model, modules) or self._code.reason
        self.verified_in: object = None
        if self.reason is None:
            self._take(model, modules)

    def _take(self, model: PreTrainedModel, modules: list[nn.Module]) -> None:
        # Not the model and its dictionary, which may lead to the model.
        spaces = [vars(module) for module in modules[1:]]
        for module in modules:
            spaces += [module._parameters, module._buffers, module._modules, *(vars(module)[name] for name in _HOOKS)]
        self._config = model.config
        configs = {id(c): c for c in (model.config, *(getattr(m, "config", None) for m in modules)) if c is not None}
        for config in configs.values():
            # The first copy of an object adds a list of slots to its class, which is no change of code.
            config.__reduce_ex__(2)
        containers = [*spaces, *itertools.chain.from_iterable(map(_containers_in, configs.values()))]
        self._stamp = Stamp(containers, modules[1:], [], list(set(map(type, configs.values()))))
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self._tensors = [t for t in tensors if not t.is_inference()]
        has_pointers = all(type(t) in _TENSORS and t.layout is torch.strided for t in tensors)
        self._placed = tensors if has_pointers else []
        self._values, self._attributes, self._places = self._values_now(model), _attributes(model), self._places_now()

    def _values_now(self, model: PreTrainedModel) -> tuple[Any, ...]:
        """What the model computes with, as far as tensors and the model itself say it. Versions only grow."""
        return type(model), id(model.config), sum(map(_VERSION, self._tensors))

    def _places_now(self) -> tuple[list[int], list[Any], list[int]]:
        """Where the weights lie, and how: another view of the same memory has its address and version."""
        placed = self._placed
        return list(map(_POINTER, placed)), list(map(_STRIDES, placed)), list(map(_COUNT, placed))

    def successor(self, model: PreTrainedModel) -> Record | None:
        """The record of a model now; None if its code or its weights are others than those of this record. They may lie elsewhere only where
        :func:`moving` has moved them, for the merge of another call."""
        if self._moves == runtime_of(model).moves and self.is_current(model):
            return self
        with _moving:
            now = Record(model)
        if self.reason is not None or now.reason is not None:
            return None
        before, after = ((r._values, list(map(id, r._tensors))) for r in (self, now))
        is_there = self._moves != now._moves or self._places == now._places
        return now if before == after and is_there else None

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether the model is what it was."""
        if self.reason is not None or not (self._code.is_current() and self._stamp.is_current()):
            return False
        try:
            return (
                # Those that are the class's own may be replaced unseen.
                vars(model).keys().isdisjoint(_REPLACED)
                and self._values_now(model) == self._values
                and _attributes(model) == self._attributes
                and self._places_now() == self._places
            )
        except RuntimeError:
            # A tensor has become one that has no version or no memory.
            return False


def _attributes(model: PreTrainedModel) -> tuple[Any, ...]:
    """The names of the model's own attributes, and the numbers and names among them, as some multiply logits by one."""
    numbers = tuple(value for value in vars(model).values() if isinstance(value, (int, float, str)))
    return tuple(vars(model)), numbers, id(vars(model).get("_hf_hook"))


def _containers_in(value: Any) -> Iterator[Any]:
    """The dictionaries and lists of a configuration, those in them included."""
    if isinstance(value, PretrainedConfig):
        value = vars(value)
    if isinstance(value, (dict, list)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers_in(each)


_moving = Lock()

_call = threading.local()


@contextmanager
def one_call() -> Iterator[None]:
    """Within a call a model is looked at once: its weights, hooks and code may change between calls and not within one."""
    before = getattr(_call, "token", None)
    _call.token = object()
    try:
        yield
    finally:
        _call.token = before


def _record(model: PreTrainedModel) -> Record:
    runtime, token = runtime_of(model), getattr(_call, "token", None)
    found: Record | None = runtime.record
    if found is not None and token is not None and found.verified_in is token:
        return found
    if found is None or not found.is_current(model):
        found = runtime.record = Record(model)
    found.verified_in = token
    return found


def token_of(model: PreTrainedModel) -> object:
    """What stands for a model as it is now: the same object as before, unless its code or its weights have changed."""
    return _record(model).token


def record_within(model: PreTrainedModel) -> Record | None:
    """What a call compares a model with while it runs; None where it cannot: the model is not known, or its own forwards may change it."""
    found: Record | None = runtime_of(model).record
    if found is None or found.reason is not None:
        return None
    for module in model.modules():
        if is_trusted(type(module)) or any(hooks_of(module)) or any(vars(module)[name] for name in _HOOKS):
            return None
    return found


def refresh(model: PreTrainedModel | None = None) -> None:
    """Read weights and code of a model again in the next call, after a change that cannot be seen.

    Calls notice almost all changes of a model by themselves. ``docs/calls.md`` lists what they cannot see, or see at the end of a call: changes of single
    values of a large model that go past torch's version counters, for example.

    Args:
        model: The model that has changed; None: any of them.
    """
    global _refreshed
    _refreshed += 1
    forget_code()
    if model is None:
        forget_records()
    else:
        runtime_of(without_wrapper(model)).record = None


@contextmanager
def moving(model: PreTrainedModel) -> Iterator[None]:
    """Surround the merge of a model's weights, which moves them: afterwards the model is read again, within a call, too."""
    with _moving:
        try:
            yield
        finally:
            runtime = runtime_of(model)
            runtime.moves, runtime.record = runtime.moves + 1, None


def unknown_reason(model: PreTrainedModel) -> str | None:
    """Why a model has to be decoded by transformers now, as a phrase; None if it is known, see :mod:`pipespec.engine.known`."""
    return _watched_reason() or _record(model).reason


def _watched_reason() -> str | None:
    """What sees or changes the operations of this process now."""
    if any(_GLOBAL_HOOKS):
        hooks = itertools.chain.from_iterable(hooks.values() for hooks in _GLOBAL_HOOKS)
        if not all(is_original(hook) for hook in hooks):
            return "there are global hooks of modules (torch.nn.modules.module)"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    if torch._C._len_torch_function_stack():
        from torch.overrides import _get_current_function_mode_stack

        # torch.set_default_device() is one.
        if any(type(mode).__name__ != "DeviceContext" for mode in _get_current_function_mode_stack()):
            return "a TorchFunctionMode is active"
    return None


def _foreign_reason(model: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """What the instances of a model's modules have that their classes have not."""
    if compute_dtype(model) == torch.float16 and "cpu" in {device.type for device in LayerDevices.of(model).devices}:
        return "it is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
    for name in sorted(_REPLACED & vars(model).keys()):
        if vars(model)[name] is not None and not _is_of_class(type(model), name, vars(model)[name]):
            return f"it has a {name}() of its own"
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and any(getattr(a, "alora_invocation_tokens", None) for a in adapters.values()):
        return "it has an activated LoRA adapter, which counts from the end of each forward"
    for module in modules:
        what = _module_reason(model, module)
        if what is not None:
            return f"{_name_of(model, module)} {what}"
        if module.training and has_dropout(module):
            return "it is in training mode with dropout or jitter, whose draws depend on the widths of the forwards"
    return _layers_reason(model)


def _module_reason(model: PreTrainedModel, module: nn.Module) -> str | None:
    """What an instance has that its class has not, as a phrase without a subject."""
    space, kind = vars(module), type(module)
    if not all(is_original(hook) for place in _HOOKS for hook in space[place].values()):
        return "has hooks"
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and type(tensor) not in _TENSORS and not _is_known_kind(type(tensor)):
            return f"has a weight of class {type(tensor).__name__}"
    for name in space.keys() - _STANDARD:
        # A part of a module may be a function, as an activation.
        is_run = callable(getattr(kind, name, None)) or (module is not model and callable(space[name]))
        if is_run and not (_is_of_class(kind, name, space[name]) or is_original(space[name])):
            return f"has a {name}() of its own"
    for hook in hooks_of(module):
        if not _is_known_kind(type(hook)) or any(callable(getattr(type(hook), name, None)) for name in vars(hook)):
            return "has hooks of accelerate's kind"
    if space.get("is_causal") is False:
        return "is not causal"
    if "config" in space:
        attention = getattr(model.config, "_attn_implementation", None)
        if getattr(space["config"], "_attn_implementation", attention) != attention:
            return "has another attention than the model"
    if getattr(module, "max_norm", None) is not None:
        return "changes its weights when it is called (max_norm)"
    return None


def _is_known_kind(kind: type) -> bool:
    return package_of(kind.__module__) in PACKAGES or is_trusted(kind)


def _layers_reason(model: PreTrainedModel) -> str | None:
    """Whether the layers are those of the configuration, in their order."""
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None if layers is None else "its layers are not in a ModuleList"
    if len(layers) == 0:
        # The stages of its pipeline have them, in other processes.
        return None
    config = text_config(model.config)
    count, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if not len(layers) == count == len(types or layers):
        what = count if types is None else f"{count}, of {len(types)} types"
        return f"it has {len(layers)} layers, and its configuration says {what}"
    for i, layer in enumerate(list(layers)[:count]):
        for part in each_module(layer):
            if vars(part).get("layer_idx") not in (None, i):
                return f"its layers are not in the order of their caches (layer {vars(part)['layer_idx']} at {i})"
    return layout_unsupported_reason(model) or _heads_reason(model, layers)


def _heads_reason(model: PreTrainedModel, layers: nn.ModuleList) -> str | None:
    """Whether each layer has as many heads of keys and values as the configuration says: heads may be pruned."""
    layout = CacheLayout.of(model.config)
    if tensor_parallel_size(model) > 1:
        return None
    for i in layout.attention:
        heads, key_dim, value_dim = layout.sizes(i)
        for name, dim in (("k_proj", key_dim), ("v_proj", value_dim)):
            rows = getattr(getattr(getattr(layers[i], "self_attn", None), name, None), "out_features", None)
            if isinstance(rows, int) and rows != heads * dim:
                return f"layer {i} has a {name} of {rows} rows, and its configuration says {heads} heads of {dim}"
    return None


def _is_of_class(kind: type, name: str, value: Any) -> bool:
    """Whether an attribute of an instance is the method of its class."""
    function = getattr(value, "__func__", None)
    return function is not None and function is getattr(kind, name, None)


def _name_of(model: PreTrainedModel, module: nn.Module) -> str:
    return next((name for name, other in model.named_modules() if other is module), "") or "the model"
