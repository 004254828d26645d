"""Contenders of a speed comparison: ways to generate the target's text, behind one interface."""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from pipespec.demo import FAMILY, family_path
from pipespec.drivers.base import StageFailure
from pipespec.engine.ngram import NGRAM
from pipespec.models.loading import load_model
from pipespec.pipeline import Pipeline

GREEDY: dict[str, Any] = {"do_sample": False}


@dataclass(frozen=True)
class Family:
    """A target, its drafts by name (smallest first), and their tokenizer; loaded in float32 on the CPU."""

    name: str
    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    tokenizer: Any

    @staticmethod
    def load(folder: Path | None = None) -> Family:
        """Load the bundled family, or the one in ``folder`` (``target/``, ``medium/``, ``small/``)."""
        paths = {name: folder / name if folder else family_path(name) for name in FAMILY}
        models = {name: load_model(path, dtype=torch.float32) for name, path in paths.items()}
        tokenizer = AutoTokenizer.from_pretrained(paths["target"])
        drafts = {name: models[name] for name in reversed(FAMILY) if name != "target"}
        return Family(folder.name if folder else "bundled", models["target"], drafts, tokenizer)

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """All models by name, the target last."""
        return {**self.drafts, "target": self.target}

    def encode(self, text: str) -> torch.Tensor:
        """Return the token ids, LongTensor ``[1, S]``."""
        return self.tokenizer(text, return_tensors="pt").input_ids

    def most_new_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens fit behind each of ``texts``.

        Raises:
            ValueError: One of the texts fills the target's position range.
        """
        limit: int = self.target.config.max_position_embeddings
        longest = max(self.encode(text).shape[1] for text in texts)
        if longest >= limit:
            raise ValueError(f"the prompt has {longest} tokens; the family's limit, the answer included, is {limit}")
        return limit - longest


@dataclass(frozen=True)
class Workload:
    """What every contender generates.

    Args:
        family: The models.
        new_tokens: Most new tokens per prompt.
        longest: Tokens of the longest prompt.
        threads: CPU threads of torch, for all processes together; rows in one process also try other numbers.
        sampling: Arguments of ``generate()``: ``do_sample`` and the sampling parameters.
    """

    family: Family
    new_tokens: int
    longest: int
    threads: int
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)

    @property
    def is_greedy(self) -> bool:
        return not self.sampling["do_sample"]

    @property
    def thread_numbers(self) -> list[int]:
        """Numbers of threads that tuning tries for a row in one process: all, one and two. On shared virtual cores fewer may be faster."""
        if self.family.target.device.type == "cuda":
            return [self.threads]
        return list(dict.fromkeys((self.threads, 1, min(2, len(os.sched_getaffinity(0))))))


@dataclass
class StepCounts:
    """Counts of one model in a call: forwards, tokens from them, draft tokens verified and accepted (0: unknown)."""

    name: str
    steps: int
    produced: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class GeneratedText:
    """One prompt generated once: the new tokens, the counts of each model (the target last), remarks, wall-clock seconds."""

    tokens: list[int]
    stages: tuple[StepCounts, ...]
    note: str = ""
    seconds: float = math.nan


class Contender(ABC):
    """One row of a comparison.

    Attributes:
        group: ``"hf"``, ``"reference"``, ``"other"`` (another product) or ``"ours"``.
        settings: Candidates of tuning, the default first; empty: nothing to tune.
        exact: Greedy, the text is the target's; sampled, it is the text of the seed.
        visible: All stages run in this process, where a profiler counts them.
        slow: The start may take a minute.
    """

    settings: Sequence[Any] = ()
    exact, visible, slow = True, True, False

    def __init__(self, key: str, label: str, group: str, drafts: Sequence[str] = ()) -> None:
        self.key, self.label, self.group, self.drafts = key, label, group, tuple(drafts)
        self.setting: Any = None

    @property
    def threads(self) -> int:
        """CPU threads of torch in this process during a turn."""
        return self.setting.threads if isinstance(self.setting, TunedSetting) else self.workload.threads

    def start(self, workload: Workload) -> None:
        """Prepare; an exception of any type means that the contender cannot take part."""
        self.workload = workload
        self.use(self.settings[0] if self.settings else None)

    def use(self, setting: Any) -> None:
        """Use one of ``settings`` from now on."""
        self.setting = setting

    @abstractmethod
    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        """Generate at most ``new_tokens`` tokens behind ``ids``, LongTensor ``[1, S]``."""

    def rest(self) -> None:
        """Stop everything that would slow the other contenders down. Called after each turn, not timed."""

    def close(self) -> None:
        """Release all resources; also called after a failed ``start``."""


@dataclass(frozen=True)
class TunedSetting:
    """What tuning chooses: CPU threads of torch, and HuggingFace's settings of assisted generation or prompt lookup.

    ``num_draft_tokens`` is transformers' ``num_assistant_tokens`` or ``prompt_lookup_num_tokens``.
    """

    threads: int
    num_draft_tokens: int | None = None
    confidence_threshold: float | None = None
    schedule: str = "constant"

    def __str__(self) -> str:
        parts = [] if self.num_draft_tokens is None else [f"{self.num_draft_tokens} draft tokens"]
        if self.confidence_threshold is not None:
            parts.append(f"threshold {self.confidence_threshold:g}")
        if self.schedule != "constant":
            parts.append(self.schedule)
        return ", ".join([*parts, f"{self.threads} thread{'s' if self.threads > 1 else ''}"])


# (number of draft tokens, confidence threshold, schedule of transformers). (20, 0.4) is transformers' default.
ASSISTED = (
    *((tokens, threshold, "constant") for tokens in (5, 3, 8) for threshold in (0.0, 0.4)),
    (20, 0.4, "constant"),
    (20, None, "constant"),
    (5, 0.0, "heuristic"),
    (5, 0.4, "heuristic"),
)
LOOKUP = ((3,), (10,), (20,))


class HFContender(Contender):
    """transformers' ``generate()``: plain, with an assistant model, or with prompt lookup. Tuned, also over the number of threads."""

    def __init__(self, key: str, label: str, drafts: Sequence[str] = ()) -> None:
        super().__init__(key, label, "hf", drafts)

    def start(self, workload: Workload) -> None:
        self.exact = workload.is_greedy
        candidates: Sequence[tuple[Any, ...]] = ASSISTED if self.drafts else LOOKUP if self.key == "lookup" else ((),)
        self.settings = [TunedSetting(n, *c) for c, n in itertools.product(candidates, workload.thread_numbers)]
        super().start(workload)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        family, setting = self.workload.family, self.setting
        options: dict[str, Any] = {"max_new_tokens": new_tokens, **self.workload.sampling}
        if self.drafts:
            assistant = family.drafts[self.drafts[0]]
            # transformers reads these from the assistant's generation config.
            assistant.generation_config.num_assistant_tokens = setting.num_draft_tokens
            assistant.generation_config.num_assistant_tokens_schedule = setting.schedule
            assistant.generation_config.assistant_confidence_threshold = setting.confidence_threshold
            options["assistant_model"] = assistant
        elif setting.num_draft_tokens is not None:
            options["prompt_lookup_num_tokens"] = setting.num_draft_tokens
        torch.manual_seed(seed)
        with _forwards({name: family.models[name] for name in (*self.drafts, "target")}) as forwards:
            output = family.target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens = output[0, ids.shape[1] :].tolist()
        drafts = [StepCounts(name, forwards[name]) for name in self.drafts]
        return GeneratedText(tokens, (*drafts, StepCounts("target", forwards["target"], len(tokens))))


