"""Baselines of the papers: HuggingFace's compiled generation, self-speculation, the published schedules, SPD, PPSD. Importing this adds their kinds."""

import copy
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StaticCache

from bench.config import BenchConfig
from bench.published import Asynchronous, Lockstep
from bench.samples import Sample, StepCounts
from bench.systems import (
    KINDS,
    OWN_LAYERS,
    HFSystem,
    Kind,
    LineSystem,
    PipelineSystem,
    System,
    TunedSetting,
    Unmeasured,
    Workload,
    draft_names,
    each_chain,
    generated,
    private_copies,
    single,
    use_assistant_setting,
)
from pipespec.models.properties import text_config
from pipespec.models.quantizing import sharing
from pipespec.process.records import build
from pipespec.registry import PLAIN
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModuleConfig
from pipespec_spd.partition import cut
from pipespec_spd.report import SpeculativeReport

LOOKAHEADS = {"asynchronous": (3, 0, 5), "lockstep": (5, 3, 8, 12)}
"""Minimum lookahead tried for the published schedules; 3 is the best asynchronous one in the publication."""


def kept_layers(layers: int, kept: int) -> list[int]:
    """The layers of a draft: ``kept`` of ``layers``, the first and the last one among them, evenly spaced."""
    if not 1 <= kept <= layers:
        raise ValueError(f"a draft of {kept} layers of a target with {layers}")
    return [round(i * (layers - 1) / max(1, kept - 1)) for i in range(kept)]


