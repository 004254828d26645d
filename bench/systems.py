"""Contenders of a speed comparison: ways to generate the target's text, behind one interface."""

from __future__ import annotations

import copy
import itertools
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.api.pipeline import Pipeline
from pipespec.api.report import StageReport
from pipespec.bench.results import Sample, StepCounts
from pipespec.engine.ngram import NGRAM
from pipespec.models.loading import load_model
from pipespec.models.properties import end_tokens
from pipespec.models.tokenizers import load_tokenizer
from pipespec.registry import LOCKSTEP, PLAIN, SCHEDULES, WORKERS
from pipespec.schedules.base import StageFailure

GREEDY: dict[str, Any] = {"do_sample": False}

Commits = list[tuple[float, int]]
"""``(seconds since the call, new tokens until then)`` per commit."""


@dataclass(frozen=True)
class Family:
    """A target, its drafts by name (smallest first), and their tokenizer (None: prompts are token ids)."""

    name: str
    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    tokenizer: Any

    @staticmethod
    def load(
        name: str,
        target: Path | str,
        drafts: Mapping[str, Path | str],
        *,
        dtype: torch.dtype | str = torch.float32,
        devices: Sequence[str | dict[str, str] | None] | None = None,
        trust_remote_code: bool = False,
    ) -> Family:
        """Load models.

        Args:
            name: Of the family, for reports.
            target: Path of the target, which has the tokenizer, too.
            drafts: Paths by name, smallest first.
            dtype: As :func:`pipespec.models.loading.load_model` takes it.
            devices: One per model, drafts first, as ``load_model`` takes it. None: the CPU for all.
            trust_remote_code: As ``load_model`` takes it.

        Raises:
            FileNotFoundError, ValueError, DoesNotFit: Those of ``load_model``.
        """
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        places = devices or [None] * (len(drafts) + 1)
        models = {
            n: load_model(path, device=d, **options) for (n, path), d in zip(drafts.items(), places, strict=False)
        }
        model = load_model(target, device=places[-1], **options)
        tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
        return Family(name, model, models, tokenizer)

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
        new_tokens: Maximum number of new tokens per prompt.
        longest: Tokens of the longest prompt.
        threads: CPU threads of torch, for all processes together; rows in one process also try other numbers.
        sampling: Arguments of ``generate()``: ``do_sample`` and the sampling parameters.
        times_commits: Texts have the time of each commit.
    """

    family: Family
    new_tokens: int
    longest: int
    threads: int
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    times_commits: bool = False

    @property
    def is_greedy(self) -> bool:
        return not self.sampling["do_sample"]

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: the target's, unless ``sampling`` says that there are none."""
        return [] if self.sampling.get("eos_token_id", 0) is None else end_tokens(self.family.target)

    @property
    def thread_numbers(self) -> list[int]:
        """Numbers of threads that tuning tries for a row in one process: all, one and two. On shared virtual cores fewer may be faster."""
        if self.family.target.device.type == "cuda":
            return [self.threads]
        return list(dict.fromkeys((self.threads, 1, min(2, len(os.sched_getaffinity(0))))))


class CommitClock:
    """A streamer for ``generate()`` that notes when tokens are committed. Its time begins when it is made."""

    takes_blocks = True

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._length = -1  # the prompt comes first
        self.commits: Commits = []

    def put(self, value: Any) -> None:
        """Take the prompt, then the tokens of each commit."""
        if self._length < 0:
            self._length = 0
            return
        self._length += value.numel()
        self.commits.append((time.perf_counter() - self.began, self._length))

    def end(self) -> None:
        """Required of a streamer."""

    def until(self, tokens: int) -> Commits:
        """The commits of a text that has ``tokens`` tokens."""
        return [(at, min(length, tokens)) for at, length in self.commits]


class Contender(ABC):
    """One row of a comparison.

    Attributes:
        group: ``"hf"``, ``"reference"`` (a published schedule) or ``"ours"``.
        settings: Candidates of tuning, the default first; empty: nothing to tune.
        slow: The start may take a minute.
    """

    settings: Sequence[Any] = ()
    slow = False

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
    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        """Generate at most ``new_tokens`` tokens behind ``ids``, LongTensor ``[1, S]``. The sample has no time yet."""

    def is_exact(self, workload: Workload) -> bool:
        """Whether the text has to equal the reference. transformers draws its samples from other numbers."""
        return self.group != "hf" or workload.is_greedy

    def pause(self) -> None:
        """Release processes and graphs until the next turn, which starts them again."""

    def close(self) -> None:
        """Release all resources; also called after a failed ``start``."""


