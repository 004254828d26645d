"""The code that a model runs: whether all of it is transformers', torch's, or a package's that computes column by column, and still that of its file.

The code object of a function is compared with the one that the file of its module compiles to, so neither the order of imports nor the time of a patch
matters. Python keeps the compiled file, so that the first comparison of a module reads it and does not compile it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipespec.engine.attention import ATTENTION, attention_forward
from pipespec_kernels._native import Stamp

PACKAGES = frozenset(
    ("torch", "transformers", "pipespec", "pipespec_spd", "pipespec_train", "accelerate", "peft", "bitsandbytes", "torchao", "compressed_tensors", "gptqmodel",
     "auto_gptq", "awq", "hqq", "optimum", "eetq", "aqlm", "vptq", "spqr_quant", "auto_round", "fp_quant")
)  # fmt: skip
"""Packages whose modules compute each column of a forward by itself: torch, transformers, adapters, quantisation, placement."""

_STANDARD = sys.stdlib_module_names - {"unittest"}
"""Python's own packages, less the one whose objects stand in for others."""

_PLAIN = frozenset(
    ("builtins", "collections", "typing", "abc", "enum", "functools", "contextlib", "dataclasses", "types", "copy")
)
"""Those whose functions count unread. With a file of the user's of such a name, torch could not be imported; there may be one called profile.py."""

_REGISTRIES = {
    "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS,
    "ALL_MASK_ATTENTION_FUNCTIONS": ALL_MASK_ATTENTION_FUNCTIONS,
}

_NEVER_CALLED = frozenset(
    ("__init__", "__init_subclass__", "__repr__", "extra_repr", "__class_getitem__", "__annotate_func__")
)

_TORCH = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("linear", "sparse", "normalization", "activation", "container", "dropout", "module", "conv")
)
"""Modules of torch whose classes compute each column by itself."""

_EXCLUDED = (
    "peft.tuners.adaption_prompt", "peft.tuners.xlora", "peft.tuners.poly", "torch.nn.modules.activation.MultiheadAttention",
    # They have a dimension, which may be that of the columns.
    "torch.nn.modules.activation.Softm", "torch.nn.modules.activation.LogSoftmax", "torch.nn.modules.activation.GLU",
    "torch.nn.modules.normalization.GroupNorm", "torch.nn.modules.normalization.LocalResponseNorm",
)  # fmt: skip
"""Modules and classes whose result for a column depends on the other columns of a forward."""

_SOURCES = frozenset(
    ("transformers.masking_utils", "transformers.cache_utils", "transformers.integrations.sdpa_attention", "transformers.activations",
     "transformers.modeling_layers", "transformers.modeling_rope_utils", "transformers.generation.logits_process",
     "transformers.generation.stopping_criteria")
)  # fmt: skip
"""Modules of transformers whose functions the modelling code calls, whose classes a RowCache replaces, and whose processors and criteria a pipeline
calls row by row or computes in another way."""

_FUNCTIONS = frozenset(
    ("linear", "embedding", "silu", "gelu", "softmax", "scaled_dot_product_attention", "layer_norm", "matmul")
)
"""Functions that torch's own modules call."""

_BASE = "transformers.modeling_utils"

_KNOWN_ATTENTION = ("eager", "sdpa", ATTENTION, "flash_attention_2", "flash_attention_3", "flash_attention_4")


def is_registered_here(config: Any) -> bool:
    """Whether the attention of a configuration is one that code of this process has registered, so that another process does not know it."""
    name = config._attn_implementation or ""
    is_known = name in _KNOWN_ATTENTION or name == "flex_attention" or name.startswith("paged|")
    # A name with a slash is a kernel that transformers gets itself.
    return not is_known and "/" not in name and name in ALL_ATTENTION_FUNCTIONS


# ---- what users say

_trusted: set[Any] = set()
"""What :func:`trust` was given: names, classes, and code objects of functions."""


