"""Triton's interpreter without the work that it does twice or for nothing: its kernels take a third of the time, with the same results.

The import changes the interpreter of this process.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

# It works out whether sums and products of integers overflow, and drops the finding: assertions are for debugging only.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

_builtins: dict[Any, list[str]] = {}


def _patch_builtins(package: Any, *rest: Any) -> None:
    """As ``interpreter._patch_builtin``, which searches the package in every launch."""
    if package not in _builtins:
        _builtins[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
    for name in _builtins[package]:
        if is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, *rest)


def _call(function: Any, *given: Any, **named: Any) -> Any:
    """A call of a device function, for which the interpreter makes once more the changes to the language that the launch has made."""
    return function.rewrite()(*given, **named)


interpreter._patch_builtin = _patch_builtins
# A launch makes them for the modules that its kernel names. Here for those, too, that any function it calls may name.
_everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
_patch_lang = interpreter._patch_lang
interpreter._patch_lang = lambda _: _patch_lang(_everything)
interpreter.InterpretedFunction.__call__ = _call
