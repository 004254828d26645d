"""Speculative pipeline decoding: a target in n stages, one token in flight per stage, and a drafter beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipespec.spd.drafting import Drafter
    from pipespec.spd.machine import DraftRequest
    from pipespec.spd.partition import Partition
    from pipespec.spd.pipeline import SpeculativePipeline
    from pipespec.spd.ranks import RanksPipeline

__all__ = ["DraftRequest", "Drafter", "Partition", "RanksPipeline", "SpeculativePipeline"]

_HOMES = {
    "DraftRequest": "pipespec.spd.machine",
    "Drafter": "pipespec.spd.drafting",
    "Partition": "pipespec.spd.partition",
    "RanksPipeline": "pipespec.spd.ranks",
    "SpeculativePipeline": "pipespec.spd.pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy, as in the package above: the state machine and the law need no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'pipespec.spd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
