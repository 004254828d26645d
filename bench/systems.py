"""Systems of a run: ways to generate the target's text, behind one interface, and :data:`KINDS`, the table of those that a configuration can name."""

import copy
import itertools
import json
import os
import subprocess
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.config import BenchConfig
from bench.samples import Sample, StepCounts
from pipespec.api.output import StageReport
from pipespec.api.pipeline import Pipeline
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import as_draft
from pipespec.engine.ngram import NGRAM
from pipespec.models.properties import end_tokens
from pipespec.registry import LOCKSTEP, PLAIN, SCHEDULES
from pipespec.schedules.base import StageFailure

REFERENCE = "hf"
"""Key of the system whose greedy texts the others are compared with."""

Commits = list[tuple[float, int]]
"""``(seconds since the call, new tokens until then)`` per commit."""


@dataclass(frozen=True)
class Family:
    """A target, its drafts by name (smallest first), and their tokenizer (None: prompts are token ids). A draft is what a pipeline takes."""

    name: str
    target: PreTrainedModel
    drafts: dict[str, Any]
    tokenizer: Any = None

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The models by name, the target last."""
        drafts = {name: draft for name, draft in self.drafts.items() if isinstance(draft, PreTrainedModel)}
        return {**drafts, "target": self.target}

    def draft(self, name: str) -> Any:
        """What a pipeline takes for a draft of this name."""
        return self.drafts.get(name, name)


@dataclass(frozen=True)
class Workload:
    """What every system generates.

    Args:
        family: The models.
        new_tokens: Maximum number of new tokens per prompt.
        longest: Tokens of the longest prompt.
        threads: CPU threads of torch, for all processes together; rows in one process also try other numbers.
        sampling: Arguments of ``generate()``: ``do_sample`` and the sampling parameters.
    """

    family: Family
    new_tokens: int
    longest: int
    threads: int
    sampling: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})

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


class System(ABC):
    """One way to generate the target's text: a row of the tables.

    Args:
        key: Unique in a run: ``"hf"``, ``"assisted-small"``, ``"workers-small+medium-L5"``.
        label: For tables.
        group: ``"hf"``, ``"reference"`` (a published schedule), ``"rival"`` (another program) or ``"ours"``.
        drafts: Names of the draft models, smallest first.
        about: What the results say besides, for example ``axes``: what a sweep varied.

    Attributes:
        settings: Candidates of tuning, the default first; empty: nothing to tune.
        slow: The start may take a minute.
        is_heavy: It keeps processes or graphs, which :meth:`pause` releases.
        compared_with: Key of the system whose texts these have to be; None: the run's reference.
    """

    settings: Sequence[Any] = ()
    slow = False
    is_heavy = False
    compared_with: str | None = None

    def __init__(self, key: str, label: str, group: str = "ours", drafts: Sequence[str] = (), **about: Any) -> None:
        self.key, self.label, self.group, self.drafts, self.about = key, label, group, tuple(drafts), about
        self.setting: Any = None

    def record(self) -> dict[str, Any]:
        """The system in the results."""
        return {"key": self.key, "label": self.label, "group": self.group, "drafts": list(self.drafts), **self.about}

    @property
    def threads(self) -> int:
        """CPU threads of torch in this process during a turn."""
        return self.setting.threads if isinstance(self.setting, TunedSetting) else self.workload.threads

    def start(self, workload: Workload) -> None:
        """Prepare; an exception of any type means that the system cannot take part."""
        self.workload = workload
        self.use(self.settings[0] if self.settings else None)

    def use(self, setting: Any) -> None:
        """Use one of ``settings`` from now on."""
        self.setting = setting

    @abstractmethod
    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        """Generate at most ``new_tokens`` tokens after ``ids``, LongTensor ``[1, S]``. The sample has no time yet."""

    def is_exact(self, workload: Workload) -> bool:
        """Whether the text has to equal the reference. transformers draws its samples from other numbers."""
        return self.group != "hf" or workload.is_greedy

    def pause(self) -> None:
        """Release processes and graphs until the next turn, which starts them again."""

    def close(self) -> None:
        """Release all resources; also called after a failed ``start``."""


# (number of draft tokens, confidence threshold, schedule of transformers). (20, 0.4) is transformers' default.
ASSISTED = (
    *((tokens, threshold, "constant") for tokens in (5, 3, 8) for threshold in (0.0, 0.4)),
    (20, 0.4, "constant"),
    (20, None, "constant"),
    (5, 0.0, "heuristic"),
    (5, 0.4, "heuristic"),
)
LOOKUP = ((3,), (10,), (20,))
OWN_LAYERS = "own layers"
"""Name of a draft that consists of layers of the target, in counts."""


class HFSystem(System):
    """transformers' ``generate()``: plain, with an assistant model, or with prompt lookup. Tuned, also over the number of threads.

    Args:
        key: See the base class, as for ``label`` and ``drafts``.
        candidates: Values of :class:`TunedSetting` after the threads, the default first.
        target: Instead of the family's.
    """

    def __init__(
        self, key: str, label: str, drafts: Sequence[str] = (), candidates: Sequence[tuple[Any, ...]] | None = None, target: Any = None
    ) -> None:  # fmt: skip
        super().__init__(key, label, "hf", drafts)
        self.candidates, self.target = candidates, target

    def start(self, workload: Workload) -> None:
        found = itertools.product(self._candidates(workload), workload.thread_numbers)
        self.settings = [TunedSetting(threads, *candidate) for candidate, threads in found]
        self.target = self.target or workload.family.target
        super().start(workload)

    def _candidates(self, workload: Workload) -> Sequence[tuple[Any, ...]]:
        if self.candidates is not None:
            return self.candidates
        return ASSISTED if self.drafts else LOOKUP if self.key == "lookup" else ((),)

    def _assistant(self) -> PreTrainedModel | None:
        """The model that drafts."""
        return self.workload.family.draft(self.drafts[0]) if self.drafts else None

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        setting, assistant = self.setting, self._assistant()
        options: dict[str, Any] = {"max_new_tokens": new_tokens, **self.workload.sampling}
        counted: dict[str, PreTrainedModel] = {"target": self.target}
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
        clock = CommitClock()
        output = self.target.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        tokens = output[0, ids.shape[1] :].tolist()
        return tokens, clock.until(len(tokens))


def use_assistant_setting(assistant: PreTrainedModel, setting: TunedSetting) -> None:
    """Write the setting where transformers reads it: into the generation configuration of the model that drafts."""
    assistant.generation_config.num_assistant_tokens = setting.num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = setting.schedule
    assistant.generation_config.assistant_confidence_threshold = setting.confidence_threshold


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


class PipelineSystem(System):
    """A pipeline of ours with ``options``, the defaults otherwise. In one process, the number of threads is tuned.

    Args:
        key: See the base class, as for ``label`` and ``drafts``.
        schedule: None: the pipeline chooses, and may let drafts rest.
        target: Instead of the family's.
        axes: What a sweep varied.
    """

    def __init__(
        self, key: str, label: str, schedule: str | None, drafts: Sequence[str] = (), target: Any = None,
        axes: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(key, label, "ours", drafts, schedule=schedule, options=options, axes=axes or {})
        self.schedule, self.options, self.target = schedule, options, target
        self.pipe: Any = None

    def start(self, workload: Workload) -> None:
        has_processes = self.schedule is not None and SCHEDULES[self.schedule].has_processes
        self.is_heavy = has_processes or bool(self.options.get("graphs"))
        if self.schedule in (PLAIN.name, LOCKSTEP.name):
            self.settings = [TunedSetting(n) for n in workload.thread_numbers]
        super().start(workload)
        drafts = [self.draft(name) for name in self.drafts]
        drafts = private_copies(drafts) if has_processes else drafts
        # Each repeat reads its prompt, unless the row is about kept prefixes.
        options = {"prefix_cache": 0} | self.options | ({} if self.schedule is None else {"schedule": self.schedule})
        self.pipe = Pipeline(self.target or workload.family.target, drafts, **options)

    def draft(self, name: str) -> Any:
        """What the pipeline takes for a draft of this name."""
        return self.workload.family.draft(name)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        sample, report = generated(self.pipe, self.workload, ids, new_tokens, seed), self.pipe.report
        if self.schedule not in (None, report.schedule):
            sample.notes.append(f"ran as {report.schedule}")
        sample.notes += report.decisions or ()
        # The index is the last draft where the controller chooses. "draft 0" is the first of the models.
        models = [name for name in self.drafts if name != NGRAM]
        names = [models[int(s.name.split()[1])] if s.name.startswith("draft ") else s.name for s in report.stages]
        sample.stages = [counts_of(name, stage) for name, stage in zip(names, report.stages, strict=True)]
        sample.forward = report.stages[-1].forward
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
        clock = CommitClock()
        output = pipe.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=clock, **options
        )
    tokens = output[0, ids.shape[1] :].tolist()
    return Sample(
        tokens=tokens,
        commits=clock.until(len(tokens)),
        schedule=pipe.report.schedule,
        notes=[str(w.message) for w in seen if issubclass(w.category, StageFailure)],
    )


def counts_of(name: str, stage: StageReport) -> StepCounts:
    """The counters of a stage of a report, under ``name``."""
    same = (f.name for f in fields(StepCounts) if f.name != "name")
    return StepCounts(name, **{field: getattr(stage, field) for field in same})


def private_copies(drafts: Sequence[Any]) -> list[Any]:
    """Copies of draft models on the CPU, for a system that moves their weights into shared memory. Other drafts stay as they are."""

    def is_here(draft: Any) -> bool:
        return isinstance(draft, PreTrainedModel) and draft.device.type == "cpu"

    return [copy.deepcopy(draft) if is_here(draft) else draft for draft in drafts]


class LineSystem(System):
    """A process, started by ``command``, that answers lines of JSON, ``"ready"`` first. ``variables``: of its environment."""

    command: Sequence[str]
    variables: Mapping[str, str] = {}
    _process: subprocess.Popen[str] | None = None

    def start(self, workload: Workload) -> None:
        super().start(workload)
        # Its errors are shown where the caller's are.
        self._process = subprocess.Popen(
            self.command, env={**os.environ, **self.variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if (first := self._answer()) != "ready":
            raise RuntimeError(f"{self.label} does not start: it answers {first!r}")

    def ask(self, job: Any) -> Any:
        """The answer to a job."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.label} ended with status {self._process.wait()}")
        return json.loads(line)

    def pause(self) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            stop(self._process)


