"""Partition of a LLaMA-family decoder into contiguous stages of layers, and the computation of one stage.

The embedding belongs to stage 0, where tokens enter. Final norm and LM head belong to the verifier and not to the last stage. A residual
stream has its HuggingFace index: 0 is the output of the embedding, k >= 1 the output of decoder layer k - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from pipespec.checks.models import check_architecture
from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.chain import static_capacity
from pipespec.models.families import IN_STAGES
from pipespec.models.loading import is_gguf, load_config, load_model, read_stored, weight_files
from pipespec.models.parts import ModelParts
from pipespec.models.properties import text_config
from pipespec_spd.captured import CapturedLayers
from pipespec_spd.sections import ModelSection

_INITIAL_CAPACITY = 1024
"""New tokens that a cache has room for at first. Its capacity doubles when it is full."""


@dataclass(frozen=True)
class Partition:
    """The layers of each stage.

    Args:
        counts: Number of layers of each stage, in order.

    Raises:
        ValueError: A stage has no layer.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or any(not isinstance(c, int) or isinstance(c, bool) or c < 1 for c in self.counts):
            raise ValueError(f"each stage needs a whole number of layers, at least one; got {list(self.counts)}")

    @classmethod
    def uniform(cls, layers: int, stages: int) -> Partition:
        """Stages of equal size. If ``stages`` does not divide ``layers``, the first stages have one layer more.

        Raises:
            ValueError: Not ``1 <= stages <= layers``.
        """
        if not isinstance(stages, int) or isinstance(stages, bool):
            raise TypeError(f"the number of stages must be an integer, not {stages!r}")
        if not 1 <= stages <= layers:
            raise ValueError(f"a model of {layers} layers can be cut into 1 to {layers} stages, not {stages}")
        each, more = divmod(layers, stages)
        return cls(tuple(each + (s < more) for s in range(stages)))

    def check(self, layers: int) -> None:
        """Raise ``ValueError`` unless the stages have ``layers`` layers together."""
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
        """First layer of each stage, and the layer after its last one."""
        return tuple((span.start, span.stop) for span in map(self.span, range(self.stages)))

    def owner(self, index: int) -> int:
        """The stage that computes the residual stream ``index``. Raises ``ValueError`` if there is no such stream."""
        if not 0 <= index <= self.layers:
            raise ValueError(
                f"there is no residual stream {index} in a model of {self.layers} layers (0 .. {self.layers})"
            )
        return next(s for s in range(self.stages) if max(index - 1, 0) in self.span(s))


def cut(layers: int, stages: int | Sequence[int] | Partition) -> Partition:
    """Turn a user's argument ``stages`` into a partition of ``layers``: a number of stages, or the layers of each stage.

    Raises:
        TypeError: ``stages`` has another type.
        ValueError: ``stages`` does not add up to ``layers``.
    """
    if isinstance(stages, int):
        return Partition.uniform(layers, stages)
    if not isinstance(stages, (list, tuple, Partition)):
        raise TypeError(f"stages must be an integer, or a list with the layers of each stage, not {stages!r}")
    found = stages if isinstance(stages, Partition) else Partition(tuple(stages))
    found.check(layers)
    return found


def check_target(model: PreTrainedModel) -> None:
    """Raise ``TypeError`` for a model that is not of the LLaMA family, whose forward does more than its layers do, or has other layers than it says."""
    check_architecture("target", model)
    if model.config.model_type not in IN_STAGES:
        raise TypeError(
            f"target is a {type(model).__name__} (model_type {model.config.model_type!r}); only {', '.join(IN_STAGES)} can be cut into stages"
        )
    if (found := len(model.model.layers)) != model.config.num_hidden_layers:
        raise TypeError(
            f"target has {found} layers, and its config.num_hidden_layers is {model.config.num_hidden_layers}: set that"
        )


# ---- computation of a stage


