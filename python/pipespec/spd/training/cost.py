"""What a training run costs, before it runs: parameters, floating-point operations, and hours by a stated utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipespec.spd.draft_module import DraftModuleConfig
from pipespec.spd.training.mask import depths

_ADAMW_BYTES = 16
"""Bytes per trained parameter: weight, gradient and two moments in float32."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA-like decoder that determine its operations."""

    hidden: int
    intermediate: int
    layers: int
    query_width: int
    key_width: int
    vocabulary: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape in a decoder's config, as a dictionary."""
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // heads)
        return cls(
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            query_width=heads * size,
            key_width=int(config.get("num_key_value_heads") or heads) * size,
            vocabulary=int(config["vocab_size"]),
        )

    def layer_flops(self, queries: int, keys: int) -> int:
        """Operations of one layer's forward with ``queries`` rows in queries and MLP, and ``keys`` rows in keys and values.

        The matrix products alone, two operations per multiplication and addition. Attention counts every pair of rows, as kernels with a
        dense mask compute it.
        """
        products = 2 * self.hidden * self.query_width * queries + 2 * self.hidden * self.key_width * keys
        return 2 * (products + 3 * self.hidden * self.intermediate * queries + 2 * queries * keys * self.query_width)


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of one training sequence: the target's forward, and the module's forward and backward."""

    teacher: float
    module: float

    @property
    def flops(self) -> float:
        return self.teacher + self.module


def trained_parameters(config: DraftModuleConfig, *, freeze_head: bool = False) -> int:
    """Trained parameters of a module: projections, blocks with their two norms, and the head unless it is frozen. Biases are not counted."""
    shape = Shape.of(config.target)
    h = shape.hidden
    block = 2 * h * (shape.query_width + shape.key_width) + 3 * h * shape.intermediate + 2 * h
    projections = sum((i + 1) * h * h for i in range(len(config.anchors)))
    return projections + config.layers * block + (0 if freeze_head else h * config.logits)


def sequence_cost(config: DraftModuleConfig, length: int, *, full: float, freeze_head: bool = False) -> SequenceCost:
    """Operations of a sequence, in the mean over the fills that training draws.

    The rows are those of :func:`pipespec.spd.training.trainer.simulate`: one per position and depth that exists, and in the last block
    queries of the newest depth only. A backward takes twice its forward: once for the inputs, once for the weights. The projections have no
    gradient of their inputs, a frozen head none of its weights. Both heads count at every position; a run computes them where there is a
    token to learn, so conversations cost less.

    Args:
        config: The module, with its target's sizes.
        length: Tokens of the sequence.
        full: Share of the steps with all stages filled.
        freeze_head: Whether the head is not trained.
    """
    shape = Shape.of(config.target)
    h, n = shape.hidden, config.n
    teacher = shape.layers * shape.layer_flops(length, length) + 2 * length * h * shape.vocabulary
    head = 2 * length * h * config.logits

    def module(fill: int) -> float:
        kinds = depths(fill, n)
        rows = len(kinds) * length
        projections = sum(2 * length * (kind + 1) * h * h for kind in {config.types[d] for d in kinds})
        # The first block's inputs have gradients, those of the projections' weights.
        blocks = (config.layers - 1) * shape.layer_flops(rows, rows) + shape.layer_flops(length, rows)
        return 2 * projections + 3 * blocks + (2 if freeze_head else 3) * head

    shares = {n: 1.0} if n == 1 else {n: full} | dict.fromkeys(range(1, n), (1.0 - full) / (n - 1))
    return SequenceCost(float(teacher), sum(share * module(fill) for fill, share in shares.items()))


@dataclass(frozen=True)
class Hardware:
    """A GPU as a prediction assumes it.

    Args:
        peak: Peak of dense matrix products in Tflop/s, in the dtype of training.
        utilisation: Share of the peak that training reaches.
        link: GB/s between two GPUs, for the sum of gradients.

    Raises:
        ValueError: A value is out of range.
    """

    peak: float = 989.0
    utilisation: float = 0.35
    link: float = 300.0

    def __post_init__(self) -> None:
        if not self.peak > 0 or not self.link > 0:
            raise ValueError(f"a peak of {self.peak:g} Tflop/s and a link of {self.link:g} GB/s: both must be above 0")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"the utilisation must lie above 0 and up to 1, not {self.utilisation:g}")


@dataclass(frozen=True)
class RunCost:
    """What a run costs. ``tokens`` and ``sequences`` are those of all processes; ``parameters``: trained ones."""

    parameters: int
    sequences: float
    tokens: float
    flops: float

    def hours(self, gpus: int, per_step: float, hardware: Hardware) -> float:
        """Predicted hours: operations by the reached rate, and one ring sum of float32 gradients per optimizer step, not overlapped.

        Args:
            gpus: GPUs of the run.
            per_step: Sequences per optimizer step, of all GPUs together.
            hardware: The assumptions.
        """
        computing = self.flops / (gpus * hardware.peak * 1e12 * hardware.utilisation)
        sums = self.sequences / per_step * 2 * (gpus - 1) / gpus * 4 * self.parameters / (hardware.link * 1e9)
        return (computing + sums) / 3600

    def state_bytes(self) -> int:
        """Bytes of the trained weights, their gradients and AdamW's moments on each GPU."""
        return _ADAMW_BYTES * self.parameters


def run_cost(
    config: DraftModuleConfig, sequences: float, length: float, *, full: float, freeze_head: bool = False
) -> RunCost:
    """The cost of ``sequences`` of ``length`` tokens in the mean. Attention of uneven lengths costs more than that of the mean."""
    cost = sequence_cost(config, max(1, round(length)), full=full, freeze_head=freeze_head)
    return RunCost(
        trained_parameters(config, freeze_head=freeze_head), sequences, sequences * length, sequences * cost.flops
    )