@dataclass(frozen=True)
class TunedSetting:
    """What tuning chooses: CPU threads of torch, and HuggingFace's settings of assisted generation or prompt lookup.

    ``num_draft_tokens`` is transformers' ``num_assistant_tokens`` or ``prompt_lookup_num_tokens``. ``layers``: of the target, for drafts of its own
    layers.
    """

    threads: int
    num_draft_tokens: int | None = None
    confidence_threshold: float | None = None
    schedule: str = "constant"
    layers: int | None = None

    def __str__(self) -> str:
        parts = [] if self.num_draft_tokens is None else [f"{self.num_draft_tokens} draft tokens"]
        if self.confidence_threshold is not None:
            parts.append(f"threshold {self.confidence_threshold:g}")
        if self.schedule != "constant":
            parts.append(self.schedule)
        if self.layers is not None:
            parts.append(f"{self.layers} layers")
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
    """transformers' ``generate()``: plain, with an assistant model, or with prompt lookup. Tuned, also over the number of threads.

    Args:
        key: See the base class, as for ``label`` and ``drafts``.
        options: Further arguments of ``generate()``.
    """

    def __init__(self, key: str, label: str, drafts: Sequence[str] = (), **options: Any) -> None:
        super().__init__(key, label, "hf", drafts)
        self.options = options

    def start(self, workload: Workload) -> None:
        self.settings = [
            TunedSetting(threads, *c)
            for c, threads in itertools.product(self._candidates(workload), workload.thread_numbers)
        ]
        super().start(workload)

    def _candidates(self, workload: Workload) -> Sequence[tuple[Any, ...]]:
        """Values of :class:`TunedSetting` behind the threads, the default first."""
        return ASSISTED if self.drafts else LOOKUP if self.key == "lookup" else ((),)

    def _assistant(self) -> PreTrainedModel | None:
        """The model that drafts."""
        return self.workload.family.drafts[self.drafts[0]] if self.drafts else None

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        target, setting, assistant = self.workload.family.target, self.setting, self._assistant()
        options: dict[str, Any] = {"max_new_tokens": new_tokens, **self.workload.sampling, **self.options}
        counted: dict[str, PreTrainedModel] = {"target": target}
        if assistant is not None:
            use_assistant_setting(assistant, setting)
            options["assistant_model"] = assistant
            counted[self.drafts[0] if self.drafts else OWN_LAYERS] = assistant
        elif setting.num_draft_tokens is not None:
            options["prompt_lookup_num_tokens"] = setting.num_draft_tokens
        with forwards_of(counted) as forwards:
            tokens, commits = self._generate(ids, seed, options)
        target_steps = forwards.pop("target")
        drafts = [StepCounts(name, steps) for name, steps in forwards.items()]
        stages = [*drafts, StepCounts("target", target_steps, len(tokens))]
        return Sample(tokens=tokens, stages=stages, commits=commits)

    def _generate(self, ids: torch.Tensor, seed: int, options: dict[str, Any]) -> tuple[list[int], Commits]:
        """Call ``generate()``; returns the new tokens and the commits."""
        torch.manual_seed(seed)
        clock = CommitClock() if self.workload.times_commits else None
        mask = torch.ones_like(ids)
        output = self.workload.family.target.generate(ids, attention_mask=mask, streamer=clock, **options)
        tokens = output[0, ids.shape[1] :].tolist()
        return tokens, clock.until(len(tokens)) if clock else []


OWN_LAYERS = "own layers"
"""Name of a draft that consists of layers of the target, in counts."""


def use_assistant_setting(assistant: PreTrainedModel, setting: TunedSetting) -> None:
    """Write the setting where transformers reads it: into the generation configuration of the model that drafts."""
    assistant.generation_config.num_assistant_tokens = setting.num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = setting.schedule
    assistant.generation_config.assistant_confidence_threshold = setting.confidence_threshold


