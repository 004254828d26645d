"""Checks of the operations' arguments, and the tensors that their results are written to.

The checks read metadata, and values on the CPU. They do not read values on a GPU, which would wait for the device. They run once per draft
step and take about two microseconds together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import dispatch, reference
from pipespec_kernels.noise import Noise, check_stream

native: Any = None
"""The native module; None where it was not built."""
try:
    from pipespec_kernels import _native
except ImportError as error:
    warnings.warn(f"{error} Until then tensors on the CPU go to the slow reference.", RuntimeWarning, stacklevel=2)
else:
    native = _native

INT32, INT64, FLOAT32, FLOAT64 = torch.int32, torch.int64, torch.float32, torch.float64
CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
"""Classes whose tensors have their values in memory."""
TOKEN_BYTES = {INT32: 4, INT64: 8}

# Supported dtypes of logits, with the native code's names; None: the native code does not support it.
_CODES = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16, FLOAT64))
if native is not None and not dispatch.forced:
    _CODES |= {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16, torch.float16: native.FLOAT16}

# Arguments with one entry per row (cutoffs: per row and column): the dtype, and the name of an entry in errors.
_PER_ROW = {
    "query_lens": (INT32, "count"),
    "num_draft_tokens": (INT32, "count"),
    "noise.seeds": (INT64, "value"),
    "noise.positions": (INT64, "value"),
    "noise.positions on a GPU": (INT32, "value"),
    "noise.inv_temperature": (FLOAT32, "value"),
    "noise.cutoff": (FLOAT32, "value"),
    "inv_temperature": (FLOAT32, "value"),
    "cutoff": (FLOAT32, "value"),
    "draft_inv_temperature": (FLOAT32, "value"),
    "draft_cutoff": (FLOAT32, "value"),
}

# Filters of cutoff(), each one number or one per row: the dtype, and the greatest value.
_FILTERS = {
    "inv_temperature": (FLOAT32, math.inf),
    "top_k": (INT64, math.inf),
    "top_p": (FLOAT64, 1),
    "min_p": (FLOAT64, 1),
}

FlatNoise = tuple[Tensor, Tensor, Tensor, Tensor | None, int]
"""The fields of a checked Noise: seeds, positions, inverse temperatures, cutoffs, stream."""


def check_logits(logits: Tensor, name: str = "logits") -> tuple[int, int, int, tuple[int, ...] | None]:
    """Sizes of checked logits, and the native code's first arguments; None: it does not support them."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(logits).__name__}")
    shape = logits.shape
    check_dense(logits, name)
    if len(shape) != 3:
        raise ValueError(f"{name} must be [B, Q, V], got shape {tuple(shape)}")
    batch, width, vocab = shape
    if not 0 < vocab < 2**31:
        raise ValueError(f"the vocabulary must have 1 .. 2**31-1 entries, got shape {tuple(shape)}")
    stride = logits.stride()
    if stride[2] != 1 and vocab > 1:
        raise ValueError(f"{name} must be contiguous along the vocabulary, got strides {stride}")
    code = _CODES.get(logits.dtype, -1)
    if code == -1:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {logits.dtype}")
    if code is None or type(logits) not in PLAIN or not logits.is_cpu or logits.is_neg():
        return batch, width, vocab, None
    return batch, width, vocab, (logits.data_ptr(), code, batch, width, vocab, stride[0], stride[1])


def check_tokens(tokens: Tensor, logits: Tensor, batch: int, width: int) -> int:
    """Bytes of an id in checked tokens."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
    token_bytes = TOKEN_BYTES.get(tokens.dtype)
    if token_bytes is None:
        raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")
    check_dense(tokens, "tokens")
    if tokens.shape != (batch, width):
        raise ValueError(f"tokens are {tuple(tokens.shape)}, but logits [B, Q, V] are {tuple(logits.shape)}")
    if not (tokens.is_cpu and logits.is_cpu) and tokens.device != logits.device:
        raise ValueError(f"tokens are on {tokens.device}, logits on {logits.device}")
    return token_bytes


def both_counts(
    query_lens: Any, num_draft_tokens: Any, batch: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if (query_lens is None) != (num_draft_tokens is None):
        raise ValueError("query_lens and num_draft_tokens go together")
    if query_lens is None:
        return None, None
    counts = (("query_lens", query_lens), ("num_draft_tokens", num_draft_tokens))
    query_lens, num_draft_tokens = (per_row(name, values, (batch,), device) for name, values in counts)
    return query_lens, num_draft_tokens


def per_row(name: str, values: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The checked argument ``name``, contiguous; on the CPU or on ``device``."""
    dtype, entry = _PER_ROW[name]
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            raise TypeError(f"{name} must be a tensor or numpy array of {_word(dtype)}, got {type(values).__name__}")
        values = _from_numpy(name, values)
    if values.dtype is not dtype:
        raise TypeError(f"{name} must be {_word(dtype)}, got {values.dtype}")
    check_dense(values, name)
    if not values.is_cpu and values.device != device:
        raise ValueError(_misplaced(name, values, device))
    if values.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one {entry} per row, got shape {tuple(values.shape)}")
    checked: Tensor = values if values.is_contiguous() else values.contiguous()
    return checked


