"""The code that a model's modules run: whether all of it is transformers', torch's, or a package's that computes column by column.

:class:`Code` compares it once in full, with :mod:`pipespec.models.originals`, and remembers the objects that it saw. :meth:`Code.is_current` then
compares objects alone.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipespec.engine.attention import ATTENTION, attention_forward
from pipespec.models.originals import (
    PACKAGES,
    functions_of,
    is_original,
    is_trusted,
    names_in,
    own_methods,
    package_of,
    patched_global,
    patched_method,
)
from pipespec_kernels._native import Stamp

_TORCH = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("linear", "sparse", "normalization", "activation", "container", "dropout", "module")
)
"""Modules of torch whose classes compute each column by itself."""

_EXCLUDED = (
    "peft.tuners.adaption_prompt", "peft.tuners.xlora", "peft.tuners.poly", "torch.nn.modules.activation.MultiheadAttention",
    # They have a dimension, which may be that of the columns.
    "torch.nn.modules.activation.Softm", "torch.nn.modules.activation.LogSoftmax", "torch.nn.modules.activation.GLU",
    "torch.nn.modules.normalization.GroupNorm", "torch.nn.modules.normalization.LocalResponseNorm",
)  # fmt: skip
"""Modules and classes whose result for a column depends on the other columns of a forward."""

_SOURCES = (
    "transformers.masking_utils", "transformers.cache_utils", "transformers.integrations.sdpa_attention", "transformers.activations",
    "transformers.modeling_layers", "transformers.modeling_rope_utils", "transformers.generation.logits_process",
    "transformers.generation.stopping_criteria",
)  # fmt: skip
"""Modules of transformers whose functions the modelling code calls, whose classes a RowCache replaces, and whose processors and criteria a pipeline
calls row by row or computes in another way."""

_CODE = operator.attrgetter("__code__")

_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "forward")

_OF_REGISTRIES = frozenset(("_local_mapping",))
"""Attributes of a registry."""

_KNOWN_ATTENTION = ("eager", "sdpa", ATTENTION, "flash_attention_2", "flash_attention_3", "flash_attention_4")


@functools.cache
def bypassed_methods() -> tuple[str, ...]:
    """Methods of a model that transformers' decoding loop calls, and a pipeline does not."""
    found, stack = {"generate", "_sample"}, ["_sample"]
    while stack:
        function = getattr(GenerationMixin, stack.pop())
        names = names_in(f.__code__ for f in functions_of(function))
        new = {
            name for name in names if isinstance(vars(GenerationMixin).get(name), (FunctionType, staticmethod))
        } - found
        found |= new
        stack += new
    return tuple(sorted(found))