class PipelineContender(Contender):
    """A pipeline of ours, with its defaults except for ``schedule`` and ``options``. In one process, the number of threads is tuned."""

    def __init__(self, key: str, label: str, schedule: str, drafts: Sequence[str] = (), **options: Any) -> None:
        super().__init__(key, label, "ours", drafts)
        self.schedule, self.options = schedule, options
        self.visible = schedule != "workers"
        self.pipe: Pipeline | None = None

    def start(self, workload: Workload) -> None:
        if self.schedule in ("plain", "lockstep"):
            self.settings = [TunedSetting(n) for n in workload.thread_numbers]
        super().start(workload)
        drafts: list[Any] = [workload.family.drafts.get(name, name) for name in self.drafts]
        if self.schedule == "workers":
            drafts = private_copies(drafts)
        self.pipe = Pipeline(workload.family.target, drafts, schedule=self.schedule, **self.options)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> GeneratedText:
        assert self.pipe is not None
        options = self.workload.sampling | ({} if self.workload.is_greedy else {"seed": seed})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            output = self.pipe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
        report = self.pipe.report
        assert report is not None
        notes = [str(w.message) for w in seen if issubclass(w.category, StageFailure)]
        if report.schedule != self.schedule:
            notes.append(f"ran as {report.schedule}")
        notes += report.decisions or ()
        names = (*self.drafts, "target")[-len(report.stages) :]
        stages = [
            StepCounts(name, s.steps, s.produced, s.drafted, s.accepted)
            for name, s in zip(names, report.stages, strict=True)
        ]
        return GeneratedText(output[0, ids.shape[1] :].tolist(), tuple(stages), "; ".join(notes))

    def rest(self) -> None:
        # The threads of stages on a CPU would slow down every other contender (docs/speed.md). On a GPU none of them waits
        # actively, and the graphs would have to be captured again.
        if self.schedule == "streams" and self.pipe is not None and self.pipe.target.device.type == "cpu":
            self.pipe.close()

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()


def standard_contenders(drafts: Sequence[str], schedules: Sequence[str] = ("lockstep", "workers")) -> list[Contender]:
    """The rows of the demo and of the README: HuggingFace's, then ours: prompt lookup, chains of two with each draft, and one with all."""
    found: list[Contender] = [HFContender("plain", "HF generate()")]
    found += [HFContender(f"assisted-{name}", f"HF assisted, {name}", (name,)) for name in drafts]
    found += [HFContender("lookup", "HF prompt lookup"), PipelineContender("ours-plain", "ours, target alone", "plain")]
    found.append(PipelineContender("lockstep-ngram", "lockstep, n-gram", "lockstep", (NGRAM,)))
    for schedule, chain in itertools.product(schedules, chains(drafts)):
        label = f"{schedule}, {' + '.join(chain)}"
        found.append(PipelineContender(f"{schedule}-{'+'.join(chain)}", label, schedule, chain))
    return found


def chains(drafts: Sequence[str]) -> list[tuple[str, ...]]:
    """Each draft alone, and all of them together."""
    return [(name,) for name in drafts] + ([tuple(drafts)] if len(drafts) > 1 else [])


def private_copies(drafts: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """Copies of drafts on the CPU, for a contender that moves their weights into shared memory."""
    return [copy.deepcopy(draft) if draft.device.type == "cpu" else draft for draft in drafts]


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The tokens that end the model's text."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


@contextmanager
def _forwards(models: dict[str, PreTrainedModel]) -> Iterator[dict[str, int]]:
    """Count the forwards of each model."""
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
