"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _option(default: Any, metavar: str | None, text: str, *choices: str) -> Any:
    """A field, with what the command line says of its option."""
    return field(default=default, metadata={"metavar": metavar, "text": text, "choices": choices})


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run. Give exactly one of ``steps``, ``tokens`` and ``minutes``. They are options of ``pipespec train-draft``, too.

    The published rate falls linearly to 0 (SPD, section 4.4); a cosine falls to 1 %. Muon's updates are scaled to AdamW's size. Steps without all stages
    filled draw 1 to n - 1 tokens in flight. An interruption loses at most the minutes between two checkpoints.

    Raises:
        ValueError: A value is out of range.
    """

    steps: int | None = _option(None, "N", "optimizer steps")
    tokens: int | None = _option(
        None, "N", "training tokens, padding not counted; the step that reaches them is the last one"
    )
    minutes: float | None = _option(
        None, "M", "wall-clock minutes; a resumed run then differs from an uninterrupted one"
    )
    accumulate: int = _option(1, "N", "forwards in a step")
    rate: float = _option(1e-4, "R", "peak learning rate")
    rate_schedule: str = _option("cosine", None, "how the rate falls", "cosine", "linear")
    warmup: float = _option(
        0.02, "W", "share of the run in which the rate rises; from 1 on: steps, which needs --steps or --epochs"
    )
    optimizer: str = _option("adamw", None, "adamw, or muon for all matrices but the head", "adamw", "muon")
    decay: float = _option(0.0, "W", "weight decay of matrices")
    clip: float = _option(1.0, "C", "largest norm of the gradient")
    freeze_head: bool = _option(False, None, "the head keeps the target's weights")
    temperature: float = _option(1.0, "T", "temperature of both distributions")
    argmax_weight: float = _option(0.0, "W", "weight of the cross entropy with the target's argmax")
    full: float = _option(0.5, "P", "share of the steps with all stages filled")
    amp: bool = _option(False, None, "bf16 matrix products; weights and optimizer state stay float32")
    validate_every: int = _option(100, "N", "in steps")
    save_every: int | None = _option(None, "N", "write a checkpoint after so many steps")
    save_minutes: float = _option(10.0, "M", "longest time between two checkpoints, in minutes")
    seed: int = _option(42, "N", "seed of all draws")

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.steps, self.tokens, self.minutes)) != 1:
            raise ValueError("give exactly one of steps, tokens and minutes")
        if any(limit is not None and not limit > 0 for limit in (self.steps, self.tokens, self.minutes)):
            raise ValueError("a training run needs at least one step, one token, or more than 0 minutes")
        for name in ("accumulate", "validate_every", "save_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rate", "temperature", "clip", "save_minutes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.full <= 1:
            raise ValueError(f"full is a share of the steps, between 0 and 1, not {self.full}")
        if not self.decay >= 0:
            raise ValueError(f"decay must be at least 0, not {self.decay}")
        for each in fields(self):
            if (choices := each.metadata["choices"]) and getattr(self, each.name) not in choices:
                raise ValueError(
                    f"no {each.name.replace('_', ' ')} {getattr(self, each.name)!r}: {' or '.join(choices)}"
                )
        if not 0 <= self.warmup_share < 1:
            raise ValueError(
                f"a warm-up of {self.warmup:g} must be a share of the run below 1, or fewer steps than the run has "
                "(a run limited by tokens or minutes takes a share)"
            )

    @property
    def warmup_share(self) -> float:
        """The warm-up as a share of the run."""
        return self.warmup / self.steps if self.warmup >= 1 and self.steps is not None else self.warmup
