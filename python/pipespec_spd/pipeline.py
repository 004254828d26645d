"""SpeculativePipeline: ``generate()`` on a partitioned target with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.api.base import BasePipeline
from pipespec.api.output import report_of
from pipespec.api.prepare import PreparedCall
from pipespec.checks.devices import device_name
from pipespec.checks.models import check_chain
from pipespec.engine.chain import stage_names
from pipespec.errors import NotKnown
from pipespec.models.families import embedded
from pipespec.models.loading import load_model
from pipespec.models.parts import ModelParts
from pipespec.models.properties import not_whole_reason
from pipespec.schedules.base import GenerationRequest
from pipespec_spd.decoding import SpeculativeDriver
from pipespec_spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig
from pipespec_spd.drafting import Drafter, NgramDrafter
from pipespec_spd.local import LocalDriver
from pipespec_spd.model_drafter import ModelDrafter
from pipespec_spd.module_drafter import ModuleDrafter
from pipespec_spd.partition import Partition, check_target, cut, load_skeleton
from pipespec_spd.report import SpeculativeReport

_Model: TypeAlias = PreTrainedModel | str | Path


class SpeculativePipeline(BasePipeline):
    """A target in n stages with one token in flight per stage. ``generate()`` is that of :meth:`pipespec.Pipeline.generate`.

    The text depends on target, prompt and seed only, and not on the partition, on the drafter or on its failure.

    All stages run in this process, one after the other. On one device SPD cannot beat plain decoding, since each cycle reads all weights.
    :class:`pipespec_spd.RanksPipeline` runs the stages at the same time.

    Args:
        target: A causal language model of the LLaMA family, or its path.
        drafter: The folder of a draft module that was trained for this target and these stages; ``"ngram"`` (prompt lookup); a smaller model
            or its path; or any :class:`pipespec_spd.Drafter`.
        stages: The number of equal stages, where the first ones get one layer more if it does not divide; or the layers of each stage. With
            one stage the target decodes plainly, without the drafter.
        dtype: For models given as paths, as for :class:`pipespec.Pipeline`.
        device: As ``dtype``.
        trust_remote_code: As ``dtype``.
        native: As for :class:`pipespec.Pipeline`. ``report.stages[0].forward`` says how the target ran.

    Raises:
        ValueError: Target, drafter and stages do not fit together. Raised before any weight is loaded where possible.
        TypeError: The target is no model of the LLaMA family, or an argument has another type.
        FileNotFoundError: A path holds no model.
    """

    report: SpeculativeReport | None
    has_target = True
    """As for :class:`RanksPipeline`, in whose place this class runs on one process."""

    def __init__(
        self,
        target: _Model,
        drafter: Drafter | _Model = "ngram",
        *,
        stages: int | Sequence[int] | Partition,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
        native: bool = True,
    ) -> None:
        place_name = None if device is None else device_name(device)
        options: dict[str, Any] = {"dtype": dtype, "device": place_name, "trust_remote_code": trust_remote_code}
        if isinstance(target, (str, Path)):  # before any weight is loaded
            found = cut(load_skeleton(target).config.num_hidden_layers, stages)
            config = module_config(drafter)
            if config is not None:
                config.require(target, found.ranges)
        model = load_model(target, **options)
        check_target(model)
        self.partition = cut(model.config.num_hidden_layers, stages)
        found_drafter, drafts = resolve_drafter(drafter, model, target, self.partition, **options)
        super().__init__([*drafts, model])
        self._driver: SpeculativeDriver = LocalDriver(self.target, self.partition, found_drafter, native)

    @property
    def drafter(self) -> Drafter:
        """The drafter of this process."""
        return self._driver.drafter

    def _check_request(self, request: GenerationRequest) -> None:
        if request.cache is not None and self._driver.features:
            raise NotKnown(
                "past_key_values",
                "generate(): past_key_values lacks what this drafter reads of each position, the outputs of layers",
            )

    def _report(self, generation: PreparedCall) -> SpeculativeReport:
        return speculative_report(generation, self._driver)


def speculative_report(generation: PreparedCall, driver: SpeculativeDriver) -> SpeculativeReport:
    """The report of the last call of ``driver``."""
    plain = report_of(generation, driver)
    counts = [driver.machine.count(row) for row in range(plain.rows)]
    phases, known = driver.clock.seconds, sum(driver.clock.seconds.values())
    return SpeculativeReport(
        **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
        partition=driver.partition.counts,
        drafter=type(driver.drafter).__name__,
        verified=sum(c.tokens for c in counts),
        cycles=sum(c.cycles for c in counts),
        rounds=driver.rounds,
        checked=sum(c.checked for c in counts),
        accepted=sum(c.accepted for c in counts),
        flushes=sum(c.flushes for c in counts),
        phases=phases | {"other": plain.seconds - known},
        stage_seconds=tuple(driver.clock.stage_seconds),
        parallel_seconds=plain.seconds - driver.clock.saved,
    )


def module_config(drafter: Any) -> DraftModuleConfig | None:
    """The configuration of the draft module at the path ``drafter``; None if it is no path of a draft module."""
    if isinstance(drafter, (str, Path)) and Path(drafter, CONFIG_FILE).is_file():
        return DraftModuleConfig.load(drafter)
    return None


def resolve_drafter(
    drafter: Any, target: PreTrainedModel, given_target: Any, partition: Partition, **options: Any
) -> tuple[Drafter, list[PreTrainedModel]]:
    """Turn the argument ``drafter`` of :class:`SpeculativePipeline` into a drafter and the models in it. Raises its errors.

    Args:
        given_target: The target as the user gave it, a model or a path.
        options: Arguments of ``load_model`` for a model given as a path.
    """
    if not isinstance(drafter, (Drafter, PreTrainedModel, str, Path)):
        raise TypeError(f"drafter must be 'ngram', a model, a path or a Drafter, not {type(drafter).__name__}")
    is_module = module_config(drafter) is not None
    given = [] if is_module or isinstance(drafter, Drafter) or drafter == "ngram" else [drafter]
    models = [load_model(m, **options) for m in given]
    check_chain([*models, target], [*given, given_target])
    for name, model in zip(stage_names(len(models) + 1), [*models, target], strict=True):
        if (reason := not_whole_reason(model)) is not None:
            needs = "a SpeculativePipeline needs each model whole on one device"
            raise ValueError(f"{needs}, and {name} is not: {reason}; use schedule='plain', 'lockstep' or 'workers'")
    if isinstance(drafter, Drafter):
        return drafter, []
    if models:
        return ModelDrafter(models[0]), models
    if not is_module:
        return NgramDrafter(), []
    whole = given_target if isinstance(given_target, (str, Path)) else target
    module = DraftModule.load(drafter, target=whole, stages=partition.ranges, dtype=target.dtype, device=target.device)
    return ModuleDrafter(module, partial(embedded, ModelParts.of(target))), []
