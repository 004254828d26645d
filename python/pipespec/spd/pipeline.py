"""SpeculativePipeline: a partitioned target and its drafter behind ``generate()``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.checks import check_chain
from pipespec.generation import Generation
from pipespec.loading import load_model
from pipespec.pipeline import BasePipeline
from pipespec.spd.chain import ChainDrafter
from pipespec.spd.decoding import SpeculativeDriver
from pipespec.spd.drafting import Drafter
from pipespec.spd.ngram import NgramDrafter
from pipespec.spd.partition import Partition, check_target, partition_of
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
    drafter: ``"ngram"`` (prompt lookup), a model or path, or several, smallest first (a PipeSpec chain drafts, see
        :mod:`pipespec.spd.chain`), or any :class:`pipespec.spd.Drafter`.
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
        given: list[_Model] = []
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
        models = [
            load_model(m, dtype=dtype, device=device, trust_remote_code=trust_remote_code) for m in [*given, target]
        ]
        check_target(models[-1])
        check_chain(models, [*given, target])
        super().__init__(models)
        self.partition = partition_of(self.target, stages)
        if isinstance(drafter, Drafter):
            self.drafter: Drafter = drafter
        else:
            self.drafter = ChainDrafter(models[:-1]) if given else NgramDrafter()
        for index in self.drafter.features:
            self.partition.owner(index)
        self._driver = SpeculativeDriver(self.target, self.partition, self.drafter)

    def _generate(self, generation: Generation) -> SpeculativeReport:
        driver = self._driver
        generation.run(driver)
        plain = generation.report("spd")
        counts = [driver.machine.count(row) for row in range(plain.rows)]
        phases, known = driver.clock.seconds, sum(driver.clock.seconds.values())
        return SpeculativeReport(
            **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
            partition=self.partition.counts,
            drafter=type(self.drafter).__name__,
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
