"""Where the stages of a chain lie, whether they fit there, and what cannot lie or run so: asked before any weight is read."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.angles import depend_on_length
from pipespec.cache import RowCache
from pipespec.compat import compute_dtype, text_config
from pipespec.loading import DoesNotFit, load_config
from pipespec.progress import level_of_caller
from pipespec.stage import FIRST_ROOM, PREFILL_CHUNK, WIDTH, first_capacity, fixed_capacity, stage_names
from pipespec_kernels.env import host_memory

Device = torch.device | str
Devices = Device | Mapping[str, Device | None] | Sequence[Device | None] | None
"""What ``device=`` may be: one for all, ``"auto"``, one per stage (drafts first, target last), or by the stages' names."""

AUTO = "auto"

_GIB = 1 << 30

GRAPH_ALLOWANCE = 256 << 20
"""Bytes set aside for the pools and work spaces of one stage's captured graphs. Assumed, not measured."""

PROCESS_ALLOWANCE = 512 << 20
"""Bytes set aside on a GPU for what CUDA itself takes there in another process. Assumed, not measured."""


# ---- what there is


@dataclass(frozen=True)
class DeviceFacts:
    """A place for stages.

    ``name``: ``"cpu"``, or ``"cuda:0"`` and so on; ``total``, ``free``: bytes; ``peers``: GPUs whose memory it can reach directly.
    """

    name: str
    total: int
    free: int
    peers: tuple[str, ...] = ()


def device_facts(names: Sequence[str] | None = None) -> list[DeviceFacts]:
    """The CPU and the GPUs that torch can see; or those of ``names``.

    To ask a GPU for its free memory makes a CUDA context there, which takes some of it. What torch has reserved there and does not use is free.
    """
    found = []
    if names is None or "cpu" in names:
        found.append(DeviceFacts("cpu", *host_memory()))
    count = torch.cuda.device_count()
    for i in range(count):
        if names is None or f"cuda:{i}" in names:
            free, total = torch.cuda.mem_get_info(i)
            free += torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i)
            peers = tuple(f"cuda:{j}" for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j))
            found.append(DeviceFacts(f"cuda:{i}", total, free, peers))
    return found


# ---- what a stage needs


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage before it is loaded.

    ``config``: of its decoder; ``weights``: bytes of its parameters and buffers; ``loaded``: whether they lie on ``device`` already;
    ``quantised``: how, or None.
    """

    name: str
    config: Any
    dtype: torch.dtype
    weights: int
    device: str = "cpu"
    loaded: bool = False
    quantised: str | None = None

    @classmethod
    def of_model(cls, name: str, model: PreTrainedModel) -> StageFacts:
        return cls(
            name,
            text_config(model.config),
            compute_dtype(model),
            weight_bytes(model),
            str(model.device),
            True,
            quantisation(model),
        )

    @classmethod
    def of_path(
        cls, name: str, path: str | Path, dtype: torch.dtype | str = "auto", *, trust_remote_code: bool = False
    ) -> StageFacts:
        """From its config.json; the weights are counted on the meta device, of quantised ones the stored bytes in the safetensors' headers.

        Raises as :func:`pipespec.loading.load_config`; ``ValueError`` for a dtype that does not exist.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        quantised = quantisation(config)
        wanted = _dtype(dtype, config, path)
        stored = _stored(path) if quantised is not None else []
        weights = sum(size for _, size in stored)
        if not stored:
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), dtype=wanted, trust_remote_code=trust_remote_code
                )
            skeleton.tie_weights()  # 5.0 leaves that to the loading
            weights = weight_bytes(skeleton)
        return cls(name, text_config(config), wanted, weights, quantised=quantised)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; what is tied counts once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _stored(path: str | Path) -> list[tuple[str, int]]:
    """dtype and bytes of each tensor in the safetensors of a folder, from their headers; empty for a hub name."""
    folder, found = Path(path), []
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        else:
            files = [file for file in [folder / "model.safetensors"] if file.is_file()]
        for file in files:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header: dict[str, Any] = json.loads(opened.read(min(size, file.stat().st_size)))
            header.pop("__metadata__", None)
            for tensor in header.values():
                begin, end = tensor["data_offsets"]
                found.append((str(tensor["dtype"]), int(end) - int(begin)))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the headers of its safetensors cannot be read: {error}") from error
    return found


