"""The step of a stage as work of its device alone: lengths, forward, selection; nothing comes back to the host.

What plan has filled goes in, what commit takes comes out, at fixed addresses: so that plan, this and commit can be captured in a CUDA graph. On the
CPU the same code runs uncaptured.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipespec.attention import ATTENTION
from pipespec.cache import RowCache
from pipespec.drivers.base import Request
from pipespec.forward import forward
from pipespec.placement import GRAPH_ALLOWANCE, NotCapturable
from pipespec.sampling import Record, Selection, nothing_to_draw
from pipespec.stage import Stage, Start, fixed_capacity, stage_names
from pipespec_kernels import _native, ops
from pipespec_kernels.noise import Noise
from pipespec_kernels.state import Action, StateBlock

_KEPT = 4
"""Numbers of rows for which a stage keeps its cache (and its graphs) from call to call."""

_numbers = itertools.count()
"""Of rooms: no two have the same, whatever has been thrown away."""

_DRAWN = 2**62
"""More than any position: everything could be drawn."""


def why_not(request: Request, device: str) -> str | None:
    """What a call asks for that cannot be done on the device, or without the caller's thread; None: nothing."""
    if torch.is_autocast_enabled(device):
        return "autocast is the calling thread's, and lasts as long as that likes"
    selection = request.start.selection
    if request.record is not None:
        return "output_scores and output_logits are noted by the host"
    if selection.stepwise:
        names = ", ".join(dict.fromkeys(getattr(p, "__name__", type(p).__name__) for p in selection.processors))
        return f"these logits processors are run by the host, position by position: {names}"
    if selection.penalty != 1.0:
        return "a repetition_penalty needs the text on the host"
    return None


