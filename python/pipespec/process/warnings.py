"""Warnings that point at the user's line."""

from __future__ import annotations

import sys

_INSIDE = {"pipespec", "pipespec_kernels", "transformers", "torch", "contextlib"}
"""Packages that may stand between the user's line and a warning."""


def user_stacklevel() -> int:
    """``stacklevel`` of a warning: the number of frames between the caller of this function and the first one outside of :data:`_INSIDE`."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level
