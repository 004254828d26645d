"""A chain as a list of drafts: what each kind of draft can do, and how its stage is made.

A kind of draft is one file, with a subclass of :class:`DraftSpec`, and one row of :data:`pipespec.registry.DRAFTS`. Drivers, configuration, worker processes and
reports read the attributes of the specs. They do not know the kinds. :class:`StageInputs` is what each stage of a call starts from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.sampling import SamplingParams
from pipespec.models.properties import step_bytes
from pipespec.registry import DRAFTS
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

if TYPE_CHECKING:
    from pipespec.engine.grammar import Grammar


INITIAL_CAPACITY = 1024
"""Generated tokens that a new cache has room for. A cache that becomes full doubles."""

PREFILL_CHUNK = 512
"""Tokens per row and forward in the prefill, at least. It bounds activations and masks."""

GPU_CHUNK = 2048
"""Tokens of all rows in such a forward on a GPU. There the host's launches take longer than the products of few tokens."""


def stage_names(count: int) -> list[str]:
    """Names of the stages of a chain of ``count`` models: drafts first, target last."""
    return [f"draft {i}" for i in range(count - 1)] + ["target"]


def prefill_chunk(rows: int, device: str) -> int:
    """Tokens per row and forward in the prefill of so many rows. ``device``: its name."""
    return PREFILL_CHUNK if device.startswith("cpu") else max(PREFILL_CHUNK, GPU_CHUNK // rows)


def first_capacity(longest: int, most: int) -> int:
    """Positions of a new cache that grows, for prompts of up to ``longest`` tokens and texts of up to ``most`` positions."""
    return min(most, longest + INITIAL_CAPACITY + WIDTH)


def static_capacity(most: int) -> int:
    """Positions of a static cache for texts of up to ``most`` positions, so that similar calls share a cache.

    The widest step beyond a power of two: a limit that is one, as is usual, does not double the cache.
    """
    return (1 << max(most - WIDTH - 1, 0).bit_length()) + WIDTH


@dataclass(frozen=True)
class StageInputs:
    """What each stage of a call starts from.

    Attributes:
        prompts: per row, int32 token ids ``[P_r]`` without padding.
        limits: per row, the length that its text may reach.
        sampling_params: how tokens are chosen.
        vocabulary: tokens of the target's vocabulary.
        chunk: tokens per row and forward in the prefill.
        grammar: what constrains the tokens of each row, for the target and for drafts that run in turn with it; None: nothing.
    """

    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    sampling_params: SamplingParams
    vocabulary: int
    chunk: int = PREFILL_CHUNK
    grammar: Grammar | None = None

    @property
    def most(self) -> int:
        """Positions that a row may come to use, padding columns of its last step included."""
        return max(self.limits) + WIDTH

    @property
    def capacity(self) -> int:
        """Positions of a new cache that grows. A limit is often the model's own, far beyond the text."""
        return first_capacity(max(len(p) for p in self.prompts), self.most)


@dataclass(frozen=True, eq=False)
class DraftSpec:
    """One draft of a chain. A subclass is a kind of draft; its fields are what a user chooses.

    A spec is small and can be pickled: it is sent to the process where the stage runs. The model that runs is not part of it.

    Attributes:
        name: Of the stage, in reports. Empty: ``"draft 0"`` and so on.
        label: How messages call the kind.
        stage_class: Of its stages: a :class:`pipespec.engine.stage.Stage`, or an :class:`InlineStage`.
        form: Of an inline stage, in place of how a model's forward runs, for reports.
        inline: Whether the stage has no model. It then runs in the process of the stage downstream, which lets it draft before each of its own steps, see
            :class:`InlineStage`.
        own_model: Whether its model is one of transformers, which is loaded, placed and checked as the target is. Else :meth:`load` makes it.
        reads_target: Whether it reads the target's hidden states. It then runs in the target's process, in turn with it.
        verifies: Whether it verifies draft tokens of a stage upstream, or passes them on. Otherwise it is the first of the drafts.
        draws: Whether the target may accept its tokens by rejection sampling, for which its stage takes ``acceptance``.
        translates: Whether its model has another tokenizer than the target. Its stage then counts ``translated``.
        runs_at_once: Whether stages of it may run in several threads at the same time, over the same model or spec.
        lookahead: Default of its lookahead. None: the schedule's.
        drafts_at_once: Whether one forward drafts all tokens of a round, so that further ones take next to no time.
        source: How the controller calls it, see :class:`pipespec.engine.controller.Choice`. Empty: the controller cannot drive a chain with it.
        given: What the user passed for its model: a path, or the model itself.
    """

    name: ClassVar[str] = ""
    label: ClassVar[str]
    stage_class: ClassVar[Any]
    form: ClassVar[str] = ""
    inline: ClassVar[bool] = False
    own_model: ClassVar[bool] = False
    reads_target: ClassVar[bool] = False
    verifies: ClassVar[bool] = True
    draws: ClassVar[bool] = False
    translates: ClassVar[bool] = False
    runs_at_once: ClassVar[bool] = False
    lookahead: ClassVar[int | None] = None
    drafts_at_once: ClassVar[bool] = False
    source: ClassVar[str] = ""

    @property
    def given(self) -> Any:
        return None

    @classmethod
    def recognise(cls, given: Any) -> DraftSpec | None:
        """The draft that a user means by ``given``, if it is of this kind. The name in its row need not be recognised."""
        return None

    def check(self, target: PretrainedConfig) -> None:
        """Raise ``ValueError`` if it cannot draft for a target of this configuration. Before models are loaded."""

    def load(self, target: PreTrainedModel, dtype: torch.dtype | str) -> Any:
        """Load what it runs next to a target; None for an inline stage. Not called for a model of transformers."""
        return None

    def fit(self, model: Any, target: PreTrainedModel, weights: str | None) -> tuple[Any, str | None]:
        """Fit a loaded model to the target that runs. Returns it and its weight format, after ``weights``. None: as it is."""
        return model, None

    def without_history(self) -> DraftSpec:
        """Return this draft such that it keeps nothing of a call for later ones."""
        return self

    def for_target(self, given: Any, target: PreTrainedModel) -> DraftSpec:
        """This draft with what it takes from the target's files. ``given``: the target as the user passed it."""
        return self

    def step_bytes(self, model: Any) -> float:
        """Bytes of the weights that a step of the model reads."""
        return step_bytes(model)

    def make_stage(self, model: Any, *place: Any, **options: Any) -> Any:
        """Make the stage, by default one of ``stage_class``, which takes ``place`` (block, index, trace) and ``options``, too. ``model``: what it runs; None for
        an inline stage, which takes this spec."""
        return self.stage_class(self if self.inline else model, *place, **options)


class InlineStage(ABC):
    """A stage without a model. The stage downstream, in the same process, lets it draft before each of its steps.

    It is never set alive in the block: what it can draft is there when the stage downstream plans, so that no stage waits for it.

    Args:
        spec: Of the draft.
        block: The state block of the chain.
        index: Place in the chain.
        trace: Buffer for the times of its steps; None: no trace.
        upstream: The stage upstream, if it is an inline one, too.
    """

    def __init__(
        self,
        spec: Any,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        *,
        upstream: InlineStage | None = None,
    ) -> None:
        self.spec, self.block, self.index, self.trace, self.upstream = spec, block, index, trace, upstream

    def start(self, prompts: Sequence[np.ndarray]) -> None:
        """Start a call, and so do the inline stages upstream. ``prompts``: per row, int32 ``[P_r]``."""
        if self.upstream is not None:
            self.upstream.start(prompts)
        self.prefill(prompts)

    def draft(self, count: int) -> None:
        """Publish at most ``count`` draft tokens per row: its own, and where it has none those of the stage upstream."""
        if self.upstream is not None:
            self.upstream.draft(count)
        self.fill(count)
        if self.index > 0:
            self.relay(count)

    @abstractmethod
    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        """Read the prompts. The first step takes the last token of each from the block."""

    @abstractmethod
    def fill(self, count: int) -> None:
        """Draft own tokens until each row is ``count`` tokens ahead of the stage downstream, or has none."""

    @abstractmethod
    def relay(self, count: int) -> None:
        """Publish the tokens of the stage upstream, at most ``count`` per row."""

    def foresee(self, count: int) -> list[tuple[int, int]]:
        """What the controller chooses by, for a kind with a ``source``: per row, how many tokens :meth:`fill` would draft now, and how many tokens of the text
        they are based on."""
        return []

    def release(self) -> None:
        """Free what belongs to the last call, here and in the inline stages upstream."""
        if self.upstream is not None:
            self.upstream.release()


def as_draft(given: Any) -> DraftSpec:
    """The draft that a user means by ``given``: a spec, a model, a path, or the name of a kind."""
    if isinstance(given, DraftSpec):
        return given
    for row in DRAFTS:
        kind = row.spec_class()
        spec: DraftSpec | None = (
            kind() if isinstance(given, str) and given and given == row.name else kind.recognise(given)
        )
        if spec is not None:
            return spec
    raise TypeError(f"{given!r} is no draft")


def make_upstream(
    drafts: Sequence[DraftSpec],
    block: StateBlock,
    first: int,
    trace_of: Callable[[int], _native.TraceBuffer | None] = lambda stage: None,
) -> InlineStage | None:
    """Make the inline stages, from place ``first`` on, that a stage in this process has directly upstream. Returns the last one; None if there is none.
    ``trace_of``: by place, the buffer for the times of its steps."""
    upstream: InlineStage | None = None
    for index, draft in enumerate(drafts, first):
        upstream = draft.make_stage(None, block, index, trace_of(index), upstream=upstream)
    return upstream
