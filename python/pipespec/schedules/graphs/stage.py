"""StaticStage: a stage whose step is work of its device alone, so that it can be captured in a CUDA graph. GraphedStage: one with a model.

A step reads what plan filled and writes what commit takes, at fixed addresses. Nothing returns to the host. On the CPU the same code runs without
capture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pipespec.checks.models import check_exact
from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.chain import StageInputs, stage_names, static_capacity
from pipespec.engine.forward import choose_fused, described, forward
from pipespec.engine.known import CAPTURED, identify
from pipespec.engine.prefixes import KeptText, Origin, Source
from pipespec.engine.sampling import ScoreRecord, Step
from pipespec.engine.stage import Stage
from pipespec.errors import NotCapturable
from pipespec.models.properties import quantisation, text_config
from pipespec.models.tiled import weights_in
from pipespec.schedules.base import warn_of_speed
from pipespec.schedules.graphs.buffers import GraphKey, StageStep, StaticBuffers, StaticSampler, TextBuffers, versions
from pipespec_kernels import _native
from pipespec_kernels.scheduler import Rectangle
from pipespec_kernels.state import Action, StateBlock

if TYPE_CHECKING:
    from pipespec.engine.fused import FusedForm

MAX_BUFFERS = 4
"""Numbers of rows for which a stage keeps its static buffers, and their graphs, from call to call."""

MAX_GRAPHED_COLUMNS = 1024
"""Maximum number of columns, of all rows, for which the forwards over a prompt of a model of 8B parameters are graphs. On an H200 the products of a few more columns take it as
long as its launches take the host: 21 to 34 ms. Smaller models have more columns, see :func:`graphed_columns`."""

GRAPH_WIDTHS = (64, 96, 128, 192, 256, 384, 512)
"""Columns of the graphs over a prompt. Of a prompt the last graph has padding: on average a ninth."""


def graphed_columns(model: Any) -> int:
    """The maximum number of columns for a model: as many as take as much work as those of a model of 8B parameters, up to eight times as many."""
    parameters = weights_in(model)
    return int(MAX_GRAPHED_COLUMNS * min(max(8e9 / max(parameters, 1), 1.0), 8.0))


class StaticStage(ABC):
    """A stage of captured steps, as their drivers see it.

    Attributes:
        block: The state block of the chain.
        index: Place in the chain.
    """

    block: StateBlock
    index: int

    @property
    def name(self) -> str:
        return stage_names(self.block.target + 1)[self.index]

    @property
    def is_target(self) -> bool:
        return self.index == self.block.target

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its steps run."""

    @property
    @abstractmethod
    def buffers(self) -> StaticBuffers | TextBuffers:
        """The static buffers of the present call, since :meth:`prepare`."""

    @abstractmethod
    def all_buffers(self) -> Sequence[StaticBuffers | TextBuffers]:
        """The static buffers for all numbers of rows."""

    @abstractmethod
    def prepare(self, inputs: StageInputs) -> StaticBuffers | TextBuffers:
        """Set up the static buffers of a call, or reuse those of an earlier call that fit. :meth:`prefill` comes next."""

    @abstractmethod
    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        """Start a call: read the prompts."""

    def capture_prompts(self) -> None:
        """Capture the graphs over prompts, where there are any. After :meth:`prepare`."""

    def bound(self, lookahead: int) -> int:
        """How far a step that may be ``lookahead`` tokens ahead is planned ahead: plan leaves one position of that to a token behind the draft tokens."""
        return lookahead

    @abstractmethod
    def sync_lengths(self) -> None:
        """Take over from the block what steps that :meth:`step` did not run have done. While no stage runs."""

    @abstractmethod
    def step(self, lookahead: int, max_draft_tokens: int) -> Action:
        """Take a step that the host plans, in a call that needs it. See :meth:`pipespec.engine.stage.Stage.step`."""

    @abstractmethod
    def body(
        self, tokens: Tensor, kv: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, n_select: Tensor
    ) -> Tensor:
        """Run what lies between plan and commit of one step, without a wait for the device. The arguments are those of plan, and the result is that of commit,
        int32 ``[rows, width]``."""

    @abstractmethod
    def body_on_host(self, planned: Rectangle | _native.StagePort) -> Tensor:
        """:meth:`body` of a step that the host plans, which waits for the device."""

    def planned_on_host(self, planned: Rectangle | _native.StagePort) -> list[Tensor]:
        """The arguments of :meth:`body` as the host has planned them, over the same memory."""
        arrays = planned.tokens, planned.kv, planned.query_lens, planned.num_draft_tokens, planned.n_select
        return [torch.from_numpy(array)[: self.buffers.rows] for array in arrays]


