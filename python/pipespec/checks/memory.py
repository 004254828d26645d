"""The memory of a call: whether its caches fit in addition to what is there, checked before they are allocated, and what helps where they do not."""

from __future__ import annotations

import errno
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from transformers import PreTrainedModel

from pipespec.checks.devices import device_facts, gib
from pipespec.engine.inputs import first_capacity, static_capacity
from pipespec.errors import DoesNotFit, user_stacklevel
from pipespec.models.devices import LayerDevices, local_kv_heads
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import is_out_of_memory
from pipespec.models.properties import compute_dtype, kv_dtype

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


def cache_bytes(model: PreTrainedModel, rows: int, capacity: int) -> dict[str, int]:
    """Bytes of the caches of a model on each device, for ``rows`` texts of ``capacity`` positions."""
    layout, dtype = CacheLayout.of(model.config, local_kv_heads(model)), compute_dtype(model)
    shares = LayerDevices.of(model).shares()
    return {
        str(device): layout.bytes_for(rows, capacity, kv_dtype(model.config, dtype, device), layers)
        for device, layers in shares.items()
    }


def check_memory(
    models: Mapping[str, PreTrainedModel],
    *,
    rows: int,
    longest: int,
    limit: int,
    is_static: bool = False,
    release: Callable[[], None] = lambda: None,
) -> None:
    """Check that the caches of a call fit: the bytes of their keys and values, and :data:`HEADROOM` per stage.

    Caches that grow need their first capacity free now, and their last one must fit the device at all. Static caches need their last capacity now. On a
    CPU other programs may release memory: what is not free is a ``RuntimeWarning`` there.

    Raises ``DoesNotFit``, with the numbers.

    Args:
        models: those that will hold caches, by the names of their stages.
        rows: texts, whose longest prompt has ``longest`` tokens, and which may come to use ``limit`` positions.
        release: frees the caches of earlier calls; called only where there is too little memory otherwise.
    """
    last = static_capacity(limit) if is_static else limit
    first = last if is_static else first_capacity(longest, limit)
    needs = {
        capacity: {name: cache_bytes(m, rows, capacity) for name, m in models.items()} for capacity in (first, last)
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
