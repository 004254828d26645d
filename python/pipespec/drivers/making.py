"""Which driver a schedule stands for."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from pipespec.drivers.base import Driver, Policy
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.drivers.rounds import RoundsDriver
from pipespec.drivers.streams import StreamsDriver
from pipespec.drivers.workers import WorkersDriver


def make_driver(
    schedule: str, models: Sequence[PreTrainedModel], policy: Policy, trace: int = 0, *, graphs: bool = False
) -> Driver:
    """The driver of ``schedule``, ``"plain"``, ``"lockstep"``, ``"workers"`` or ``"streams"``, over ``models``, the target last and with
    ``"plain"`` alone. ``graphs``: of the first two, with captured steps; ``"streams"`` always has them.

    Raises what the driver does: ``ValueError``; ``RuntimeError`` where no processes can be started;
    :class:`pipespec.placement.NotCapturable`.
    """
    if schedule == "workers":
        return WorkersDriver(models, policy, trace)
    if schedule == "streams":
        return StreamsDriver(models, policy, trace)
    return RoundsDriver(models, policy, trace) if graphs else LockstepDriver(models, policy, trace)
