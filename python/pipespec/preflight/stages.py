"""Size and dtype of a stage, from a loaded model or from its files before any weight is read."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.models import families
from pipespec.models.devices import LayerDevices, local_kv_heads, offloaded_modules
from pipespec.models.layout import CacheLayout
from pipespec.models.loading import DAMAGE, damaged, load_config, stored_tensors, unusable
from pipespec.models.properties import compute_dtype, quantisation, text_config, weight_bytes
from pipespec.process.signals import pass_on


@dataclass(frozen=True)
class Part:
    """A part of a model that lies on one device: ``name`` of the module, bytes of its ``weights``, whether it is a decoder layer."""

    name: str
    weights: int
    is_layer: bool


@dataclass(frozen=True)
class Share:
    """What one device has of a stage: ``weights`` in bytes, and the number of ``layers``."""

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
        weights: bytes of its parameters and buffers.
        device: where it is, or is to be; of a split stage, where its inputs are.
        loaded: whether its weights are on ``device`` already.
        quantised: the method, or None.
        packed: bytes of the packed copy of the native form on a CPU, at most; 0 where the model's family has none.
        shares: of a stage that is split over devices; empty for one that is whole.
        staged: bytes that offloaded weights take at a time on the device that computes, at most.
        kv_heads: key/value heads per layer in this process; None: as the configuration says.
        parts: in the order of the forward, for a model that can be split; empty for a loaded one.
    """

    name: str
    config: Any
    dtype: torch.dtype
    weights: int
    device: str = "cpu"
    loaded: bool = False
    quantised: str | None = None
    packed: int = 0
    shares: tuple[Share, ...] = ()
    staged: int = 0
    kv_heads: int | None = None
    parts: tuple[Part, ...] = ()

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
        """Of a model that is loaded, as the stage ``name``."""
        facts = cls.of_call(name, model)
        shares = tuple(replace(share, weights=_bytes_on(model, torch.device(share.device))) for share in facts.shares)
        # Offloaded weights are not there.
        weights = _bytes_on(model, torch.device(facts.device)) if facts.staged else weight_bytes(model)
        return replace(
            facts, weights=weights, quantised=quantisation(model), packed=_packed_bytes(model), shares=shares
        )

    @classmethod
    def of_call(cls, name: str, model: PreTrainedModel, *, has_cache: bool = True) -> StageFacts:
        """Of a loaded model, as far as one call needs memory for it: without its weights. ``has_cache``: False for one that uses another's cache."""
        at, offloaded = LayerDevices.of(model), offloaded_modules(model)
        on = at.shares()
        shares = tuple(Share(str(d), 0, on[d]) for d in at.devices) if at.is_split else ()
        if not has_cache:
            shares = (Share(str(at.inputs), 0, 0),)
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
            ValueError: a dtype that torch does not have, safetensors whose headers cannot be read, or a configuration that no model has.
            Exception: those of :func:`pipespec.models.loading.load_config`.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        quantised = quantisation(config)
        loaded_dtype = _loaded_dtype(dtype, config, path)
        weights, packed = sum(size for _, size in stored_tensors(path)) if quantised is not None else 0, 0
        parts: tuple[Part, ...] = ()
        if not weights:
            try:
                with torch.device("meta"):
                    skeleton = AutoModelForCausalLM.from_config(
                        copy.deepcopy(config), dtype=loaded_dtype, trust_remote_code=trust_remote_code
                    )
            except DAMAGE as error:
                pass_on(error)
                raise damaged(path, error, config) from error
            except ValueError as error:
                pass_on(error)
                raise unusable(path, error) from error
            skeleton.tie_weights()  # transformers 5.0 ties in from_pretrained only
            weights, packed = weight_bytes(skeleton), _packed_bytes(skeleton)
            parts = _parts(skeleton)
        return cls(name, text_config(config), loaded_dtype, weights, quantised=quantised, packed=packed, parts=parts)


def _packed_bytes(model: PreTrainedModel) -> int:
    try:
        families.family_of(model)
    except families.NotReadable:
        return 0
    return families.packed_bytes(model) if model.dtype in families.DTYPES else 0


def _bytes_on(model: PreTrainedModel, device: torch.device) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.device == device}
    return sum(t.nbytes for t in tensors.values())


def _parts(model: PreTrainedModel) -> tuple[Part, ...]:
    """The parts of a model in the order of its forward. Empty for one whose layers are in an unusual place.

    A head that shares the embedding's weights comes with the embedding.
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    embedding, layers = model.get_input_embeddings(), getattr(base, "layers", None)
    if base is None or base is model or not isinstance(layers, torch.nn.ModuleList):
        return ()
    prefix, seen = model.base_model_prefix, set[int]()
    first: list[Part] = []
    middle: list[Part] = []
    last: list[Part] = []

    def part(name: str, module: torch.nn.Module, *, is_layer: bool = False) -> Part:
        new = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers()) if id(t) not in seen}
        seen.update(new)
        return Part(name, sum(new.values()), is_layer)

    for name, module in base.named_children():
        if module is layers:
            middle = [part(f"{prefix}.layers.{i}", layer, is_layer=True) for i, layer in enumerate(layers)]
        else:
            (last if middle and module is not embedding and "rotary" not in name else first).append(
                part(f"{prefix}.{name}", module)
            )
    for name, module in model.named_children():
        if module is not base:
            found = part(name, module)
            (last if found.weights else first).append(found)
    return (*first, *middle, *last)


_STORED_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _loaded_dtype(requested: torch.dtype | str, config: Any, path: str | Path) -> torch.dtype:
    """The dtype by the rule of ``from_pretrained``: the requested one, else the configuration's, else that of the first float stored."""
    if isinstance(requested, str) and requested != "auto":
        found = getattr(torch, requested, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(
                f"dtype={requested!r} is not a dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'"
            )
        return found
    if isinstance(requested, torch.dtype):
        return requested
    configured = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    return next((_STORED_FLOATS[name] for name, _ in stored_tensors(path) if name in _STORED_FLOATS), torch.float32)
