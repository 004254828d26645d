"""Partition: a LLaMA-family decoder in contiguous stages of layers. Where the cuts are, and what one stage computes.

The embedding is applied where a token enters, so it belongs to stage 0; final norm and LM head belong to whoever verifies, never to
the last stage. A residual stream is named by its HuggingFace index: 0 is the embedding's output, k >= 1 what decoder layer k - 1 leaves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from pipespec.cache import RowCache
from pipespec.checks import check_architecture
from pipespec.forward import Parts, Section

_FIRST_ROOM = 1024
"""New tokens for which a cache has room at first; then its room doubles."""

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose forward is: embedding, layers with one rotary embedding, norm, head. Others scale or mix in between."""


@dataclass(frozen=True)
class Partition:
    """``counts[s]``: layers of stage ``s``, in order. ``ValueError`` unless each is at least 1."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or any(not isinstance(c, int) or isinstance(c, bool) or c < 1 for c in self.counts):
            raise ValueError(f"each stage needs a whole number of layers, at least one; got {list(self.counts)}")

    @classmethod
    def uniform(cls, layers: int, stages: int) -> Partition:
        """Stages of equal size; where ``stages`` does not divide ``layers`` the first ones have one layer more.

        ``ValueError`` unless ``1 <= stages <= layers``.
        """
        _check_stages(layers, stages)
        each, more = divmod(layers, stages)
        return cls(tuple(each + (s < more) for s in range(stages)))

    @classmethod
    def balanced(cls, costs: Sequence[float], stages: int) -> Partition:
        """The cuts with the fastest slowest stage; among those the most even ones (smallest sum of squares).

        ``costs``: of each layer, any unit. Exact: the linear partition problem by dynamic programming, O(stages layers^2).
        ``ValueError`` for costs that are negative or no numbers, and unless ``1 <= stages <= layers``.
        """
        _check_stages(len(costs), stages)
        if any(not 0 <= c < float("inf") for c in costs):
            raise ValueError(f"the costs of layers must be finite and not negative, got {list(costs)}")
        layers = len(costs)
        before = [0.0]
        for cost in costs:
            before.append(before[-1] + cost)
        # slowest[e]: of the best cuts of layers 0 .. e-1 into s stages.
        slowest = {0: 0.0}
        for s in range(1, stages + 1):
            slowest = {
                end: min(max(slowest[begin], before[end] - before[begin]) for begin in slowest if begin < end)
                for end in range(s, layers - stages + s + 1)
            }
        bound = slowest[layers]
        # Again within that bound. even[e]: the smallest sum of squares, and its counts.
        even: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for _ in range(stages):
            longer: dict[int, tuple[float, tuple[int, ...]]] = {}
            for begin, (squares, counts) in even.items():
                for end in range(begin + 1, layers + 1):
                    cost = before[end] - before[begin]
                    if cost > bound:
                        break
                    found = (squares + cost**2, (*counts, end - begin))
                    longer[end] = min(longer.get(end, found), found)
            even = longer
        return cls(even[layers][1])

    def check(self, layers: int) -> None:
        """``ValueError`` unless these stages make up a model of ``layers`` layers."""
        if self.layers != layers:
            raise ValueError(
                f"the stages {list(self.counts)} have {self.layers} layers together, the model has {layers}: give counts that sum to that"
            )

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def layers(self) -> int:
        return sum(self.counts)

    def span(self, stage: int) -> range:
        """The layers of ``stage``."""
        begin = sum(self.counts[:stage])
        return range(begin, begin + self.counts[stage])

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First layer and the one behind the last, of each stage."""
        return tuple((span.start, span.stop) for span in map(self.span, range(self.stages)))

    def owner(self, index: int) -> int:
        """The stage that computes the residual stream ``index``. ``ValueError`` where there is none."""
        if not 0 <= index <= self.layers:
            raise ValueError(
                f"there is no residual stream {index} in a model of {self.layers} layers (0 .. {self.layers})"
            )
        return next(s for s in range(self.stages) if max(index - 1, 0) in self.span(s))


def _check_stages(layers: int, stages: int) -> None:
    if not isinstance(stages, int) or isinstance(stages, bool):
        raise TypeError(f"the number of stages must be an integer, not {stages!r}")
    if not 1 <= stages <= layers:
        raise ValueError(f"a model of {layers} layers can be cut into 1 to {layers} stages, not {stages}")


def cut(layers: int, stages: int | Sequence[int] | str | Partition, costs: Callable[[], Sequence[float]]) -> Partition:
    """What a user means by ``stages``: a number, layers per stage, or ``"balanced:n"``, for which ``costs()`` are asked for.

    ``TypeError`` or ``ValueError`` for anything else, and for what does not make up ``layers``.
    """
    if isinstance(stages, str):
        kind, _, number = stages.partition(":")
        if kind != "balanced" or not number.isdecimal():
            raise ValueError(
                f"stages={stages!r}: give a number, layers per stage, or 'balanced:n' with n stages, such as 'balanced:4'"
            )
        _check_stages(layers, int(number))
        return Partition.balanced(costs(), int(number))
    if isinstance(stages, int):
        return Partition.uniform(layers, stages)
    if not isinstance(stages, (list, tuple, Partition)):
        raise TypeError(f"stages must be an integer, layers per stage, or 'balanced:n', not {stages!r}")
    found = stages if isinstance(stages, Partition) else Partition(tuple(stages))
    found.check(layers)
    return found


