"""SpeculativePipeline: a partitioned target and its drafter behind ``generate()``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.checks import check_chain
from pipespec.generation import Generation
from pipespec.loading import load_model
from pipespec.pipeline import BasePipeline
from pipespec.spd.chain import ChainDrafter
from pipespec.spd.decoding import LocalDriver, SpeculativeDriver
from pipespec.spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig, ModuleDrafter
from pipespec.spd.drafting import Drafter
from pipespec.spd.ngram import NgramDrafter
from pipespec.spd.partition import Partition, check_target, cut, load_skeleton, partition_of
from pipespec.spd.report import SpeculativeReport

_Model: TypeAlias = PreTrainedModel | str | Path


class SpeculativePipeline(BasePipeline):
    """A target in n stages with one token in flight per stage; ``generate()`` as :meth:`pipespec.Pipeline.generate` has it.

    The text depends on target, prompt and seed only: not on the partition, the drafter, or its failure.

    All stages run in this process, in turn: the text, the acceptance and the times of the parts are those of stages on devices of their own,
    the wall clock is not. On one device speculative pipeline decoding cannot beat plain decoding, since each cycle reads all weights.

    Parameters
    ----------
    target: a LLaMA-family causal language model, or the path of one.
    drafter: the folder of a draft module trained for this target and these stages; ``"ngram"`` (prompt lookup); a model or path, or several,
        smallest first (a PipeSpec chain drafts, see :mod:`pipespec.spd.chain`); or any :class:`pipespec.spd.Drafter`.
    stages: n (equal stages, the first ones larger by one layer where n does not divide), layers per stage, or ``"balanced:n"`` (by measured
        time of each layer). With one stage it is plain decoding and the drafter is not asked.
    dtype, device, trust_remote_code: for models given as paths, as for :class:`pipespec.Pipeline`.

    Raises ``ValueError``, ``TypeError`` or ``FileNotFoundError``, before any work, for what does not fit together.
    """

    report: SpeculativeReport | None

    def __init__(
        self,
        target: _Model,
        drafter: Drafter | _Model | Sequence[_Model] = "ngram",
        *,
        stages: int | Sequence[int] | str | Partition,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        if isinstance(target, (str, Path)):  # before any weight is loaded
            layers = load_skeleton(target).config.num_hidden_layers
            found = cut(layers, stages, lambda: [1.0] * layers)
            config = module_config(drafter)
            if config is not None and not isinstance(stages, str):
                config.require(target, found.ranges)
        model = load_model(target, **options)
        check_target(model)
        self.partition = partition_of(model, stages)
        self.drafter, drafts = resolve_drafter(drafter, model, target, self.partition, **options)
        super().__init__([*drafts, model])
        self._copies = True
        self._driver: SpeculativeDriver = LocalDriver(self.target, self.partition, self.drafter)

    def _spare(self, generation: Generation) -> None:
        self._driver.forget()

    def _generate(self, generation: Generation) -> SpeculativeReport:
        return run(generation, self._driver, "spd")


def run(generation: Generation, driver: SpeculativeDriver, schedule: str) -> SpeculativeReport:
    """Generate, and tell what it took."""
    generation.run(driver)
    plain = generation.report(schedule)
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
    """The configuration of the draft module that lies at the path ``drafter``; None where it is no path of one."""
    if isinstance(drafter, (str, Path)) and Path(drafter, CONFIG_FILE).is_file():
        return DraftModuleConfig.load(drafter)
    return None


def resolve_drafter(
    drafter: Any, target: PreTrainedModel, given_target: Any, partition: Partition, **options: Any
) -> tuple[Drafter, list[PreTrainedModel]]:
    """What a user means by ``drafter``, and the models in it; ``options``: for models given as paths.

    Raises as :class:`SpeculativePipeline`.
    """
    if module_config(drafter) is not None:
        whole = given_target if isinstance(given_target, (str, Path)) else target
        module = DraftModule.load(
            drafter, target=whole, stages=partition.ranges, dtype=target.dtype, device=target.device
        )
        check_chain([target], [given_target])
        return ModuleDrafter(module, target.get_input_embeddings()), []
    given: list[Any] = []
    if isinstance(drafter, (PreTrainedModel, Path)) or (isinstance(drafter, str) and drafter != "ngram"):
        given = [drafter]
    elif isinstance(drafter, (list, tuple)):
        given = list(drafter)
        if not given:
            raise ValueError("drafter is an empty list: give a model, or 'ngram' to draft without one")
    elif not isinstance(drafter, Drafter) and drafter != "ngram":
        raise TypeError(
            f"drafter must be 'ngram', a model, a path, a list of these, or a Drafter, not {type(drafter).__name__}"
        )
    models = [load_model(m, **options) for m in given]
    check_chain([*models, target], [*given, given_target])
    if isinstance(drafter, Drafter):
        return drafter, []
    return (ChainDrafter(models) if models else NgramDrafter()), models
