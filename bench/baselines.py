"""Baselines of the papers: HuggingFace's compiled generation, self-speculation, the published schedules, PPSD; and their kinds for a run."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StaticCache

from bench import staged
from bench.own_layers import kept_layers, with_layers
from bench.published import Asynchronous, Lockstep
from pipespec.bench.config import BenchConfig
from pipespec.bench.contenders import (
    OWN_LAYERS,
    Contender,
    HFContender,
    PipelineContender,
    TunedSetting,
    Workload,
    chains,
    private_copies,
    standard_contenders,
    use_assistant_setting,
)
from pipespec.bench.results import Sample, StepCounts, SystemSettings
from pipespec.bench.systems import KINDS, Kind, each_chain, single
from pipespec.registry import LOCKSTEP, PLAIN, STREAMS, WORKERS

LOOKAHEADS = {"asynchronous": (3, 0, 5), "lockstep": (5, 3, 8, 12)}
"""Minimum lookahead tried for the published schedules; 3 is the best asynchronous one in the publication."""


def all_contenders(drafts: Sequence[str]) -> list[Contender]:
    """Every row for a target with these drafts, smallest first."""
    captured = torch.cuda.is_available()
    standard = standard_contenders(drafts, (LOCKSTEP.name, WORKERS.name, *([STREAMS.name] if captured else [])))
    hf = [c for c in standard if c.group == "hf"]
    ours = [c for c in standard if c.group == "ours"]
    if captured:
        ours.append(PipelineContender("ours-plain-graphs", "ours, target alone, graphs", PLAIN.name, graphs=True))
    for chain in chains(drafts) if captured else ():
        name, label = "+".join(chain), f"lockstep, {' + '.join(chain)}, graphs"
        ours.append(PipelineContender(f"lockstep-graphs-{name}", label, LOCKSTEP.name, chain, graphs=True))
    published = [PublishedContender(*pair) for pair in itertools.product(LOOKAHEADS, chains(drafts))]
    return [*hf, CompiledContender(), *published, *ours]


class CompiledContender(HFContender):
    """transformers' ``generate()`` with a static cache and a compiled forward."""

    slow = True

    def __init__(self) -> None:
        super().__init__("static", "HF static cache, compiled")

    def start(self, workload: Workload) -> None:
        super().start(workload)
        config = workload.family.target.config
        self.cache = StaticCache(config=config, max_cache_len=workload.longest + workload.new_tokens)
        self.compile_config = CompileConfig()
        # Without this, transformers silently does not compile on a CPU.
        self.compile_config._compile_all_devices = True

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        self.cache.reset()
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "compile_config": self.compile_config}
        tokens, commits = self._generate(ids, seed, options | {"past_key_values": self.cache} | self.workload.sampling)
        # Hooks that count forwards would break the compiled graph.
        return Sample(tokens=tokens, stages=[StepCounts("target", len(tokens), len(tokens))], commits=commits)

    def close(self) -> None:
        self.cache = None


class OwnLayersContender(HFContender):
    """Draft&Verify (Zhang et al. 2024): the target without some of its layers drafts, and drafting ends at a low confidence.

    transformers' assisted generation, where the assistant shares the target's weights. The publication searches the layers to skip for each model
    and task; here they are fixed (:func:`kept_layers`).
    """

    def __init__(self) -> None:
        super().__init__("draft-verify", "HF assisted, skipped layers")
        self._drafts: dict[int, PreTrainedModel] = {}

    def _candidates(self, workload: Workload) -> Sequence[tuple[Any, ...]]:
        layers = workload.family.target.config.num_hidden_layers
        sizes = dict.fromkeys(max(1, round(share * layers)) for share in (0.5, 0.65))
        thresholds = ((12, 0.6), (8, 0.4), (5, 0.0))
        return [(tokens, at, "constant", n) for n in sizes for tokens, at in thresholds]

    def _assistant(self) -> PreTrainedModel:
        layers = self.setting.layers
        if layers not in self._drafts:
            target = self.workload.family.target
            self._drafts[layers] = with_layers(target, kept_layers(target.config.num_hidden_layers, layers))
        return self._drafts[layers]

    def close(self) -> None:
        self._drafts.clear()


