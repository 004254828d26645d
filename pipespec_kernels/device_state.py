"""A stage's port onto a state block on a GPU: plan and commit are kernels, so that a step needs no copy to the host.

The block is the one of :mod:`pipespec_kernels.state`, byte for byte, in the memory of a GPU or pinned on the host::

    host = StateBlock.create(stages=2, rows=4, capacity=512)
    host.reset(starts, limits, last, eos)
    block = torch.from_numpy(host.memory.array).cuda()
    port = DevicePort(block, stage=1, width=8)
    port.set_policy(lookahead=8, max_draft_tokens=7)
    port.plan()  # a launch: port.tokens, port.kv, port.query_lens, port.num_draft_tokens, port.n_select, port.action
    selected, _ = ops.verify(logits, port.tokens, port.n_select, port.num_draft_tokens)
    port.commit(selected)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels import _native

_HEADER_BYTES: int = _native.Block.bytes(0, 0, 1)


class PolicyRing(NamedTuple):
    """The policies of the steps that a scheduler launches. The launcher writes them, and plan reads the policy of its step over the bus, without a
    copy.

    Attributes:
        policies: int32 ``[_cuda.STEPS_IN_FLIGHT, 4]``, pinned. Step n uses row ``n % STEPS_IN_FLIGHT``.
        scratch: The stage's ``StepScratch`` on the GPU, which counts the steps.
    """

    policies: Tensor
    scratch: Tensor


class DevicePort:
    """Plan and commit of one stage for all rows of a block, as launches on a stream. ``plan`` and ``commit`` neither wait nor
    allocate, so they can be captured in a CUDA graph.

    Stages that run at the same time must be ordered by stream or event. Stages that sleep on the
    host (``StagePort.park``) are not woken.

    Args:
        block: a state block: contiguous uint8 tensor in a GPU's memory, or in pinned memory. The constructor reads it once, which waits for the
            device. All ports of a block in a GPU's memory are on that GPU. The host and other GPUs do not access it while kernels run over it.
        stage: the stage, from 0; the last one is the target.
        width: columns of the rectangle: the maximum number of tokens that a row feeds in a step, 1 or more.
        rows: of the rectangle, at most the block's; default: all.
        policy: the policies of a scheduler's launcher; default: one of its own, see :meth:`set_policy`.
        device: of the kernels and the arrays, where the block is pinned; default: the current GPU.

    Attributes:
        tokens: int32 ``[rows, width]``, on the GPU like the others: ids to feed, zeros after them.
        kv, query_lens, num_draft_tokens: int32 ``[rows]``: position of the first fed token, tokens fed, how many of them are draft tokens.
        n_select: int32 ``[rows]``: ``query_lens`` where a choice is needed, else 0: what :func:`ops.verify` takes as ``query_lens``.
        action: int32 ``[rows]``: :class:`pipespec_kernels.state.Action`.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        ImportError: the CUDA module was not built. The message has the build command.
    """

    def __init__(
        self,
        block: Tensor,
        stage: int,
        width: int,
        device: torch.device | str | None = None,
        *,
        rows: int | None = None,
        policy: PolicyRing | None = None,
    ) -> None:
        if not isinstance(block, Tensor):
            raise TypeError(f"block must be a tensor, got {type(block).__name__}")
        if block.dtype is not torch.uint8 or block.dim() != 1 or not block.is_contiguous():
            raise TypeError(f"block must be contiguous uint8 [bytes], got {block.dtype} {tuple(block.shape)}")
        if not block.is_cuda and not (torch.cuda.is_available() and block.is_pinned()):
            raise ValueError(
                f"block must be on a GPU or in pinned memory, is on {block.device} (for one on the host: StateBlock.port)"
            )
        if block.numel() < _HEADER_BYTES:
            raise ValueError("this memory holds no pipespec state block")
        header = block[:_HEADER_BYTES].cpu().numpy()
        sizes = _native.Block(header.ctypes.data)  # raises if it is no block
        if block.numel() < sizes.size:
            raise ValueError(f"block has {block.numel()} bytes, fewer than its own header says")
        if not 0 <= stage < sizes.stages:
            raise ValueError(f"the block has {sizes.stages} stages, none of number {stage}")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        rows = sizes.rows if rows is None else rows
        if not 1 <= rows <= sizes.rows:
            raise ValueError(f"the block has {sizes.rows} rows, not {rows}")
        from pipespec_kernels import _cuda

        self._cuda: Any = _cuda
        # In pinned memory the host and other GPUs share the block.
        self._scope = _cuda.Scope.DEVICE if block.is_cuda else _cuda.Scope.SYSTEM
        self.block, self.stage, self.width, self.rows = block, stage, width, rows
        self.tokens = torch.zeros(
            (self.rows, width), dtype=torch.int32, device=block.device if block.is_cuda else device or "cuda"
        )
        self.device = self.tokens.device  # with an index, for comparison with the devices of tensors
        # StepPolicy of csrc/protocol/plan.hpp: the kernel reads it when it runs.
        self._ring = policy
        self._policy = torch.zeros(4, dtype=torch.int32, device=self.device) if policy is None else policy.policies
        one_per_row = torch.zeros((5, self.rows), dtype=torch.int32, device=self.device)
        self.kv, self.query_lens, self.num_draft_tokens, self.n_select, self.action = one_per_row.unbind(0)
        arrays = (self.tokens, self.kv, self.query_lens, self.num_draft_tokens, self.n_select, self.action)
        self._arrays = tuple(array.data_ptr() for array in arrays)

    def set_policy(self, lookahead: int, max_draft_tokens: int, min_draft_tokens: int = 0) -> None:
        """Set lookahead, the limit of draft tokens per step, and ``min_draft_tokens``, for the plans launched later on the current stream.

        Raises:
            ValueError: A number that has more than 32 bits.
            RuntimeError: The policy is the launcher's.
        """
        if self._ring is not None:
            raise RuntimeError("the launcher writes this port's policies")
        if (
            min(lookahead, max_draft_tokens, min_draft_tokens) < 0
            or max(lookahead, max_draft_tokens, min_draft_tokens) >= 2**32
        ):
            raise ValueError(
                f"a policy has numbers of 32 bits, got {lookahead}, {max_draft_tokens}, {min_draft_tokens}"
            )
        words = torch.tensor([lookahead, max_draft_tokens, min_draft_tokens, self.width], dtype=torch.int64)
        self._policy.copy_(words.to(torch.int32))  # the low 32 bits of each

    def plan(self, stream: int | None = None) -> None:
        """Fill the arrays. ``stream``: a ``cudaStream_t`` as an integer; default: torch's current stream."""
        with torch.cuda.device(self.device):
            self._cuda.plan(
                self.block.data_ptr(),
                self._scope,
                self.stage,
                self.rows,
                self.width,
                self._policy.data_ptr(),
                0 if self._ring is None else self._ring.scratch.data_ptr(),
                *self._arrays,
                self._stream(stream),
            )

    def commit(self, selected: Tensor, stream: int | None = None) -> None:
        """Commit ``selected`` of :func:`ops.verify` for the last plan: int32 ``[rows, width]`` on the GPU."""
        if not isinstance(selected, Tensor) or selected.dtype is not torch.int32 or selected.device != self.device:
            raise TypeError(f"selected must be an int32 tensor on {self.device}")
        if selected.shape != (self.rows, self.width) or selected.stride(1) != 1:
            raise ValueError(
                f"selected must be {[self.rows, self.width]} with contiguous rows, got shape {tuple(selected.shape)}, "
                f"strides {selected.stride()}"
            )
        with torch.cuda.device(self.device):
            self._cuda.commit(
                self.block.data_ptr(),
                self._scope,
                self.stage,
                self.rows,
                self.width,
                *self._arrays,
                selected.data_ptr(),
                selected.stride(0),
                self._stream(stream),
            )

    def open(self, scratch: Tensor, stream: int | None = None) -> None:
        """Launch the first kernel of a step under a scheduler: it writes the time to ``scratch``, a ``StepScratch`` on the GPU."""
        with torch.cuda.device(self.device):
            self._cuda.open_step(scratch.data_ptr(), self._stream(stream))

    def close(self, shadow: Tensor, scratch: Tensor, log: Tensor, stream: int | None = None) -> None:
        """Launch the last kernel of a step: it copies the stage's part of the block to ``shadow`` (unless that is the block) and writes ``log``.

        ``shadow``: the host shadow, pinned; ``log``: a ``StepLog``, pinned; see ``csrc/cuda/protocol_kernels.hpp``.
        """
        with torch.cuda.device(self.device):
            self._cuda.close_step(
                self.block.data_ptr(),
                shadow.data_ptr(),
                self.stage,
                self.rows,
                *self._arrays,
                scratch.data_ptr(),
                log.data_ptr(),
                self._stream(stream),
            )

    def _stream(self, stream: int | None) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream
