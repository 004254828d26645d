"""One memory estimate: what the stages of a chain need on each device, compared with the memory of the device.

The rule: weights, exactly; caches, exactly (:meth:`pipespec.models.layout.CacheLayout.bytes_for`); an upper bound of the activations of one
forward; :data:`HEADROOM` per stage.
"""

from __future__ import annotations

import copy
import errno
import functools
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.inputs import PREFILL_CHUNK, first_capacity, static_capacity
from pipespec.errors import DoesNotFit
from pipespec.models.devices import LayerDevices, local_kv_heads, offloaded_modules
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import DAMAGE, is_out_of_memory, load_config, stored_tensors, unusable
from pipespec.models.properties import compute_dtype, quantisation, text_config, weight_bytes
from pipespec.preflight.devices import DeviceFacts, device_facts
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
        is_shortage = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if is_shortage or (isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error)):
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
            is_limited = limit != resource.RLIM_INFINITY
            limited = f", or raise this process's limit of {_gib(limit)} GiB (ulimit -v)" if is_limited else ""
            error.add_note(f"There was not enough memory for this call: lower max_new_tokens or the batch{limited}")
        raise


# ---- what a stage is


@dataclass(frozen=True)
class Share:
    """What one device has of a stage: ``weights`` in bytes that are not there yet, and the number of ``layers``."""

    device: str
    weights: int
    layers: int


@dataclass(frozen=True)
class StageFacts:
    """What the memory estimate needs of a stage.

    Attributes:
        name: of the stage.
        config: of its decoder.
        dtype: of its hidden states, keys and values.
        weights: bytes of its parameters and buffers that are to be loaded; 0 where they are loaded.
        device: where it is, or is to be; of a split stage, where its inputs are.
        loaded: whether its weights are on ``device`` already.
        quantised: the method, or None.
        shares: of a stage that is split over devices; empty for one that is whole.
        staged: bytes that offloaded weights take at a time on the device that computes, at most.
        kv_heads: key/value heads per layer in this process; None: as the configuration says.
        skeleton: the model on the meta device, if it can be split.
    """

    name: str
    config: Any
    dtype: torch.dtype
    weights: int
    device: str = "cpu"
    loaded: bool = False
    quantised: str | None = None
    shares: tuple[Share, ...] = ()
    staged: int = 0
    kv_heads: int | None = None
    skeleton: PreTrainedModel | None = None

    @functools.cached_property
    def layout(self) -> CacheLayout:
        """Of its keys and values in this process."""
        return CacheLayout.of(self.config, self.kv_heads)

    @property
    def on(self) -> tuple[Share, ...]:
        """What each of its devices has."""
        return self.shares or (Share(self.device, self.weights, getattr(self.config, "num_hidden_layers", 0)),)

    @classmethod
    def of_model(cls, name: str, model: PreTrainedModel) -> StageFacts:
        """Of a model that is loaded."""
        at, offloaded = LayerDevices.of(model), offloaded_modules(model)
        on = at.shares()
        shares = tuple(Share(str(d), 0, on[d]) for d in at.devices) if at.is_split else ()
        return cls(
            name,
            text_config(model.config),
            compute_dtype(model),
            0,
            str(at.inputs),
            True,
            shares=shares,
            staged=max((sum(p.nbytes for p in part.parameters()) for part in offloaded.values()), default=0),
            kv_heads=local_kv_heads(model),
        )

    @classmethod
    def of_path(
        cls, name: str, path: str | Path, dtype: torch.dtype | str = "auto", *, trust_remote_code: bool = False
    ) -> StageFacts:
        """Of a model that is not loaded.

        Weights are counted on the meta device. Quantised weights count as the headers of their safetensors list them.

        Args:
            name: of the stage.
            path: a folder, or a hub name.
            dtype: as ``from_pretrained`` takes it.
            trust_remote_code: as ``from_pretrained`` takes it.

        Raises:
            ValueError: a dtype that torch does not have, or files that hold no model.
            Exception: those of :func:`pipespec.models.loading.load_config`.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        quantised, loaded_dtype = quantisation(config), _loaded_dtype(dtype, config, path)
        if quantised is not None and (weights := sum(size for _, size in stored_tensors(path))):
            return cls(name, text_config(config), loaded_dtype, weights, quantised=quantised)
        try:
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), dtype=loaded_dtype, trust_remote_code=trust_remote_code
                )
        except (ValueError, *DAMAGE) as error:
            raise unusable(path, error) from error
        skeleton.tie_weights()  # transformers 5.0 ties in from_pretrained only
        weights = weight_bytes(skeleton)
        return cls(name, text_config(config), loaded_dtype, weights, quantised=quantised, skeleton=skeleton)


def _loaded_dtype(requested: torch.dtype | str, config: Any, path: str | Path) -> torch.dtype:
    """The dtype by the rule of ``from_pretrained``: the requested one, else the configuration's, else that of the first float stored."""
    found = requested if isinstance(requested, torch.dtype) else getattr(torch, requested, None)
    if requested == "auto":
        found = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
        if not isinstance(found, torch.dtype):
            floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            found = next((floats[name] for name, _ in stored_tensors(path) if name in floats), torch.float32)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={requested!r} is not a dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'")
    return found


