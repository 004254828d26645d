"""ForwardGroup: the processes that hold one tensor-parallel model, and run its forwards together.

transformers shards a model over processes (``tp_plan``). Every forward then needs all of them, with the same tokens. The leader, rank 0 of the group,
plans, selects and commits. It announces each forward: tokens, lengths of the cache, columns with logits. The others run it.

Announcements go over a gloo group of its own. So they neither wait for a GPU nor meet the exchanges of the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from pipespec.models.compat import tensor_parallel_group


@dataclass(frozen=True)
class Announced:
    """What the leader has announced: a forward, the end of the call, or its failure.

    Attributes:
        tokens: ``[rows, q]`` to feed; None at the end of the call.
        lengths: per row, tokens that the cache holds before the forward.
        keep: columns with logits.
        text: at the end of the call, per row int32 ids of the generated text.
        failure: why the call has failed; None: it has not.
    """

    tokens: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    keep: int = 0
    text: tuple[np.ndarray, ...] = ()
    failure: str | None = None


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

    @property
    def is_leader(self) -> bool:
        """Whether this process plans and commits."""
        return self.rank == 0

    # ---- the leader

    def announce(self, tokens: torch.Tensor, lengths: Sequence[int], keep: int) -> None:
        """Announce a forward, which this process runs next. Arguments are those of :class:`Announced`."""
        self._broadcast(Announced(tokens.cpu(), tuple(lengths), keep))

    def end(self, text: Sequence[Sequence[int]]) -> None:
        """End the call: per row the generated ids."""
        self._broadcast(Announced(text=tuple(np.array(row, np.int32) for row in text)))

    def fail(self, error: BaseException) -> None:
        """End the call, which has failed."""
        self._broadcast(Announced(failure=f"{type(error).__name__}: {error}"))

    def _broadcast(self, announced: Announced | None) -> Any:
        found = [announced]
        dist.broadcast_object_list(found, self._leader, self._group)
        return found[0]

    # ---- the others

    def receive(self) -> Announced:
        """Wait for the next announcement.

        Raises:
            RuntimeError: the leader's call has failed, or its process has ended.
        """
        found: Announced = self._broadcast(None)
        if found.failure is not None:
            raise RuntimeError(f"generate() failed in rank 0, which leads: {found.failure}")
        return found

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
        all_: list[Any] = [None] * self.size
        dist.all_gather_object(all_, (error is not None, len(texts), digest), self._group)
        if error is not None:
            return
        for rank, (failed, *_) in enumerate(all_):
            if failed:
                raise RuntimeError(f"generate() failed in rank {rank} of the target's group; its own error says why")
        other = next((rank for rank, found in enumerate(all_) if found != all_[0]), None)
        if other is not None:
            raise ValueError(
                f"generate() was called with other inputs in rank {other} than in rank 0: with a tensor-parallel target, every rank makes the "
                "same calls"
            )