def with_layers(target: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of some of the target's layers, with its embedding, norm and head. It shares the target's parameters.

    Args:
        target: a model whose layers are all alike, such as LLaMA.
        kept: indices of layers, ascending.
    """
    draft = sharing(target)
    decoder: Any = getattr(draft, draft.base_model_prefix)
    total = len(decoder.layers)
    decoder.layers = nn.ModuleList(decoder.layers[i] for i in kept)
    for place, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # where its keys and values lie in the cache
                module.layer_idx = place
    # Often one object.
    for config in (draft.config, text_config(draft.config), decoder.config):
        types = getattr(config, "layer_types", None)
        if types is not None and len(types) == total:
            config.layer_types = [types[i] for i in kept]
        config.num_hidden_layers = len(kept)
    return draft


class CompiledSystem(HFSystem):
    """transformers' ``generate()`` with a static cache and a compiled forward."""

    slow = True

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


class OwnLayersSystem(HFSystem):
    """Draft&Verify (Zhang et al. 2024): the target without some of its layers drafts, and drafting ends at a low confidence.

    transformers' assisted generation, where the assistant shares the target's weights. The publication searches the layers to skip for each model
    and task; here they are fixed (:func:`kept_layers`).
    """

    def start(self, workload: Workload) -> None:
        self._drafts: dict[int, PreTrainedModel] = {}
        super().start(workload)

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


class EarlyExitSystem(HFSystem):
    """LayerSkip's schedule (Elhoushi et al. 2024): the target's first layers and its head draft, all layers verify.

    transformers' ``assistant_early_exit``. LayerSkip also trains the target for it; other targets draft worse.
    """

    def start(self, workload: Workload) -> None:
        if not hasattr(GenerationConfig(), "assistant_early_exit"):
            raise NotImplementedError("this version of transformers has no assistant_early_exit")
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
        # The other systems read the same object.
        before = target.generation_config
        target.generation_config = copy.deepcopy(before)
        use_assistant_setting(target, setting)
        try:
            options = {"max_new_tokens": new_tokens, "assistant_early_exit": setting.layers, **self.workload.sampling}
            tokens, commits = self._generate(ids, seed, options)
        finally:
            handle.remove()
            target.config.num_hidden_layers = depth
            target.generation_config = before
        stages = [StepCounts(OWN_LAYERS, counts[OWN_LAYERS]), StepCounts("target", counts["target"], len(tokens))]
        return Sample(tokens=tokens, stages=stages, commits=commits)


class PublishedSystem(System):
    """The published schedules of :mod:`bench.published`."""

    def __init__(self, schedule: str, drafts: Sequence[str], lookahead: int | None = None) -> None:
        point = [] if lookahead is None else [f"L{lookahead}"]
        kind, axes = f"published-{schedule}", {} if lookahead is None else {"lookahead": lookahead}
        label = ", ".join([kind, " + ".join(drafts), *point])
        super().__init__("-".join([kind, "+".join(drafts), *point]), label, "reference", drafts, axes=axes)
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
            raise NotImplementedError("the published system is greedy only")
        drafts = [workload.family.draft(name) for name in self.drafts]
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
        return Sample(tokens=tokens, stages=stages, commits=commits)

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()


class StagedSystem(System):
    """SPD: the target in stages with one token in flight in each, all in this process (:class:`pipespec_spd.SpeculativePipeline`).

    Args:
        key: See the base class, as for ``label`` and ``drafts``.
        stages: As the pipeline takes it.
        drafter: ``"ngram"``, the folder of a draft module, ``"model"``: the last of the models ``drafts``, or ``"exit"``: the layers of the first stage
            with the target's own norm and head.
    """

    def __init__(
        self, key: str, label: str, stages: int | Sequence[int], drafter: str, axes: dict[str, Any], drafts: Sequence[str] = ()
    ) -> None:  # fmt: skip
        super().__init__(key, label, "ours", drafts, options={"stages": stages, "drafter": drafter}, axes=axes)
        self.stages, self.drafter = stages, drafter
        self.pipe: Any = None

    def start(self, workload: Workload) -> None:
        self.settings = [TunedSetting(n) for n in workload.thread_numbers]
        super().start(workload)
        target, drafter = workload.family.target, self.drafter
        found: Any = drafter
        if drafter == "model":
            found = workload.family.draft(self.drafts[-1])
        elif drafter == "exit":
            found = with_layers(target, range(cut(target.config.num_hidden_layers, self.stages).counts[0]))
        self.pipe = SpeculativePipeline(target, found, stages=self.stages)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        return staged_sample(generated(self.pipe, self.workload, ids, new_tokens, seed), self.pipe.report)


def staged_sample(sample: Sample, report: SpeculativeReport) -> Sample:
    """A sample with the counts and times of an SPD call."""
    # A cycle decides at most one token. Accepted drafts are those that a cycle confirmed.
    target = StepCounts("target", report.cycles, report.verified, report.checked, report.accepted)
    target.rollbacks = report.flushes
    sample.stages, sample.phases = [target], dict(report.phases)
    sample.cycles, sample.verified = report.cycles, report.verified
    sample.stage_seconds, sample.parallel_seconds = list(report.stage_seconds), report.parallel_seconds
    return sample


class RanksSystem(LineSystem):
    """The SPD of ``staged`` on ``ranks`` processes of torchrun with one thread each, which read their parts of the model in ``target``.

    ``drafter``: as :class:`pipespec_spd.RanksPipeline` takes it, a model as its path.
    """

    is_heavy = True
    variables: ClassVar[dict[str, str]] = {"OMP_NUM_THREADS": "1"}

    def __init__(self, staged: StagedSystem, target: str, drafter: str, ranks: int) -> None:
        about: dict[str, Any] = {"options": staged.about["options"], "axes": staged.about["axes"], "ranks": ranks}
        super().__init__(f"{staged.key}-ranks{ranks}", f"{staged.label}, {ranks} ranks", drafts=staged.drafts, **about)
        self._launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self._job = {"target": target, "drafter": drafter, "stages": staged.stages}

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy:
            raise NotImplementedError("greedy only")
        how = {"sampling": workload.sampling, "dtype": str(workload.family.target.dtype).removeprefix("torch.")}
        self.command = [*self._launch, "-m", "bench.spd", "rank", json.dumps(self._job | how)]
        super().start(workload)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        return build(Sample, self.ask([ids.tolist(), new_tokens]))


class OneThread(PipelineSystem):
    """Plain decoding on one thread, which a rank is compared with."""

    def start(self, workload: Workload) -> None:
        super().start(workload)
        self.settings = [TunedSetting(1)]
        self.use(self.settings[0])


def _published(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    minimum = 0 if kind == "published-asynchronous" else 1
    lookaheads: list[int | None] = [n for n in config.lookahead if n >= minimum] or [None]
    for chain, lookahead in itertools.product(each_chain(kind, config, drafts), lookaheads):
        yield PublishedSystem(kind.removeprefix("published-"), chain, lookahead)


def _staged(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    """SPD: one system per number of stages and drafter, and one per draft module, which belongs to one split."""
    needs = {"module": "a draft module that was trained for the target: --module", "model": "a draft: --drafts"}
    possible = {"module": bool(config.module), "ngram": True, "model": bool(drafts)}
    wanted = config.drafters or tuple(name for name, is_possible in possible.items() if is_possible)
    if unknown := [name for name in wanted if name not in possible]:
        raise ValueError(f"no drafter {', '.join(map(repr, unknown))} for spd: there are {', '.join(possible)}")
    if "module" in wanted:
        yield from map(_with_module, config.module, _module_names(config.module))
    for stages, drafter in itertools.product(config.stages, wanted):
        if drafter == "module" and config.module:
            continue
        names = list(drafts[-1:]) if drafter == "model" else []
        by = names[0] if names else drafter
        key, label = f"spd-{by}-n{stages}", f"spd, {stages} stage{'s' * (stages > 1)}, {by}"
        if possible[drafter]:
            yield StagedSystem(key, label, stages, drafter, {"stages": stages, "drafter": drafter}, names)
        else:
            yield Unmeasured(key, label, f"it needs {needs[drafter]}")


def _on_ranks(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    """The systems of SPD on ranks: each n stages on n processes, and on n + 1, where rank 0 has no stage."""
    paths = dict(zip(draft_names(config.drafts), config.drafts, strict=True))
    yield OneThread("plain-one-thread", "target alone, one thread", PLAIN.name)
    for staged in _staged("spd", config, drafts):
        if not isinstance(staged, StagedSystem) or config.target is None:
            yield Unmeasured(
                f"{staged.key}-ranks", f"{staged.label}, ranks", "ranks read a model and a drafter from files"
            )
            continue
        drafter = paths[staged.drafts[-1]] if staged.drafter == "model" else staged.drafter
        for ranks in (staged.about["axes"]["stages"], staged.about["axes"]["stages"] + 1):
            yield RanksSystem(staged, config.target, drafter, ranks)


def _module_names(folders: Sequence[str]) -> list[str]:
    """Names of draft modules: those of their folders, numbered where these are equal."""
    names = [Path(folder).name for folder in folders] if len(folders) > 1 else ["module"]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _with_module(folder: str, name: str) -> System:
    """SPD with a draft module, in the stages that it was trained for. Its anchors are an axis: which stages feed the module."""
    trained = DraftModuleConfig.load(folder)
    label = f"spd, {trained.n} stages, {'' if name == 'module' else 'module '}{name}"
    axes = {"stages": trained.n, "drafter": name, "anchors": list(trained.anchors)}
    return StagedSystem(f"spd-{name}-n{trained.n}", label, [end - begin for begin, end in trained.stages], folder, axes)


def _ppsd(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    for stages in config.stages:
        axes = {"stages": stages, "drafter": "exit"}
        yield StagedSystem(f"ppsd-n{stages}", f"PPSD, {stages} stages, the target's own head", stages, "exit", axes)


NOT_MEASURED = (
    "its draft head has to be trained for each target, and the published figures come from another engine (SGLang)"
)

BASELINES = {
    "static": Kind(
        "generate() with a static cache and a compiled forward",
        single(lambda: CompiledSystem("static", "HF static cache, compiled")),
        has_drafts=False,
    ),
    "draft-verify": Kind(
        "Draft&Verify: the target without some of its layers drafts",
        single(lambda: OwnLayersSystem("draft-verify", "HF assisted, skipped layers (Draft&Verify)")),
    ),
    "layerskip": Kind(
        "LayerSkip's schedule: the target's first layers draft",
        single(lambda: EarlyExitSystem("layerskip", "HF early exit (LayerSkip)")),
    ),
    "published-lockstep": Kind("the lockstep baseline as published with PipeSpec", _published),
    "published-asynchronous": Kind("PipeSpec as published", _published),
    "spd": Kind("pipespec, the target in stages with one token in each", _staged),
    "spd-ranks": Kind("the same on torchrun's processes, one thread each", _on_ranks),
    "ppsd": Kind("PPSD's schedule: the target in stages, and what the first one has read drafts", _ppsd),
    "eagle3": Kind(f"not measured: {NOT_MEASURED}", single(lambda: Unmeasured("eagle3", "eagle3", NOT_MEASURED))),
}
KINDS.update(BASELINES)