# ---- the estimate


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
    """

    name: str
    device: str
    weights: int
    caches: int
    activations: int
    headroom: int
    dtype: torch.dtype

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
        rows: list[tuple[str, ...]] = [("", "on", "weights", "caches", "activations", "headroom", "sum")]
        for n in self.needs:
            sizes = (n.weights, n.caches, n.activations, n.headroom, n.sum)
            rows.append((n.name, n.device, *map(_gib, sizes)))
        lines = [aligned(rows, left=2)]
        for fact in facts:
            needed = _gib(self.on(fact.name))
            lines.append(f"{fact.name}: {needed} GiB needed, {_gib(fact.free)} free of {_gib(fact.total)}")
        return "\n".join(lines)

    def check(self, facts: Sequence[DeviceFacts]) -> None:
        """Compare with the memory of the devices.

        On a GPU the free memory counts. On a CPU other programs may release memory: a need above the total is refused, a need above the free memory
        is a ``RuntimeWarning``.

        Raises:
            DoesNotFit: with the numbers, where a device does not have enough.
        """
        for fact in facts:
            need, on_cpu = self.on(fact.name), fact.name == "cpu"
            if fact.total == 0:
                continue
            available = fact.total if on_cpu else fact.free
            if need > available:
                one, many = f"a text of {self.capacity} positions", f"{self.rows} x {self.capacity} positions"
                raise DoesNotFit(
                    f"the stages need {_gib(need)} GiB on {'this machine' if on_cpu else fact.name} for "
                    f"{many if self.rows > 1 else one}, which has {_gib(available)} for them (GiB):\n"
                    f"{self.table(facts)}\nWhat helps: lower max_new_tokens or the batch; a smaller dtype (dtype='bfloat16') or quantised "
                    "weights; another device for a draft (device={'draft 0': 'cuda:1'}), or fewer drafts"
                )
            if need > fact.free:
                warnings.warn(
                    f"the stages need {_gib(need)} GiB of memory and {_gib(fact.free)} are free: unless other programs give some "
                    "back, this may be very slow, or the system may end the process",
                    RuntimeWarning,
                    stacklevel=user_stacklevel(),
                )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


def estimate(stages: Sequence[StageFacts], rows: int, capacity: int, *, shares_weights: bool = False) -> Estimate:
    """Bytes that a chain needs on each device, by the rule of this module. A stage that is split over devices has a need on each.

    Args:
        stages: drafts first, target last.
        rows: texts in the batch.
        capacity: positions of each cache.
        shares_weights: whether drafts run in processes of their own. The weights of a draft on a GPU then exist three times: in the caller's process,
            in the draft's, and in shared memory of the host.
    """
    needs = []
    for stage in stages:
        is_copied = shares_weights and stage.device != "cpu" and stage.name != "target"
        activations = _activations(stage, rows, capacity) + stage.staged
        for share in stage.on:
            weights, headroom = (2 * share.weights, 2 * HEADROOM) if is_copied else (share.weights, HEADROOM)
            caches = cache_bytes(stage, share, rows, capacity)
            needs.append(StageNeed(stage.name, share.device, weights, caches, activations, headroom, stage.dtype))
        if is_copied:
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


@dataclass(frozen=True, kw_only=True)
class CallNeeds:
    """What one call needs memory for.

    Attributes:
        rows: Texts in the batch.
        longest: Tokens of the longest prompt.
        limit: Positions that a row may come to use.
        graphs: Whether the caches are static.
        copied: Whether the caller gets a copy of the target's keys and values.
        distributions: Bytes per device for what the draft tokens are drawn from.
    """

    rows: int
    longest: int
    limit: int
    graphs: bool = False
    copied: bool = False
    distributions: Mapping[str, int] = field(default_factory=dict)


def check_memory(
    models: Mapping[str, PreTrainedModel],
    call: CallNeeds,
    reusable_bytes: Callable[[], Mapping[str, int]] = dict,
    release_unused: Callable[[], None] = lambda: None,
) -> None:
    """Check the memory for one call on loaded models.

    Caches that grow need their first capacity free now, and their last one must fit the device at all. Static caches do not grow: they need
    their last capacity now.

    Args:
        models: those that will hold caches, by the names of their stages, the target last.
        call: what it needs memory for.
        reusable_bytes: bytes per device that the call takes over from earlier ones.
        release_unused: frees what the call does not take over; called only where there is too little memory otherwise.

    Raises:
        DoesNotFit: with the numbers.
    """
    stages = [StageFacts.of_model(name, m) for name, m in models.items()]
    devices = list(dict.fromkeys([*(share.device for stage in stages for share in stage.on), *call.distributions]))

    def available() -> list[DeviceFacts]:
        reused = reusable_bytes()
        return [replace(f, free=min(f.total, f.free + reused.get(f.name, 0))) for f in device_facts(devices)]

    def needed(capacity: int) -> Estimate:
        found = estimate(stages, call.rows, capacity)
        more = [StageNeed("distributions", d, 0, n, 0, 0, torch.float32) for d, n in call.distributions.items()]
        for target in stages[-1:] if call.copied else ():  # none where the layers are on other ranks
            for s in target.on:
                size = cache_bytes(target, s, call.rows, min(capacity, call.limit))
                more.append(StageNeed("its copy", s.device, 0, size, 0, 0, target.dtype))
        return replace(found, needs=(*found.needs, *more))

    last = needed(static_capacity(call.limit) if call.graphs else call.limit)
    facts = available()
    last.check([replace(f, free=f.total) for f in facts])
    first = last if call.graphs else needed(first_capacity(call.longest, call.limit))
    if any(first.on(f.name) > f.free for f in facts if f.total):
        release_unused()
        facts = available()
    first.check(facts)
