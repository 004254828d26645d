"""The experts of a feed-forward, as the native decoder takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipespec_kernels.formats import QuantizedMatrix

__all__ = ["Experts", "Routing"]

_SCORES = {"softmax": 0, "sigmoid": 1, "sparse_mixer": 2}


@dataclass(frozen=True)
class Routing:
    """How the experts of a column are chosen, and their weights.

    Attributes:
        chosen: Experts of each column.
        scores: What the router's logits become: ``softmax``, ``sigmoid``, or ``sparse_mixer`` (arXiv 2409.12136), which chooses two.
        is_normalised: The weights of a column sum to ``factor``.
        factor: Of the weights.
        groups: Equal groups of neighbouring experts.
        chosen_groups: Groups whose experts may be chosen: those with the largest sums of their best scores.
        group_best: The number of best scores that a group is judged by.
        jitter: Of ``sparse_mixer``.
    """

    chosen: int
    scores: str = "softmax"
    is_normalised: bool = True
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    jitter: float = 0.0

    def check(self, name: str, experts: int) -> None:
        """Raise ``ValueError`` for a choice that is not possible among so many experts."""
        if self.scores not in _SCORES:
            raise ValueError(f"{name}: scores must be one of {', '.join(_SCORES)}, got {self.scores!r}")
        size = experts // self.groups if self.groups > 0 and experts % self.groups == 0 else 0
        fits = 0 < self.chosen_groups <= self.groups and 0 < self.group_best <= size
        if not fits or not 0 < self.chosen <= self.chosen_groups * size:
            raise ValueError(f"{name}: {experts} experts do not allow {self}")
        if self.scores == "sparse_mixer" and self.chosen != 2:
            raise ValueError(f"{name}: sparse_mixer chooses two experts, not {self.chosen}")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer with ``E`` of them, of intermediate size ``I``. Matrices are those of :class:`pipespec_kernels.decoder.LayerWeights`.

    Attributes:
        routing: The choice.
        router: ``[E, H]``.
        gate: ``[E * I, H]``, or with the rows of ``up`` after those of each expert's gate ``[E * 2 I, H]``.
        up: ``[E * I, H]``; None: it is in ``gate``.
        down: ``[E * H, I]``.
        router_bias: ``[E]``.
        choice_bias: float32 ``[E]``, added to scores in the choice, and not in the weights.
        gate_bias: An entry per row of ``gate``; also for ``up``, where that is None.
        up_bias: An entry per row of ``up``.
        down_bias: ``[E * H]``.
        shared: Gate, up and down of an expert that all columns have; or none.
        shared_router: ``[1, H]``: the sigmoid of its product is the weight of the shared expert, which else is 1.
        limit: Gates are at most, and ups are within, this; then 1 is added to ups. 0: neither.
    """

    routing: Routing
    router: Tensor | QuantizedMatrix
    gate: Tensor | QuantizedMatrix
    up: Tensor | QuantizedMatrix | None
    down: Tensor | QuantizedMatrix
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared: tuple[Any, Any, Any] | tuple[()] = ()
    shared_router: Tensor | QuantizedMatrix | None = None
    limit: float = 0.0

    def native(self, name: str, hidden: int, at: Callable[..., tuple[int, ...]]) -> tuple[Any, ...]:
        """What the native code takes. ``at``: the address of a weight, by its name and the shape that it must have."""
        routing, count, size = self.routing, self.router.shape[0], self.down.shape[1]
        routing.check(name, count)
        rows = size if self.up is not None else 2 * size
        if not size or (self.shared_router is not None and not self.shared):
            raise ValueError(f"{name}: experts need an intermediate size, and a shared_router needs a shared expert")
        up, up_bias = (self.gate, self.gate_bias) if self.up is None else (self.up, self.up_bias)
        shared = self.shared[2].shape[1] if self.shared else 0
        gate, up_, down = self.shared or (None,) * 3
        weights = (
            ("router", self.router, (count, hidden)),
            ("router_bias", self.router_bias, (count,)),
            ("choice_bias", self.choice_bias, (count,)),
            ("gate", self.gate, (count * rows, hidden)),
            ("up", up, (count * rows, hidden)),
            ("down", self.down, (count * hidden, size)),
            ("gate_bias", self.gate_bias, (count * rows,)),
            ("up_bias", up_bias, (count * rows,)),
            ("down_bias", self.down_bias, (count * hidden,)),
            ("shared gate", gate, (shared, hidden)),
            ("shared up", up_, (shared, hidden)),
            ("shared down", down, (hidden, shared)),
            ("shared_router", self.shared_router, (1, hidden)),
        )
        sizes = (routing.groups, routing.chosen_groups, routing.group_best, size, shared, rows, rows - size)
        return (
            [at(f"{name}.{part}", weight, shape) for part, weight, shape in weights],
            (count, routing.chosen, _SCORES[routing.scores], routing.is_normalised, *sizes),
            (routing.factor, routing.jitter, self.limit),
        )