def partition_of(model: PreTrainedModel, stages: int | Sequence[int] | str | Partition) -> Partition:
    """:func:`cut` for a model, by its measured layers."""
    return cut(model.config.num_hidden_layers, stages, lambda: layer_seconds(model))


def check_target(model: PreTrainedModel) -> None:
    """``TypeError`` for a model that is not of the LLaMA family: stages would leave out what its forward does beside them."""
    check_architecture("target", model)
    if model.config.model_type not in FAMILY:
        raise TypeError(
            f"target is a {type(model).__name__} (model_type {model.config.model_type!r}); only {', '.join(FAMILY)} can be cut into stages"
        )


# ---- what a stage computes


class LayerStage:
    """Consecutive layers of a model (its own modules, nothing is copied), with the keys and values of these layers only.

    Parameters
    ----------
    layers: the modules; ``first``: number of the first one in the model.
    config: the model's. rotary: its rotary embedding. embed: its token embedding; for stage 0, else None.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, config: Any, rotary: nn.Module, embed: nn.Module | None
    ) -> None:
        self.layers, self.first, self.config, self.embed = list(layers), first, config, embed
        self._section = Section(Parts(config, self.layers, first, rotary, embed))
        weight = next(self.layers[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self._cache: RowCache | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, partition: Partition, stage: int) -> LayerStage:
        """Stage ``stage`` of a model that is there."""
        base, span = model.model, partition.span(stage)
        layers = [base.layers[i] for i in span]
        return cls(layers, span.start, model.config, base.rotary_emb, base.embed_tokens if span.start == 0 else None)

    @property
    def cache(self) -> RowCache:
        assert self._cache is not None, "open() comes first"
        return self._cache

    def open(self, rows: int, longest: int, most: int) -> None:
        """Empty rows, with room for prompts of ``longest`` tokens and some more; :meth:`step` makes more, up to ``most`` positions.

        The storage of the call before is used again where it fits.
        """
        capacity = min(most, longest + _FIRST_ROOM)
        self._most = most
        if self._cache is None or not self._cache.fits(rows, capacity) or not self._matches(self._cache):
            self._cache = None  # before the new one is allocated
            config = self._section.parts.cache_config()
            self._cache = RowCache(config, rows, capacity, dtype=self.dtype, device=self.device)
        self._cache.reset()
        self._section.open(self.dtype, self.device)

    def _matches(self, cache: RowCache) -> bool:
        weight = next(self.layers[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device  # it may have been moved, or cast
        return cache.dtype == self.dtype and cache.device == self.device

    def close(self) -> None:
        """Give the cache back to the system."""
        self._cache = None

    def step(
        self, fed: torch.Tensor, held: Sequence[int], see: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Feed ``q`` columns at positions ``held[r] ..`` of the rows; what the last layer leaves, ``[rows, q, H]``.

        ``fed``: of stage 0 tokens ``[rows, q]``, of others what the stage before leaves. Positions from ``held`` on are forgotten first, and the
        new ones are there afterwards. ``see(k, stream)``: told each residual stream k that arises here; stage 0 embeds.
        """
        cache = self.cache
        cache.truncate(held)
        need = cache.get_seq_length() + fed.shape[1]
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._most)))
        hidden = fed.to(self.device)
        if self.embed is not None:
            hidden = self._section.embedded(hidden)
            if see is not None:
                see(0, hidden)
        return self._section.through(hidden, cache, see)


