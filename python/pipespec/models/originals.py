"""Whether classes and functions are still those that their module's file defines.

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

PACKAGES = frozenset(
    ("torch", "transformers", "pipespec", "accelerate", "peft", "bitsandbytes", "torchao", "compressed_tensors", "gptqmodel",
     "auto_gptq", "awq", "hqq", "optimum", "eetq", "aqlm", "vptq", "spqr_quant", "auto_round", "fp_quant")
)  # fmt: skip
"""Packages whose modules compute each column of a forward by itself: torch, transformers, adapters, quantisation, placement."""

_PLAIN = frozenset(
    ("builtins", "collections", "typing", "abc", "enum", "functools", "contextlib", "dataclasses", "types")
)
_NEVER_CALLED = frozenset(
    ("__init__", "__init_subclass__", "__repr__", "extra_repr", "__class_getitem__", "__annotate_func__")
)
_ALWAYS_CALLED = frozenset(("__call__", "__getattr__", "__getattribute__", "__new__"))


_trusted: set[Any] = set()
"""What :func:`trust` was given: names, classes, and code objects of functions."""


def trust(*code: Any) -> None:
    """Say of code of your own that it computes each column of a forward by itself, and each row: a hook that observes, an adapter, a model with remote code,
    a logits processor that knows one row alone.

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


def is_trusted(kind: type) -> bool:
    """Whether :func:`trust` was given a class, its module, or its package."""
    return bool(_trusted) and (kind in _trusted or _is_trusted_module(kind.__module__))


def is_trusted_function(value: Any) -> bool:
    """Whether :func:`trust` was given a function."""
    return bool(_trusted) and getattr(value, "__code__", None) in _trusted


def _is_trusted_module(name: Any) -> bool:
    return name in _trusted or package_of(name) in _trusted


def package_of(name: str | None) -> str:
    """The first part of the name of a module."""
    return (name or "").partition(".")[0]


