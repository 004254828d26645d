"""The driver of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.models.devices import input_device
from pipespec.registry import SCHEDULES, names
from pipespec.schedules.base import Driver

_runs_uncaptured = False
"""Whether captured schedules run their steps uncaptured on a CPU. Only the tests set this."""


def make_driver(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> Driver:
    """Build the driver of ``config.schedule``.

    Args:
        models: Drafts, then the target. With ``"plain"`` the drafts take no part.
        config: Its schedule is any but ``"ranks"``, whose models are in other processes: see
            :func:`pipespec.schedules.ranks.membership.join`.

    Raises:
        ValueError: The models cannot run in this schedule, or captured steps would run on a CPU.
        RuntimeError: Worker processes do not start.
        NotCapturable: A step cannot become a CUDA graph.
    """
    row = config.schedule_row
    if not row.has_drafts:
        models = models[-1:]
    if config.head is not None and config.head not in models:
        models = [config.head, *models]
    if config.graphs and not _runs_uncaptured and all(input_device(model).type == "cpu" for model in models):
        what = f"schedule={row.name!r}" if row.is_captured else "graphs=True"
        others = names([r for r in SCHEDULES.values() if not (r.needs or r.is_captured)])
        raise ValueError(
            f"{what} runs captured CUDA graphs, and all models are on the CPU: use schedule={others} without graphs there"
        )
    kind: type[Driver] = row.driver_class(captured=config.graphs, controlled=config.controlled)
    return kind(models, config)