class Code:
    """The code of some classes of modules.

    Args:
        model: the class of the model.
        kinds: the classes of its modules, that of the model included.
        attention: name of the attention implementation.

    Attributes:
        reason: what of it is not known, as a phrase; None: all is known.
    """

    def __init__(self, model: type, kinds: frozenset[type], attention: Any) -> None:
        self._attention = attention
        # Objects by place, and the places: attributes of classes and modules, values of mappings, and code objects of functions.
        self._seen: list[tuple[Callable[[], Any], Any]] = []
        self._functions: list[FunctionType] = []
        # The classes and mappings that have the places.
        self._classes: list[type] = []
        self._spaces: list[dict[str, Any]] = []
        self.reason = self._read(model, kinds)
        self._functions = list(dict.fromkeys(self._functions))
        self._codes = list(map(_CODE, self._functions))
        self._stamp = self._new_stamp()

    def _new_stamp(self) -> Any:
        spaces = {id(space): space for space in self._spaces}
        return Stamp(list(spaces.values()), [], self._functions, list(dict.fromkeys(self._classes)))

    def is_current(self) -> bool:
        """Whether everything is as it was. It costs microseconds while nothing of the classes and mappings has changed."""
        if self._stamp.is_current():
            return True
        try:
            if any(read() != expected for read, expected in self._seen):
                return False
        except AttributeError:  # one is gone
            return False
        if list(map(_CODE, self._functions)) != self._codes:
            return False
        # Something else of them has changed.
        self._stamp = self._new_stamp()
        return True

    def _read(self, model: type, kinds: frozenset[type]) -> str | None:
        reasons = [self._class(kind) for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))]
        reasons += [self._methods(GenerationMixin, bypassed_methods()), self._methods(model, bypassed_methods())]
        reasons += [self._sources(kinds), self._registries()]
        return next((reason for reason in reasons if reason is not None), None)

    def _class(self, kind: type) -> str | None:
        """Watch a class and those that it extends. Returns what is not known of them."""
        reason = _not_by_columns(kind)
        names: dict[str, None] = dict.fromkeys(_CALLS)
        for base in kind.__mro__:
            if not issubclass(base, nn.Module) or base is nn.Module:
                continue
            is_large = base.__module__ == "transformers.modeling_utils"
            methods = {} if is_large else own_methods(base)
            names |= dict.fromkeys(methods)
            for value in methods.values():
                self._functions += functions_of(value)
            name = patched_method(base, _CALLS if is_large else None)
            if name is not None and reason is None:
                reason = _foreign(base, name)
        # A name that its class lacks is looked for, as it may come.
        present = [name for name in names if hasattr(kind, name)]
        self._watch_attributes(kind, present)
        return reason or self._methods(nn.Module, _CALLS)

    def _methods(self, kind: type, names: Sequence[str]) -> str | None:
        """Watch methods of a class. Returns the one that is not known."""
        present = [name for name in names if hasattr(kind, name)]
        self._watch_attributes(kind, present)
        for name in present:
            self._functions += functions_of(getattr(kind, name))
        for base in kind.__mro__:
            patched = patched_method(base, [name for name in present if name in vars(base)])
            if patched is not None:
                return _foreign(base, patched)
        return None

    def _watch_attributes(self, place: Any, names: Sequence[str]) -> None:
        if names:
            read = functools.partial(operator.attrgetter(*names), place)
            self._seen.append((read, read()))
        if isinstance(place, type):
            # One more attribute may hide a base class's.
            self._seen.append((functools.partial(_size, place), _size(place)))
            self._classes.append(place)
        else:
            self._spaces.append(vars(place))

    def _sources(self, kinds: frozenset[type]) -> str | None:
        """Watch the globals that the code reads, in its modules and in torch."""
        codes: dict[str, list[Any]] = {}
        for kind in kinds:
            for base in kind.__mro__:
                if base.__module__.startswith("transformers.models."):
                    for value in own_methods(base).values():
                        codes.setdefault(base.__module__, []).extend(f.__code__ for f in functions_of(value))
        codes[GenerationMixin.__module__] = [
            f.__code__ for name in bypassed_methods() for f in functions_of(getattr(GenerationMixin, name))
        ]
        for name in _SOURCES:
            for value in [v for v in vars(sys.modules[name]).values() if getattr(v, "__module__", None) == name]:
                held = own_methods(value).values() if isinstance(value, type) else (value,)
                codes.setdefault(name, []).extend(f.__code__ for each in held for f in functions_of(each))
        reason, all_names = None, set()
        for name in sorted(codes):
            module = sys.modules[name]
            # With the functions that these call in turn.
            space, names = vars(module), names_in(codes[name])
            for _ in range(3):
                called = [
                    f.__code__ for n in names & space.keys() for f in functions_of(space[n]) if f.__globals__ is space
                ]
                names |= names_in(called)
            all_names |= names
            self._functions += [f for n in sorted(names & space.keys()) for f in functions_of(space[n])]
            self._seen.append((functools.partial(_values, space), _values(space)))
            self._spaces.append(space)
            patched = patched_global(module, names) or _other_registry(space)
            if patched is None and name in _SOURCES:
                patched = next(
                    (f"{n}.{m}" for n, k in space.items() if isinstance(k, type) and k.__module__ == name for m in [patched_method(k)] if m), None
                )  # fmt: skip
                for kind in (k for k in space.values() if isinstance(k, type) and k.__module__ == name):
                    self._watch_attributes(kind, list(own_methods(kind)))
            if patched is not None and reason is None:
                reason = f"{name}.{patched} is not that of transformers"
        return reason or self._torch(all_names)

    def _torch(self, names: set[str]) -> str | None:
        """Watch torch's functions of these names."""
        names = names | {
            "linear",
            "embedding",
            "silu",
            "gelu",
            "softmax",
            "scaled_dot_product_attention",
            "layer_norm",
            "matmul",
        }
        reason = None
        for place, what in (
            (torch, "torch"),
            (torch.nn.functional, "torch.nn.functional"),
            (torch.Tensor, "torch.Tensor"),
        ):
            present = [name for name in sorted(names) if callable(getattr(place, name, None))]
            self._watch_attributes(place, present)
            for name in present:
                value = getattr(place, name)
                self._functions += functions_of(value)
                if reason is None and not is_original(value):
                    reason = f"{what}.{name} is not that of torch"
        return reason

    def _registries(self) -> str | None:
        """Watch the attention and its mask. Returns what is not known of them."""
        name, reason = self._attention, None
        for registry, what in ((ALL_ATTENTION_FUNCTIONS, "attention"), (ALL_MASK_ATTENTION_FUNCTIONS, "mask")):
            read = functools.partial(registry.get, name)
            value = read()
            self._seen.append((read, value))
            self._spaces += [vars(registry), registry._local_mapping, registry._global_mapping]
            reason = reason or self._methods(type(registry), ("__getitem__", "get", "get_interface"))
            if vars(registry).keys() - _OF_REGISTRIES:
                reason = f"transformers' registry of {what} functions has attributes of its own"
            if value is not None:
                self._functions += functions_of(value)
                if not is_original(value) or (
                    name == ATTENTION and what == "attention" and value is not attention_forward
                ):
                    reason = f"the {what} function {name!r} is not that of transformers"
        return f"its attention is {name!r}" if name not in _KNOWN_ATTENTION else reason


