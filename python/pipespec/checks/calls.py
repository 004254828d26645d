"""Checks of a call: whether its caches fit the memory, before they are allocated, and its text the RoPE of the target."""

from __future__ import annotations

import errno
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.chain import first_capacity, static_capacity
from pipespec.errors import DoesNotFit, UnsupportedInput, user_stacklevel
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import is_out_of_memory
from pipespec.models.properties import (
    LayerDevices,
    compute_dtype,
    kv_dtype,
    local_kv_heads,
    rope_changes_at,
    rope_type,
)
from pipespec_kernels.env import host_memory


class DeviceFacts(NamedTuple):
    """A device: ``"cpu"`` or ``"cuda:0"``, the bytes of its memory (0: the system does not report it), and those that can be allocated now."""

    name: str
    total: int
    free: int


def device_facts(names: Sequence[str] | None = None) -> list[DeviceFacts]:
    """The CPU and the GPUs that torch sees; ``names``: these only, as a query creates a CUDA context. What torch has reserved and does not use is free."""
    found = []
    if names is None or "cpu" in names:
        found.append(DeviceFacts("cpu", *host_memory()))
    for i in range(torch.cuda.device_count()):
        if names is None or f"cuda:{i}" in names:
            free, total = torch.cuda.mem_get_info(i)
            unused = torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i)
            found.append(DeviceFacts(f"cuda:{i}", total, free + unused))
    return found


def gib(size: int) -> str:
    """A number of bytes in GiB."""
    return f"{size / (1 << 30):.{2 if size < 100 << 30 else 0}f}"


HEADROOM = 256 << 20
"""Bytes for each stage in addition to its caches: activations, logits, work spaces, the memory pool of captured graphs. Assumed, not measured."""


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Add to an error for lack of memory what helps. The check before a call sees neither limits of a process nor what others take meanwhile."""
    try:
        yield
    except BaseException as error:
        is_shortage = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if is_shortage or (isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error)):
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
            is_limited = limit != resource.RLIM_INFINITY
            limited = f", or raise this process's limit of {gib(limit)} GiB (ulimit -v)" if is_limited else ""
            error.add_note(f"There was not enough memory for this call: lower max_new_tokens or the batch{limited}")
        raise


def cache_bytes(model: PreTrainedModel, rows: int, capacity: int, static: bool | torch.dtype = False) -> dict[str, int]:
    """Bytes of the caches of a model on each device, for ``rows`` texts of ``capacity`` positions. ``static``: as of :class:`pipespec.engine.cache.RowCache`."""
    layout, dtype = CacheLayout.of(model.config, local_kv_heads(model)), compute_dtype(model)
    shares = LayerDevices.of(model).shares()

    def kept_in(device: torch.device) -> torch.dtype:
        if isinstance(static, torch.dtype):
            return static
        return dtype if static else kv_dtype(model.config, dtype, device)

    return {str(device): layout.bytes_for(rows, capacity, kept_in(device), layers) for device, layers in shares.items()}


def check_memory(
    models: Mapping[str, PreTrainedModel],
    *,
    rows: int,
    longest: int,
    limit: int,
    static: bool | torch.dtype = False,
    release: Callable[[], None] = lambda: None,
) -> None:
    """Check that the caches of a call fit: the bytes of their keys and values, and :data:`HEADROOM` per stage.

    Caches that grow need their first capacity free now, and their last one must fit the device at all. Static caches need their last capacity now. On a
    CPU other programs may release memory: what is not free is a ``RuntimeWarning`` there.

    Raises ``DoesNotFit``, with the numbers.

    Args:
        models: those that will hold caches, by the names of their stages.
        rows: texts, whose longest prompt has ``longest`` tokens, and which may come to use ``limit`` positions.
        static: as of :class:`pipespec.engine.cache.RowCache`.
        release: frees the caches of earlier calls; called only where there is too little memory otherwise.
    """
    last = static_capacity(limit) if static else limit
    first = last if static else first_capacity(longest, limit)
    needs = {
        capacity: {name: cache_bytes(m, rows, capacity, static) for name, m in models.items()}
        for capacity in (first, last)
    }

    def on(device: str, capacity: int) -> dict[str, int]:
        return {name: need[device] + HEADROOM for name, need in needs[capacity].items() if device in need}

    devices = sorted({device for need in needs[first].values() for device in need})
    facts = device_facts(devices)
    if any(sum(on(fact.name, first).values()) > fact.free for fact in facts if fact.total):
        release()
        facts = device_facts(devices)
    for fact in (fact for fact in facts if fact.total):
        for capacity, available in ((last, fact.total), (first, fact.free)):
            stages = on(fact.name, capacity)
            if (need := sum(stages.values())) <= available:
                continue
            if fact.name == "cpu" and available == fact.free < fact.total:
                warnings.warn(
                    f"the stages need {gib(need)} GiB of memory and {gib(available)} are free: unless other programs give some "
                    "back, this may be very slow, or the system may end the process",
                    RuntimeWarning,
                    stacklevel=user_stacklevel(),
                )
                continue
            each = ", ".join(f"{name} {gib(size)}" for name, size in stages.items())
            raise DoesNotFit(
                f"the stages need {gib(need)} GiB on {fact.name} for {rows} x {capacity} positions ({each}), which has {gib(available)} for "
                f"them of {gib(fact.total)}: lower max_new_tokens or the batch; a smaller dtype (dtype='bfloat16'); another device for a draft "
                "(device={'draft 0': 'cuda:1'}), or fewer drafts"
            )


def check_rope(target: PreTrainedModel, positions: int) -> None:
    """Raise ``UnsupportedInput`` where the RoPE of a text, which may use so many positions with its last step's padding, may depend on its length."""
    limit = rope_changes_at(target)
    if limit is not None and positions > limit:
        raise UnsupportedInput(
            "max_new_tokens",
            f"max_new_tokens: a text of up to {positions - WIDTH} tokens, prompt included, is too long: beyond {limit - WIDTH} tokens the "
            f"target's RoPE ({rope_type(target)}) may depend on the length of each forward; ask for fewer tokens, or call transformers' generate()",
        )
