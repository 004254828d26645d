"""Speculative pipeline decoding: one target in n stages, one token in flight per stage, a draft beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipespec.spd.drafting import Drafter, Request
    from pipespec.spd.partition import Partition
    from pipespec.spd.pipeline import SpeculativePipeline
    from pipespec.spd.ranks import RanksPipeline

__all__ = ["Drafter", "Partition", "RanksPipeline", "Request", "SpeculativePipeline"]

_HOMES = {
    "Drafter": "pipespec.spd.drafting",
    "Partition": "pipespec.spd.partition",
    "RanksPipeline": "pipespec.spd.ranks",
    "Request": "pipespec.spd.drafting",
    "SpeculativePipeline": "pipespec.spd.pipeline",
}


def __getattr__(name: str) -> Any:
    # As the package above: the state machine must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'pipespec.spd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