class PipelineContender(Contender):
    """A pipeline of ours, with its defaults except for ``schedule`` and ``options``. In one process, the number of threads is tuned."""

    def __init__(self, key: str, label: str, schedule: str, drafts: Sequence[str] = (), **options: Any) -> None:
        super().__init__(key, label, "ours", drafts)
        self.schedule, self.options = schedule, options
        self.pipe: Pipeline | None = None

    def start(self, workload: Workload) -> None:
        if self.schedule in (PLAIN.name, LOCKSTEP.name):
            self.settings = [TunedSetting(n) for n in workload.thread_numbers]
        super().start(workload)
        drafts: list[Any] = [workload.family.drafts.get(name, name) for name in self.drafts]
        if SCHEDULES[self.schedule].has_processes:
            drafts = private_copies(drafts)
        self.pipe = Pipeline(workload.family.target, drafts, schedule=self.schedule, **self.options)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        assert self.pipe is not None
        sample = generated(self.pipe, self.workload, ids, new_tokens, seed)
        report = self.pipe.report
        assert report is not None
        if report.schedule != self.schedule:
            sample.notes.append(f"ran as {report.schedule}")
        sample.notes += report.decisions or ()
        # The index is the last draft where the controller chooses. "draft 0" is the first of the models.
        models = [name for name in self.drafts if name != NGRAM]
        names = [models[int(s.name.split()[1])] if s.name.startswith("draft ") else s.name for s in report.stages]
        sample.stages = [counts_of(name, stage) for name, stage in zip(names, report.stages, strict=True)]
        return sample

    def pause(self) -> None:
        self.close()

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()


def generated(pipe: Any, workload: Workload, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
    """Call a pipeline of ours; returns tokens, times of commits, the schedule, and failures of stages as notes."""
    options = workload.sampling | ({} if workload.is_greedy else {"seed": seed})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        clock = CommitClock() if workload.times_commits else None
        output = pipe.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=clock, **options
        )
    tokens = output[0, ids.shape[1] :].tolist()
    return Sample(
        tokens=tokens,
        commits=clock.until(len(tokens)) if clock else [],
        schedule=pipe.report.schedule,
        notes=[str(w.message) for w in seen if issubclass(w.category, StageFailure)],
    )


def counts_of(name: str, stage: StageReport) -> StepCounts:
    """The counters of a stage of a report, under ``name``."""
    same = (f.name for f in fields(StepCounts) if f.name != "name")
    return StepCounts(name, **{field: getattr(stage, field) for field in same})


def standard_contenders(
    drafts: Sequence[str], schedules: Sequence[str] = (LOCKSTEP.name, WORKERS.name)
) -> list[Contender]:
    """The rows of the demo and of the README: HuggingFace's, then ours: prompt lookup, chains of two with each draft, and one with all."""
    found: list[Contender] = [HFContender("plain", "HF generate()")]
    found += [HFContender(f"assisted-{name}", f"HF assisted, {name}", (name,)) for name in drafts]
    found += [
        HFContender("lookup", "HF prompt lookup"),
        PipelineContender("ours-plain", "ours, target alone", PLAIN.name),
    ]
    found.append(PipelineContender("lockstep-ngram", "lockstep, n-gram", LOCKSTEP.name, (NGRAM,)))
    for schedule, chain in itertools.product(schedules, chains(drafts)):
        label = f"{schedule}, {' + '.join(chain)}"
        found.append(PipelineContender(f"{schedule}-{'+'.join(chain)}", label, schedule, chain))
    return found


def chains(drafts: Sequence[str]) -> list[tuple[str, ...]]:
    """Each draft alone, and all of them together."""
    return [(name,) for name in drafts] + ([tuple(drafts)] if len(drafts) > 1 else [])


def private_copies(drafts: Sequence[Any]) -> list[Any]:
    """Copies of draft models on the CPU, for a contender that moves their weights into shared memory. Other drafts stay as they are."""

    def is_here(draft: Any) -> bool:
        return isinstance(draft, PreTrainedModel) and draft.device.type == "cpu"

    return [copy.deepcopy(draft) if is_here(draft) else draft for draft in drafts]


@contextmanager
def forwards_of(models: dict[str, PreTrainedModel]) -> Iterator[dict[str, int]]:
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
