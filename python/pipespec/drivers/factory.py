"""The driver of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.drivers.base import Driver
from pipespec.drivers.controlled import ControlledDriver
from pipespec.drivers.graphed.rounds import RoundsDriver
from pipespec.drivers.graphed.streams import StreamsDriver
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.drivers.workers.driver import WorkersDriver


def make_driver(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> Driver:
    """Build the driver of ``config.schedule``.

    Args:
        models: Drafts, then the target. With ``"plain"`` the drafts take no part.
        config: Its schedule is any but ``"ranks"``, whose models are in other processes: see
            :func:`pipespec.drivers.ranks.membership.join`.

    Raises:
        ValueError: The models cannot run in this schedule.
        RuntimeError: Worker processes do not start.
        NotCapturable: A step cannot become a CUDA graph.
    """
    if config.schedule == "workers":
        return WorkersDriver(models, config)
    if config.schedule == "streams":
        return StreamsDriver(models, config)
    if config.schedule == "plain":
        models = models[-1:]
    if config.graphs:
        return RoundsDriver(models, config)
    return ControlledDriver(models, config) if config.controlled else LockstepDriver(models, config)