_STORED_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _dtype(wanted: torch.dtype | str, config: Any, path: str | Path) -> torch.dtype:
    """What a model computes in, by the rule of ``from_pretrained``: asked for, else the configuration's, else as stored."""
    if isinstance(wanted, str) and wanted != AUTO:
        found = getattr(torch, wanted, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype={wanted!r} is no dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'")
        return found
    if isinstance(wanted, torch.dtype):
        return wanted
    given = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(given, torch.dtype):
        return given
    return next((_STORED_FLOATS[name] for name, _ in _stored(path) if name in _STORED_FLOATS), torch.float32)


@dataclass(frozen=True)
class StageNeed:
    """Bytes that a stage takes on ``device``, with ``weights`` (0: they lie there already and are in ``loaded``) and caches."""

    name: str
    device: str
    weights: int
    caches: int
    rest: int
    dtype: torch.dtype
    loaded: int = 0

    @property
    def sum(self) -> int:
        return self.weights + self.caches + self.rest


@dataclass(frozen=True)
class Estimate:
    """What a chain needs for ``rows`` texts of ``capacity`` positions."""

    needs: tuple[StageNeed, ...]
    rows: int
    capacity: int

    def on(self, device: str) -> int:
        """Bytes beyond what is there already."""
        return sum(need.sum for need in self.needs if need.device == device)

    def loaded(self, device: str) -> int:
        return sum(need.loaded for need in self.needs if need.device == device)

    def table(self, facts: Sequence[DeviceFacts]) -> str:
        """The numbers, in GiB: a line per stage and place, then a line per device."""
        rows = [("", "on", "weights", "caches", "rest", "sum")]
        for n in self.needs:
            weights = _gib(n.weights) if n.weights or not n.loaded else "loaded"
            rows.append((n.name, n.device, weights, _gib(n.caches), _gib(n.rest), _gib(n.sum)))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        for fact in facts:
            lines.append(
                f"{fact.name}: {_gib(self.on(fact.name))} GiB needed, {_gib(fact.free)} free of {_gib(fact.total)}"
            )
        return "\n".join(lines)

    def check(self, facts: Sequence[DeviceFacts]) -> None:
        """Raises :class:`DoesNotFit`, with the numbers, where a device's memory does not suffice.

        A GPU has what is free. On a CPU others may give memory back: what cannot fit is refused, what is not free now is a ``RuntimeWarning``.
        """
        for fact in facts:
            need = self.on(fact.name)
            if fact.total == 0:  # the system does not tell
                continue
            has = fact.free if fact.name != "cpu" else fact.total - self.loaded(fact.name)
            if need > has:
                what = (
                    f"{self.rows} x {self.capacity} positions"
                    if self.rows > 1
                    else f"a text of {self.capacity} positions"
                )
                whose = "this machine" if fact.name == "cpu" else fact.name
                raise DoesNotFit(
                    f"the stages need {_gib(need)} GiB on {whose} for {what}, which has {_gib(has)} for them (GiB):\n"
                    f"{self.table(facts)}\n{self._advice(fact.name)}"
                )
            if need > fact.free:
                warnings.warn(
                    f"the stages need {_gib(need)} GiB of memory and {_gib(fact.free)} are free: unless others give some back, this "
                    "may be very slow, or ended by the system",
                    RuntimeWarning,
                    stacklevel=level_of_caller(),
                )

    def _advice(self, device: str) -> str:
        here = [n for n in self.needs if n.device == device]
        ways = []
        if sum(n.caches + n.rest for n in here) > sum(n.weights for n in here):
            ways.append("lower max_new_tokens or the batch")
        elif any(n.dtype.itemsize > 2 for n in here):
            ways.append("a smaller dtype (dtype='bfloat16'), or quantised weights")
        else:
            ways.append("quantised weights")
        if any(n.name != "target" for n in here):
            ways.append("another device for a draft (device={'draft 0': 'cuda:1'}), or fewer drafts")
        return "What helps: " + "; ".join(ways)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


def estimate(
    stages: Sequence[StageFacts],
    rows: int,
    capacity: int,
    *,
    schedule: str = "lockstep",
    graphs: bool = False,
) -> Estimate:
    """Bytes that a chain needs on each device.

    Exact are the weights and the caches (``rows x capacity`` positions, see :meth:`RowCache.bytes_for`). *rest* is an upper bound of what one
    forward holds at a time, with q = the prefill's chunk, S = ``capacity``, H hidden and I intermediate size, n and n_kv heads of d, V tokens:
    per token of the chunk 6 H + (2 n + 2 n_kv) d + 3 I values, an additive mask of rows x q x S, keys and values repeated for all heads
    (2 n d S per row), scores of n x q x S per row where attention is ``"eager"``, and logits of ``WIDTH`` columns in the model's dtype and float32.
    ``graphs``: plus ``GRAPH_ALLOWANCE`` for each stage on a GPU. In ``"workers"`` a draft on a GPU exists there twice, in the caller's process
    and in its own, with ``PROCESS_ALLOWANCE``, and once in shared memory on the host.
    """
    needs = []
    for stage in stages:
        on_gpu = stage.device != "cpu"
        weights = 0 if stage.loaded else stage.weights
        rest = _working_set(stage, rows, capacity)
        if on_gpu and graphs:
            rest += GRAPH_ALLOWANCE
        apart = schedule == "workers" and on_gpu and stage.name != "target"
        if apart:
            weights += stage.weights
            rest += PROCESS_ALLOWANCE
        caches = RowCache.bytes_for(stage.config, rows, capacity, stage.dtype)
        loaded = stage.weights if stage.loaded else 0
        needs.append(StageNeed(stage.name, stage.device, weights, caches, rest, stage.dtype, loaded))
        if apart:
            needs.append(StageNeed(f"{stage.name} (shared)", "cpu", stage.weights, 0, 0, stage.dtype))
    return Estimate(tuple(needs), rows, capacity)


_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""What a configuration must say for its model to be estimated."""


def _working_set(stage: StageFacts, rows: int, capacity: int) -> int:
    config = stage.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    size, q = stage.dtype.itemsize, min(PREFILL_CHUNK, capacity)
    values = (
        q * (6 * hidden + 2 * (heads + kv_heads) * dim + 3 * intermediate) + q * capacity + 2 * heads * dim * capacity
    )
    if getattr(config, "_attn_implementation", None) == "eager":
        values += heads * q * capacity * 2
    return int(rows * (values * size + min(WIDTH, capacity) * config.vocab_size * (size + 4)))


def check_memory(
    models: Mapping[str, PreTrainedModel],
    rows: int,
    longest: int,
    most: int,
    *,
    graphs: bool = False,
    copied: bool = False,
    kept: Callable[[], Mapping[str, int]] = dict,
    spare: Callable[[], None] = lambda: None,
) -> None:
    """Raises :class:`DoesNotFit` if a call on loaded models cannot have the memory that its caches and forwards need.

    ``models``: those that will hold caches, by the names of their stages; ``rows`` texts, prompts of ``longest`` tokens, at most ``most``
    positions. Where caches grow, what they begin with must be free, and what they may grow to must fit at all; with ``graphs`` they do not
    grow. ``copied``: whether the target's keys and values are handed to the caller as a copy. ``kept``: bytes per device that the call takes over of what earlier ones have left there. ``spare``: gives back what it does not go
    on with; called where there is too little room otherwise.
    """
    stages = [
        StageFacts(name, text_config(m.config), compute_dtype(m), 0, str(m.device), True) for name, m in models.items()
    ]
    devices = list(dict.fromkeys(stage.device for stage in stages))

    def room() -> list[DeviceFacts]:
        taken_over = kept()
        return [replace(f, free=min(f.total, f.free + taken_over.get(f.name, 0))) for f in device_facts(devices)]

    def needed(capacity: int) -> Estimate:
        found = estimate(stages, rows, capacity, graphs=graphs)
        if not copied:
            return found
        target = stages[-1]
        size = RowCache.bytes_for(target.config, rows, min(capacity, most), target.dtype)
        return replace(found, needs=(*found.needs, StageNeed("its copy", target.device, 0, size, 0, target.dtype)))

    whole = needed(fixed_capacity(most) if graphs else most)
    found = room()
    whole.check([replace(f, free=f.total) for f in found])
    first = whole if graphs else needed(first_capacity(longest, most))
    if any(first.on(f.name) > f.free for f in found if f.total):
        spare()
        found = room()
    first.check(found)


# ---- which stage where


def requested(device: Devices, count: int) -> list[str | None] | str:
    """``device=`` as one name or None per stage (``"cuda"`` becomes the current GPU), or :data:`AUTO`.

    Raises ``ValueError`` for a device that no stage can run on or that is not there, and for one too many or too few; ``TypeError``
    for what is no device.
    """
    names = stage_names(count)
    if isinstance(device, Mapping):
        unknown = [key for key in device if key not in names]
        if unknown:
            raise ValueError(
                f"device: there is no stage {', '.join(map(repr, unknown))}; the stages are {', '.join(names)}"
            )
        each = [device.get(name) for name in names]
    elif isinstance(device, Sequence) and not isinstance(device, str):
        if len(device) != count:
            raise ValueError(f"device: one for all, or one per stage ({count}: {', '.join(names)}), not {len(device)}")
        each = list(device)
    elif device == AUTO:
        return AUTO
    else:
        each = [device] * count
    return [None if d is None else _device(d) for d in each]


def _device(device: Device) -> str:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be 'cpu', 'cuda:0' or the like, not {device!r}")
    if device == AUTO:
        raise ValueError(
            "device='auto' places all stages, not one of several: give it alone, or name a device for each"
        )
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={str(device)!r} is none; use 'cpu', 'cuda', 'cuda:1', or 'auto'") from None
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise ValueError(f"device={str(device)!r}: stages run on cpu or cuda, not on {found.type}")
    count = torch.cuda.device_count()
    if count == 0:
        build = "" if torch.version.cuda else "; this torch is a build for CPUs"
        raise ValueError(f"device={str(device)!r}: torch sees no GPU here{build} (`pipespec doctor` says more)")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise ValueError(f"device={str(device)!r}: torch sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    return f"cuda:{index}"


def check_contradictions(stages: Sequence[StageFacts], devices: Sequence[str | None]) -> None:
    """Raises ``ValueError`` where ``devices`` wants a loaded model elsewhere than where it lies."""
    for stage, device in zip(stages, devices, strict=True):
        if stage.loaded and device is not None and device != stage.device:
            raise ValueError(
                f"{stage.name} was given as a model on {stage.device}, and device={device!r} says otherwise: move it with "
                "model.to(...), leave device out, or give its path"
            )


def choose(
    stages: Sequence[StageFacts],
    facts: Sequence[DeviceFacts],
    capacity: int = FIRST_ROOM,
    **how: Any,
) -> list[str]:
    """The devices for ``device="auto"``; the same for the same facts.

    Without GPUs, the CPU. Otherwise the target goes to the GPU with most free memory; then the drafts, the last one first, each to a GPU where
    it fits: one that has no stage yet, if there is one, rather one that the target's GPU reaches directly, rather one with much free memory,
    rather the first. Models that are loaded stay. Raises :class:`DoesNotFit` for a stage that fits nowhere: none is put on the CPU unasked.
    """
    gpus = [f for f in facts if f.name != "cpu"]
    if not gpus:
        return ["cpu"] * len(stages)
    placed = {stage.name: stage for stage in stages if stage.loaded}

    def left(gpu: DeviceFacts) -> int:
        return gpu.free - estimate(list(placed.values()), 1, capacity, **how).on(gpu.name)

    for stage in reversed(stages):
        if stage.loaded:
            continue
        target = placed.get("target")
        taken = {s.device for s in placed.values()}
        reached = {f.name for f in gpus if target is not None and target.device in f.peers}
        if stage.name == "target":
            ranked = sorted(gpus, key=lambda gpu: -left(gpu))
        else:
            ranked = sorted(gpus, key=lambda gpu: (gpu.name in taken, gpu.name not in reached, -left(gpu)))
        fitting = [
            gpu
            for gpu in ranked
            if estimate([replace(stage, device=gpu.name)], 1, capacity, **how).on(gpu.name) <= left(gpu)
        ]
        if not fitting:
            tried = [*placed.values(), replace(stage, device=ranked[0].name)]
            raise DoesNotFit(
                f"{stage.name} fits on no GPU (GiB):\n{estimate(tried, 1, capacity, **how).table(gpus)}\n"
                "What helps: a smaller dtype (dtype='bfloat16'), quantised weights, fewer drafts, or device= with a place for each stage"
            )
        placed[stage.name] = replace(stage, device=fitting[0].name)
    return [placed[stage.name].device for stage in stages]


def arrange(
    given: Sequence[PreTrainedModel | str | Path],
    *,
    device: Devices = None,
    dtype: torch.dtype | str = "auto",
    schedule: str = "lockstep",
    graphs: bool = False,
    trust_remote_code: bool = False,
    facts: Sequence[DeviceFacts] | None = None,
) -> list[str | None]:
    """Where to load each of ``given`` (None: it lies somewhere already), drafts first, target last; no weight is read.

    ``facts``: of the devices, instead of asking them. Raises :class:`DoesNotFit` if the weights, and caches for one text, do not fit;
    ``ValueError`` for devices that cannot be, and for what cannot run in ``schedule``; and as :func:`pipespec.loading.load_config`.
    """
    wanted = requested(device, len(given))
    stages = []
    for name, model in zip(stage_names(len(given)), given, strict=True):
        if isinstance(model, PreTrainedModel):
            stages.append(StageFacts.of_model(name, model))
        else:
            stages.append(StageFacts.of_path(name, model, dtype, trust_remote_code=trust_remote_code))
    if schedule == "workers":
        for stage in stages[:-1]:
            _check_quantised_draft(stage.name, stage.quantised)
    if isinstance(wanted, list):
        check_contradictions(stages, wanted)
    if all(stage.loaded and not stage.device.startswith("cuda") for stage in stages):
        return [None] * len(stages)
    if any(not hasattr(stage.config, field) for stage in stages for field in _SIZES):
        # No decoder, as check_architecture() will say of the model.
        wanted = [AUTO] * len(stages) if isinstance(wanted, str) else wanted
        return [None if s.loaded else "cpu" if d in (None, AUTO) else d for s, d in zip(stages, wanted, strict=True)]
    longest = [getattr(stage.config, "max_position_embeddings", None) or FIRST_ROOM for stage in stages]
    capacity = min(*longest, FIRST_ROOM) + WIDTH
    how: dict[str, Any] = {"schedule": schedule, "graphs": graphs}
    if isinstance(wanted, str):
        facts = device_facts() if facts is None else facts
        devices = choose(stages, facts, capacity, **how)
    else:
        devices = [d or (s.device if s.loaded else "cpu") for d, s in zip(wanted, stages, strict=True)]
    stages = [replace(stage, device=d) for stage, d in zip(stages, devices, strict=True)]
    needed = estimate(stages, 1, capacity, **how)
    places = list(dict.fromkeys(need.device for need in needed.needs))
    found = device_facts(places) if facts is None else [f for f in facts if f.name in places]
    needed.check(found)
    return [None if stage.loaded else stage.device for stage in stages]


# ---- how models are stored


def quantisation(model: Any) -> str | None:
    """How a model, or one of this configuration, is quantised, in a word or two; None if it is not."""
    config = getattr(model, "config", model)
    settings = getattr(config, "quantization_config", None)
    if settings is not None and not isinstance(settings, dict):
        settings = settings.to_dict() if hasattr(settings, "to_dict") else vars(settings)
    method = getattr(model, "quantization_method", None) or (settings or {}).get("quant_method")
    method = str(getattr(method, "value", method or ""))
    settings = settings or {}
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else settings.get("bits")
    if not method and bits:
        method = "bitsandbytes"  # older files do not name it
    if method:
        return f"{method} {bits}-bit" if isinstance(bits, int) else method
    if getattr(model, "hf_quantizer", None) is not None:
        return type(model.hf_quantizer).__name__
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            # bitsandbytes and torchao pack weights into classes of their own, also without transformers.
            root = type(parameter).__module__.split(".")[0]
            if root in ("bitsandbytes", "torchao"):
                return f"{root} {type(parameter).__name__}"
    return None


def check_placement(models: Sequence[PreTrainedModel]) -> None:
    """Raises ``ValueError`` for a model that lies where, or computes in what, no stage can run. Quantised models can."""
    for name, model in zip(stage_names(len(models)), models, strict=True):
        _check_whole(name, model)
        if model.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {model.device}; stages run on cpu or cuda")
        dtype = compute_dtype(model)
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
        if dtype == torch.float16 and model.device.type == "cpu":
            raise ValueError(
                f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
            )


def _check_whole(name: str, model: PreTrainedModel) -> None:
    """The keys and values of a model lie in one piece of memory, so all of it must lie on one device, and stay there."""
    offloaded: list[str] = []
    devices: dict[torch.device, str] = {}
    sharded = ""
    for at, module in model.named_modules():
        if _offloads(module.__dict__.get("_hf_hook")):
            offloaded.append(at or "all of it")
        for parameter in module._parameters.values():
            if parameter is not None:
                devices.setdefault(parameter.device, at)
                if type(parameter).__name__ == "DTensor":
                    sharded = at
    mapped = getattr(model, "hf_device_map", None) or {}
    kinds = {str(place) for place in mapped.values()}
    if len(kinds) > 1:
        offloaded += [
            at or "all of it" for at, place in mapped.items() if str(place) in ("cpu", "disk") and at not in offloaded
        ]
    if offloaded:
        raise ValueError(
            f"{name} is offloaded by accelerate ({_some(offloaded)}): its weights would travel to the GPU in every step; load it whole "
            "onto one device (device_map={'': 'cuda:0'}), in a smaller dtype or quantised where it does not fit"
        )
    if any(d.type == "meta" for d in devices):
        raise ValueError(f"{name} has weights that are not loaded (on the meta device, or offloaded); load it whole")
    if sharded:
        raise ValueError(
            f"{name} is sharded over processes ({sharded} holds a DTensor); each stage must be whole in one process"
        )
    if len(devices) > 1:
        where = ", ".join(
            f"{device} from {at or 'the top'}" for device, at in sorted(devices.items(), key=lambda x: str(x[0]))
        )
        raise ValueError(
            f"{name} is spread over {where}; the caches of a stage lie on one device, and so must the model (no device_map='auto'): "
            "device_map={'': 'cuda:0'}, in a smaller dtype or quantised where it does not fit"
        )


def _offloads(hook: Any) -> bool:
    """Whether this is a hook of accelerate's that brings weights from elsewhere when the module is called."""
    if hook is None:
        return False
    if any(_offloads(inner) for inner in getattr(hook, "hooks", ())):
        return True
    return bool(getattr(hook, "offload", False)) or type(hook).__name__ == "CpuOffload"


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_quantised_draft(name: str, method: str | None) -> None:
    if method is not None:
        raise ValueError(
            f"{name} is quantised ({method}): a worker's process builds a draft anew around weights in shared memory, and packed ones "
            "cannot be put there; use schedule='lockstep', or a draft that is not quantised (the target may be)"
        )


def check_shareable(models: Sequence[PreTrainedModel]) -> None:
    """Raises ``ValueError`` where a draft cannot run in a worker's process, which builds its class on weights in shared memory.

    The target stays where it is, so it may be anything.
    """
    for name, model in zip(stage_names(len(models)), models[:-1], strict=False):
        kind = type(model)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise ValueError(
                f"{name}: a worker process cannot import its class {kind.__qualname__}; define it in a module, or use "
                "schedule='lockstep'"
            )
        _check_quantised_draft(name, quantisation(model))
        for at, tensor in (*model.named_parameters(), *model.named_buffers()):
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                raise ValueError(
                    f"{name}: {at} is a {type(tensor).__name__}, which cannot lie in shared memory; use schedule='lockstep'"
                )
        with torch.device("meta"):
            anew = kind(copy.deepcopy(model.config))
        known = _tensor_names(anew)
        own = sorted(_tensor_names(model) - known)
        if own:
            raise ValueError(
                f"{name} has {_some(own)}, which its class {kind.__qualname__} does not make (an adapter, replaced layers?): a worker's "
                "process could not build it; merge what was added into the weights, or use schedule='lockstep'"
            )


def _tensor_names(model: nn.Module) -> set[str]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, _ in named}