def _from_numpy(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values, device=CPU)  # whatever the default device is
    except (TypeError, ValueError):
        shown = f"a numpy array of {values.dtype} with strides {values.strides}"
        raise TypeError(f"{name} must be numbers that torch can read in place, got {shown}") from None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _misplaced(name: str, values: Tensor, device: torch.device) -> str:
    places = "the CPU" if device.type == "cpu" else f"the CPU or on {device} like the logits"
    return f"{name} must be on {places}, is on {values.device}"


def filters(values: Iterable[Any], batch: int, device: torch.device) -> list[Tensor]:
    """The checked filters of cutoff(), in the order of the table: contiguous tensors ``[B]``."""
    return [
        _filter(value, batch, dtype, name, device)
        for value, (name, (dtype, _)) in zip(values, _FILTERS.items(), strict=True)
    ]


def _filter(values: Any, batch: int, dtype: torch.dtype, name: str, device: torch.device) -> Tensor:
    if isinstance(values, (int, float)):
        if dtype is INT64 and not isinstance(values, int):
            raise TypeError(f"{name} must be an integer, got {values!r}")
        check_number(name, values)
        return torch.full((batch,), values, dtype=dtype, device=CPU)
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            raise TypeError(f"{name} must be a number, a tensor or a numpy array, got {type(values).__name__}")
        values = _from_numpy(name, values)
    check_dense(values, name)
    if values.dtype.is_complex:
        raise TypeError(f"{name} must be real numbers, got {values.dtype}")
    if dtype is INT64 and values.dtype not in (INT32, INT64):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    if not values.is_cpu and values.device != device:
        raise ValueError(_misplaced(name, values, device))
    if values.dim() == 0:  # for example a numpy scalar
        values = values.expand(batch)
    if values.shape != (batch,):
        raise ValueError(f"{name} must be a number or [{batch}], got shape {tuple(values.shape)}")
    checked: Tensor = values.to(dtype).contiguous()
    return checked


def fields(noise: Noise) -> tuple[Any, Any, Any, Any, int]:
    """The fields of a Noise, with its offset added to the positions."""
    if not isinstance(noise, Noise):
        raise TypeError(f"noise must be a Noise, got {type(noise).__name__}")
    positions = noise.positions
    if not isinstance(noise.offset, (int, torch.SymInt)):
        raise TypeError(f"noise.offset must be an integer, got {type(noise.offset).__name__}")
    check_number("noise.offset", noise.offset)
    if isinstance(positions, Tensor) and positions.dtype is INT32:
        positions = positions.long()
    if noise.offset:
        positions = positions + noise.offset
    return noise.seeds, positions, noise.inv_temperature, noise.cutoff, noise.stream


def fields_for_kernel(noise: Noise) -> tuple[tuple[Any, Any, Any, Any, int], int]:
    """As :func:`fields`, and the offset that remains: positions on a GPU stay as they are, because an operation on them would be a launch."""
    if not isinstance(noise, Noise) or not isinstance(noise.positions, Tensor) or noise.positions.is_cpu:
        return fields(noise), 0
    return (noise.seeds, noise.positions, noise.inv_temperature, noise.cutoff, noise.stream), noise.offset


def check_noise(noise: tuple[Any, Any, Any, Any, int], batch: int, width: int, device: torch.device) -> FlatNoise:
    """The fields of a checked Noise, contiguous: they must outlive the call that gets their addresses."""
    seeds, positions, inv_temperature, cutoff, stream = noise
    check_stream(stream)
    rows = (batch,)
    short = isinstance(positions, Tensor) and positions.dtype is INT32 and not positions.is_cpu
    return (
        per_row("noise.seeds", seeds, rows, device),
        per_row("noise.positions on a GPU" if short else "noise.positions", positions, rows, device),
        per_row("noise.inv_temperature", inv_temperature, rows, device),
        None if cutoff is None else per_row("noise.cutoff", cutoff, (batch, width), device),
        stream,
    )