class EarlyExitContender(HFContender):
    """LayerSkip's schedule (Elhoushi et al. 2024): the target's first layers and its head draft, all layers verify.

    transformers' ``assistant_early_exit``. LayerSkip also trains the target for it; other targets draft worse.
    """

    def __init__(self) -> None:
        super().__init__("layerskip", "HF early exit")

    def start(self, workload: Workload) -> None:
        if not hasattr(GenerationConfig(), "assistant_early_exit"):
            raise NotImplementedError("this version of transformers has no assistant_early_exit")
        self._before = copy.deepcopy(workload.family.target.generation_config)
        super().start(workload)

    def _candidates(self, workload: Workload) -> Sequence[tuple[Any, ...]]:
        layers = workload.family.target.config.num_hidden_layers
        exits = dict.fromkeys(max(1, layers // part) for part in (4, 2))
        return [(tokens, at, "constant", n) for n in exits for tokens, at in ((6, 0.0), (3, 0.0), (8, 0.4))]

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        target, setting = self.workload.family.target, self.setting
        depth = target.config.num_hidden_layers
        counts = {OWN_LAYERS: 0, "target": 0}

        def count(*_: object) -> None:
            # transformers lowers this number while the first layers draft.
            counts["target" if target.config.num_hidden_layers == depth else OWN_LAYERS] += 1

        handle = target.register_forward_pre_hook(count)
        use_assistant_setting(target, setting)
        try:
            options = {"max_new_tokens": new_tokens, "assistant_early_exit": setting.layers, **self.workload.sampling}
            tokens, commits = self._generate(ids, seed, options)
        finally:
            handle.remove()
            target.config.num_hidden_layers = depth
            use_assistant_setting(target, _setting_in(self._before))
        stages = [StepCounts(OWN_LAYERS, counts[OWN_LAYERS]), StepCounts("target", counts["target"], len(tokens))]
        return Sample(tokens=tokens, stages=stages, commits=commits)


def _setting_in(config: GenerationConfig) -> TunedSetting:
    """What a generation configuration says about assisted generation."""
    return TunedSetting(
        1, config.num_assistant_tokens, config.assistant_confidence_threshold, config.num_assistant_tokens_schedule
    )


class PublishedContender(Contender):
    """The published schedules of :mod:`bench.published`."""

    def __init__(self, schedule: str, drafts: Sequence[str], lookahead: int | None = None) -> None:
        key = f"reference-{schedule}-{'+'.join(drafts)}"
        super().__init__(key, f"published, {schedule}, {' + '.join(drafts)}", "reference", drafts)
        self.schedule = schedule
        self.settings = LOOKAHEADS[schedule] if lookahead is None else (lookahead,)
        self.chain: Asynchronous | Lockstep | None = None

    @property
    def threads(self) -> int:
        """CPU threads of the target: those that the asynchronous draft processes leave."""
        threads = self.workload.threads
        return (
            threads
            if self.schedule == "lockstep"
            else max(1, threads - self._draft_threads(threads) * len(self.drafts))
        )

    def _draft_threads(self, threads: int) -> int:
        return max(1, threads // (len(self.drafts) + 1))

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy:
            raise ValueError("the published system is greedy only")
        drafts = [workload.family.drafts[name] for name in self.drafts]
        lookahead = self.settings[0]
        if self.schedule == "asynchronous":
            models = [*private_copies(drafts), workload.family.target]
            self.chain = Asynchronous(models, lookahead, self._draft_threads(workload.threads))
        else:
            self.chain = Lockstep([*drafts, workload.family.target], lookahead)
        super().start(workload)

    def use(self, setting: Any) -> None:
        super().use(setting)
        assert self.chain is not None
        self.chain.lookahead = setting

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        assert self.chain is not None
        began = time.perf_counter()
        tokens = self.chain.generate(ids[0].tolist(), new_tokens, self.workload.end_tokens)
        counts, target = self.chain.counts(), self.chain.target
        stages = [StepCounts(name, steps) for name, (steps, _, _) in zip(self.drafts, counts, strict=False)]
        # The prompt's forward, which is not in the counts, gives the first token.
        steps, drafted, accepted = counts[-1]
        histogram = tuple(target.histogram[j] for j in range(max(target.histogram, default=0) + 1))
        stages.append(StepCounts("target", steps + 1, steps + accepted + 1, drafted, accepted, histogram=histogram))
        commits = [(at - began, min(length, len(tokens))) for at, length in target.commits]
        return Sample(tokens=tokens, stages=stages, commits=commits if self.workload.times_commits else [])

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()


def _published(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    least = 0 if kind == "published-asynchronous" else 1
    lookaheads: list[int | None] = [n for n in config.lookahead if n >= least] or [None]
    for chain, lookahead in itertools.product(each_chain(kind, config, drafts), lookaheads):
        point = "" if lookahead is None else f"L{lookahead}"
        yield SystemSettings(
            key=f"{kind}-{'+'.join(chain)}" + f"-{point}" * bool(point),
            kind=kind,
            label=f"{kind}, {' + '.join(chain)}" + f", {point}" * bool(point),
            drafts=list(chain),
            lookahead=None if lookahead is None else [lookahead] * len(chain),
            axes={} if lookahead is None else {"lookahead": lookahead},
        )


NOT_MEASURED = (
    "its draft head has to be trained for each target, and the published figures come from another engine (SGLang)"
)


def _eagle3(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    yield SystemSettings(key=kind, kind=kind, label=kind, not_measured=NOT_MEASURED)


def _refuse(system: SystemSettings) -> Contender:
    raise ValueError(f"{system.key} is not measured")


def _make_published(system: SystemSettings) -> Contender:
    lookahead = None if system.lookahead is None else system.lookahead[0]
    return PublishedContender(system.kind.removeprefix("published-"), system.drafts, lookahead)


BASELINES = {
    "static": Kind(
        "generate() with a static cache and a compiled forward",
        single("HF static cache, compiled"),
        lambda system: CompiledContender(),
        has_drafts=False,
    ),
    "draft-verify": Kind(
        "Draft&Verify: the target without some of its layers drafts",
        single("HF assisted, skipped layers (Draft&Verify)"),
        lambda system: OwnLayersContender(),
    ),
    "layerskip": Kind(
        "LayerSkip's schedule: the target's first layers draft",
        single("HF early exit (LayerSkip)"),
        lambda system: EarlyExitContender(),
    ),
    "published-lockstep": Kind("the lockstep baseline as published with PipeSpec", _published, _make_published),
    "published-asynchronous": Kind("PipeSpec as published", _published, _make_published),
    **staged.KINDS,
    "eagle3": Kind(f"not measured: {NOT_MEASURED}", _eagle3, _refuse),
}
"""Kinds of systems for :data:`pipespec.bench.systems.KINDS`."""


def register() -> None:
    """Add the baselines to the kinds of systems."""
    KINDS.update(BASELINES)