def trust(*code: Any) -> None:
    """Say of code of your own that it computes each column of a forward by itself, and each row: a hook that observes, an adapter, a model with remote code,
    a logits processor that reads one row alone.

    Without that, transformers decodes a model that runs it, token by token, without drafts. With it, the code sees several columns at once, and the
    prompt in parts. If the statement is wrong, texts are, too.

    Args:
        *code: Classes of modules, functions, or names of packages and modules (``"transformers_modules"`` for all models with remote code).

    Raises:
        TypeError: Something else.
    """
    for each in code:
        if isinstance(each, (str, type)):
            _trusted.add(each)
        elif isinstance(each, (FunctionType, MethodType)):
            _trusted.add(each.__code__)
        else:
            raise TypeError(f"trust() takes functions, classes and names of packages, not {each!r:.80}")
    forget_code()


def is_trusted(value: Any) -> bool:
    """Whether :func:`trust` was given a class or a function, its module, or its package."""
    if not _trusted:
        return False
    is_class = isinstance(value, type)
    module = value.__module__ if is_class else getattr(value, "__globals__", {}).get("__name__")
    return not _trusted.isdisjoint(
        (value if is_class else getattr(value, "__code__", None), module, package_of(module))
    )


# ---- functions and methods


def package_of(name: str | None) -> str:
    """The first part of the name of a module."""
    return (name or "").partition(".")[0]


@functools.cache
def _codes_of(module: str) -> dict[str, list[CodeType]]:
    """By qualified name, the code objects of all functions and classes in the file of a module; empty where it has no file."""
    found: dict[str, list[CodeType]] = {}
    try:
        whole: Any = sys.modules[module].__spec__.loader.get_code(module)  # type: ignore[union-attr]
    except Exception:  # no loader, or one without code
        return found
    for code in _nested((whole,)):
        found.setdefault(code.co_qualname, []).append(code)
    return found


