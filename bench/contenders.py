"""Who takes part in ``bench.bench_generate``: transformers' ways to a text, the published schedules, and ours, behind one interface.

They share models and a process, and each shall be as fast as it would be alone. So attention is everybody's own (:class:`Attention`); on a CPU those that
move a draft's weights to where other processes see them move copies (:func:`moved`), and threads of stages end with their turn (:meth:`Contender.rest`).
"""

from __future__ import annotations

import copy
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from bench.baselines import Asynchronous, Lockstep
from pipespec.demo.comparison import ASSISTED, LOOKUP, Family, HuggingFace, Row, Setting
from pipespec.drivers.base import StageFailure
from pipespec.pipeline import Pipeline

TUNED = (*ASSISTED, Setting(20), Setting(5, 0.0, "heuristic"), Setting(5, 0.4, "heuristic"))
"""For assisted generation, per draft. The first is what an untuned run gets."""

LOOKUPS = (*LOOKUP, Setting(20))

LOOKAHEADS = {"asynchronous": (3, 0, 5), "lock-step": (5, 3, 8, 12)}
"""Least windows tried for the published schedules; 3 was the best asynchronous one in its own measurements."""


@dataclass(frozen=True)
class Sampling:
    """None of these: greedy."""

    temperature: float
    top_p: float = 1.0

    def options(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class Outcome:
    """One prompt generated once. ``text``: the new tokens; ``forwards``: by model, the prompt's left out; ``verifications``: the target's
    steps, ``produced`` the tokens that came from them; ``note``: what the caller of the contender ought to know."""

    text: list[int]
    forwards: dict[str, int]
    verifications: int
    produced: int
    note: str = ""


@dataclass(frozen=True)
class Field:
    """What all contenders get. ``longest``: tokens of the longest prompt; ``threads``: of torch, for all processes together."""

    family: Family
    new_tokens: int
    longest: int
    sampling: Sampling | None
    threads: int

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        return {**self.family.drafts, "target": self.family.target}


class Contender(ABC):
    """One row. ``group``: ``"hf"``, ``"reference"`` or ``"ours"``; ``settings``: to choose the best from, the first being the default.

    ``start`` may raise anything that says why this contender cannot take part. ``exact``: greedy it writes the target's text, sampled the text
    that the seed stands for. ``visible``: all of its stages run in this process, where a profiler sees them. ``slow``: its start may take a minute.
    """

    settings: Sequence[Any] = ()
    exact, visible, slow = True, True, False

    def __init__(self, key: str, label: str, group: str, drafts: Sequence[str] = ()) -> None:
        self.key, self.label, self.group, self.drafts = key, label, group, tuple(drafts)
        self.setting: Any = None

    def start(self, field: Field) -> None:
        self.field = field
        self.use(self.settings[0] if self.settings else None)

    def use(self, setting: Any) -> None:
        self.setting = setting

    @abstractmethod
    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        """Generate behind ``ids [1, P]``."""

    def rest(self) -> None:
        """After each turn: stop what would slow the others down. Not timed."""

    def close(self) -> None:
        """Release what was started. Also after a ``start`` that failed."""


class _Rivals(Contender):
    """transformers' ``generate()``, plain or assisted."""

    def __init__(self, key: str, label: str, drafts: Sequence[str] = ()) -> None:
        super().__init__(key, label, "hf", drafts)
        if drafts:
            self.settings = TUNED
        elif key == "lookup":
            self.settings = LOOKUPS

    def start(self, field: Field) -> None:
        self.exact = field.sampling is None  # sampled: other random numbers than ours
        row = Row("lookup" if self.key == "lookup" else "plain", self.label, None, self.drafts)
        self.generator = HuggingFace(row, field.family, **(field.sampling.options() if field.sampling else {}))
        super().start(field)

    def use(self, setting: Any) -> None:
        super().use(setting)
        self.generator.setting = setting

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        torch.manual_seed(seed)
        with _forwards(self.field.models) as forwards:
            output, counts = self.generator.generate(ids, new_tokens)
        text = output[0, ids.shape[1] :].tolist()
        rounds = counts[0].steps if counts else len(text)
        return Outcome(text, {name: count - 1 for name, count in forwards.items() if count}, rounds, len(text))


class _Compiled(Contender):
    """transformers' ``generate()`` with a static cache, its forward compiled."""

    slow = True

    def __init__(self) -> None:
        super().__init__("static", "HF static cache, compiled", "hf")

    def start(self, field: Field) -> None:
        super().start(field)
        self.exact = field.sampling is None
        target = field.family.target
        self.cache = StaticCache(config=target.config, max_cache_len=field.longest + field.new_tokens)
        config = CompileConfig()
        config._compile_all_devices = True  # otherwise transformers would silently not compile on a CPU
        self.options: dict[str, Any] = {"compile_config": config, "past_key_values": self.cache}
        self.options |= field.sampling.options() if field.sampling else {"do_sample": False}

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        torch.manual_seed(seed)
        self.cache.reset()
        target = self.field.family.target
        mask = torch.ones_like(ids)
        output = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **self.options)
        text = output[0, ids.shape[1] :].tolist()
        return Outcome(text, {"target": len(text) - 1}, len(text), len(text))

    def close(self) -> None:
        self.cache = self.options = None  # type: ignore[assignment]


