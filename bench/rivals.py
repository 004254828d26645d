"""All contenders of ``bench.bench_generate``: the standard ones, HuggingFace's compiled generation, the published schedules, captured steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from bench.baselines import Asynchronous, Lockstep
from pipespec.demo.contenders import (
    Contender,
    GeneratedText,
    HFContender,
    PipelineContender,
    StepCounts,
    Workload,
    chains,
    end_tokens,
    private_copies,
    standard_contenders,
)

LOOKAHEADS = {"asynchronous": (3, 0, 5), "lock-step": (5, 3, 8, 12)}
"""Minimum lookahead tried for the published schedules; 3 is the best asynchronous one in the publication."""


def all_contenders(drafts: Sequence[str]) -> list[Contender]:
    """Every row for a target with these drafts, smallest first."""
    standard = standard_contenders(drafts, ("lockstep", "workers", "streams"))
    hf = [c for c in standard if c.group == "hf"]
    ours = [c for c in standard if c.group == "ours"]
    ours.append(PipelineContender("ours-plain-graphs", "ours, target alone, graphs", "plain", graphs=True))
    for chain in chains(drafts):
        name, label = "+".join(chain), f"lockstep, {' + '.join(chain)}, graphs"
        ours.append(PipelineContender(f"lockstep-graphs-{name}", label, "lockstep", chain, graphs=True))
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

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        torch.manual_seed(seed)
        self.cache.reset()
        output = self.workload.family.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            compile_config=self.compile_config,
            past_key_values=self.cache,
            **self.workload.sampling,
        )
        tokens = output[0, ids.shape[1] :].tolist()
        # Hooks that count forwards would break the compiled graph.
        return GeneratedText(tokens, (StepCounts("target", len(tokens), len(tokens)),))

    def close(self) -> None:
        self.cache = None


class PublishedContender(Contender):
    """The published schedules of :mod:`bench.baselines`."""

    def __init__(self, schedule: str, drafts: Sequence[str]) -> None:
        key = f"reference-{schedule}-{'+'.join(drafts)}"
        super().__init__(key, f"published, {schedule}, {' + '.join(drafts)}", "reference", drafts)
        self.schedule, self.settings = schedule, LOOKAHEADS[schedule]
        self.visible = schedule == "lock-step"
        self.chain: Asynchronous | Lockstep | None = None

    @property
    def threads(self) -> int:
        """CPU threads of the target: those that the asynchronous draft processes leave."""
        threads = self.workload.threads
        return threads if self.visible else max(1, threads - self._draft_threads(threads) * len(self.drafts))

    def _draft_threads(self, threads: int) -> int:
        return max(1, threads // (len(self.drafts) + 1))

    def start(self, workload: Workload) -> None:
        if not workload.is_greedy:
            raise ValueError("the published system is greedy only")
        drafts = [workload.family.drafts[name] for name in self.drafts]
        lookahead = LOOKAHEADS[self.schedule][0]
        if self.schedule == "asynchronous":
            models = [*private_copies(drafts), workload.family.target]
            most = workload.longest + workload.new_tokens + 256
            self.chain = Asynchronous(models, lookahead, most, self._draft_threads(workload.threads))
        else:
            self.chain = Lockstep([*drafts, workload.family.target], lookahead)
        super().start(workload)

    def use(self, setting: Any) -> None:
        super().use(setting)
        assert self.chain is not None
        self.chain.lookahead = setting

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        assert self.chain is not None
        tokens = self.chain.generate(ids[0].tolist(), new_tokens, end_tokens(self.workload.family.target))
        counts = self.chain.counts()
        stages = [StepCounts(name, steps) for name, (steps, _, _) in zip(self.drafts, counts, strict=False)]
        # The prompt's forward, which is not in the counts, gives the first token.
        steps, drafted, accepted = counts[-1]
        stages.append(StepCounts("target", steps + 1, steps + accepted + 1, drafted, accepted))
        return GeneratedText(tokens, tuple(stages))

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()


class AttentionIsolation:
    """Keeps the attention implementation that one contender sets on shared models from the other contenders."""

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        self._models = list(models)
        self._first = self._now()
        self._own: dict[str, list[str | None]] = {}

    def _now(self) -> list[str | None]:
        return [model.config._attn_implementation for model in self._models]

    def _set(self, wanted: list[str | None]) -> None:
        for model, implementation in zip(self._models, wanted, strict=True):
            if model.config._attn_implementation != implementation:
                model.config._attn_implementation = implementation

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Restore the attention that the contender ``key`` used last; afterwards restore the original implementations."""
        self._set(self._own.get(key, self._first))
        try:
            yield
        finally:
            self._own[key] = self._now()
            self._set(self._first)