def stop(process: subprocess.Popen[Any], seconds: float = 10.0) -> None:
    """End a process: by the end of its input, and where it has none or takes longer by a signal."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    process.kill()
    process.wait()


class Unmeasured(System):
    """A row of a paper's table that cannot be measured here. ``reason``: why."""

    def __init__(self, key: str, label: str, reason: str) -> None:
        super().__init__(key, label)
        self.reason = reason

    def start(self, workload: Workload) -> None:
        raise NotImplementedError(self.reason)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        raise NotImplementedError(self.reason)


# ---- from a configuration to systems


@dataclass(frozen=True)
class Kind:
    """A kind of systems: what it is, and a function of its name, the configuration and the names of the drafts that makes its rows.

    ``has_drafts``: whether drafts propose tokens. Speed-ups refer to the fastest system without drafts.
    """

    about: str
    rows: Callable[[str, BenchConfig, Sequence[str]], Iterator[System]]
    has_drafts: bool = True


def draft_names(paths: Sequence[str]) -> list[str]:
    """Names of models by the last parts of their paths; numbered where these are equal."""
    names = [Path(path).name for path in paths]
    return names if len({*names, "target"}) == len(names) + 1 else [f"draft {i}" for i in range(len(paths))]


def systems_of(config: BenchConfig, drafts: Sequence[str]) -> list[System]:
    """The rows that a configuration asks for, with its reference first. When sampling, also ``plain``, whose text is the reference then.

    ``drafts``: names of the draft models, smallest first.

    Raises:
        ValueError: A kind does not exist, or needs a draft and there is none, or a draft module is damaged.
        FileNotFoundError: A folder has no draft module.
    """
    if unknown := [kind for kind in config.systems if kind not in KINDS]:
        raise ValueError(f"no system {', '.join(map(repr, unknown))}: there are {', '.join(KINDS)}")
    kinds = dict.fromkeys(
        [config.reference, *([PLAIN.name] if config.temperature is not None else []), *config.systems]
    )
    found = []
    for kind in kinds:
        for system in KINDS[kind].rows(kind, config, drafts):
            system.about = {"kind": kind, "has_drafts": KINDS[kind].has_drafts} | system.about
            found.append(system)
    if repeated := sorted({s.key for s in found if sum(o.key == s.key for o in found) > 1}):
        raise ValueError(f"two systems have one key: {', '.join(repeated)}")
    return found