def address(tensor: Tensor | None) -> int:
    """For the native code; 0: there is no tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(noise: FlatNoise) -> tuple[int, int, int, int, int]:
    seeds, positions, inv_temperature, cutoff, stream = noise
    return seeds.data_ptr(), positions.data_ptr(), inv_temperature.data_ptr(), address(cutoff), stream


def moved(noise: FlatNoise, device: torch.device, offset: int = 0) -> Noise:
    seeds, positions, inv_temperature, cutoff, stream = noise
    cutoff = None if cutoff is None else cutoff.to(device)
    return Noise(seeds.to(device), positions.to(device), inv_temperature.to(device), cutoff, stream, offset)


def check_dense(tensor: Tensor, name: str) -> None:
    """Check that a tensor has strides; others, such as sparse ones, have no address."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one with layout {tensor.layout}")


def check_contiguous(
    tensor: Any,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    like: str = "the logits",
) -> None:
    """Check a contiguous tensor; None in ``shape`` is any size."""
    if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
        raise TypeError(f"{name} must be a tensor of {dtype}, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    check_dense(tensor, name)
    fits = tensor.dim() == len(shape) and all(
        n is None or n == have for n, have in zip(shape, tensor.shape, strict=False)
    )
    if not fits or tensor.device != device or not tensor.is_contiguous():
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be contiguous [{sizes}] on {device} like {like}, got shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} on {tensor.device}"
        )


def check_flag(name: str, value: Any) -> None:
    """Check that a value is a bool."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_number(name: str, value: Any) -> None:
    """Check that a value is a number that fits in 64 bits."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got {value}")


def num_threads(threads: Any) -> int:
    if threads is None:
        return torch.get_num_threads()
    if not isinstance(threads, int):
        raise TypeError(f"threads must be an integer, got {threads!r}")
    if not -(2**31) <= threads < 2**31:
        raise ValueError(f"threads must fit in 32 bits, got {threads}")
    return threads  # the native code checks the number of threads


# The native code makes these checks itself; the other implementations need them here.


def check_noise_values(noise: FlatNoise, rows: Iterable[int], width: int, name: str = "inv_temperature") -> None:
    check_inv_temperature(noise[2], rows, name)
    if noise[1].is_cpu:
        positions = noise[1].tolist()
        for row in rows:
            if not 0 <= positions[row] <= 2**63 - 1 - width:
                raise ValueError(f"row {row}: positions must not be negative, is {positions[row]}")


def check_inv_temperature(values: Tensor, rows: Iterable[int], name: str = "inv_temperature") -> None:
    if values.is_cpu:
        scales = values.tolist()
        for row in rows:
            if not 0 < scales[row] < math.inf:
                raise ValueError(f"row {row}: {name} must be finite and positive, is {scales[row]}")


def check_count_values(query_lens: Tensor, num_draft_tokens: Tensor, width: int) -> None:
    if query_lens.is_cpu and num_draft_tokens.is_cpu:
        reference.check_counts(query_lens, num_draft_tokens, width)


def busy_rows(query_lens: Tensor) -> list[int]:
    """The rows that do not idle; none if ``query_lens`` is on a GPU, where the host does not read it."""
    return [row for row, fed in enumerate(query_lens.tolist()) if fed > 0] if query_lens.is_cpu else []


def check_filter_values(values: Iterable[Tensor]) -> None:
    for column, (name, (_, limit)) in zip(values, _FILTERS.items(), strict=True):
        if column.is_cpu:
            for row, value in enumerate(column.tolist()):
                if not 0 <= value <= limit or (name == "inv_temperature" and not 0 < value < math.inf):
                    raise ValueError(f"row {row}: {name} {value} is not valid")


def is_everywhere(values: Tensor, value: float) -> bool:
    return values.is_cpu and bool((values == value).all())


def result(
    out: Tensor | None, shape: tuple[int, ...], name: str, device: torch.device, dtype: torch.dtype = INT32
) -> Tensor:
    """``out``, after a check that it can take the result, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, Tensor) or out.dtype is not dtype or out.layout is not torch.strided:
        raise TypeError(
            f"{name} must be {'an' if dtype is INT32 else 'a'} {_word(dtype)} tensor, got {getattr(out, 'dtype', type(out).__name__)}"
        )
    if out.shape != shape or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous on {device} with shape {shape}, "
            f"got shape {tuple(out.shape)}, strides {out.stride()} on {out.device}"
        )
    return out


def results(out: tuple[Tensor, Tensor] | None, query_lens: Tensor, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Tensors for ``selected`` and ``accepted``, on the device of ``query_lens``."""
    if out is None:
        # new_empty() of an int32 tensor takes half the time of torch.empty() with dtype and device.
        return query_lens.new_empty((batch, width)), torch.empty_like(query_lens)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors, got {type(out).__name__}")
    device = query_lens.device
    return result(out[0], (batch, width), "out[0]", device), result(out[1], (batch,), "out[1]", device)


def write_to(results: tuple[Tensor, Tensor], selected: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the results into these tensors, unless they are there already."""
    if results[0] is not selected:
        selected.copy_(results[0])
        accepted.copy_(results[1])
    return selected, accepted
