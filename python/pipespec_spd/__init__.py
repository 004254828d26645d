"""Speculative pipeline decoding: a target in n stages, one token in flight per stage, and a drafter beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipespec_spd.drafting import Drafter
    from pipespec_spd.machine import DraftRequest
    from pipespec_spd.partition import Partition
    from pipespec_spd.pipeline import SpeculativePipeline
    from pipespec_spd.ranks import RanksPipeline

__all__ = ["DraftRequest", "Drafter", "Partition", "RanksPipeline", "SpeculativePipeline"]

_HOMES = {
    "DraftRequest": "pipespec_spd.machine",
    "Drafter": "pipespec_spd.drafting",
    "Partition": "pipespec_spd.partition",
    "RanksPipeline": "pipespec_spd.ranks",
    "SpeculativePipeline": "pipespec_spd.pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy, as in pipespec: the state machine and the law need no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'pipespec_spd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