class _Published(Contender):
    """The published schedules, see :mod:`bench.baselines`."""

    def __init__(self, schedule: str, drafts: Sequence[str]) -> None:
        key = f"reference-{schedule}-{'+'.join(drafts)}"
        super().__init__(key, f"published, {schedule}, {' + '.join(drafts)}", "reference", drafts)
        self.schedule, self.settings = schedule, LOOKAHEADS[schedule]
        self.visible = schedule == "lock-step"
        self.chain: Asynchronous | Lockstep | None = None

    def start(self, field: Field) -> None:
        if field.sampling is not None:
            raise ValueError("the published system is greedy only")
        drafts = [field.family.drafts[name] for name in self.drafts]
        if self.schedule == "asynchronous":
            drafts = moved(drafts)
        models = [*drafts, field.family.target]
        cores = max(1, field.threads // len(models))
        if self.schedule == "asynchronous":
            room = field.longest + field.new_tokens + 256
            self.chain = Asynchronous(models, LOOKAHEADS[self.schedule][0], room, cores)
            self.threads = max(1, field.threads - cores * len(self.drafts))
        else:
            self.chain, self.threads = Lockstep(models, LOOKAHEADS[self.schedule][0]), field.threads
        super().start(field)

    def use(self, setting: Any) -> None:
        super().use(setting)
        assert self.chain is not None
        self.chain.lookahead = setting

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        assert self.chain is not None
        torch.set_num_threads(self.threads)
        try:
            text = self.chain.generate(ids[0].tolist(), new_tokens, _end_tokens(self.field.family.target))
        finally:
            torch.set_num_threads(self.field.threads)
        counts = self.chain.counts()
        forwards = {name: steps for name, (steps, _, _) in zip((*self.drafts, "target"), counts, strict=True)}
        steps, _, accepted = counts[-1]
        return Outcome(text, forwards, steps, steps + accepted)

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()


class _Ours(Contender):
    """A pipeline of ours, with its defaults."""

    def __init__(self, key: str, label: str, schedule: str, drafts: Sequence[str] = (), **options: Any) -> None:
        super().__init__(key, label, "ours", drafts)
        self.schedule, self.options = schedule, options
        self.visible = schedule != "workers"
        self.pipe: Pipeline | None = None

    def start(self, field: Field) -> None:
        super().start(field)
        drafts = [field.family.drafts[name] for name in self.drafts]
        if self.schedule == "workers":
            drafts = moved(drafts)
        self.pipe = Pipeline(field.family.target, drafts, schedule=self.schedule, **self.options)
        self.sampling = field.sampling.options() if field.sampling else {"do_sample": False}

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        assert self.pipe is not None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            options = self.sampling | ({"seed": seed} if self.sampling["do_sample"] else {})
            mask = torch.ones_like(ids)
            output = self.pipe.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **options)
        report = self.pipe.report
        assert report is not None
        notes = [str(w.message) for w in seen if issubclass(w.category, StageFailure)]
        if report.schedule != self.schedule:
            notes.append(f"ran as {report.schedule}")
        notes += report.decisions or ()
        names = (*self.drafts, "target")[-len(report.stages) :]
        forwards = {name: stage.steps for name, stage in zip(names, report.stages, strict=True)}
        last = report.stages[-1]
        return Outcome(output[0, ids.shape[1] :].tolist(), forwards, last.steps, last.produced, "; ".join(notes))

    def rest(self) -> None:
        # On a CPU everybody else in the process is slower while its stages' threads, each with threads of torch's, are there (docs/speed.md). On a
        # GPU nothing like that waits, and graphs would have to be captured again.
        if self.schedule == "streams" and self.pipe is not None and self.field.family.target.device.type == "cpu":
            self.pipe.close()

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()


def everybody(drafts: Sequence[str]) -> list[Contender]:
    """All contenders for a target with these drafts, smallest first: chains of two with each of them, and one with all."""
    chains = [(name,) for name in drafts] + ([tuple(drafts)] if len(drafts) > 1 else [])
    found: list[Contender] = [_Rivals("plain", "HF generate()"), _Compiled()]
    found += [_Rivals(f"assisted-{name}", f"HF assisted, {name}", (name,)) for name in drafts]
    found.append(_Rivals("lookup", "HF prompt lookup"))
    found += [_Published(schedule, chain) for schedule in LOOKAHEADS for chain in chains]
    found.append(_Ours("ours-plain", "ours, target alone", "plain"))
    found.append(_Ours("ours-plain-graphs", "ours, target alone, graphs", "plain", graphs=True))
    for schedule, options in (("lockstep", {}), ("lockstep", {"graphs": True}), ("workers", {}), ("streams", {})):
        for chain in chains:
            graphs = "-graphs" if options else ""
            label = f"{schedule}, {' + '.join(chain)}" + (", graphs" if options else "")
            found.append(_Ours(f"{schedule}{graphs}-{'+'.join(chain)}", label, schedule, chain, **options))
    return found


def moved(drafts: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """``drafts`` for a contender that puts their weights into shared memory: on a CPU, where that moves the model's own, copies."""
    return [copy.deepcopy(draft) if draft.device.type == "cpu" else draft for draft in drafts]


class Attention:
    """Contenders share models. What one sets as their attention stays its own: others find what was there at first."""

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
        """While the contender ``key`` runs."""
        self._set(self._own.get(key, self._first))
        try:
            yield
        finally:
            self._own[key] = self._now()
            self._set(self._first)


@contextmanager
def _forwards(models: dict[str, PreTrainedModel]) -> Iterator[dict[str, int]]:
    """How often ``model.forward`` was called, by name."""
    counts = dict.fromkeys(models, 0)

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[name] += 1

        return hook

    handles = [model.register_forward_pre_hook(count(name)) for name, model in models.items()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _end_tokens(model: PreTrainedModel) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def cores() -> int:
    return len(os.sched_getaffinity(0))
