"""Kept texts: what earlier calls have read, so that the next one reads only what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.native import Checksums
from pipespec.engine.sampling import common_length
from pipespec.models.properties import each_module
from pipespec_kernels.env import host_memory

SHARE = 8
"""Kept texts may take this part of the memory that would be free without them, unless a budget is given."""

MOST = 128
"""Texts that are kept at most: each prompt is compared with all of them."""

SHORTEST = 32
"""Tokens of the shortest prefix that is used. Fewer are read again sooner than they are copied, and rows that begin together stay together."""


class Origin(NamedTuple):
    """What keys and values depend on besides the tokens. Those of another origin are not those that a call would compute. It keeps no weights alive.

    Attributes:
        model: see :func:`pipespec.engine.known.token_of`: another object once its code or its weights have changed.
        form: its token, or its class.
        weights: see :meth:`WeightWatch.version`; None for a form that compares what it has copied by itself.
        numerics: what else their bits depend on.
        grid: a prefix ends at a multiple of this number: prompts are read in chunks that begin there.
        is_shared: whether forwards run all rows together, so that their bits depend on the number of rows.
    """

    model: object
    form: object
    weights: object = None
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

    def equals(self, other: KeptText) -> bool:
        """Whether both have the same tokens to take over."""
        mine, its = ((kept.held, kept.skipped, kept.whole, kept.origin) for kept in (self, other))
        return mine == its and np.array_equal(self.text, other.text)

    def row_alone(self, row: int) -> KeptText:
        """The same, of which only one row counts."""
        return replace(self, held=[n if r == row else 0 for r, n in enumerate(self.held)])

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


_FRESH = 0.1
"""Seconds for which a measurement of free memory holds: a call asks twice, and the control groups' files take a tenth of its time on the host."""


class PrefixStore:
    """The kept texts of one model, the last used one last.

    Args:
        budget: bytes of keys, values, states and hidden states that they may take; 0: none is kept. None: an eighth of the memory that would be free
            without them, measured at each call.

    Attributes:
        spare: storage whose text no longer counts, for the next call that it has room for.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.texts: list[KeptText] = []
        self._measured: tuple[float, int] | None = None
        self.spare: RowCache | None = None

    def clear(self) -> None:
        self.texts, self.spare = [], None

    def takes(self, held: Sequence[int]) -> bool:
        """Whether a text is worth keeping whose rows hold so many tokens."""
        return self.budget != 0 and max(held, default=0) >= SHORTEST

    def add(self, kept: KeptText) -> None:
        """Keep the text of the last call, which stays whatever its size until another one comes. An equal one goes."""
        again = [old for old in self.texts if kept.equals(old)]
        # In this order: a signal may end the call in between, and what a later one overwrites must be no text's.
        self.texts = [*(old for old in self.texts[1 - MOST :] if old not in again), kept]
        self.spare = again[0].cache if again else self.spare

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
        now = time.monotonic()
        if self._measured is None or now > self._measured[0] + _FRESH:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[1]
            self._measured = now, free
        return (self._measured[1] + held) // SHARE


HOST = "cpu"
"""Type of the device whose memory :class:`Checksums` reads."""

COLUMNS = 4099
"""Words that lie so far apart are added up on a device. A prime: neighbouring rows of a matrix that change places change sums. Two words whose distance is a multiple
of it, and which change places, change none."""


class WeightWatch:
    """Compares all values of a model's weights with those of the last call, for changes that go past torch's version counters, as those through ``.data``.

    That takes about as long as the forward of one token, and a kept prefix saves more. On a GPU it is one launch for each tensor, which reads it once.
    """

    def __init__(self) -> None:
        self._model: object = None
        self._sums: Checksums | None = None
        self._places: list[tuple[Any, ...]] = []
        self._elsewhere: list[torch.Tensor] = []
        self._version = object()

    def version(self, model: torch.nn.Module, token: object) -> object:
        """What stands for the present values: the same object as before, unless one of them has changed.

        Args:
            model: whose weights are read.
            token: of the model, see :func:`pipespec.engine.known.token_of`. Another one has other tensors.
        """
        tensors = list(_memory_of(model))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return object()  # their values are not compared
        # Of a device only sums are kept: views would keep weights alive that the user has replaced.
        words: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type != HOST:
                words.setdefault(tensor.device, []).append(words_of(tensor))
        places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        elsewhere = list(map(sums_of, words.values()))
        if token is not self._model or places != self._places or not self._agree(elsewhere):
            # The old ones are freed first: they keep weights alive.
            self._sums = None
            self._sums, self._elsewhere, self._places = Checksums(tensors), elsewhere, places
            self._model, self._version = token, object()
        return self._version

    def _agree(self, elsewhere: list[torch.Tensor]) -> bool:
        if self._sums is None or not (self._sums.agree() and self._sums.rest_agrees()):
            return False
        return all(map(torch.equal, elsewhere, self._elsewhere))


def _memory_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The strided tensors that hold a model's weights and buffers. Of a quantised tensor, those that it consists of."""
    held = (t for m in each_module(model) for t in (*m._parameters.values(), *m._buffers.values()))
    left: list[Any] = [tensor for tensor in held if tensor is not None]
    while left:
        tensor = left.pop()
        if is_traceable_wrapper_subclass(tensor):
            left += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        elif tensor.numel() and not tensor.is_meta:
            yield tensor.detach()


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between the first and the last number of a strided tensor, in words of 64 bits ``[n]``, or in bytes where these do not fill it."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    data = tensor.as_strided((span,), (1,)).view(torch.uint8)
    is_aligned = data.storage_offset() % 8 == 0 and len(data) % 8 == 0
    return data.view(torch.int64) if is_aligned else data


def sums_of(words: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of the words of some tensors, int64 on their device, each of words that lie :data:`COLUMNS` apart. Any change of one word changes one."""
    found = []
    for of_tensor in words:
        whole = len(of_tensor) // COLUMNS * COLUMNS
        if whole:
            found.append(of_tensor[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64))
        found.append(of_tensor[whole:].long())
    return torch.cat(found)


def numeric_settings() -> tuple[Any, ...]:
    """The settings of this process on which the bits of torch's products and attention depend."""
    backends: Any = torch.backends
    cuda, mkldnn, cudnn = backends.cuda, backends.mkldnn, backends.cudnn
    # torch.get_float32_matmul_precision() and allow_tf32 set these, and raise an error when they are read after a setting by the newer names.
    kinds: tuple[Any, ...] = (backends, cuda.matmul, mkldnn, mkldnn.matmul, cudnn, cudnn.conv)
    precision = tuple(kind.fp32_precision for kind in kinds)
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    reduced = tuple(getattr(cuda.matmul, name) for name in names)
    return *precision, *attention, cuda.cudnn_sdp_enabled(), *reduced, torch.are_deterministic_algorithms_enabled()