class Verifier:
    """Final norm and LM head: from what the last stage leaves to logits."""

    def __init__(self, norm: nn.Module, head: nn.Module, config: Any) -> None:
        self.head = head
        self._section = Section(Parts(config, norm=norm, head=head))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Verifier:
        return cls(model.model.norm, model.get_output_embeddings(), model.config)

    def open(self) -> None:
        """A call begins: look at what norm and head are."""
        weight = next(self.head.parameters())
        self._section.open(weight.dtype, weight.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [rows, q, H]``: residual stream L. Returns ``[rows, q, V]``."""
        return self._section.logits(hidden.to(next(self.head.parameters()).device))


def layer_seconds(model: PreTrainedModel, repeats: int = 7, context: int = 64) -> list[float]:
    """Measured seconds of each layer for one new token of one row behind ``context`` others; medians of ``repeats``."""
    base = model.model
    hidden = torch.randn(
        (1, context, model.config.hidden_size), generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(model.device, model.dtype)
    out = []
    with torch.inference_mode():
        for number in range(model.config.num_hidden_layers):
            # Without the embedding the first one, too, is fed hidden states.
            stage = LayerStage([base.layers[number]], number, model.config, base.rotary_emb, None)
            stage.open(1, context, context + 1)
            stage.step(hidden, [0])
            took = []
            for _ in range(repeats + 1):  # the first one warms up
                _synchronise(model.device)
                began = time.perf_counter()
                stage.step(hidden[:, :1], [context])
                _synchronise(model.device)
                took.append(time.perf_counter() - began)
            out.append(median(took[1:]))
    return out


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- from safetensors, only what is needed


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """The model at ``path`` without any weight (on the meta device): what can be checked before weights are loaded.

    ``path``: a folder with config.json and safetensors, or a hub name that is in the local cache. Raises ``FileNotFoundError`` where there
    is none, ``TypeError`` for a model that is not of the LLaMA family.
    """
    if _file(path, "config.json") is None:
        raise FileNotFoundError(f"{path} holds no model: there is no config.json in it")
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILY:
        raise TypeError(f"{path} holds a {config.model_type} model; only {', '.join(FAMILY)} can be cut into stages")
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    check_target(model)
    return model.eval()


def load_stage(
    path: str | Path,
    partition: Partition,
    stage: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LayerStage:
    """Stage ``stage`` of the model at ``path``: reads its own layers from the safetensors and nothing else.

    ``dtype``: None keeps what config.json says. Raises as :func:`load_skeleton`; ``ValueError``, before any weight is read, for a partition
    of another number of layers or a stage that it does not have, and where weights are missing, damaged or of another shape.
    """
    model = load_skeleton(path)
    partition.check(model.config.num_hidden_layers)
    if not 0 <= stage < partition.stages:
        raise ValueError(f"there is no stage {stage} among {partition.stages}")
    base, span = model.model, partition.span(stage)
    parts = {f"model.layers.{i}": base.layers[i] for i in span}
    if stage == 0:
        parts["model.embed_tokens"] = base.embed_tokens
    _load(path, parts, dtype or model.config.dtype or torch.float32, device)
    return LayerStage.of(_with_rotary(model, device), partition, stage)


def load_ends(
    path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model at ``path`` without its layers: embedding, final norm and LM head. Raises as :func:`load_stage`."""
    model = load_skeleton(path)
    base, tied = model.model, model.config.tie_word_embeddings
    base.layers = nn.ModuleList()
    parts = {"model.embed_tokens": base.embed_tokens, "model.norm": base.norm}
    if not tied:
        parts["lm_head"] = model.lm_head
    _load(path, parts, dtype or model.config.dtype or torch.float32, device)
    if tied:
        model.lm_head.weight = base.embed_tokens.weight
    if _file(path, "generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(path)
    return _with_rotary(model, device)


def _with_rotary(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """The rotary embedding has no weights, only buffers that follow from the configuration."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model


def _load(path: str | Path, parts: dict[str, nn.Module], dtype: torch.dtype, device: torch.device | str) -> None:
    """Give the modules of ``parts`` the weights stored under their names."""
    wanted = {
        f"{prefix}.{name}": (module, name) for prefix, module in parts.items() for name, _ in module.named_parameters()
    }
    for file, names in _files(path, wanted).items():
        try:
            with safe_open(file, framework="pt", device="cpu") as stored:
                for full in names:
                    module, name = wanted[full]
                    owner, _, leaf = name.rpartition(".")
                    expected = module.get_parameter(name)
                    value = stored.get_tensor(full)
                    if value.shape != expected.shape:
                        raise ValueError(
                            f"{file}: {full} has shape {list(value.shape)}, config.json makes it {list(expected.shape)}"
                        )
                    value = value.to(device, dtype)
                    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from error


def _files(path: str | Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Which file holds which of the weights ``names``. ``ValueError`` for weights that none holds."""
    index = _file(path, "model.safetensors.index.json")
    single = _file(path, "model.safetensors")
    if index is not None:
        where: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    elif single is not None:
        try:
            with safe_open(single, framework="pt") as stored:
                where = dict.fromkeys(stored.keys(), "model.safetensors")
        except SafetensorError as error:
            raise ValueError(f"{single} is damaged: {error}") from error
    else:
        raise ValueError(f"{path} holds no safetensors weights")
    missing = [name for name in names if name not in where]
    if missing:
        raise ValueError(
            f"{path}: its safetensors lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} ({len(missing)} in all); get "
            "the complete weights"
        )
    out: dict[str, list[str]] = {}
    for name in names:
        file = _file(path, where[name])
        if file is None:
            raise ValueError(
                f"{path}: the file {where[name]}, which holds {name}, is not there; get the complete weights"
            )
        out.setdefault(file, []).append(name)
    return out


def _file(path: str | Path, name: str) -> str | None:
    """A file of a model's folder, or of a hub name's in the local cache."""
    if Path(path).is_dir():
        file = Path(path) / name
        return str(file) if file.is_file() else None
    try:
        found: str | None = cached_file(str(path), name, local_files_only=True)
    except OSError:
        return None
    return found