# ---- what can be captured


class NotCapturable(RuntimeError):
    """A model's step cannot become a CUDA graph. ``stage``: whose; ``part``: the module, by its name in the model; ``cause``."""

    def __init__(self, stage: str, part: str, cause: str) -> None:
        super().__init__(f"{stage} cannot be captured in a CUDA graph: {part}: {cause}")
        self.stage, self.part, self.cause = stage, part, cause


def check_capturable(models: Sequence[PreTrainedModel]) -> None:
    """Raises :class:`NotCapturable` where it can be seen, without a GPU, that a model's step cannot be captured.

    What shows only in the attempt is for whoever captures.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        for part, cause in (*_never_fixed(model), *_never_captured(model)):
            raise NotCapturable(name, part, cause)


def check_streams(models: Sequence[PreTrainedModel]) -> None:
    """Whether these models can run with ``schedule="streams"`` or ``graphs=True``.

    On GPUs each step is captured, which is asked of :func:`check_capturable`; on the CPU the same steps run uncaptured, so only what attention
    by lengths and fixed widths cannot do is refused. GPUs need not reach each other's memory: what the stages say to each other then lies in
    pinned memory of the host.

    Raises ``ValueError`` for stages on GPUs and on the CPU at once, :class:`NotCapturable` as said.
    """
    names = stage_names(len(models))
    on_cpu = [name for name, model in zip(names, models, strict=True) if model.device.type == "cpu"]
    if on_cpu and len(on_cpu) < len(models):
        raise ValueError(
            f"schedule='streams' and graphs=True want all stages on GPUs, and {', '.join(on_cpu)} "
            f"{'lies' if len(on_cpu) == 1 else 'lie'} on the CPU: move it there (device=...), or use schedule='workers'"
        )
    if not on_cpu:
        check_capturable(models)
    for name, model in zip(names, models, strict=True):
        for part, cause in _never_fixed(model):
            raise NotCapturable(name, part, cause)


def _never_fixed(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Parts that cannot work with a fixed cache and columns of padding, captured or not, and why."""
    config = text_config(model.config)
    first = next((at for at, module in model.named_modules() if "Attention" in type(module).__name__), "its attention")
    if not model._can_set_attn_implementation():
        yield (
            first,
            f"{type(model).__name__} calls its attention by itself, not through transformers' AttentionInterface",
        )
    elif getattr(config, "attn_logit_softcapping", None):
        yield first, "it caps its scores (attn_logit_softcapping), which attention by lengths does not"
    for at, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            yield at, "it has attention sinks, which attention by lengths does not know"
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if depend_on_length(kind):
                yield (
                    at,
                    f"rotary angles of type {kind!r} depend on the longest position of a forward, padding included, and are chosen anew in each",
                )