def _nested(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    """Code objects and those in them."""
    for code in codes:
        yield code
        yield from _nested(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _names_in(codes: Iterable[CodeType]) -> set[str]:
    """Names of globals and attributes that code objects, and those in them, read."""
    return {name for code in _nested(codes) for name in code.co_names}


def _parts_of(value: Any) -> Iterator[Any]:
    """What a call of ``value`` runs: the functions in decorators, bound methods, properties and partial functions, and callables of other types."""
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield value
            if value.__code__ in _trusted:
                continue
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            stack.append(value.__func__)
        elif isinstance(value, property):
            stack += [part for part in (value.fget, value.fset) if part is not None]
        elif isinstance(value, functools.partial):
            stack.append(value.func)
        else:
            yield value
        # What a decorator or a partial function keeps.
        stack += [vars(value)["__wrapped__"]] if "__wrapped__" in getattr(value, "__dict__", ()) else []


def _functions_of(value: Any) -> list[FunctionType]:
    return [part for part in _parts_of(value) if isinstance(part, FunctionType)]


def is_original(value: Any) -> bool:
    """Whether all that a call of ``value`` runs is Python's own, or compiled from the file of its module, in one of :data:`PACKAGES`."""
    return all(map(_is_original, _parts_of(value)))


def _is_original(part: Any) -> bool:
    if isinstance(part, FunctionType):
        module, code = str(part.__globals__.get("__name__")), part.__code__
        return (
            is_trusted(part)
            or package_of(module) in _PLAIN
            or (package_of(module) in PACKAGES and code in _codes_of(module).get(code.co_qualname, ()))
        )
    if isinstance(part, type):
        return package_of(part.__module__) in PACKAGES | _PLAIN
    package = package_of(type(part).__module__)
    if isinstance(part, BuiltinFunctionType) or package in _PLAIN:
        return True
    return package in PACKAGES and (not callable(part) or is_original(type(part).__call__))


def _is_read_first(value: Any) -> bool:
    """Whether an attribute of a class is read before one of the instance: properties and other data descriptors, less those of Python itself."""
    return hasattr(type(value), "__set__") and not isinstance(value, (GetSetDescriptorType, MemberDescriptorType))


def _is_patched(kind: type, name: str, value: Any) -> bool:
    """Whether a method is not the one that the file of its class defines, and replaces one, or is called without being named."""
    codes, qualified = _codes_of(kind.__module__), f"{kind.__qualname__}.{name}"
    is_ours = package_of(kind.__module__) in PACKAGES
    matters = (
        name in _CALLED
        or (is_ours and (qualified in codes or _is_read_first(value)))
        or any(hasattr(base, name) for base in kind.__mro__[1:-1])
    )
    if name in _NEVER_CALLED or not matters or is_trusted(value):
        return False
    # The method of another class is not this one's.
    belongs_to_class = qualified not in codes or any(f.__code__ in codes[qualified] for f in _functions_of(value))
    return not (is_ours and belongs_to_class and is_original(value))


@functools.cache
def _imported(module: str) -> frozenset[str]:
    """The names at the top of a module's file."""
    return frozenset(name for code in _codes_of(module).get("<module>", ()) for name in code.co_names)


def _is_of(module: ModuleType, name: str, value: Any) -> bool:
    """Whether a value of a module's global is what its file defines, or imports, under this name."""
    codes = _codes_of(module.__name__)
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value
    if isinstance(value, type):
        if name in codes:
            return (value.__module__, value.__qualname__) == (module.__name__, name)
        return (value.__name__ == name or value.__name__ in _imported(module.__name__)) and package_of(
            value.__module__
        ) in PACKAGES | _STANDARD
    if name in _REGISTRIES:
        return value is _REGISTRIES[name]
    if not callable(value):
        return package_of(type(value).__module__) in PACKAGES | _STANDARD
    found = {function.__code__ for function in _functions_of(value)}
    if name in codes:
        # One of another module may have its name.
        is_of_module = not found.isdisjoint(codes[name])
    else:
        imported = _imported(module.__name__)
        is_of_module = not found or any(code.co_name == name or code.co_name in imported for code in found)
    return is_of_module and is_original(value)


# ---- all code of a model


def _bypassed() -> frozenset[str]:
    found, stack = {"generate", "_sample"}, ["_sample"]
    while stack:
        names = _names_in(f.__code__ for f in _functions_of(getattr(GenerationMixin, stack.pop())))
        new = {n for n in names if isinstance(vars(GenerationMixin).get(n), (FunctionType, staticmethod))} - found
        found |= new
        stack += new
    return frozenset(found)


BYPASSED = _bypassed()
"""Methods of a model that transformers' decoding loop calls, and a pipeline does not."""

_CALLED = BYPASSED.union(
    ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__", "__new__", "forward")
)
"""Methods that are called, whatever class has them."""


class Code:
    """The code of some classes of modules, and what it calls.

    Args:
        kinds: the classes of a model's modules, its own included.
        attention: name of the attention implementation.

    Attributes:
        reason: what of it is not known, as a phrase; None: all is known.
        is_current: whether everything is as it was, in microseconds.
    """

    def __init__(self, kinds: frozenset[type], attention: Any) -> None:
        self._classes: dict[type, None] = {}
        self._spaces: list[dict[str, Any]] = []
        self._functions: dict[FunctionType, None] = {}
        in_order = sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))
        bases = dict.fromkeys(base for kind in in_order for base in kind.__mro__[:-1])
        # All of it is watched, whatever the first reason is.
        reasons = [_not_by_columns(kind) for kind in in_order]
        for base in bases:
            # Of the large ones that all models have, only what a forward or a decoding loop calls.
            is_large = not issubclass(base, nn.Module) or base is nn.Module or base.__module__ == _BASE
            reasons.append(self._class_reason(base, _CALLED if is_large else None))
        reasons += [*self._global_reasons(kinds), *self._attention_reasons(attention)]
        self.reason = next(filter(None, reasons), None)
        self.is_current = Stamp(self._spaces, [], list(self._functions), list(self._classes)).is_current

    def _watch(self, value: Any) -> None:
        self._functions |= dict.fromkeys(_functions_of(value))

    def _class_reason(self, kind: type, names: Iterable[str] | None = None) -> str | None:
        """Watch what a class itself defines that runs code. Returns which of it is not known. ``names``: those that count; None: all."""
        methods = {
            name: value
            for name, value in vars(kind).items()
            if (callable(value) or isinstance(value, (staticmethod, classmethod)) or _is_read_first(value))
            and not isinstance(value, type)
            and (names is None or name in names)
        }
        self._classes[kind] = None
        for value in methods.values():
            self._watch(value)
        if is_trusted(kind):
            return None
        name = next((name for name, value in methods.items() if _is_patched(kind, name, value)), None)
        if name is None:
            return None
        if package_of(kind.__module__) in PACKAGES:
            return f"{kind.__qualname__}.{name} is not that of {kind.__module__}"
        return f"{kind.__qualname__} has its own {name}()"

    def _global_reasons(self, kinds: Iterable[type]) -> Iterator[str | None]:
        """Watch the globals that the code reads, in its modules and in torch. Yields those that are not known."""
        modules = {base.__module__ for kind in kinds for base in kind.__mro__}
        modules = {name for name in modules if name.startswith("transformers.models.")} | _SOURCES
        names = {name: _names_in(_codes_of(name).get("<module>", ())) for name in modules}
        bypassed = [f for name in BYPASSED for f in _functions_of(getattr(GenerationMixin, name))]
        names[GenerationMixin.__module__] = _names_in(f.__code__ for f in bypassed)
        for name in sorted(names):
            module, space = sys.modules[name], vars(sys.modules[name])
            self._spaces.append(space)
            for each in sorted(names[name] & space.keys()):
                self._watch(space[each])
                if isinstance(space[each], dict):
                    # Of classes of caches by type of layer, for example.
                    self._spaces.append(space[each])
                if not _is_of(module, each, space[each]):
                    yield f"{name}.{each} is not that of transformers"
                elif (
                    name in _SOURCES
                    and getattr(space[each], "__module__", None) == name
                    and isinstance(space[each], type)
                ):
                    yield self._class_reason(space[each])
        self._spaces += [vars(torch), vars(torch.nn.functional)]
        self._classes[torch.Tensor] = None
        for place in (torch, torch.nn.functional, torch.Tensor):
            for each in sorted(_FUNCTIONS.union(*names.values())):
                value = getattr(place, each, None)
                if callable(value):
                    self._watch(value)
                    if not is_original(value):
                        where = "torch.Tensor" if place is torch.Tensor else place.__name__
                        yield f"{where}.{each} is not that of torch"

    def _attention_reasons(self, name: Any) -> Iterator[str | None]:
        """Watch the attention and its mask. Yields what is not known of them."""
        if name not in _KNOWN_ATTENTION:
            yield f"its attention is {name!r}"
        for registry, what in ((ALL_ATTENTION_FUNCTIONS, "attention"), (ALL_MASK_ATTENTION_FUNCTIONS, "mask")):
            self._spaces += [vars(registry), registry._local_mapping, registry._global_mapping]
            for base in (base for base in type(registry).__mro__ if package_of(base.__module__) in PACKAGES):
                yield self._class_reason(base)
            if vars(registry).keys() != {"_local_mapping"}:
                yield f"transformers' registry of {what} functions has attributes of its own"
            function = registry.get(name)
            self._watch(function)
            is_replaced = name == ATTENTION and what == "attention" and function is not attention_forward
            if function is not None and (is_replaced or not is_original(function)):
                yield f"the {what} function {name!r} is not that of transformers"


def _not_by_columns(kind: type) -> str | None:
    """Why modules of a class may compute a column otherwise where there are other columns; None if they do not."""
    for base in kind.__mro__:
        name, package = f"{base.__module__}.{base.__qualname__}", package_of(base.__module__)
        if not issubclass(base, nn.Module):
            continue
        if name.startswith(_EXCLUDED) or (package == "torch" and base.__module__ not in _TORCH):
            return f"a module is of class {name}"
        if package in PACKAGES or is_trusted(base):
            return None
    return f"a module is of class {kind.__module__}.{kind.__qualname__}"


_code = functools.lru_cache(maxsize=64)(Code)


def code_of(kinds: frozenset[type], attention: Any) -> Code:
    """The code of a model's classes, compared again if something of it has changed. Arguments as for :class:`Code`."""
    if not _code(kinds, attention).is_current():
        forget_code()
    return _code(kinds, attention)


def forget_code() -> None:
    """Compare all code again."""
    _code.cache_clear()
