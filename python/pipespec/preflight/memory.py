"""Memory: the need of a chain's stages on each device, and a comparison with the memory of the device.

The rule: weights, exactly; caches, exactly (:meth:`pipespec.models.layout.CacheLayout.bytes_for`); an upper bound of the activations of one
forward; :data:`HEADROOM` per stage. The packed copies of the native form stand beside the sum, because no stage depends on one: it is made only where
it takes at most half of the free memory, see :class:`pipespec.engine.native.NativeForm`.
"""

from __future__ import annotations

import errno
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.stage import PREFILL_CHUNK, first_capacity, static_capacity
from pipespec.errors import DoesNotFit
from pipespec.preflight.devices import DeviceFacts, device_facts
from pipespec.preflight.stages import Share, StageFacts
from pipespec.process.table import aligned
from pipespec.process.warnings import user_stacklevel

_GIB = 1 << 30

HEADROOM = 256 << 20
"""Bytes set aside for each stage beside its weights, cache and activations: work spaces, the memory pool of captured graphs.

Fixed: it grows neither with the model nor with the batch. Assumed, not measured. A worker process on a GPU counts it twice, for its CUDA
context.
"""


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Add to an error for lack of memory what helps. The check before a call sees neither limits of a process nor what others take meanwhile."""
    try:
        yield
    except BaseException as error:
        if (
            isinstance(error, (MemoryError, torch.OutOfMemoryError))
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))  # of torch on a CPU
        ):
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
            is_limited = limit != resource.RLIM_INFINITY
            limited = f", or raise this process's limit of {_gib(limit)} GiB (ulimit -v)" if is_limited else ""
            error.add_note(f"There was not enough memory for this call: lower max_new_tokens or the batch{limited}")
        raise


@dataclass(frozen=True)
class StageNeed:
    """Bytes that a stage takes on one device.

    Attributes:
        name: of the stage.
        device: where.
        weights: bytes to be allocated for weights; 0 where they are there already.
        caches: bytes of keys and values, or of the distributions of draft tokens.
        activations: bytes that one forward holds at a time, at most.
        headroom: see :data:`HEADROOM`.
        dtype: of the stage.
        loaded: bytes of weights that are there already.
        packed: bytes of a packed copy of the weights, at most, not in the sum.
    """

    name: str
    device: str
    weights: int
    caches: int
    activations: int
    headroom: int
    dtype: torch.dtype
    loaded: int = 0
    packed: int = 0

    @property
    def sum(self) -> int:
        """Bytes to be allocated."""
        return self.weights + self.caches + self.activations + self.headroom


@dataclass(frozen=True)
class Estimate:
    """What a chain needs for ``rows`` texts of ``capacity`` positions."""

    needs: tuple[StageNeed, ...]
    rows: int
    capacity: int

    def on(self, device: str) -> int:
        """Bytes to be allocated on ``device``."""
        return sum(need.sum for need in self.needs if need.device == device)

    def table(self, facts: Sequence[DeviceFacts]) -> str:
        """The numbers in GiB: a line per stage and device, then a line per device."""
        rows: list[tuple[str, ...]] = [("", "on", "weights", "caches", "activations", "headroom", "sum", "packed copy")]
        for n in self.needs:
            weights = _gib(n.weights) if n.weights or not n.loaded else "loaded"
            caches, activations, headroom, total = map(_gib, (n.caches, n.activations, n.headroom, n.sum))
            packed = _gib(n.packed) if n.packed else "-"
            rows.append((n.name, n.device, weights, caches, activations, headroom, total, packed))
        lines = [aligned(rows, left=2)]
        for fact in facts:
            needed, copied = _gib(self.on(fact.name)), sum(n.packed for n in self.needs if n.device == fact.name)
            copies = f" and up to {_gib(copied)} for packed copies, where there is room" if copied else ""
            lines.append(f"{fact.name}: {needed} GiB needed{copies}, {_gib(fact.free)} free of {_gib(fact.total)}")
        return "\n".join(lines)

    def check(self, facts: Sequence[DeviceFacts]) -> None:
        """Compare with the memory of the devices.

        On a GPU the free memory counts. On a CPU other programs may release memory: a need above the total is refused, a need above the free memory
        is a ``RuntimeWarning``.

        Raises:
            DoesNotFit: with the numbers, where a device does not have enough.
        """
        for fact in facts:
            need = self.on(fact.name)
            if fact.total == 0:
                continue
            on_cpu = fact.name == "cpu"
            loaded = sum(n.loaded for n in self.needs if n.device == fact.name)
            available = fact.total - loaded if on_cpu else fact.free
            if need > available:
                one, many = f"a text of {self.capacity} positions", f"{self.rows} x {self.capacity} positions"
                raise DoesNotFit(
                    f"the stages need {_gib(need)} GiB on {'this machine' if on_cpu else fact.name} for "
                    f"{many if self.rows > 1 else one}, which has {_gib(available)} for them (GiB):\n"
                    f"{self.table(facts)}\n{self._advice(fact.name)}"
                )
            if need > fact.free:
                warnings.warn(
                    f"the stages need {_gib(need)} GiB of memory and {_gib(fact.free)} are free: unless other programs give some "
                    "back, this may be very slow, or the system may end the process",
                    RuntimeWarning,
                    stacklevel=user_stacklevel(),
                )

    def _advice(self, device: str) -> str:
        here = [n for n in self.needs if n.device == device]
        advice = []
        if sum(n.caches + n.activations for n in here) > sum(n.weights for n in here):
            advice.append("lower max_new_tokens or the batch")
        elif any(n.dtype.itemsize > 2 for n in here):
            advice.append("a smaller dtype (dtype='bfloat16'), or quantised weights")
        else:
            advice.append("quantised weights")
        if any(n.name != "target" for n in here):
            advice.append("another device for a draft (device={'draft 0': 'cuda:1'}), or fewer drafts")
        return "What helps: " + "; ".join(advice)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


def estimate(stages: Sequence[StageFacts], rows: int, capacity: int, *, schedule: str = "lockstep") -> Estimate:
    """Bytes that a chain needs on each device, by the rule of this module.

    A stage that is split over devices has a need on each. With ``schedule="workers"`` the weights of a draft on a GPU exist three times: in the caller's process, in the worker's, and in shared
    memory of the host.

    Args:
        stages: drafts first, target last.
        rows: texts in the batch.
        capacity: positions of each cache.
        schedule: how the stages run.
    """
    needs = []
    for stage in stages:
        shared = schedule == "workers" and stage.device != "cpu" and stage.name != "target"
        activations = _activations(stage, rows, capacity) + stage.staged
        for share in stage.on:
            weights, headroom = 0 if stage.loaded else share.weights, HEADROOM
            caches = cache_bytes(stage, share, rows, capacity)
            if shared:
                weights, headroom = weights + stage.weights, 2 * HEADROOM
            loaded = share.weights if stage.loaded else 0
            packed = stage.packed if share.device == "cpu" and not stage.shares else 0
            needs.append(
                StageNeed(stage.name, share.device, weights, caches, activations, headroom, stage.dtype, loaded, packed)
            )
        if shared:
            needs.append(StageNeed(f"{stage.name} (shared)", "cpu", stage.weights, 0, 0, 0, stage.dtype))
    return Estimate(tuple(needs), rows, capacity)


def cache_bytes(stage: StageFacts, share: Share, rows: int, capacity: int) -> int:
    """Bytes of the keys and values, and the states, of a stage's layers on one device."""
    return stage.layout.bytes_for(rows, capacity, stage.dtype, share.layers)


