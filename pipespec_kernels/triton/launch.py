"""Shared parts of the launches: the division of rows into blocks, the work space, the rows' state, and the checks of arguments."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipespec_kernels.noise import Noise
from pipespec_kernels.triton.philox import INTERPRETED

INTEGERS = (torch.int32, torch.int64)
MAX_VOCAB = 1 << 30  # ids and tiles are counted in int32
# Arguments whose values do not change the code worth mentioning: each value of 1, or multiple of 16, would be a kernel of its own.
_NUMBERS = "width notes stream splits offset tokens_stride_b tokens_stride_q cutoff_stride_b cutoff_stride_q draft_cutoff_stride_b draft_cutoff_stride_q"
_NUMBERS += " top_n num_biases history_stride"
_FEW_VALUES = "tokens query_lens num_draft_tokens selected accepted best ticket rejected next_token length epoch seeds positions inv_temperature"
_FEW_VALUES += " draft_inv_temperature cutoff draft_cutoff invalid_positions lse arrivals top_k top_p min_p out"
_FEW_VALUES += (
    " chosen top_ids top history lengths repetition presence frequency prompt_lengths bias_ids bias bitmask table"
)
UNSPECIALIZED = {"do_not_specialize": _NUMBERS.split(), "do_not_specialize_on_alignment": _FEW_VALUES.split()}
MIN_WIDTH_BLOCK = 32
"""Columns in a walk along draft tokens, so that the usual widths share a kernel."""
MAX_ROWS = 65535  # CUDA's limit for the outer dimensions of a grid
_PDL = os.environ.get("PIPESPEC_PDL", "")
if _PDL not in ("", "0", "1"):
    raise ValueError(f"PIPESPEC_PDL is {_PDL!r}: leave it unset, or use '0' or '1'")


@dataclass(frozen=True)
class Config:
    """The division of a row of logits. The choices of ``verify`` do not depend on it.

    Attributes:
        block: logits that a block of threads processes at once, a power of two, at least 8.
        warps: warps per block of threads.
        splits: at most that many blocks of threads share a row.
    """

    block: int
    warps: int
    splits: int


class Cut(NamedTuple):
    """A :class:`Config` fitted to a vocabulary: ``splits`` spans of ``span`` logits, none of them empty."""

    splits: int
    span: int


def cut(config: Config, vocab: int) -> Cut:
    block, splits = config.block, config.splits
    if block < 8 or block & (block - 1) or splits < 1 or config.warps < 1:
        raise ValueError(f"a block must be a power of two >= 8, warps and splits at least 1, got {config}")
    tiles = -(-vocab // block)
    per_split = -(-tiles // splits)
    return Cut(-(-tiles // per_split), per_split * block)


_RESIDENT = 4
"""Blocks of threads that a multiprocessor holds at once, at least."""


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_config(rows: int, vocab: int, multiprocessors: int, busy: bool) -> Config:
    """Enough blocks to fill the device where there are few rows, long spans where there are many.

    A block's reduction costs as many instructions as some fifty logits per thread, so a long span spreads that cost over more logits. A wide tile
    keeps more bytes in flight, which helps a kernel that only reads. A kernel that is ``busy`` with noise waits for its arithmetic instead. Where
    the rows fill the device several times over, spans are short enough that most blocks start after the first ones have ended: they are skipped
    after a rejected draft token. The numbers come from counting instructions and bytes; they have not been tuned on a device.
    """
    wanted = _RESIDENT * multiprocessors
    if rows * (vocab // 4096) < wanted:
        return Config(1024, 4, max(1, wanted // max(rows, 1)))
    block, tiles = (2048, 4) if busy else (4096, 8)
    short = -(-vocab // (block * tiles))
    return Config(block, 8, short if rows * short >= 2 * wanted else max(1, wanted // rows))


def notes_pay(blocks: int, device: torch.device) -> int:
    """Whether blocks note rejected draft tokens for those that start later: 0 where all start at once. A note takes a trip to the L2 cache."""
    return int(device.type == "cpu" or blocks > _RESIDENT * multiprocessors(device))


def default_config(rows: int, vocab: int, device: torch.device, busy: bool) -> Config:
    if device.type == "cpu":
        # In the interpreter an operation has the same cost at every width.
        return Config(min(1 << 15, max(16, 1 << (vocab - 1).bit_length())), 1, 1)
    return choose_config(rows, vocab, multiprocessors(device), busy)


class Workspace:
    """Memory through which the blocks of a launch combine their results. Zero before and after every launch.

    Launches that may run at the same time need different work spaces. So do CUDA graphs that may be replayed at the same time. Without one ``verify``
    makes its own, with a second small launch.

    Args:
        batch, width: the largest ``B`` and ``Q`` to come.
        device: of the tensors.
    """

    def __init__(self, batch: int, width: int, device: torch.device | str) -> None:
        self.batch, self.width = batch, width
        self.words = torch.zeros(batch * (max(width, 2) + 2), dtype=torch.int64, device=device)
        self.device = self.words.device

    def pieces(self, batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Words for the best choices (``[B, Q]``, at least two a row), a ticket for each row, and its first draft token that is known to be rejected
        (the number of columns from there on; 0: none is known); int64."""
        if self.device != device:
            raise ValueError(f"the workspace is on {self.device}, the logits on {device}")
        if batch > self.batch or width > self.width:
            raise ValueError(f"the workspace is for {self.batch} x {self.width} at most, got {batch} x {width}")
        tickets, rejected, best = self.words.split((self.batch, self.batch, self.words.numel() - 2 * self.batch))
        return best, tickets, rejected