class Kind(NamedTuple):
    """What of a selection is part of the code, so that another one needs another graph. The numbers are not: they lie in memory."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, selection: Selection) -> Kind:
        if selection.seeds is None:
            return cls()
        return cls(True, selection.top_k > 0, selection.top_p < 1.0, selection.min_p > 0.0)


class Choice:
    """How one stage chooses tokens on its device: :class:`pipespec.sampling.Selector` with its numbers at fixed addresses.

    ``judges``: whether this is the target, whose logits must allow a choice.
    """

    def __init__(self, rows: int, device: torch.device, judges: bool) -> None:
        self.kind, self._judges = Kind(), judges
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inverse_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(rows, dtype=torch.float64, device=device)
        # Per row the first position at which nothing could be drawn; and where the host looks for it.
        self._undrawn = torch.full((rows,), _DRAWN, dtype=torch.int64, device=device)
        self._told = (
            self._undrawn if device.type == "cpu" else torch.empty_like(self._undrawn, device="cpu").pin_memory()
        )

    def set(self, selection: Selection) -> None:
        """For the next call. The kind is new, the numbers are written to where the old ones were."""
        self.kind = Kind.of(selection)
        if selection.seeds is None:
            return
        self._seeds.copy_(torch.from_numpy(np.array(selection.seeds, dtype=np.uint64).view(np.int64)))
        self._inverse_temperature.fill_(1 / selection.temperature)
        self._top_k.fill_(selection.top_k)
        self._top_p.fill_(selection.top_p)
        self._min_p.fill_(selection.min_p)
        self._undrawn.fill_(_DRAWN)
        self._told.fill_(_DRAWN)

    def __call__(self, logits: Tensor, tokens: Tensor, kv: Tensor, n_select: Tensor, n_hint: Tensor) -> Tensor:
        """``selected``, int32 ``[rows, width]``, as :func:`pipespec_kernels.ops.verify` gives it for the columns of a step."""
        kind = self.kind
        if not kind.sampled:
            return ops.verify(logits, tokens, n_select, n_hint)[0]
        cutoff = None
        if kind.top_k or kind.top_p or kind.min_p:
            # A number that is off is the host's to see: the filter is left out.
            cutoff = ops.cutoff(
                logits,
                inv_temperature=self._inverse_temperature,
                top_k=self._top_k if kind.top_k else 0,
                top_p=self._top_p if kind.top_p else 1.0,
                min_p=self._min_p if kind.min_p else 0.0,
                n_fed=n_select,
                n_hint=n_hint,
            )
        positions = kv.to(torch.int64) + 1  # of the token that column 0 chooses
        noise = Noise(self._seeds, positions, self._inverse_temperature, cutoff)
        selected = ops.verify(logits, tokens, n_select, n_hint, noise=noise)[0]
        if self._judges:
            self._note_undrawn(logits, selected, positions, n_select - 1 - n_hint)
        return selected

    def _note_undrawn(self, logits: Tensor, selected: Tensor, positions: Tensor, first: Tensor) -> None:
        rows, width, _ = logits.shape
        columns = first.to(torch.int64)[:, None] + torch.arange(width, device=logits.device)
        row = torch.arange(rows, device=logits.device)[:, None]
        best = logits[row, columns.clamp(0, width - 1), selected.to(torch.int64).clamp(min=0)]
        bad = (selected >= 0) & ~torch.isfinite(best)
        found = (positions[:, None] + columns).masked_fill(~bad, _DRAWN).amin(1)
        torch.minimum(self._undrawn, found, out=self._undrawn)
        if self._told is not self._undrawn:
            self._told.copy_(self._undrawn, non_blocking=True)

    def check_drawn(self) -> None:
        """``ValueError`` where a token was drawn from logits that are no distribution, in a step that has ended."""
        if self.kind.sampled:
            for row, position in enumerate(self._told.tolist()):
                if position < _DRAWN:
                    raise nothing_to_draw(row, position)


class Room(NamedTuple):
    """What a stage has at fixed addresses for one number of rows; ``graphs``: what has been captured over it."""

    cache: RowCache
    choice: Choice
    number: int
    weights: int
    graphs: dict[Any, Any]

    @property
    def code(self) -> tuple[int, Kind]:
        """What a graph over it depends on: this very room, and the kind of choice."""
        return self.number, self.choice.kind


class FixedStage(Stage):
    """A stage whose cache lies at fixed addresses, so that its step can be captured; the model's attention must be ``"pipespec"``.

    For each number of rows it keeps one cache (the last few; a capacity grows to powers of two), and a caller's own is copied from
    and to. :meth:`step` is there, too: for what needs the host.
    """

    def __init__(
        self, model: PreTrainedModel, block: StateBlock, index: int, trace: _native.TraceBuffer | None = None
    ) -> None:
        super().__init__(model, block, index, trace)
        self._rooms: dict[int, Room] = {}  # by rows, the last used one last
        self._lent: RowCache | None = None
        self.is_ready = False
        """Whether the last prefill came to its end."""

    @property
    def name(self) -> str:
        return stage_names(self.block.target + 1)[self.index]

    @property
    def judges(self) -> bool:
        return self.index == self.block.target

    @property
    def cache(self) -> RowCache:
        assert self._cache is not None
        return self._cache

    def prepare(self, start: Start) -> Room:
        """The room for the rows of a call, with its selection: that of an earlier call where it fits. :meth:`prefill` comes next."""
        rows, capacity = len(start.prompts), fixed_capacity(start.most)
        self._fit_vocabulary(start.vocabulary)
        self._scored = start.vocabulary
        weights = hash(
            tuple(tensor.data_ptr() for tensor in itertools.chain(self.model.parameters(), self.model.buffers()))
        )
        self.__dict__.pop("room", None)
        found = self._rooms.pop(rows, None)
        if found is None or not found.cache.fits(rows, capacity) or not found.cache.suits(self.model):
            if found is not None and found.cache is self._cache and not start.reuse:
                self._cache = None
            del found  # before the new one is allocated
            cache = RowCache.for_model(self.model, rows, capacity, fixed=True)
            found = Room(cache, Choice(rows, cache.device, self.judges), next(_numbers), weights, {})
        elif found.weights != weights:  # graphs read the old ones
            found = found._replace(number=next(_numbers), weights=weights, graphs={})
        self._rooms[rows] = self.room = found
        while len(self._rooms) > _KEPT:
            del self._rooms[next(iter(self._rooms))]
        found.choice.set(start.selection)
        return found

    def rooms(self) -> Sequence[Room]:
        """All that are kept."""
        return list(self._rooms.values())

    def keeps(self, start: Start, given: RowCache | None) -> int:
        """As :meth:`Stage.keeps`, graphs included. What is given is copied."""
        rows, capacity = len(start.prompts), fixed_capacity(start.most)
        room = self._rooms.get(rows)
        if room is None or not room.cache.fits(rows, capacity) or not room.cache.suits(self.model):
            return 0
        return room.cache.nbytes * capacity // room.cache.capacity + (GRAPH_ALLOWANCE if room.graphs else 0)

    def spare(self, start: Start, given: RowCache | None) -> None:
        """Give back the rooms that a call would not use, and the one that is larger than it needs, unless it goes on with its content."""
        rows = len(start.prompts)
        own = self._rooms.get(rows)
        goes_on = given is None and start.reuse and own is not None and own.cache is self._cache
        kept = own is not None and (goes_on or own.cache.capacity == fixed_capacity(start.most))
        self._rooms = {rows: own} if own is not None and kept else {}
        if own is None or not kept or own.cache is not self._cache:
            self._cache = None
        self.__dict__.pop("room", None)

    def _room(self, start: Start, held: list[int]) -> RowCache:
        if "room" not in self.__dict__:  # it could not be prepared; what is wrong is told once more
            with torch.inference_mode(False), torch.no_grad():
                self.prepare(start)
        before, cache = self._cache, self.room.cache
        if before is not None and before is not cache and any(held):
            cache.copy_from(before, held)
        self._cache = cache
        return cache

    def prefill(self, start: Start, record: Record | None = None) -> None:
        self.is_ready = False
        super().prefill(start, record)
        self._known = [len(prompt) - 1 for prompt in start.prompts]
        self.is_ready = True

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        self._lent = cache
        super().adopt(cache, text)

    def release(self, lengths: Sequence[int]) -> RowCache:
        """A copy, in the cache that was adopted if there was one: ours stays where the graphs know it."""
        own, lent, self._lent = self.cache, self._lent, None
        if own is lent:  # it has not come to a prefill
            return super().release(lengths)
        if lent is not None and all(n <= held for n, held in zip(lengths, lent.lengths, strict=True)):
            lent.truncate(lengths)  # nothing new, or a call that failed
        else:
            lengths = [min(n, held) for n, held in zip(lengths, own.lengths, strict=True)]
            room = self._text.shape[1]  # for going on, too
            if lent is None:
                lent = RowCache.for_model(self.model, own.rows, room)
            elif lent.capacity < max(lengths):
                lent.reserve(room)
            lent.copy_from(own, lengths)
        lent.text = [self._text[row, :n].copy() for row, n in enumerate(lengths)]
        return lent

    def forget(self) -> None:
        super().forget()
        self._rooms.clear()
        self.__dict__.pop("room", None)

    @torch.inference_mode()
    def body(self, tokens: Tensor, kv: Tensor, n_hint: Tensor, n_select: Tensor) -> Tensor:
        """Forward and selection of one step: ``selected``, int32 ``[rows, width]``, for commit.

        ``tokens [rows, width]`` and ``kv``, ``n_hint``, ``n_select [rows]``, int32 on the model's device, as plan fills them. All columns are
        fed and scored, padding as well: which of them count only the device knows. Nothing here waits for it.
        """
        cache = self.room.cache
        cache.lead(kv)
        fed = tokens if self._clamp is None else tokens.clamp(max=self._clamp)
        logits = forward(self.model, fed, cache, keep=tokens.shape[1])
        if logits.shape[2] > self._scored:
            logits = logits[:, :, : self._scored]
        return self.room.choice(logits, tokens, kv, n_select, n_hint)

    def check_drawn(self) -> None:
        """See :meth:`Choice.check_drawn`."""
        self.room.choice.check_drawn()

    def settle(self) -> None:
        """Note what the cache holds after steps that were not ours: what the block says. While none runs."""
        if not self.is_ready:
            return
        for row, begin in enumerate(self._known):
            end = max(begin, min(self.block.kv(self.index, row), self.block.length(self.index, row)))
            self._text[row, begin:end] = self.block.tokens(self.index, row, begin, end)
            self._held[row] = end
        self.cache.hold(self._held)


class HostPort:
    """A stage's end of a block on the host, in the terms of :class:`pipespec_kernels.device_state.DevicePort`."""

    def __init__(
        self, block: StateBlock, stage: int, width: int, rows: int, trace: _native.TraceBuffer | None = None
    ) -> None:
        self._port = port = block.port(stage, width)
        port.trace(trace)
        self.tokens = torch.from_numpy(port.tokens)[:rows]
        self.kv, self.n_hint, self.n_select = (
            torch.from_numpy(array)[:rows] for array in (port.kv, port.n_hint, port.n_select)
        )
        self.set_policy(0, 0)

    def set_policy(self, window: int, max_hints: int) -> None:
        self._policy = window, max_hints

    def plan(self) -> Action:
        """Fill the arrays. What the rows together should do."""
        return self._port.plan(*self._policy, 0)

    def commit(self, selected: Tensor) -> None:
        self._port.commit(selected.data_ptr(), selected.stride(0))


