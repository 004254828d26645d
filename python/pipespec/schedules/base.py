"""A call and what runs it: the interface of all decoders, and what the drivers of a chain share.

:class:`Decoder` is what a pipeline hands a call to. :class:`Driver` is a decoder that runs one chain of stages over a state block.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.cache import RowCache
from pipespec.engine.chain import StageInputs, make_upstream, stage_names
from pipespec.engine.forward import forget_stale
from pipespec.engine.runtime import runtime_of
from pipespec.engine.sampling import ScoreRecord
from pipespec.engine.stage import Stage
from pipespec.errors import user_stacklevel
from pipespec.models.properties import input_device
from pipespec.registry import PLAIN, SCHEDULES, imported, names
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock
from pipespec_kernels.trace import TraceMemory


class SpeedWarning(RuntimeWarning):
    """A call runs slower than it could. The text is the same."""


class StageFailure(SpeedWarning):
    """A draft stage died or failed. The text is the same."""


class StaleText(RuntimeWarning):
    """The text of a call is that of weights which were changed before it, unseen."""


def warn_of_speed(reason: str, kind: type[SpeedWarning] = SpeedWarning) -> None:
    warnings.warn(f"{reason}. The text is not affected, only its speed", kind, stacklevel=user_stacklevel())


def warn_of_stale_text() -> None:
    """The call that ends now has read weights from before a change."""
    warnings.warn(
        "generate(): weights of the model were changed before or during this call in a way that leaves no trace in torch (.data, numpy, DLPack, "
        "inference tensors), and this text is still that of the weights before the change: repeat this call. The texts of earlier calls are right. "
        "Later calls read the new weights. pipespec.refresh(model) right after such a change avoids this",
        StaleText,
        stacklevel=user_stacklevel(),
    )


class TextSource(Protocol):
    """Where the committed tokens of a call are read: a :class:`StateBlock`, or an object with the same methods."""

    @property
    def target(self) -> int: ...
    def length(self, stage: int, row: int) -> int: ...
    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]: ...
    def end_row(self, row: int) -> None: ...
    def counters(self, stage: int, row: int) -> dict: ...


class CacheOwner(Protocol):
    """Holder of the target's keys and values, see :class:`Stage`. ``complete`` gives None where they are on other machines."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None: ...
    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> RowCache | None: ...
    def forget(self) -> None: ...


@dataclass(eq=False)
class GenerationRequest:
    """One call of ``generate()``.

    Args:
        inputs: What the target begins with. Drafts begin with the same, but for ``draft_sampling_params``.
        eos: Token ids that end a row.
        on_commit: Called after each step of the target with the text so far; what it raises ends the call.
        record: Where the target stores scores and logits.
        cache: A copy of the caller's keys and values, which the target continues.
        returns_cache: Whether the caller gets the target's keys and values after the call.
    """

    inputs: StageInputs
    eos: Sequence[int]
    on_commit: Callable[[TextSource], None] | None = None
    record: ScoreRecord | None = None
    cache: RowCache | None = None
    returns_cache: bool = False

    @cached_property
    def draft_sampling_params(self) -> bytes:
        """The part of the sampling parameters that drafts apply, pickled."""
        return self.inputs.sampling_params.for_drafts()

    def committed(self, text: TextSource) -> None:
        """Report that the target took a step."""
        if self.on_commit is not None:
            self.on_commit(text)

    def hand_cache_to(self, owner: CacheOwner) -> None:
        """Let ``owner`` adopt :attr:`cache`, if there is one."""
        if self.cache is not None:
            held = zip(self.inputs.prompts, self.cache.lengths, strict=True)
            owner.adopt(self.cache, [prompt[:n] for prompt, n in held])


