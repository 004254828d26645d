"""What a driver is, and what all of them share: the state block and the numbers that steer the stages."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.progress import level_of_caller
from pipespec.sampling import Record
from pipespec.stage import WIDTH, Stage, Start, stage_names
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock
from pipespec_kernels.trace import TraceMemory


@dataclass(frozen=True)
class Request:
    """One call of ``generate()``, for the drivers.

    ``start``: what the target begins with, and the drafts but for their ``draft_selection``; ``eos``: ids that end a row; ``on_commit``:
    called by the target's side after each of its steps; ``record``: where the target notes scores and logits.
    """

    start: Start
    eos: Sequence[int]
    on_commit: Callable[[], None] | None = None
    record: Record | None = None

    @cached_property
    def draft_selection(self) -> bytes:
        """What drafts may run of the selection, pickled."""
        return self.start.selection.for_drafts()


@dataclass(frozen=True)
class Policy:
    """The numbers that steer a chain; the text does not depend on them, and they may change between any two steps.

    ``windows[i]``: how many tokens draft i may be ahead of the stage downstream of it; 0: the draft rests. ``wait``: drafts that the
    target awaits when it has fewer (a bet with a deadline, never a condition); ``decode_meanwhile``: instead of sleeping it decodes one token
    and leaves those there are alone (workers). ``threads``: of the target beside workers; None: what they
    leave, or all while the drafts rest.
    """

    windows: tuple[int, ...] = field(default_factory=tuple)
    wait: int = 0
    decode_meanwhile: bool = False
    threads: int | None = None

    def window(self, stage: int) -> int:
        return self.windows[stage] if stage < len(self.windows) else 0

    def max_hints(self, stage: int) -> int:
        return min(self.windows[stage - 1], WIDTH // 2) if 0 < stage <= len(self.windows) else 0

    @property
    def rests(self) -> bool:
        """Whether nobody drafts for the target."""
        return self.max_hints(len(self.windows)) == 0


class StageFailure(RuntimeWarning):
    """A draft stage died or failed; the text is the same, only slower."""


class Text(Protocol):
    """Where a call's committed tokens are read: a :class:`StateBlock`, or what keeps its books in the same terms."""

    @property
    def target(self) -> int: ...
    def length(self, stage: int, row: int) -> int: ...
    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]: ...
    def end_row(self, row: int) -> None: ...
    def counters(self, stage: int, row: int) -> dict: ...


class Holder(Protocol):
    """Whoever has the target's keys and values; see :class:`Stage`. ``release`` gives None where they cannot be had."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None: ...
    def release(self, lengths: Sequence[int]) -> RowCache | None: ...


class Runner(Protocol):
    """What a call of ``generate()`` needs below it: a :class:`Driver`, or another way to the target's text.

    ``block`` and ``target`` may be looked at while ``run`` calls ``on_commit``, and afterwards.
    """

    @property
    def block(self) -> Text: ...
    @property
    def target(self) -> Holder: ...
    def run(self, request: Request) -> None: ...


class Driver(ABC):
    """Runs the stages of one chain until the target's rows are complete.

    After ``run`` the block holds the target's tokens, whatever happened to the drafts; if it raises, those committed so far. ``trace``: how
    many of its last steps each stage keeps for :meth:`traces`; 0: none.

    ``schedule``: its name. ``ran_as``, ``remarks``: the name of what the last call ran as, where that was another one, and why.
    """

    schedule: ClassVar[str]

    def __init__(self, models: Sequence[PreTrainedModel], policy: Policy, trace: int = 0) -> None:
        self.models = list(models)
        self.policy = policy
        self.ran_as = self.schedule
        self.remarks: tuple[str, ...] = ()
        self.block = self._make_block()
        self._trace_memory = TraceMemory(len(models), trace) if trace else None

    def _make_block(self) -> StateBlock:
        return StateBlock.create(len(self.models), 1, 64)

    @property
    @abstractmethod
    def target(self) -> Stage:
        """The last stage."""

    def _prepare(self, request: Request) -> None:
        """Lay the rows out in the block. While no stage runs."""
        self._ensure(request)
        self.target.takes_hints = True  # until it knows better
        prompts, limits = request.start.prompts, request.start.limits
        starts = [len(p) for p in prompts]
        self.block.reset(starts, limits, [int(p[-1]) for p in prompts], request.eos)
        if self._trace_memory is not None:
            self._trace_memory.clear()

    def _trace_of(self, stage: int) -> _native.TraceBuffer | None:
        """Where ``stage`` notes its steps; None: nowhere."""
        return None if self._trace_memory is None else self._trace_memory.buffer(stage)

    def _ensure(self, request: Request) -> None:
        """Room in the block for the rows. While no stage runs."""
        new = (limit - len(prompt) for prompt, limit in zip(request.start.prompts, request.start.limits, strict=True))
        self.block.ensure(len(request.start.prompts), max(new) + 2)

    def _lost(self, i: int, what: str) -> None:
        """Tell the user, once, and no stage waits for it any more."""
        self.block.set_alive(i, False)
        message = f"draft stage {i} {what}. The text is not affected, only its speed"
        warnings.warn(message, StageFailure, stacklevel=level_of_caller())

    @abstractmethod
    def run(self, request: Request) -> None:
        """Generate. Returns when every row of the target is complete."""

    def steer(self, policy: Policy) -> None:
        """Use these numbers from the next step on. Between calls, or from a request's ``on_commit``."""
        if len(policy.windows) != len(self.models) - 1:
            raise ValueError(
                f"a chain of {len(self.models)} needs {len(self.models) - 1} windows, not {policy.windows}"
            )
        self.policy = policy

    @property
    def in_force(self) -> Policy:
        """The policy, or that of resting drafts once the target takes no hints any more."""
        return self.policy if self.target.takes_hints else Policy((0,) * len(self.policy.windows))

    def traces(self) -> dict[str, np.ndarray]:
        """Per stage, smallest draft first, the steps of the last call as :meth:`TraceMemory.read` has them; empty where nothing is traced."""
        if self._trace_memory is None:
            return {}
        return {name: self._trace_memory.read(i) for i, name in enumerate(stage_names(len(self.models)))}

    @property
    def stages(self) -> Sequence[Stage]:
        """Those in this process, the target last."""
        return [self.target]

    def forget(self) -> None:
        """Give back the caches of the stages in this process, until the next call. While none runs."""
        for stage in self.stages:
            stage.forget()

    def keeps(self, start: Start, given: RowCache | None) -> Counter[str]:
        """Per device, bytes that a call need not allocate: see :meth:`Stage.keeps`. ``given``: the cache that the target will adopt."""
        found: Counter[str] = Counter()
        for stage in self.stages:
            found[str(stage.model.device)] += stage.keeps(start, given if stage is self.target else None)
        return found

    def spare(self, start: Start, given: RowCache | None) -> None:
        """Give back what a call does not go on with: see :meth:`Stage.spare`. While none runs."""
        for stage in self.stages:
            stage.spare(start, given if stage is self.target else None)

    def close(self) -> None:
        """Release what the driver holds beyond memory. May be called more than once."""