class LayerStage:
    """Consecutive layers of a model, and the embedding in stage 0, with the keys and values of these layers only. The modules are the model's own.

    Args:
        parts: The layers, and what they need.
        stages: Stages of the model: the maximum number of positions that a step rolls back.
        model: See :class:`pipespec_spd.sections.ModelSection`.

    Attributes:
        section: The layers' forward; :func:`pipespec_spd.sections.open_sections` chooses its form.
    """

    def __init__(self, parts: ModelParts, stages: int = 1, model: PreTrainedModel | None = None) -> None:
        self._stages, self.section = stages, ModelSection(parts, model)
        self.layers, self.first, self.config, self.embed = parts.layers, parts.first, parts.config, parts.embed
        self._cache: RowCache | None = None
        self._layers: CapturedLayers | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, partition: Partition, stage: int, *, captured: bool = False) -> LayerStage:
        """Stage ``stage`` of a loaded model. ``captured``: its steps may be CUDA graphs."""
        base, span = model.model, partition.span(stage)
        layers = [base.layers[i] for i in span]
        embed = base.embed_tokens if span.start == 0 else None
        parts = ModelParts(model.config, layers, span.start, base.rotary_emb, embed)
        return cls(parts, partition.stages, model if captured else None)

    @property
    def dtype(self) -> torch.dtype:
        return self.section.parts.dtype

    @property
    def device(self) -> torch.device:
        return self.section.parts.device

    @property
    def cache(self) -> RowCache:
        assert self._cache is not None, "open() comes first"
        return self._cache

    def open(self, rows: int, longest: int, max_positions: int) -> None:
        """Start with empty rows. The storage of the previous call is reused if it fits.

        The cache has room for the ``longest`` prompt and some more tokens. :meth:`step` grows it, up to ``max_positions`` positions of a row. In the fused form it has
        room for all of them, as :func:`pipespec.checks.calls.check_memory` counts.
        """
        capacity, cache, fused = min(max_positions, longest + _INITIAL_CAPACITY), self._cache, self.section.fused
        self._max_positions = max_positions
        if fused is not None:
            capacity = static_capacity(max_positions - 1 + WIDTH)
        # The user may have moved or cast the model.
        is_alike = cache is not None and (cache.compute_dtype, cache.device) == (self.dtype, self.device)
        is_alike = is_alike and fused is (self._layers and self._layers.form)
        if cache is None or not is_alike or not cache.fits(rows, capacity):
            self._cache = self._layers = cache = None  # before the new ones are allocated
            config, static = (self.section.parts if fused is None else fused.parts).cache_config(), fused is not None
            # Graphs write it in any inference mode.
            with torch.inference_mode(False):
                cache = RowCache(config, rows, capacity, dtype=self.dtype, device=self.device, static=static)
            self._cache = cache
            cache.reserve_states(self._stages + 1)
            if fused is not None:
                self._layers = CapturedLayers(fused, cache, f"the stage of layer {self.first}")
        cache.reset()

    def close(self) -> None:
        self._cache = self._layers = None

    def step(
        self, fed: torch.Tensor, held: Sequence[int], features: Collection[int] = (), until: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run ``q`` columns and append them to the cache.

        Args:
            fed: Tokens ``[rows, q]`` for stage 0, the output of the stage before for others.
            held: Positions of each row that stay in the cache. Later ones are dropped first.
            features: HF indices of the residual streams to return. Those of other stages do not matter.
            until: Positions of each row that stay after the step, in a prefill; None: each column may be rolled back to.

        Returns:
            The output of the last layer, ``[rows, q, H]``, and by HF index the residual streams that this stage computes, likewise.
        """
        cache = self.cache
        if self._layers is not None:
            return self._layers.step(fed.to(self.device), held, features)
        cache.truncate(held)
        need = cache.get_seq_length() + fed.shape[1]
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._max_positions)))
        if until is not None:
            cache.aim(until)
        hidden = fed.to(self.device)
        if self.embed is None:
            return self.section.run_layers(hidden, cache, features)
        embedded = self.section.embed(hidden)
        hidden, streams = self.section.run_layers(embedded, cache, features)
        return hidden, {0: embedded} | streams if 0 in features else streams


class Verifier:
    """Final norm and LM head: the output of the last stage to logits."""

    def __init__(self, norm: nn.Module, head: nn.Module, config: Any, model: PreTrainedModel | None = None) -> None:
        self.section = ModelSection(ModelParts(config, norm=norm, head=head), model)

    @classmethod
    def of(cls, model: PreTrainedModel, *, captured: bool = False) -> Verifier:
        return cls(model.model.norm, model.get_output_embeddings(), model.config, model if captured else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, q, V]`` of the last residual stream, ``hidden [rows, q, H]``."""
        return self.section.logits(hidden.to(self.section.parts.device))


# ---- loading a part of the safetensors


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """The model at ``path`` on the meta device, for checks before any weight is loaded: a folder, a hub name, or a GGUF file.

    Raises:
        FileNotFoundError: There is no model.
        TypeError: The model is not of the LLaMA family.
    """
    config = text_config(load_config(path))
    if config.model_type not in IN_STAGES:
        raise TypeError(f"{path} holds a {config.model_type} model; only {', '.join(IN_STAGES)} can be cut into stages")
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
    """Load stage ``stage`` of the model at ``path``, see :func:`load_skeleton`. Only its own layers are read from the safetensors.

    ``dtype`` and ``device`` are those of the weights; None: the dtype of config.json.

    Raises:
        FileNotFoundError, TypeError: As :func:`load_skeleton`.
        ValueError: Partition and model do not fit, or weights are missing, damaged or of another shape.
    """
    model = load_skeleton(path)
    partition.check(model.config.num_hidden_layers)
    if is_gguf(path):  # mapped: what other stages have is not read
        return LayerStage.of(load_model(path, device=device), partition, stage)
    parts = [f"model.layers.{i}." for i in partition.span(stage)]
    if stage == 0:
        parts.append("model.embed_tokens.")
    return LayerStage.of(_filled(model, path, parts, dtype, device), partition, stage)


def load_ends(
    path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load embedding, final norm and LM head of the model at ``path``. Arguments and errors as for :func:`load_stage`."""
    if is_gguf(path):
        model = load_model(path, device=device)
        model.model.layers = nn.ModuleList()
        return model
    model = load_skeleton(path)
    model.model.layers = nn.ModuleList()
    tied = model.config.tie_word_embeddings
    _filled(model, path, ["model.embed_tokens.", "model.norm.", *([] if tied else ["lm_head."])], dtype, device)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _filled(
    model: PreTrainedModel,
    path: str | Path,
    parts: Sequence[str],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> PreTrainedModel:
    """A skeleton with the stored weights whose names begin with one of ``parts``. ``dtype``: None for that of config.json."""
    prefixes, dtype = tuple(parts), dtype or model.config.dtype or torch.float32
    found: dict[str, torch.Tensor] = {}
    try:
        files = weight_files(path, prefixes)
    except OSError as error:
        raise ValueError(f"{path}: {error}; get the complete weights") from error
    for file in files:
        found |= {name: value.to(device, dtype) for name, value in read_stored(file, prefixes).items()}
    try:
        lacking = model.requires_grad_(False).load_state_dict(found, strict=False, assign=True).missing_keys
    except RuntimeError as error:  # another shape
        raise ValueError(f"{path}: {error}") from error
    if missing := [name for name in lacking if name.startswith(prefixes)]:
        raise ValueError(
            f"{path}: its safetensors lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} ({len(missing)} in all); get "
            "the complete weights"
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name.startswith(prefixes):
            raise TypeError(f"{path}: {name} is in no file of weights, so stages of this model run in one process only")
    # Its buffers follow from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device).eval()
    return model