# ---- the attention


_borrowed: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, int]] = weakref.WeakKeyDictionary()


class _Lent(str):
    """``"pipespec"`` in the configuration of a model that has borrowed it. A copy or a pickle has the model's ``own``: nobody would give it back there."""

    own: str

    @classmethod
    def to_owner_of(cls, own: str) -> _Lent:
        lent = cls(ATTENTION)
        lent.own = own
        return lent

    def __deepcopy__(self, memo: object) -> str:
        return self.own

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.own,)


class Attention:
    """``attn_implementation="pipespec"`` of some models for as long as it is held; then each has its own again, as their copies have at once.

    Several may hold the same model: the last one gives it back. Raises :class:`NotCapturable` for one that takes no other attention.
    """

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        held: list[weakref.ref[PreTrainedModel]] = []  # a model may refer to its pipeline
        self._finalizer = weakref.finalize(self, _give_back, held)
        self._finalizer.atexit = False
        for i, model in enumerate(models):
            own, holders = _borrowed.get(model, (model.config._attn_implementation, 0))
            cause = "it stays as it is"
            try:
                if model.config._attn_implementation != ATTENTION:
                    model.set_attn_implementation(ATTENTION)
                    if model.config._attn_implementation == ATTENTION:
                        model.config._attn_implementation = _Lent.to_owner_of(own)
            except (ValueError, ImportError) as error:
                cause = str(error)
            if model.config._attn_implementation != ATTENTION:
                self.close()
                name = stage_names(len(models))[i]
                raise NotCapturable(
                    name, f"{type(model).__name__}'s {own} attention, which is not {ATTENTION!r}", cause
                )
            _borrowed[model] = own, holders + 1
            held.append(weakref.ref(model))

    def close(self) -> None:
        self._finalizer()


def _give_back(models: list[weakref.ref[PreTrainedModel]]) -> None:
    for held in models:
        model = held()
        if model is None:
            continue
        own, holders = _borrowed.pop(model)
        if holders > 1:
            _borrowed[model] = own, holders - 1
        elif model.config._attn_implementation == ATTENTION and own != ATTENTION:  # else somebody has chosen since
            model.set_attn_implementation(own)