@functools.cache
def codes_of(module: str) -> dict[str, tuple[CodeType, ...]]:
    """By qualified name, the code objects of all functions in the file of a module; empty where it has no file."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    loader: Any = getattr(spec, "loader", None)
    try:
        whole = loader.get_code(module)
    except Exception:  # no loader, or one without code
        whole = None
    found: dict[str, list[CodeType]] = {}
    stack = [] if whole is None else [whole]
    while stack:
        code = stack.pop()
        found.setdefault(code.co_qualname, []).append(code)
        stack += _codes_in(code)
    return {name: tuple(codes) for name, codes in found.items()}


def names_in(codes: Iterable[CodeType]) -> set[str]:
    """Names of globals and attributes that code objects, and those in them, read."""
    found, stack = set(), list(codes)
    while stack:
        code = stack.pop()
        found |= set(code.co_names)
        stack += _codes_in(code)
    return found


def _codes_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def parts_of(value: Any) -> Iterator[Any]:
    """What a call of ``value`` runs: the functions behind decorators, bound methods, properties and partial functions, and callables of other types."""
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
            stack += _held(value)
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            stack.append(value.__func__)
        elif isinstance(value, property):
            stack += [part for part in (value.fget, value.fset) if part is not None]
        elif isinstance(value, functools.partial):
            stack.append(value.func)
        else:
            yield value
        # What a wrapper of another class, or a partial function, keeps.
        stack += [held for name, held in getattr(value, "__dict__", {}).items() if name == "__wrapped__"]


def _held(function: FunctionType) -> list[Any]:
    """Functions in the closure of a function: what a decorator has wrapped."""
    found = []
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(held, (FunctionType, MethodType, functools.partial)):
            found.append(held)
    return found


def functions_of(value: Any) -> list[FunctionType]:
    """The functions among :func:`parts_of`."""
    return [part for part in parts_of(value) if isinstance(part, FunctionType)]


def is_original(value: Any) -> bool:
    """Whether all that a call of ``value`` runs is built in, or compiled from the file of its module, in one of :data:`PACKAGES`."""
    return all(_is_original(part) for part in parts_of(value))


def _is_original(part: Any) -> bool:
    if isinstance(part, FunctionType):
        module = part.__globals__.get("__name__")
        if _trusted and (part.__code__ in _trusted or _is_trusted_module(module)):
            return True
        if package_of(module) in _PLAIN:
            return True
        return package_of(module) in PACKAGES and part.__code__ in codes_of(str(module)).get(
            part.__code__.co_qualname, ()
        )
    if isinstance(part, type):
        return package_of(part.__module__) in PACKAGES | _PLAIN
    kind = type(part)
    if isinstance(part, BuiltinFunctionType) or package_of(kind.__module__) in _PLAIN:
        return True
    return package_of(kind.__module__) in PACKAGES and (not callable(part) or is_original(kind.__call__))


def own_methods(kind: type) -> dict[str, Any]:
    """What a class defines itself that runs code."""
    return {
        name: value
        for name, value in vars(kind).items()
        if (callable(value) or isinstance(value, (staticmethod, classmethod)) or _is_read_first(value))
        and not isinstance(value, type)
    }


def _is_read_first(value: Any) -> bool:
    """Whether an attribute of a class is read before one of the instance: properties and other data descriptors, less those of Python itself."""
    return hasattr(type(value), "__set__") and not isinstance(value, (GetSetDescriptorType, MemberDescriptorType))


def patched_method(kind: type, names: Iterable[str] | None = None) -> str | None:
    """The name of a method that a class does not have from the file of its module; None if there is none.

    Args:
        kind: the class. One outside of :data:`PACKAGES` may have methods that replace none of its base classes.
        names: methods that count; None: all.
    """
    if is_trusted(kind):
        return None
    is_ours = package_of(kind.__module__) in PACKAGES
    codes = codes_of(kind.__module__) if is_ours else {}
    found = own_methods(kind)
    for name in found if names is None else [name for name in names if name in found]:
        mine = f"{kind.__qualname__}.{name}"
        value = found[name]
        matters = (
            name in _ALWAYS_CALLED
            or mine in codes
            or any(hasattr(base, name) for base in kind.__mro__[1:-1])
            or (is_ours and _is_read_first(value))
        )
        if name in _NEVER_CALLED or not matters:
            continue
        if is_trusted_function(value):
            continue
        if not is_ours or not is_original(value):
            return name
        # The method of another class is not this one's.
        if mine in codes and not any(f.__code__.co_qualname == mine for f in functions_of(value)):
            return name
    return None


def patched_global(module: ModuleType, names: Iterable[str]) -> str | None:
    """The first of ``names`` under which a module holds another object than its file defines or imports; None if there is none."""
    codes, space = codes_of(module.__name__), vars(module)
    imported = {name for code in codes.get("<module>", ()) for name in code.co_names}
    return next(
        (name for name in sorted(set(names) & space.keys()) if not _is_of(module, name, space[name], codes, imported)),
        None,
    )


def _is_of(
    module: ModuleType, name: str, value: Any, codes: dict[str, tuple[CodeType, ...]], imported: set[str]
) -> bool:
    """Whether a value of a module's global is what its file defines, or imports, under this name."""
    is_defined = name in codes
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value
    if isinstance(value, type):
        package = package_of(value.__module__)
        if package not in PACKAGES:
            return not is_defined and package in sys.stdlib_module_names
        if is_defined:
            return value.__module__ == module.__name__ and value.__qualname__ == name
        return value.__name__ == name or value.__name__ in imported
    if not callable(value):
        return package_of(type(value).__module__) in PACKAGES | sys.stdlib_module_names
    if not _is_checked(value):
        return True
    known = {function.__code__.co_name for function in functions_of(value)}
    is_its_own = not known or name in known or (not is_defined and bool(known & imported))
    if is_defined:
        # One of another module may have its name.
        is_its_own = any(function.__code__ in codes[name] for function in functions_of(value))
    return is_its_own and is_original(value)


def _is_checked(value: Any) -> bool:
    """Whether a callable in a module is compared: the functions of torch, transformers and others, and objects of classes outside of the standard library."""
    modules = {function.__globals__.get("__name__") for function in functions_of(value)} or {type(value).__module__}
    return not all(package_of(module) in sys.stdlib_module_names for module in modules)
