"""One memory estimate: what the stages of a chain need on each device, compared with the memory of the device.

The rule: weights and caches, exactly; an upper bound of the activations of one forward; :data:`HEADROOM` per stage.
"""

from __future__ import annotations

import copy
import errno
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.checks.devices import DeviceFacts, device_facts
from pipespec.config import WIDTH
from pipespec.engine.inputs import first_capacity, prefill_chunk, static_capacity
from pipespec.errors import DoesNotFit, user_stacklevel
from pipespec.models.devices import LayerDevices, local_kv_heads, offloaded_modules
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import file_in_blocks, is_out_of_memory, load_config, readable, stored_bytes, stored_dtype
from pipespec.models.properties import compute_dtype, quantisation, text_config, weight_bytes

HEADROOM = 256 << 20
"""Bytes for each stage beside its weights, cache and activations: work spaces, the memory pool of captured graphs. Assumed, not measured. A worker
process on a GPU counts it twice, for its CUDA context."""


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


class Share(NamedTuple):
    """What one device has of a stage: bytes of weights that are not there yet, and the number of layers with keys and values."""

    device: str
    weights: int
    layers: int


class StageFacts(NamedTuple):
    """What the memory estimate needs of a stage: its model, on the meta device where it is not loaded, and its devices, that of its inputs first."""

    name: str
    model: PreTrainedModel
    shares: tuple[Share, ...]

    @property
    def weights(self) -> int:
        """Bytes of its parameters and buffers that are to be loaded."""
        return sum(share.weights for share in self.shares)

    @classmethod
    def of_model(cls, name: str, model: PreTrainedModel) -> StageFacts:
        """Of a model that is loaded."""
        at = LayerDevices.of(model)
        layers = at.shares()
        return cls(name, model, tuple(Share(str(device), 0, layers[device]) for device in at.devices))

    @classmethod
    def of_path(
        cls, name: str, path: str | Path, dtype: torch.dtype | str = "auto", *, trust_remote_code: bool = False
    ) -> StageFacts:
        """Of a model that is not loaded, on the CPU: weights counted on the meta device, quantised ones as the headers of their safetensors say.

        Raises:
            ValueError: a dtype that torch does not have, or files that hold no model.
            Exception: those of :func:`pipespec.models.loading.load_config`.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        wanted = _loaded_dtype(dtype, config, path)
        with readable(path), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=wanted, trust_remote_code=trust_remote_code
            )
        model.tie_weights()  # transformers 5.0 ties in from_pretrained only
        if (file := file_in_blocks(path)) is not None:
            stored = file.nbytes
        else:
            stored = 0 if quantisation(config) is None else stored_bytes(path)
        layers = getattr(text_config(config), "num_hidden_layers", 0)
        return cls(name, model, (Share("cpu", stored or weight_bytes(model), layers),))


def _loaded_dtype(requested: torch.dtype | str, config: Any, path: str | Path) -> torch.dtype:
    """The dtype by the rule of ``from_pretrained``: the requested one, else the configuration's, else that of the first float stored."""
    found = requested if isinstance(requested, torch.dtype) else getattr(torch, requested, None)
    if requested == "auto":
        found = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None) or stored_dtype(path)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={requested!r} is not a dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'")
    return found


class StageNeed(NamedTuple):
    """Bytes that a stage takes on one device. Weights that are there already count 0."""

    name: str
    device: str
    weights: int
    caches: int
    activations: int = 0
    headroom: int = 0

    @property
    def sum(self) -> int:
        return self.weights + self.caches + self.activations + self.headroom


class Estimate(NamedTuple):
    """What a chain needs for ``rows`` texts of ``capacity`` positions."""

    needs: tuple[StageNeed, ...]
    rows: int
    capacity: int

    def on(self, device: str) -> int:
        """Bytes to be allocated on ``device``."""
        return sum(need.sum for need in self.needs if need.device == device)

    def check(self, facts: Sequence[DeviceFacts]) -> None:
        """Compare with the memory of the devices: on a GPU, the free memory.

        On a CPU other programs may release memory: a need above the total is refused, a need above the free memory is a ``RuntimeWarning``.

        Raises:
            DoesNotFit: with the numbers, where a device does not have enough.
        """
        for fact in (fact for fact in facts if fact.total):
            need, on_cpu = self.on(fact.name), fact.name == "cpu"
            available = fact.total if on_cpu else fact.free
            if need > available:
                from pipespec.process.table import aligned

                rows: list[tuple[str, ...]] = [("", "on", *StageNeed._fields[2:], "sum")]
                rows += [(n.name, n.device, *map(_gib, (*n[2:], n.sum))) for n in self.needs]
                sums = [
                    f"{f.name}: {_gib(self.on(f.name))} GiB needed, {_gib(f.free)} free of {_gib(f.total)}"
                    for f in facts
                ]
                raise DoesNotFit(
                    f"the stages need {_gib(need)} GiB on {fact.name} for {self.rows} x {self.capacity} positions, which has {_gib(available)} "
                    "for them (GiB):\n"
                    + "\n".join([aligned(rows, left=2), *sums])
                    + "\nWhat helps: lower max_new_tokens or the batch; a smaller dtype "
                    "(dtype='bfloat16') or quantised weights; another device for a draft (device={'draft 0': 'cuda:1'}), or fewer drafts"
                )
            if need > fact.free:
                warnings.warn(
                    f"the stages need {_gib(need)} GiB of memory and {_gib(fact.free)} are free: unless other programs give some "
                    "back, this may be very slow, or the system may end the process",
                    RuntimeWarning,
                    stacklevel=user_stacklevel(),
                )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.{2 if size < 100 << 30 else 0}f}"


