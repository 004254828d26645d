"""Kept texts: what earlier calls have read, so that the next one reads only what is new."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.sampling import common_length
from pipespec_kernels.env import host_memory

SHARE = 8
"""Kept texts may take this part of the memory that would be free without them, unless a budget is given."""

MOST = 128
"""Texts that are kept at most: each prompt is compared with all of them."""

SHORTEST = 32
"""Tokens of the shortest prefix that is used. Fewer are read again sooner than they are copied, and rows that begin together stay together."""


class Origin(NamedTuple):
    """What keys and values depend on besides the tokens. Those of another origin are not those that a call would compute.

    Attributes:
        record: of the model, see :func:`pipespec.engine.known.record_of`: another object once its code or its weights have changed.
        form: of its forwards.
        numerics: what else their bits depend on.
        grid: a prefix ends at a multiple of this number: prompts are read in chunks that begin there.
        is_shared: whether forwards run all rows together, so that their bits depend on the number of rows.
    """

    record: object
    form: object
    numerics: tuple[Any, ...] = ()
    grid: int = 1
    is_shared: bool = False


NOT_KEPT = Origin(None, None)
"""Of keys and values from elsewhere."""


@dataclass(eq=False)
class KeptText:
    """The texts of a call, one per row, and the cache that holds them.

    Attributes:
        text: int32 ``[rows, positions]``.
        held: per row, the position up to which the cache holds the text.
        skipped: per row, the position of the first token in the cache.
        whole: per row, the position up to which the text was read in whole chunks of the grid.
        origin: of the keys and values.
    """

    cache: RowCache
    text: np.ndarray
    held: list[int]
    skipped: list[int]
    whole: list[int]
    origin: Origin

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, states and hidden states."""
        features = self.cache.features
        return self.cache.nbytes + (features.nbytes if isinstance(features, Features) else 0)

    def row_alone(self, row: int) -> KeptText:
        """The same, of which only one row counts."""
        held = [n if r == row else 0 for r, n in enumerate(self.held)]
        return replace(self, held=held)

    def usable(self, row: int, same: int) -> int:
        """How many of the first ``same`` tokens of a row a text may take over that begins with them."""
        skipped, grid = self.skipped[row], self.origin.grid
        if grid > 1:
            same = min(same, self.whole[row]) // grid * grid
        while same - skipped >= SHORTEST:
            there = skipped + self.cache.recoverable(row, same - skipped)
            if there == same:
                return same
            same = there // grid * grid
        return 0


class Source(NamedTuple):
    """Where a row of a new prompt begins: with the first tokens of a kept text.

    Attributes:
        same: tokens that agree.
        used: how many of them count.
    """

    kept: KeptText
    row: int
    same: int
    used: int

    @property
    def lost(self) -> int:
        """Tokens that the kept text would lose if the row went on in its place."""
        return self.kept.held[self.row] - self.same


