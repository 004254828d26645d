"""ModuleTracker: which module of a model runs, for messages about captures that fail."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn


class ModuleTracker:
    """Context manager that tracks which module of a model runs, in the thread that created it. Other threads may use the model, too.

    Args:
        model: The model. It has hooks while the context is open.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    @property
    def module(self) -> str:
        """The innermost module that has begun and not returned: path and class. After an error: the module that raised it."""
        return self._inside[-1] if self._inside else "the selection of its tokens"

    def __enter__(self) -> ModuleTracker:
        for path, module in self._model.named_modules():
            name = f"{path} ({type(module).__name__})" if path else type(module).__name__

            def begin(*_: Any, name: str = name) -> None:
                if threading.get_ident() == self._thread:
                    self._inside.append(name)

            def end(*_: Any) -> None:
                if threading.get_ident() == self._thread:
                    self._inside.pop()

            self._hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
