"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass

RATE_SCHEDULES = ("cosine", "linear")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run.

    Args:
        steps: Optimizer steps of the run. Give exactly one of ``steps``, ``tokens`` and ``minutes``.
        tokens: Tokens of the run, padding not counted. The step that reaches them is the last one.
        minutes: Wall-clock minutes of the run.
        rate: Peak learning rate.
        rate_schedule: How the rate falls behind its linear rise: ``cosine``, to 1 % along half a cosine, or ``linear``, to 0 as published
            (SPD, section 4.4).
        warmup: Share of the run in which the rate rises; from 1 on the number of steps, which needs ``steps``.
        accumulate: Forwards per optimizer step.
        temperature: Temperature of both distributions.
        argmax_weight: Weight of the cross entropy with the target's argmax.
        full: Share of the steps with all stages filled. The others draw 1 to n - 1 tokens in flight.
        decay: Weight decay of matrices.
        clip: Largest norm of the gradient.
        freeze_head: The head keeps the target's weights.
        optimizer: ``adamw``, or ``muon`` for all matrices but the head, with updates scaled to AdamW's size.
        amp: bfloat16 products by autocast. Weights and optimizer state stay float32.
        seed: Seed of the draws.
        validate_every: Steps between validations.
        save_every: Steps between checkpoints; None: time alone decides.
        save_minutes: Minutes after which a checkpoint is written in any case: what an interruption costs at most.

    Raises:
        ValueError: A value is out of range.
    """

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    rate: float = 1e-4
    rate_schedule: str = "cosine"
    warmup: float = 0.02
    accumulate: int = 1
    temperature: float = 1.0
    argmax_weight: float = 0.0
    full: float = 0.5
    decay: float = 0.0
    clip: float = 1.0
    freeze_head: bool = False
    optimizer: str = "adamw"
    amp: bool = False
    seed: int = 42
    validate_every: int = 100
    save_every: int | None = None
    save_minutes: float = 10.0

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
        if self.rate_schedule not in RATE_SCHEDULES:
            raise ValueError(f"no rate schedule {self.rate_schedule!r}: {' or '.join(RATE_SCHEDULES)}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(
                f"a warm-up of {self.warmup:g} must be a share of the run below 1, or fewer steps than the run has "
                "(a run limited by tokens or minutes takes a share)"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"no optimizer {self.optimizer!r}: adamw or muon")

    @property
    def warmup_share(self) -> float:
        """The warm-up as a share of the run."""
        return self.warmup / self.steps if self.warmup >= 1 and self.steps is not None else self.warmup
