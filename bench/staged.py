"""The target in layer stages as systems of a run: SPD, and PPSD's schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.own_layers import with_layers
from pipespec.bench.config import BenchConfig
from pipespec.bench.contenders import Contender, TunedSetting, Workload, generated
from pipespec.bench.results import Sample, StepCounts, SystemSettings
from pipespec.bench.systems import Kind
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModuleConfig
from pipespec_spd.partition import partition_of


class StagedContender(Contender):
    """SPD: the target in stages with one token in flight in each, all in this process (:class:`pipespec_spd.SpeculativePipeline`).

    Args:
        key: See the base class, as for ``label`` and ``drafts``.
        stages: As the pipeline takes it.
        drafter: ``"ngram"``, the folder of a draft module, ``"chain"``: the models ``drafts``, or ``"exit"``: the layers of the first stage
            with the target's own norm and head.
    """

    def __init__(
        self, key: str, label: str, stages: int | Sequence[int], drafter: str, drafts: Sequence[str] = ()
    ) -> None:
        super().__init__(key, label, "ours", drafts)
        self.stages, self.drafter = stages, drafter
        self.pipe: Any = None

    def start(self, workload: Workload) -> None:
        self.settings = [TunedSetting(n) for n in workload.thread_numbers]
        super().start(workload)
        target, drafter = workload.family.target, self.drafter
        found: Any = drafter
        if drafter == "chain":
            found = [workload.family.drafts[name] for name in self.drafts]
        elif drafter == "exit":
            found = [with_layers(target, range(partition_of(target, self.stages).counts[0]))]
        self.pipe = SpeculativePipeline(target, found, stages=self.stages)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        sample, report = generated(self.pipe, self.workload, ids, new_tokens, seed), self.pipe.report
        # A cycle decides at most one token. Accepted drafts are those that a cycle confirmed.
        target = StepCounts("target", report.cycles, report.verified, report.checked, report.accepted)
        target.rollbacks = report.flushes
        sample.stages, sample.phases = [target], dict(report.phases)
        sample.cycles, sample.verified = report.cycles, report.verified
        sample.stage_seconds, sample.parallel_seconds = list(report.stage_seconds), report.parallel_seconds
        return sample


def _staged(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    """SPD: one system per number of stages and drafter, and one per draft module, which belongs to one split."""
    needs = {"module": "a draft module that was trained for the target: --module", "chain": "a draft: --draft"}
    possible = {"module": bool(config.module), "ngram": True, "chain": bool(drafts)}
    wanted = config.drafters or tuple(name for name, is_possible in possible.items() if is_possible)
    if unknown := [name for name in wanted if name not in possible]:
        raise ValueError(f"no drafter {', '.join(map(repr, unknown))} for spd: there are {', '.join(possible)}")
    if "module" in wanted:
        yield from map(_with_module, config.module, _module_names(config.module))
    for stages, drafter in itertools.product(config.stages, wanted):
        if drafter == "module" and config.module:
            continue
        names = list(drafts) if drafter == "chain" else []
        by = "+".join(names) or drafter
        yield SystemSettings(
            key=f"spd-{by}-n{stages}",
            kind="spd",
            label=f"spd, {stages} stages, {by}",
            drafts=names,
            options={"stages": stages, "drafter": drafter},
            axes={"stages": stages, "drafter": drafter},
            not_measured=None if possible[drafter] else f"it needs {needs[drafter]}",
        )


def _module_names(folders: Sequence[str]) -> list[str]:
    """Names of draft modules: those of their folders, numbered where these are equal."""
    names = [Path(folder).name for folder in folders] if len(folders) > 1 else ["module"]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _with_module(folder: str, name: str) -> SystemSettings:
    """SPD with a draft module, in the stages that it was trained for. Its anchors are an axis: which stages feed the module."""
    trained = DraftModuleConfig.load(folder)
    return SystemSettings(
        key=f"spd-{name}-n{trained.n}",
        kind="spd",
        label=f"spd, {trained.n} stages, {'' if name == 'module' else 'module '}{name}",
        options={"stages": [end - begin for begin, end in trained.stages], "drafter": folder},
        axes={"stages": trained.n, "drafter": name, "anchors": list(trained.anchors)},
    )


def _ppsd(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    for stages in config.stages:
        options = {"stages": stages, "drafter": "exit"}
        label = f"PPSD, {stages} stages, the target's own head"
        yield SystemSettings(key=f"ppsd-n{stages}", kind=kind, label=label, options=options, axes=dict(options))


def _contender(system: SystemSettings) -> Contender:
    """The contender of a row whose options have ``stages`` and ``drafter``."""
    return StagedContender(system.key, system.label, system.options["stages"], system.options["drafter"], system.drafts)


KINDS = {
    "spd": Kind("pipespec, the target in stages with one token in each", _staged, _contender),
    "ppsd": Kind("PPSD's schedule: the target in stages, and what the first one has read drafts", _ppsd, _contender),
}
"""Kinds of systems for :data:`pipespec.bench.systems.KINDS`."""