class RowState(NamedTuple):
    """The state of the rows that a verification updates, written in place by the kernel. All ``[B]``, int32 or int64, contiguous.

    Attributes:
        next_token: becomes the row's own choice after the accepted draft tokens: the first token of the next step.
        length: committed tokens of the row; grows by ``accepted + 1``. (The cache holds keys and
            values of one token fewer.)
        epoch: grows by one where a draft token was rejected. Draft tokens of an earlier epoch are invalid.

    The state of rows that idle or have invalid counts does not change.
    """

    next_token: Tensor
    length: Tensor
    epoch: Tensor


def check_device(device: torch.device, what: str) -> None:
    if INTERPRETED:
        if device.type != "cpu":
            raise ValueError(f"TRITON_INTERPRET is set: {what} must be on the CPU, is on {device}")
    elif device.type != "cuda":
        raise ValueError(f"{what} must be on a GPU, is on {device} (on the CPU use pipespec_kernels.ops)")


def check_limits(logits: Tensor) -> tuple[int, int, int]:
    """The sizes of logits that a launch can take."""
    batch, width, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"the vocabulary must have 1 .. 2**30 entries, got shape {tuple(logits.shape)}")
    if batch > MAX_ROWS or width > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows and columns in a launch, got shape {tuple(logits.shape)}")
    check_device(logits.device, "logits")
    return batch, width, vocab


def fields(noise: Noise | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Contiguous seeds, positions (without the offset) and scales, and the cutoff as it is; all None without noise."""
    if noise is None:
        return None, None, None, None
    return noise.seeds.contiguous(), noise.positions.contiguous(), noise.inv_temperature.contiguous(), noise.cutoff


def strides(tensor: Tensor | None) -> tuple[int, int]:
    """Of the first two dimensions, for a kernel; 0 where there is no tensor."""
    return (0, 0) if tensor is None else tensor.stride()[:2]  # type: ignore[return-value]


def results(out: tuple[Tensor, Tensor] | None, batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors for the selected tokens and the accepted draft tokens."""
    if out is not None:
        return out
    selected = torch.empty((batch, width), dtype=torch.int32, device=device)
    return selected, torch.empty(batch, dtype=torch.int32, device=device)


def on(device: torch.device) -> Any:
    """The device to launch on. Triton launches on the current device, which may differ from that of the tensors."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


@functools.cache
def dependent(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of every launch: whether it may begin before the one ahead of it has ended (``PIPESPEC_PDL=1``, on an NVIDIA GPU that can)."""
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if _PDL == "1" and able else {"PDL": False}


# The first statement of every kernel, before all loads, stores and atomics. Every block waits, also one that then returns without an access, so a
# kernel ends only after the one ahead of it: what has waited for that one has waited for all earlier ones. A block lets the next kernel begin after
# its own wait, and that begins once all blocks have let it: none of them still needs the room that the waiting blocks take up.
@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """Wait for the end of the launch ahead and for what it wrote, then let the next one begin. Without ``PDL`` nothing."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