class GraphedStage(Stage, StaticStage):
    """A stage with static buffers. The attention of its model must be ``"pipespec"``.

    It keeps one set of buffers for each of the last few numbers of rows. A cache of the caller is copied in. :meth:`step`
    remains for calls that need the host.

    Args, in addition to those of :class:`Stage`:
        exact: Whether the model must run in the exact fused form, prefill included. :meth:`prepare` raises ValueError where it cannot.

    Attributes:
        kept_in: The dtype of keys and values, as ``static`` of :class:`RowCache`.
        is_prefilled: Whether the last prefill ended without an error.
        capture_prompt: Captures the forward over so many columns of the prompt, after what each row holds, with or without the logits of the last one; None, as after
            :meth:`prepare`: the host launches it.
    """

    def __init__(self, *place: Any, exact: bool = False, **options: Any) -> None:
        super().__init__(*place, **options)
        self._exact = exact
        self._buffers: dict[int, StaticBuffers] = {}  # by rows, the last used one last
        self._current: StaticBuffers | None = None
        self.kept_in: bool | torch.dtype = True
        self.is_prefilled = False
        self.capture_prompt: Callable[[GraphedStage, int, Sequence[int], bool], Any] | None = None
        self._may_pad = False
        self._graphed_columns = graphed_columns(self.model)

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    @property
    def cache(self) -> RowCache:
        """The cache of the present or last call."""
        assert self._cache is not None
        return self._cache

    def by_modules_reason(self) -> str | None:
        """Why its graphs run its model's own modules, or quantised ones of others within the fused form; None if they run the fused form alone, which has an eighth
        of the launches."""
        _, own, reason = described(self.model, self.buffers.cache).partition("transformers: ")
        if not own and not self._may_pad and (method := quantisation(self.model)) is not None:
            return (
                f"the graphs of {self.name} call the modules of {method} for its products, with some 13 launches per layer beside theirs instead of 5, and may take "
                "longer than with weights in 16 bits; the unquantised model with weights=, or a GGUF file, has kernels of pipespec's own"
            )
        launches = "with some 40 launches per layer instead of 5"
        return f"the graphs of {self.name} run transformers' modules, {launches}: {reason}" if own else None

    # ---- buffers

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers of the present call, since :meth:`prepare`."""
        assert self._current is not None
        return self._current

    def all_buffers(self) -> Sequence[StaticBuffers]:
        """The static buffers for all numbers of rows."""
        return list(self._buffers.values())

    def prepare(self, inputs: StageInputs) -> StaticBuffers:
        """Set up the static buffers of a call, or reuse those of an earlier call that fit. :meth:`prefill` comes next."""
        rows, capacity = len(inputs.prompts), static_capacity(inputs.most)
        if self._given is None:
            self._shelve()
        self._fit_vocabulary(inputs.vocabulary)
        self._scored = inputs.vocabulary
        if self._exact:
            check_exact(self.model, captured=True)
        form, weights = self._choose_form()
        # Padding must not change the products of the tokens next to it.
        self._may_pad = form is not None and not form.has_opaque
        self._current = self.capture_prompt = None
        found = self._buffers.pop(rows, None)
        if found is None or not self._can_use(found.cache, rows, capacity):
            if found is not None and found.cache is self._cache:
                self._cache = None
            # The old buffers are released before the allocation.
            del found
            cache = self._make_cache(rows, capacity)
            sampler = StaticSampler(rows, cache.device, self.is_target)
            found = StaticBuffers(cache, sampler, next(versions), weights, {}, {})
        elif found.weights != weights:
            # The graphs read the old weights, or the tables of another form, or have other numbers of the modules.
            found = found._replace(version=next(versions), weights=weights, graphs={}, prompt_graphs={})
        self._buffers[rows] = self._current = found
        if form is not None:
            form.add_cache(found.cache)
        while len(self._buffers) > MAX_BUFFERS:
            del self._buffers[next(iter(self._buffers))]
        found.sampler.start(inputs)
        return found

    def _choose_form(self) -> tuple[FusedForm | None, int]:
        """The fused form of the model's forwards, if it has one, and a hash of what a graph of them depends on."""
        form = choose_fused(self.model, exact=self._exact) if self._native else None
        return form, hash((form and form.number, identify(self.model, CAPTURED).seen))

    def _make_cache(self, rows: int, capacity: int) -> RowCache:
        cache = RowCache.for_model(self.model, rows, capacity, static=self.kept_in)
        if self.published is not None:
            layers, dtype = self.published
            cache.features = features = Features(layers, [0] * rows, dtype)
            features.reserve(capacity, len(layers) * text_config(self.model.config).hidden_size, cache.device)
        return cache

    def _can_use(self, cache: RowCache, rows: int, capacity: int) -> bool:
        """Whether a call of this size runs over an earlier call's cache."""
        return cache.fits(rows, capacity) and cache.matches(self.model)

    def release(self) -> None:
        super().release()
        self._buffers.clear()
        self._current = None

    # ---- the text that the cache holds

    def _begin_cache(
        self, inputs: StageInputs, sources: Sequence[Source | None], taken: KeptText | None, held: Sequence[int]
    ) -> RowCache:
        self._ensure_prepared(inputs)
        cache = self.buffers.cache
        self._store.make_room(len(inputs.prompts), cache.capacity, sources)
        cache.reset()
        self._lay_features(cache, [0] * len(inputs.prompts))
        return cache

    def _find(self, inputs: StageInputs) -> tuple[Origin | None, list[Source | None]]:
        self._ensure_prepared(inputs)
        return super()._find(inputs)

    def _ensure_prepared(self, inputs: StageInputs) -> None:
        # After a failed prepare(), this call raises the same error.
        if self._current is None:
            with torch.inference_mode(False), torch.no_grad():
                self.prepare(inputs)

    def _like(self) -> RowCache:
        return self.buffers.cache

    def _shelve(self) -> None:
        # The buffers stay, and a copy on the device takes no time.
        before = self._cache
        super()._shelve()
        self._store.spare, self._cache = None, before

    def _to_keep(self, cache: RowCache, held: Sequence[int]) -> RowCache | None:
        if not self._store.free(cache.nbytes * max(held) // cache.capacity, cache.device):
            return None
        # A static one has the same dtype.
        copied = RowCache.for_model(self.model, cache.rows, max(1, *held), static=self.kept_in)
        if isinstance(cache.features, Features):
            copied.features = Features(cache.features.layers, [0] * cache.rows, cache.features.dtype)
        copied.take_rows([(cache, row) for row in range(cache.rows)], held)
        return copied

    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        self.is_prefilled = False
        super().prefill(inputs, record)
        self._prefilled = [len(prompt) - 1 for prompt in inputs.prompts]
        self.is_prefilled = True

    def _forward(self, fed: Tensor, cache: RowCache, keep: int) -> Tensor:
        rows, q = fed.shape
        # Few different widths: the last one has padding.
        widest = GRAPH_WIDTHS[-1]
        full, rest = divmod(q, widest)
        widths = [widest] * full + [width for width in GRAPH_WIDTHS if width >= rest][:1] * (rest > 0)
        held = cache.lengths
        fits = rows * sum(widths) <= self._graphed_columns and max(held) + sum(widths) <= cache.capacity
        if keep > 1 or not fits or self.capture_prompt is None or not self._may_pad:
            return super()._forward(fed, cache, keep)
        # What an interrupted forward has written does not count.
        after, self._held = self._held, [min(pair) for pair in zip(self._held, held, strict=True)]
        ends = [False] * (len(widths) - 1) + [keep > 0]
        graphs = [self._prompt_graph(width, held, selects) for width, selects in zip(widths, ends, strict=True)]
        if None in graphs:
            cache.set_lengths(held)
            self._held = after
            return super()._forward(fed, cache, keep)
        for at, graph in enumerate(graphs):
            begin = at * widest
            logits = graph(fed[:, begin : begin + widest], [n + begin for n in held])
        cache.set_lengths([n + q for n in held])
        self._held = after
        return cast("Tensor", logits.clone())

    def _gives_last_logits(self, cache: RowCache) -> bool:
        """Always: one step less before the first token."""
        return True

    def _prompt_graph(self, width: int, held: Sequence[int], selects: bool) -> Any:
        """The graph of a forward over so many columns of the prompt, ``selects``: with the logits of the last one. None where there is none."""
        graphs, key = self.buffers.prompt_graphs, (width, selects)
        if key not in graphs and self.capture_prompt is not None:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    graphs[key] = self.capture_prompt(self, width, held, selects)
            except NotCapturable as error:
                # Not again over these buffers. The tracebacks hold the memory of the capture.
                graphs[key] = error.__cause__ = None
                warn_of_speed(f"{error}; the host launches each kernel over its prompts")
        return graphs.get(key)

    def capture_prompts(self) -> None:
        """Capture the graphs over prompts of all widths, so that no call waits for them. After :meth:`prepare`; nothing where its prompts run without graphs."""
        rows, widest = self.buffers.cache.rows, GRAPH_WIDTHS[-1]
        if not self._may_pad:
            return
        for width in GRAPH_WIDTHS:
            if rows * width <= self._graphed_columns and width <= self.buffers.cache.capacity:
                # Only whole graphs come before the one with the last column.
                for selects in {self.is_target, self.is_target and width < widest}:
                    self._prompt_graph(width, [0] * rows, selects)

    def sync_lengths(self) -> None:
        """Take over from the block which tokens the cache holds, after steps that :meth:`step` did not run. While no stage runs."""
        if not self.is_prefilled:
            return
        for row, begin in enumerate(self._prefilled):
            end = max(begin, min(self.block.kv(self.index, row), self.block.length(self.index, row)))
            self._text[row, begin:end] = self.block.tokens(self.index, row, begin, end)
            self._held[row] = end
        self.cache.set_lengths(self._held)

    # ---- the step

    @torch.inference_mode()
    def body(
        self, tokens: Tensor, kv: Tensor, query_lens: Tensor, num_draft_tokens: Tensor, n_select: Tensor
    ) -> Tensor:
        """Run forward and selection of one step, without a wait for the device.

        All columns are fed and scored, padding included, as only the device has the number of tokens in each row; the kernels of a step without any return at
        once. The arguments are those of plan, and the result is that of commit, int32 ``[rows, width]``.
        """
        self.buffers.cache.follow(kv, query_lens)
        logits = self._score_columns(tokens, kv, n_select)
        return self.buffers.sampler(logits, Step(tokens, kv, n_select, num_draft_tokens))

    def _score_columns(self, tokens: Tensor, kv: Tensor, n_select: Tensor) -> Tensor:
        """The forward of :meth:`body`, at the lengths that the cache follows. Returns the logits ``[rows, width, vocabulary]``."""
        return self._run(tokens, tokens.shape[1])[:, :, : self._scored]

    def _run(self, tokens: Tensor, keep: int, last: Tensor | None = None) -> Tensor:
        fed = tokens if self._clamp is None else tokens.clamp(max=self._clamp)
        return forward(self.model, fed, self.buffers.cache, keep=keep, last=last)

    @torch.inference_mode()
    def read(self, tokens: Tensor, kv: Tensor, last: Tensor | None) -> Tensor:
        """Run the forward over a part of the prompt, for a capture. ``tokens``, ``kv``: as for :meth:`body`.

        Returns the logits ``[rows, 1, vocabulary]`` of column ``last``, int64 ``[1]``; without it those of no column."""
        self.buffers.cache.follow(kv)
        return self._run(tokens, int(last is not None), last)

    def key(self, width: int) -> GraphKey:
        """Of the graph that is one step of this stage."""
        return GraphKey.of([StageStep(0, width)], [self.buffers])

    def body_on_host(self, planned: Rectangle | _native.StagePort) -> Tensor:
        """:meth:`body` of a step that the host plans, which waits for the device: through a graph of its own if there is one."""
        given = self.planned_on_host(planned)
        graph = self.buffers.graphs.get(self.key(given[0].shape[1]))
        if graph is not None:
            found: Tensor = graph(*given)
            return found
        return self.body(*(tensor.to(self.device) for tensor in given)).cpu()