def _activations(stage: StageFacts, rows: int, capacity: int) -> int:
    """Bytes that one forward of a prefill's chunk or of a step holds at a time, at most.

    Per token: 6 hidden states, queries and keys and values twice, 3 intermediate states. Per row: an additive mask for each window, keys and
    values repeated for all heads (with latent attention, made from the latents), with eager attention the scores twice, and logits of a step's widest columns in the model's dtype and in float32.
    """
    config, tokens = stage.config, min(PREFILL_CHUNK, capacity)
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    values = tokens * (6 * hidden + 2 * (heads + kv_heads) * head_dim + 3 * intermediate)
    if getattr(config, "kv_lora_rank", None):
        head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    values += len(set(stage.layout.windows)) * tokens * capacity + 2 * heads * head_dim * capacity
    states = stage.layout.states
    if states is not None:
        # Inputs and outputs of the convolution, and queries, keys and values of the chunks, in float32.
        values += 12 * tokens * states.channels
    if getattr(config, "_attn_implementation", None) == "eager":
        values += 2 * heads * tokens * capacity
    size = stage.dtype.itemsize
    return int(rows * (values * size + min(WIDTH, capacity) * config.vocab_size * (size + 4)))


def check_memory(
    models: Mapping[str, PreTrainedModel],
    rows: int,
    longest: int,
    most: int,
    *,
    graphs: bool = False,
    copied: bool = False,
    distributions: Mapping[str, int] | None = None,
    in_targets_cache: Sequence[str] = (),
    reusable_bytes: Callable[[], Mapping[str, int]] = dict,
    release_unused: Callable[[], None] = lambda: None,
) -> None:
    """Check the memory for one call on loaded models.

    Caches that grow need their first capacity free now, and their last one must fit the device at all. Static caches do not grow: they need
    their last capacity now.

    Args:
        models: those that will hold caches, by the names of their stages, the target last.
        rows: texts in the batch.
        longest: tokens of the longest prompt.
        most: positions that a row may come to use.
        graphs: whether the caches are static.
        copied: whether the caller gets a copy of the target's keys and values.
        distributions: bytes per device for what the draft tokens are drawn from.
        in_targets_cache: names of the drafts whose keys and values lie in the target's cache.
        reusable_bytes: bytes per device that the call takes over from earlier ones.
        release_unused: frees what the call does not take over; called only where there is too little memory otherwise.

    Raises:
        DoesNotFit: with the numbers.
    """
    stages = [StageFacts.of_call(name, model, has_cache=name not in in_targets_cache) for name, model in models.items()]
    devices = list(dict.fromkeys([*(share.device for stage in stages for share in stage.on), *(distributions or {})]))

    def available() -> list[DeviceFacts]:
        reused = reusable_bytes()
        return [replace(f, free=min(f.total, f.free + reused.get(f.name, 0))) for f in device_facts(devices)]

    def needed(capacity: int) -> Estimate:
        found = estimate(stages, rows, capacity)
        kept = (distributions or {}).items()
        drawn = tuple(StageNeed("distributions", device, 0, size, 0, 0, torch.float32) for device, size in kept)
        found = replace(found, needs=(*found.needs, *drawn))
        if not copied:
            return found
        target = stages[-1]
        copies = tuple(
            StageNeed("its copy", s.device, 0, cache_bytes(target, s, rows, min(capacity, most)), 0, 0, target.dtype)
            for s in target.on
        )
        return replace(found, needs=(*found.needs, *copies))

    last = needed(static_capacity(most) if graphs else most)
    facts = available()
    last.check([replace(f, free=f.total) for f in facts])
    first = last if graphs else needed(first_capacity(longest, most))
    if any(first.on(f.name) > f.free for f in facts if f.total):
        release_unused()
        facts = available()
    first.check(facts)