def _never_captured(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    if compute_dtype(model) == torch.float64:
        yield "its dtype", "it computes in float64, for which there are no GPU kernels here; use float32"
    devices: dict[torch.device, str] = {}
    for at, module in model.named_modules():
        if _offloads(module.__dict__.get("_hf_hook")):
            yield at or type(model).__name__, "accelerate brings its weights from elsewhere in each call (offloading)"
        for parameter in module._parameters.values():
            if parameter is not None:
                devices.setdefault(parameter.device, at)
    if len(devices) > 1:
        yield list(devices.values())[1], "the model is split over several devices (device_map), and a graph runs on one"
    method = quantisation(model)
    if method is None:
        return
    part = next((at for at, module in model.named_modules() if at and _packs(module)), "its linear layers")
    if method.startswith("bitsandbytes") and ("8-bit" in method or "Int8" in method):
        yield (
            part,
            f"quantised with {method}, whose product picks out columns with outliers, and the host waits for their number",
        )
    elif not method.startswith("bitsandbytes") and not getattr(
        getattr(model, "hf_quantizer", None), "is_compileable", False
    ):
        yield (
            part,
            f"quantised with {method}, which transformers does not run under CUDA graphs either: a kernel outside of the captured stream "
            "would be lost without an error",
        )


def _packs(module: nn.Module) -> bool:
    """Whether a module holds a weight in another form than torch's own layers."""
    own = (*module._parameters.values(), *module._buffers.values())
    names = {"qweight", "weight_packed", "weight_scale", "SCB"} & {*module._parameters, *module._buffers}
    return bool(names) or any(
        t is not None
        and (type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer) or t.dtype in (torch.uint8, torch.int8))
        for t in own
    )