def estimate(
    stages: Sequence[StageFacts], rows: int, capacity: int, *, longest: int | None = None, shares_weights: bool = False
) -> Estimate:
    """Bytes that a chain, drafts first, needs on each device for ``rows`` caches of ``capacity`` positions, by the rule of this module.

    ``longest``: tokens of the longest prompt; None: any.
    ``shares_weights``: drafts run in processes of their own. The weights of a draft on a GPU then exist three times: in the caller's process, in the
    draft's, and in shared memory of the host.
    """
    needs = []
    for stage in stages:
        # All stages read prompts in the parts of the target.
        chunk = prefill_chunk(rows, stages[-1].shares[0].device)
        tokens = min(max(min(chunk, longest or chunk), WIDTH), capacity)
        model, is_copied = stage.model, shares_weights and stage.shares[0].device != "cpu" and stage.name != "target"
        layout, dtype = CacheLayout.of(model.config, local_kv_heads(model)), compute_dtype(model)
        # Offloaded weights come to the device that computes, a module at a time.
        staged = (sum(p.nbytes for p in part.parameters()) for part in offloaded_modules(model).values())
        held = _activations(text_config(model.config), layout, dtype.itemsize, rows, capacity, tokens)
        held += max(staged, default=0)
        for device, weights, layers in stage.shares:
            caches, times = layout.bytes_for(rows, capacity, dtype, layers), 1 + is_copied
            needs.append(StageNeed(stage.name, device, times * weights, caches, held, times * HEADROOM))
        if is_copied:
            needs.append(StageNeed(f"{stage.name} (shared)", "cpu", stage.weights, 0))
    return Estimate(tuple(needs), rows, capacity)


def _activations(config: Any, layout: CacheLayout, size: int, rows: int, capacity: int, tokens: int) -> int:
    """Bytes that one forward of ``tokens`` per row in the prefill, or of a step, holds at a time, at most, with values of ``size`` bytes.

    Per token: 6 hidden states, queries, keys and values twice, 3 intermediate states. Per row: an additive mask for each window, keys and values
    repeated for all heads, with eager attention the scores twice, and logits of a step's widest columns in the model's dtype and in float32.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    if getattr(config, "kv_lora_rank", None):  # made from the latents
        head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    values = tokens * (6 * hidden + 4 * heads * head_dim + 3 * wide)
    values += len(set(layout.windows)) * tokens * capacity + 2 * heads * head_dim * capacity
    if layout.states is not None:
        # Inputs and outputs of the convolution, and queries, keys and values of the chunks, in float32.
        values += 12 * tokens * layout.states.channels
    if getattr(config, "_attn_implementation", None) == "eager":
        values += 2 * heads * tokens * capacity
    return int(rows * (values * size + min(WIDTH, capacity) * config.vocab_size * (size + 4)))


def check_memory(
    models: Mapping[str, PreTrainedModel],
    *,
    rows: int,
    longest: int,
    limit: int,
    graphs: bool = False,
    copied: bool = False,
    distributions: Mapping[str, int] | None = None,
    reusable_bytes: Callable[[], Mapping[str, int]] = dict,
    release_unused: Callable[[], None] = lambda: None,
) -> None:
    """Check the memory for one call of ``rows`` texts on loaded models.

    Caches that grow need their first capacity free now, and their last one must fit the device at all. Static caches need their last capacity now.

    Args:
        models: those that will hold caches, by the names of their stages, the target last.
        longest: tokens of the longest prompt.
        limit: positions that a row may come to use.
        graphs: whether the caches are static.
        copied: whether the caller gets a copy of the target's keys and values.
        distributions: bytes per device for what the draft tokens are drawn from.
        reusable_bytes: bytes per device that the call takes over from earlier ones.
        release_unused: frees what the call does not take over; called only where there is too little memory otherwise.

    Raises:
        DoesNotFit: with the numbers.
    """
    distributions = distributions or {}
    stages = [StageFacts.of_model(name, model) for name, model in models.items()]
    devices = list(dict.fromkeys([*(share.device for stage in stages for share in stage.shares), *distributions]))

    def available() -> list[DeviceFacts]:
        reused = reusable_bytes()
        return [f._replace(free=min(f.total, f.free + reused.get(f.name, 0))) for f in device_facts(devices)]

    def needed(capacity: int) -> Estimate:
        found = estimate(stages, rows, capacity, longest=longest)
        more = [StageNeed("distributions", device, 0, size) for device, size in distributions.items()]
        for target in stages[-1:] if copied else ():  # none where the layers are on other ranks
            needs = estimate([target], rows, min(capacity, limit)).needs
            more += [StageNeed("its copy", need.device, 0, need.caches) for need in needs]
        return found._replace(needs=(*found.needs, *more))

    last = needed(static_capacity(limit) if graphs else limit)
    facts = available()
    last.check([f._replace(free=f.total) for f in facts])
    first = last if graphs else needed(first_capacity(longest, limit))
    if any(first.on(f.name) > f.free for f in facts if f.total):
        release_unused()
        facts = available()
    first.check(facts)
