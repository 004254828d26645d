"""SpeculativePipeline: ``generate()`` on a partitioned target with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.api.base import BasePipeline
from pipespec.api.output import report_of
from pipespec.api.prepare import PreparedCall
from pipespec.errors import UnsupportedInput
from pipespec.models.devices import LayerDevices
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import load_model
from pipespec.preflight.checks import check_chain
from pipespec.preflight.devices import device_name
from pipespec.preflight.support import check_whole
from pipespec.schedules.request import GenerationRequest
from pipespec_spd.chain import ChainDrafter
from pipespec_spd.decoding import SpeculativeDriver
from pipespec_spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig
from pipespec_spd.drafting import Drafter, NgramDrafter
from pipespec_spd.local import LocalDriver
from pipespec_spd.module_drafter import ModuleDrafter
from pipespec_spd.partition import Partition, check_target, cut, load_skeleton, partition_of, place, stage_devices
from pipespec_spd.report import SpeculativeReport

_Model: TypeAlias = PreTrainedModel | str | Path


class SpeculativePipeline(BasePipeline):
    """A target in n stages with one token in flight per stage. ``generate()`` is that of :meth:`pipespec.Pipeline.generate`.

    The text depends on target, prompt and seed only, and not on the partition, on the drafter or on its failure.

    All stages run in this process: one after the other, or with ``devices`` at the same time. On one device SPD cannot beat plain decoding, since each
    cycle reads all weights.

    Args:
        target: A causal language model of the LLaMA family, or its path.
        drafter: The folder of a draft module that was trained for this target and these stages; ``"ngram"`` (prompt lookup); one or
            several models or paths, smallest first, which draft as a PipeSpec chain (:mod:`pipespec_spd.chain`); or any
            :class:`pipespec_spd.Drafter`.
        stages: The number of equal stages, where the first ones get one layer more if it does not divide; the layers of each stage; or
            ``"balanced:n"``, by the measured time of each layer. With one stage the target decodes plainly, without the drafter.
        dtype: For models given as paths, as for :class:`pipespec.Pipeline`.
        device: As ``dtype``.
        devices: One device per stage. The stages of a cycle then run at the same time, each in a thread of its own, while the drafter runs, and
            hidden states are copied from device to device. The layers of a model that is given move there, and drafts that are given as paths are
            loaded on the first device. ``["cpu"] * n`` runs n stages at the same time on one CPU. None: all stages run one after the other where the
            model lies. Two GPUs have not been tried.
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
        drafter: Drafter | _Model | Sequence[_Model] = "ngram",
        *,
        stages: int | Sequence[int] | str | Partition,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        devices: Sequence[torch.device | str] | None = None,
        trust_remote_code: bool = False,
        native: bool = True,
    ) -> None:
        if devices is not None and device is not None:
            raise ValueError("give either device=, for all stages, or devices=, one per stage")
        place_name = None if device is None else device_name(device)
        options: dict[str, Any] = {"dtype": dtype, "device": place_name, "trust_remote_code": trust_remote_code}
        if isinstance(target, (str, Path)):  # before any weight is loaded
            layers = load_skeleton(target).config.num_hidden_layers
            found = cut(layers, stages, lambda: [1.0] * layers)
            config = module_config(drafter)
            if config is not None and not isinstance(stages, str):
                config.require(target, found.ranges)
            if devices is not None:
                stage_devices(devices, found)
        model = load_model(target, **options)
        check_target(model)
        self.partition = partition_of(model, stages)
        places = None if devices is None else stage_devices(devices, self.partition)
        if places is not None:
            options["device"] = places[0]
        found_drafter, drafts = resolve_drafter(
            drafter, model, target, self.partition, inputs=None if places is None else places[0], **options
        )
        if places is not None:  # after all checks of the whole target
            place(model, self.partition, places)
            self._is_placed = True
        super().__init__([*drafts, model])
        self._driver: SpeculativeDriver = LocalDriver(
            self.target, self.partition, found_drafter, native, at_once=devices is not None
        )

    @property
    def drafter(self) -> Drafter:
        """The drafter of this process."""
        return self._driver.drafter

    def _check_request(self, request: GenerationRequest) -> None:
        is_spread = self._is_placed and LayerDevices.of(self.target).is_split
        if request.returns_cache and is_spread and CacheLayout.of(self.target.config).states is not None:
            raise UnsupportedInput(
                "return_dict_in_generate",
                "generate(): the target has recurrent layers, whose states no cache holds for stages on several devices (devices=), so the cache "
                "cannot be returned: set use_cache=False",
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
    drafter: Any,
    target: PreTrainedModel,
    given_target: Any,
    partition: Partition,
    inputs: torch.device | None = None,
    **options: Any,
) -> tuple[Drafter, list[PreTrainedModel]]:
    """Turn the argument ``drafter`` of :class:`SpeculativePipeline` into a drafter and the models in it. Raises its errors.

    Args:
        given_target: The target as the user gave it, a model or a path.
        inputs: Where the target's embedding will be; None: where it is. A draft module is loaded there.
        options: Arguments of ``load_model`` for models given as paths.
    """
    is_module = module_config(drafter) is not None
    given: list[Any] = []
    if isinstance(drafter, (list, tuple)):
        given = list(drafter)
        if not given:
            raise ValueError("drafter is an empty list: give a model, or 'ngram' to draft without one")
    elif not isinstance(drafter, (Drafter, PreTrainedModel, str, Path)):
        raise TypeError(
            f"drafter must be 'ngram', a model, a path, a list of these, or a Drafter, not {type(drafter).__name__}"
        )
    elif not (is_module or isinstance(drafter, Drafter) or drafter == "ngram"):
        given = [drafter]
    models = [load_model(m, **options) for m in given]
    check_chain([*models, target], [*given, given_target])
    check_whole([*models, target], "a SpeculativePipeline")
    if isinstance(drafter, Drafter):
        return drafter, []
    if models:
        return ChainDrafter(models), models
    if not is_module:
        return NgramDrafter(), []
    whole = given_target if isinstance(given_target, (str, Path)) else target
    place = inputs or target.device
    module = DraftModule.load(drafter, target=whole, stages=partition.ranges, dtype=target.dtype, device=place)
    return ModuleDrafter(module, target.get_input_embeddings()), []