class PrefixStore:
    """The kept texts of one model, the last used one last.

    Args:
        budget: bytes of keys, values, states and hidden states that they may take; 0: none is kept. None: an eighth of the memory that would be free
            without them, counted anew at each call.

    Attributes:
        spare: storage whose text no longer counts, for the next call that it has room for.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.texts: list[KeptText] = []
        self.spare: RowCache | None = None

    def clear(self) -> None:
        self.texts, self.spare = [], None

    def takes(self, held: Sequence[int]) -> bool:
        """Whether a text is worth keeping whose rows hold so many tokens."""
        return self.budget != 0 and max(held, default=0) >= SHORTEST

    def add(self, kept: KeptText) -> None:
        """Keep the text of the last call, which stays whatever its size until another one comes."""
        self.texts = [*self.texts[1 - MOST :], kept]

    def retain(self, stays: Callable[[KeptText], bool]) -> None:
        """Forget all other texts."""
        self.texts = [kept for kept in self.texts if stays(kept)]

    def find(self, prompt: np.ndarray, among: Collection[KeptText]) -> Source | None:
        """The longest prefix that a prompt has in common with a text of ``among``. The last token of the prompt is read in any case."""
        best: Source | None = None
        for kept in among:
            for row, held in enumerate(kept.held):
                same = common_length(kept.text[row, :held], prompt[:-1])
                count = kept.usable(row, same)
                # Of equal ones, the one that loses least in place; then the last used one.
                if count and (best is None or (count, same - held) >= (best.used, -best.lost)):
                    best = Source(kept, row, same, count)
        return best

    def find_batch(self, prompts: Sequence[np.ndarray], among: Collection[KeptText]) -> list[Source | None]:
        """The batch of ``among``, of as many rows, whose rows begin as the prompts do: all with as many tokens."""
        best: list[Source | None] = [None] * len(prompts)
        most = 0
        for kept in among:
            found = [self.find(prompt, [kept.row_alone(row)]) for row, prompt in enumerate(prompts)]
            count = min(0 if source is None else source.used for source in found)
            if count >= max(most, 1) and all(kept.usable(row, count) == count for row in range(len(found))):
                most = count
                best = [Source(kept, row, source.same, count) for row, source in enumerate(found) if source is not None]
        return best

    def take_over(self, sources: Sequence[Source | None]) -> KeptText | None:
        """The kept text whose rows go on as the rows of a call, which then owns it. None where that would lose much of one: rows are to be copied."""
        first = sources[0]
        if first is None or first.kept.cache.rows != len(sources):
            return None
        for row, source in enumerate(sources):
            if source is None or source.kept is not first.kept or source.row != row or source.lost > WIDTH:
                return None
        self.texts.remove(first.kept)
        return first.kept

    def make_room(self, rows: int, capacity: int, sources: Sequence[Source | None]) -> RowCache | None:
        """:meth:`free` the bytes of a cache of this size. The texts of ``sources`` stay, and were used now.

        Returns:
            Storage of a text that went, or of a call whose text is not kept; the store has it no longer.
        """
        if self.texts:
            used = [kept for kept in self.texts if any(source and source.kept is kept for source in sources)]
            self.texts = [kept for kept in self.texts if kept not in used] + used
            last = self.texts[-1]
            like = last.cache
            self.free(last.nbytes * rows * capacity // (like.rows * like.capacity), like.device, len(used))
        spare, self.spare = self.spare, None
        return spare

    def free(self, more: int, device: torch.device, stay: int = 0) -> bool:
        """Let the least recently used texts go, but for the last ``stay``, until ``more`` bytes fit the budget beside the rest. Whether they do."""
        held = sum(kept.nbytes for kept in self.texts)
        budget = self._budget(held, device)
        while len(self.texts) > stay and held + more > budget:
            gone = self.texts.pop(0)
            self.spare = gone.cache
            held -= gone.nbytes
        return held + more <= budget

    def _budget(self, held: int, device: torch.device) -> int:
        if self.budget is not None:
            return self.budget
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[1]
        return (free + held) // SHARE


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class WeightSamples:
    """Some values of each weight of a model, for changes that go past torch's version counters, as those through ``.data`` do.

    A change of a whole matrix shows, one of a few values may not.
    """

    COUNT = 256
    """Values per weight."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())):
            if (
                tensor is None
                or type(tensor) not in _PLAIN
                or not tensor.numel()
                or tensor.is_meta
                or tensor.is_complex()
            ):
                continue
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            step = -(-span // self.COUNT)
            view = tensor.detach().as_strided((-(-span // step),), (step,))
            self._views.setdefault((view.device, view.dtype), []).append(view)
        self._values = self._read()

    def _read(self) -> list[torch.Tensor]:
        # As bytes, since not all dtypes can be compared.
        return [torch.cat(views).view(torch.uint8) for views in self._views.values()]

    def agree(self) -> bool:
        """Whether the values are those that they were."""
        return all(map(torch.equal, self._read(), self._values))
