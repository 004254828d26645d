"""ForwardGroup: the processes that hold one tensor-parallel model, and run its forwards together.

transformers shards a model over processes (``tp_plan``). Every forward then needs all of them, with the same tokens. The leader, rank 0 of the group,
plans, selects and commits. It announces each forward: tokens, lengths of the cache, columns with logits. The others run it.

An announcement is a block of 64-bit integers in a fixed layout, over a gloo group of its own. So it neither waits for a GPU nor meets the exchanges of
the model.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from pipespec.models.compat import tensor_parallel_group

_FIRST = 512
"""Integers of the first block of an announcement. Longer ones take a second block."""

_FORWARD, _END, _FAILURE = 1, 2, 3
_HEADER = 4  # kind, integers behind the header, and two numbers that depend on the kind


@dataclass(frozen=True)
class Announced:
    """What the leader has announced: a forward, or the end of the call.

    Attributes:
        tokens: int64 ``[rows, q]`` to feed; None at the end of the call.
        lengths: per row, tokens that the cache holds before the forward.
        keep: columns with logits.
        text: at the end of the call, per row int32 ids of the generated text.
    """

    tokens: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    keep: int = 0
    text: tuple[np.ndarray, ...] = ()


class ForwardGroup:
    """The processes that hold one tensor-parallel model. All of them build it, at the same time.

    Args:
        model: with a ``tp_plan``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        ranks = dist.get_process_group_ranks(tensor_parallel_group(model))
        self._leader, self.size = ranks[0], len(ranks)
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank = dist.get_group_rank(self._group, dist.get_rank())

    @classmethod
    def of(cls, model: PreTrainedModel) -> ForwardGroup:
        """The group of a model that is spread over processes. All pipelines on it share the group."""
        if model not in _groups:
            _groups[model] = cls(model)
        return _groups[model]

    @property
    def is_leader(self) -> bool:
        """Whether this process plans and commits."""
        return self.rank == 0

    # ---- the leader

    def announce(self, tokens: torch.Tensor, lengths: Sequence[int], keep: int) -> None:
        """Announce a forward, which this process runs next.

        Args:
            tokens: int ``[rows, q]``.
            lengths: per row, tokens that the cache holds.
            keep: columns with logits.
        """
        self._send(_FORWARD, (tokens.shape[0], keep), [*lengths, *tokens.flatten().tolist()])

    def end(self, text: Sequence[Sequence[int]]) -> None:
        """End the call: per row the generated ids."""
        self._send(_END, (len(text), 0), [*map(len, text), *(token for row in text for token in row)])

    def fail(self, error: BaseException) -> None:
        """End the call, which has failed."""
        self._send(_FAILURE, (0, 0), list(f"{type(error).__name__}: {error}"[:2000].encode()))

    def _send(self, kind: int, numbers: tuple[int, int], content: Sequence[int]) -> None:
        block = torch.zeros(_FIRST, dtype=torch.int64, device="cpu")
        whole = torch.tensor([kind, len(content), *numbers, *content], dtype=torch.int64, device="cpu")
        block[: len(whole)] = whole[:_FIRST]
        dist.broadcast(block, self._leader, self._group)
        if len(whole) > _FIRST:
            dist.broadcast(whole[_FIRST:].contiguous(), self._leader, self._group)

    # ---- the others

    def receive(self) -> Announced:
        """Wait for the next announcement.

        Raises:
            RuntimeError: the leader's call has failed, or its process has ended.
        """
        block = torch.empty(_FIRST, dtype=torch.int64, device="cpu")
        dist.broadcast(block, self._leader, self._group)
        kind, size, rows, keep = block[:_HEADER].tolist()
        content = block[_HEADER:]
        if size > len(content):
            rest = torch.empty(size - len(content), dtype=torch.int64, device="cpu")
            dist.broadcast(rest, self._leader, self._group)
            content = torch.cat([content, rest])
        content = content[:size]
        if kind == _FAILURE:
            raise RuntimeError(
                f"generate() failed in rank 0, which leads: {bytes(content.tolist()).decode(errors='replace')}"
            )
        sizes = tuple(content[:rows].tolist())
        if kind == _END:
            ends = np.cumsum(sizes)[:-1]
            return Announced(text=tuple(np.split(content[rows:].numpy().astype(np.int32), ends)))
        return Announced(content[rows:].view(rows, -1), sizes, keep)

    # ---- all of them

    def agree(self, texts: Sequence[np.ndarray], limits: Sequence[int], error: BaseException | None = None) -> None:
        """Compare a call with that of the other ranks, before it runs.

        Args:
            texts: per row, the ids of its prompt.
            limits: per row, the length that its text may reach.
            error: why this rank cannot run the call.

        Raises:
            RuntimeError: another rank cannot run it.
            ValueError: the ranks were called with different inputs.
        """
        digest = zlib.crc32(b"".join(text.tobytes() + b"|" for text in texts) + str(list(limits)).encode())
        mine = torch.tensor([error is not None, len(texts), digest], dtype=torch.int64, device="cpu")
        all_ = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_, mine, self._group)
        if error is not None:
            return
        for rank, (failed, _, _) in enumerate(x.tolist() for x in all_):
            if failed:
                raise RuntimeError(f"generate() failed in rank {rank} of the target's group; its own error says why")
        other = next((rank for rank, found in enumerate(all_) if not torch.equal(found, all_[0])), None)
        if other is not None:
            raise ValueError(
                f"generate() was called with other inputs in rank {other} than in rank 0: with a tensor-parallel target, every rank makes the "
                "same calls"
            )


_groups: weakref.WeakKeyDictionary[PreTrainedModel, ForwardGroup] = weakref.WeakKeyDictionary()