class Decoder(ABC):
    """Runs calls of ``generate()``, one after the other.

    A pipeline checks the memory, which may call ``release``, then calls ``run``. After ``run``,
    also after one that raised, ``block`` holds what was committed.

    Attributes:
        block: The text of the present or last call.
        checked: Rows, longest prompt and limit of the last call whose memory was checked: its caches are kept.
        static_caches: Whether calls run in captured steps, whose caches cannot grow; a dtype: likewise, and keys and values are kept in it.
        ran_as: Name of the schedule that ran the last call.
        remarks: Decisions about the last call, for its report.
        serves: Whether it only takes part in the calls of another process, see :meth:`serve`.
    """

    block: TextSource
    checked: tuple[int, int, int] = (0, 0, 0)
    static_caches: bool | torch.dtype = False
    ran_as: str
    remarks: tuple[str, ...] = ()
    serves: bool = False

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @property
    @abstractmethod
    def target(self) -> CacheOwner:
        """Holder of the target's keys and values."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the stages in :attr:`block`."""
        return stage_names(self.block.target + 1)

    @abstractmethod
    def run(self, request: GenerationRequest) -> None:
        """Generate until every row of the target is complete."""

    def release(self) -> None:
        """Release the caches of the stages in this process until the next call. While none runs."""

    def warn_slower(self, reason: str) -> None:
        """Warn that calls leave the fast path, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warn_of_speed(reason)

    @property
    def forms(self) -> Sequence[str]:
        """How the forward of each stage in :attr:`block` runs, see :attr:`pipespec.api.output.StageReport.forward`."""
        return [""] * len(self.names)

    @property
    def prompt_tokens_reused(self) -> int:
        """Tokens of the last call's prompts whose keys and values the target had, from an earlier call or the caller."""
        return 0

    @property
    def plain_step_seconds(self) -> float | None:
        """Time of a step of the target without draft tokens, as measured; None where it is not."""
        return None

    @property
    def translated(self) -> Mapping[int, tuple[int, int]]:
        """By stage with another tokenizer than the target's: tokens that its model generated in the last call, and those that could not be translated."""
        return {}

    def forget_stale(self) -> bool:
        """After a call: compare all weights of the target with the copies that it has read. Returns whether some were changed in between."""
        return False

    def end_call(self) -> None:
        """After a call, also one that raised: let go of what only that call needed."""

    def share_prefixes(self, count: int) -> None:
        """Keep one of ``count`` equal parts of ``prefix_cache``: so many decoders keep texts of the same models."""

    def tokens_kept(self, prompt: np.ndarray) -> int:
        """About how many tokens of ``prompt`` (int32 ``[P]``) the target has read in earlier calls. While another call runs, too."""
        return 0

    def traces(self) -> dict[str, np.ndarray]:
        """Steps of the last call per stage, smallest draft first, see :meth:`TraceMemory.read`; empty without a trace."""
        return {}

    def close(self) -> None:
        """End worker processes and drop graphs. A later call starts them again."""

    def serve(self) -> None:
        """Take part in the calls of the process that has the target, until it closes. Raises ``RuntimeError`` where this process has it."""
        raise RuntimeError("serve() is for the ranks of drafts, with schedule='ranks': call generate() here")

    def another(self) -> Decoder | None:
        """Another decoder of the same models, for a call at the same time; None where it would need more than caches of its own."""
        return None

    def for_fork(self) -> Decoder:
        """Return the decoder that runs the calls in a child of a fork. The present one stays the parent's.

        Raises:
            RuntimeError: A fork cannot run them.
        """
        return self