def single(make: Callable[[], System]) -> Callable[[str, BenchConfig, Sequence[str]], Iterator[System]]:
    """A kind that is one row."""
    return lambda kind, config, drafts: iter([make()])


def chains(drafts: Sequence[str]) -> list[tuple[str, ...]]:
    """Each draft alone, and all of them together."""
    return [(name,) for name in drafts] + ([tuple(drafts)] if len(drafts) > 1 else [])


def each_chain(kind: str, config: BenchConfig, drafts: Sequence[str]) -> list[tuple[str, ...]]:
    """The chains that a configuration asks for. ``ValueError`` without a draft."""
    if not drafts:
        raise ValueError(f"the system {kind!r} needs a draft: give --drafts")
    both = chains(drafts)
    if config.chains == "whole":
        return both[-1:]
    return both if config.chains == "both" or len(drafts) == 1 else both[:-1]


def _assisted(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    for (name,) in [c for c in chains(drafts) if len(c) == 1] or each_chain(kind, config, drafts):
        yield HFSystem(f"assisted-{name}", f"HF assisted, {name}", [name])


def _swept(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[System]:
    """One system per chain and point of the axes."""
    schedule = LOCKSTEP.name if kind == NGRAM else kind.removesuffix("-graphs")
    for chain in [(NGRAM,)] if kind == NGRAM else each_chain(kind, config, drafts):
        for lookahead in [n for n in config.lookahead if n >= 1] or [None]:
            checked = SpeculationConfig.of([as_draft(draft) for draft in chain], schedule=schedule, lookahead=lookahead)
            point = "" if lookahead is None else f"L{lookahead}"
            options: dict[str, Any] = {} if lookahead is None else {"lookahead": list(checked.lookahead)}
            key = "-".join(filter(None, [kind, "" if kind == NGRAM else "+".join(chain), point]))
            label = "lockstep, n-gram" if kind == NGRAM else f"{kind}, {' + '.join(chain)}"
            if kind.endswith("-graphs"):
                options["graphs"] = True
            axes = {} if lookahead is None else {"lookahead": lookahead}
            yield PipelineSystem(key, ", ".join(filter(None, [label, point])), schedule, chain, axes=axes, **options)


def _plain(label: str, **options: Any) -> Callable[[str, BenchConfig, Sequence[str]], Iterator[System]]:
    return lambda kind, config, drafts: iter([PipelineSystem(kind, label, PLAIN.name, **options)])


KINDS: dict[str, Kind] = {
    REFERENCE: Kind(
        "transformers' generate(): the reference, always measured",
        single(lambda: HFSystem("hf", "HF generate()")),
        False,
    ),
    "assisted": Kind("generate() with an assistant model, tuned", _assisted),
    "lookup": Kind("generate() with prompt lookup, tuned", single(lambda: HFSystem("lookup", "HF prompt lookup"))),
    PLAIN.name: Kind("pipespec, the target alone", _plain("target alone"), False),
    "plain-graphs": Kind("the same in captured steps", _plain("target alone, graphs", graphs=True), False),
    NGRAM: Kind("pipespec, prompt lookup", _swept),
    "lockstep-graphs": Kind("pipespec, captured rounds", _swept),
    **{
        row.name: Kind(f"pipespec, stages {row.stages.partition(';')[0]}", _swept)
        for row in SCHEDULES.values()
        if row.has_drafts and not row.needs_ranks
    },
}
"""The table of kinds. ``bench.baselines`` adds those of the papers."""