def _other_registry(space: dict[str, Any]) -> str | None:
    """The name under which a module has another registry of attention functions than transformers' one."""
    for name, registry in (
        ("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS),
        ("ALL_MASK_ATTENTION_FUNCTIONS", ALL_MASK_ATTENTION_FUNCTIONS),
    ):
        if space.get(name, registry) is not registry:
            return name
    return None


def _foreign(kind: type, name: str) -> str:
    is_theirs = package_of(kind.__module__) in PACKAGES
    return (
        f"{kind.__qualname__}.{name} is not that of {kind.__module__}"
        if is_theirs
        else f"{kind.__qualname__} has its own {name}()"
    )


class _Objects(tuple[Any, ...]):
    """Objects that equal others if they are the same ones: registries, for example, are equal while their entries are."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, tuple) or len(self) != len(other) or any(map(operator.is_not, self, other))


def _values(space: dict[str, Any]) -> _Objects:
    return _Objects(space.values())


def _size(kind: type) -> int:
    return len(vars(kind))


def _not_by_columns(kind: type) -> str | None:
    """Why modules of a class may compute a column otherwise where there are other columns; None if they do not."""
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if not issubclass(base, nn.Module):
            continue
        if any(name.startswith(excluded) for excluded in _EXCLUDED):
            return f"a module is of class {name}"
        package = package_of(base.__module__)
        if (
            package == "torch"
            and base.__module__ not in _TORCH
            and not base.__module__.startswith("torch.nn.modules.conv")
        ):
            return f"a module is of class {name}"
        if package in PACKAGES or is_trusted(base):
            return None
    return f"a module is of class {kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=64)
def _made(model: type, kinds: frozenset[type], attention: Any) -> Code:
    return Code(model, kinds, attention)


def code_of(model: type, kinds: frozenset[type], attention: Any) -> Code:
    """The code of a model's classes, compared again if something of it has changed. Arguments as for :class:`Code`."""
    found = _made(model, kinds, attention)
    if not found.is_current():
        _made.cache_clear()
        found = _made(model, kinds, attention)
    return found


def forget_code() -> None:
    """Compare all code again."""
    _made.cache_clear()