class Driver(Decoder):
    """Runs the stages of one chain over a state block. ``models``: of the drafts that have one, in their order, and of the target."""

    schedule: ClassVar[str]
    block: StateBlock

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__()
        self.models = list(models)
        self.config = config
        self._stage_count = len(config.drafts) + 1
        self.ran_as = self._name_of(self.schedule)
        self.block = self._make_block()
        self._trace_memory = TraceMemory(self._stage_count, config.trace) if config.trace else None

    def _model_of(self, i: int) -> PreTrainedModel:
        """The model of stage ``i``."""
        return self.models[self.config.model_stages.index(i)]

    def _name_of(self, schedule: str) -> str:
        return schedule if self._stage_count > 1 else PLAIN.name

    def _draft_name(self, i: int) -> str:
        """Of the draft at stage ``i``, for messages."""
        return f"draft stage {self.names[i].removeprefix('draft ')}"

    def _make_block(self) -> StateBlock:
        return StateBlock.create(self._stage_count, 1, 64)

    def _make_stage(self, i: int, acceptance: RejectionAcceptance | None = None) -> Stage:
        """Stage ``i`` in this process, and the inline stages that run with it. ``acceptance``: see :class:`Stage`."""
        config = self.config
        first, *_ = config.stages_of(i)
        upstream = make_upstream(config.drafts[first:i], self.block, first, self._trace_of)
        make = config.drafts[i].make_stage if i < self.block.target else Stage
        stage: Stage = make(
            self._model_of(i),
            self.block,
            i,
            self._trace_of(i),
            native=config.native,
            upstream=upstream,
            acceptance=acceptance,
        )
        stage.upstream_failed = functools.partial(self.draft_failed, i - 1)
        # Products of a library may depend on the number of threads.
        stage.reads_wide = not config.exact
        stage.needs_same_bits = i == self.block.target or acceptance is not None
        stage.keep_prefixes(config.prefix_cache)
        return stage

    @property
    def names(self) -> Sequence[str]:
        return self.config.names

    @property
    @abstractmethod
    def target(self) -> Stage:
        """The last stage."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages in this process that have a model, the target last."""
        return [self.target]

    # ---- a call

    def run(self, request: GenerationRequest) -> None:
        request.hand_cache_to(self.target)
        self._generate(request)

    @abstractmethod
    def _generate(self, request: GenerationRequest) -> None:
        """Prefill, then take steps until every row of the target is complete."""

    def _prepare(self, request: GenerationRequest) -> None:
        """Lay the rows out in the block. While no stage runs."""
        self._ensure(request)
        prompts, limits = request.inputs.prompts, request.inputs.limits
        starts = [len(p) for p in prompts]
        self.block.reset(starts, limits, [int(p[-1]) for p in prompts], request.eos)
        if self._trace_memory is not None:
            self._trace_memory.clear()

    def _ensure(self, request: GenerationRequest) -> None:
        """Room in the block for the rows. While no stage runs."""
        new = (limit - len(prompt) for prompt, limit in zip(request.inputs.prompts, request.inputs.limits, strict=True))
        self.block.ensure(len(request.inputs.prompts), max(new) + 2)

    def _trace_of(self, stage: int) -> _native.TraceBuffer | None:
        """Where ``stage`` writes its steps; None without a trace."""
        return None if self._trace_memory is None else self._trace_memory.buffer(stage)

    def _lost(self, i: int, what: str) -> None:
        """Warn once about draft ``i``. No stage waits for it any more."""
        self.block.set_alive(i, False)
        warn_of_speed(f"{self._draft_name(i)} {what}", StageFailure)

    def draft_failed(self, i: int, error: Exception) -> None:
        """Take draft ``i`` out of the present call, after ``error`` in a stage of this process."""
        cause = f"{type(error).__name__}: {error}"
        self._lost(i, f"failed ({cause}); this call goes on without it, the next one tries it again")

    def for_fork(self) -> Decoder:
        # A call of another thread may have been running at the fork. Nothing of it can continue.
        return type(self)(self.models, self.config)

    def close(self) -> None:
        # Kept texts go, too.
        self.release()

    def release(self) -> None:
        self.checked = (0, 0, 0)
        for stage in self.stages:
            stage.release()

    # ---- afterwards

    @property
    def prompt_tokens_reused(self) -> int:
        return self.target.reused

    @property
    def translated(self) -> Mapping[int, tuple[int, int]]:
        return {stage.index: stage.translated for stage in self.stages if stage.translated is not None}

    @property
    def forms(self) -> Sequence[str]:
        return self._forms({stage.index: stage.form for stage in self.stages})

    def _forms(self, of_models: Mapping[int, str]) -> list[str]:
        """Of all stages; those without a model have one by their kind."""
        forms = [*(draft.form for draft in self.config.drafts), ""]
        return [of_models.get(i, form) for i, form in enumerate(forms)]

    def forget_stale(self) -> bool:
        form = self.target.begun
        return form is not None and forget_stale(runtime_of(self.models[-1]).forms, form)

    def end_call(self) -> None:
        for stage in self.stages:
            stage.end_call()

    def share_prefixes(self, count: int) -> None:
        if (budget := self.config.prefix_cache) is not None:
            for stage in self.stages:
                stage.keep_prefixes(-(-budget // count))

    def tokens_kept(self, prompt: np.ndarray) -> int:
        return self.target.tokens_kept(prompt)

    def traces(self) -> dict[str, np.ndarray]:
        if self._trace_memory is None:
            return {}
        return {name: self._trace_memory.read(i) for i, name in enumerate(self.names)}


_runs_uncaptured = False
"""Whether captured schedules run their steps uncaptured on a CPU. Only the tests set this."""


def make_driver(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> Driver:
    """Build the driver of ``config.schedule``: any but ``"ranks"``, whose models are in other processes. With ``"plain"`` the drafts take no part.

    Raises:
        ValueError: The models cannot run in this schedule, or captured steps would run on a CPU.
        RuntimeError: Worker processes do not start.
        NotCapturable: A step cannot become a CUDA graph.
    """
    row = config.schedule_row
    if not row.has_drafts:
        models = models[-1:]
    if config.graphs and not _runs_uncaptured and all(input_device(model).type == "cpu" for model in models):
        what = f"schedule={row.name!r}" if row.is_captured else "graphs=True"
        others = names([r for r in SCHEDULES.values() if not (r.needs or r.is_captured)])
        raise ValueError(
            f"{what} runs captured CUDA graphs, and all models are on the CPU: use schedule={others} without graphs there"
        )
    kind = imported(row.captured if config.graphs else row.controlled if config.controlled else row.driver)
    driver: Driver = kind(models, config)
    return driver
