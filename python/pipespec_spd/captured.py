"""SPD's layers on a GPU: in the fused form, over a static cache, and narrow steps as CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.form import LayerLoop, PartsForm, check_outputs, probe, probe_cache, probe_inputs
from pipespec.engine.fused import FusedForm, check_separate, merge, refused_operations
from pipespec.engine.known import moving
from pipespec.errors import NotCapturable
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec.schedules.base import warn_of_speed
from pipespec_kernels import ops
from pipespec_kernels.env import MIN_CAPABILITY
from pipespec_kernels.products import MAX_ROWS

Outputs = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""The output of the last layer, and residual streams by their index."""


def captures(device: torch.device) -> bool:
    """Whether steps on a device are captured: the kernels run there."""
    if device.type != "cuda" or torch.version.hip is not None or not find_spec("triton"):
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= MIN_CAPABILITY


def over_static(parts: ModelParts) -> ModelParts:
    """The parts, whose configuration says that their attention goes by lengths on the device: that of the fused form does."""
    config = copy.copy(parts.config)
    config._attn_implementation = ATTENTION
    return parts._replace(config=config)


class FusedParts(FusedForm, PartsForm):
    """The fused form of parts of a model, called as a :class:`pipespec.engine.form.PartsForm`. ``parts``: of :func:`over_static`."""

    def __init__(self, parts: ModelParts) -> None:
        # The norm behind the last layer is another part's. One in its place adds up what the layer has computed.
        super().__init__(parts if parts.norm is not None else parts._replace(norm=parts.layers[-1].input_layernorm))
        if self.has_opaque:
            raise NotReadable("other libraries compute some of its products")
        self.parts, self.dtype = parts, parts.dtype

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int, last: Any = None) -> torch.Tensor:
        return PartsForm.__call__(self, tokens, cache, keep)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return families.embedded(self.parts, tokens)

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = (), *, tokens: Any = None
    ) -> Outputs:
        (rows, q, size), first, last = hidden.shape, self.parts.first, len(self.parts.layers)
        self.add_cache(cache)
        x = hidden.reshape(rows * q, size)
        step = self._step(x, rows, q, cache)._replace(features={last, *(i - first for i in features)})
        (self._run_narrow if rows * q <= self.narrow_rows else self._run_wide)(x, step)
        cache.close()
        streams = {first + i: stream.view(rows, q, size) for i, stream in step.streams.items()}
        return streams[first + last], {i: stream for i, stream in streams.items() if i > first and i in features}

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        x, head = hidden[:, hidden.shape[1] - keep :], self._head.runs[0].whole()
        parts = x.flatten(0, 1).split(MAX_ROWS)
        found = torch.cat([ops.linear_small(part, *head, norm=self._last_norm, **self._norm) for part in parts])
        return found.view(*x.shape[:2], -1)


def fused_parts(parts: ModelParts, model: PreTrainedModel) -> FusedParts:
    """The fused form of parts of a model, after its outputs agreed with those of their own modules. It merges their weights, see :func:`pipespec.engine.fused.merge`.

    Raises:
        NotReadable: A part has no operation there, or the outputs do not agree.
    """
    static, given = over_static(parts), probe_inputs(parts)
    form = FusedParts(static)
    with torch.inference_mode():
        own = probe(LayerLoop(parts), probe_cache(parts), given)
        # The probes are steps of few rows. They also run through the products of wider ones.
        for form.narrow_rows in (0, MAX_ROWS):
            with refused_operations():
                ours = probe(form, probe_cache(static, static=True), given)
            check_outputs(parts, given, own, ours)
    groups = families.of_one_input(parts)
    check_separate(model, groups)
    with moving(model):
        merge(groups)
    return FusedParts(static)


class CapturedLayers:
    """The steps of a stage over a static cache. That of one column is a graph: what it is fed, the lengths, and its results are at fixed addresses.

    Args:
        form: Of the stage's parts.
        cache: Likewise.
        stage: Its name, for errors.

    Attributes: what :class:`pipespec.schedules.graphs.capture.CaptureResources` reads of a stage.
    """

    def __init__(self, form: FusedParts, cache: RowCache, stage: str) -> None:
        self.form, self.cache = form, cache
        form.add_cache(cache)
        self.name, self.device, self.is_target = stage, cache.device, True
        self._resources: Any = None
        self._graphs: dict[frozenset[int], Any] = {}

    def step(self, fed: torch.Tensor, held: Sequence[int], features: Collection[int]) -> Outputs:
        """As :meth:`pipespec_spd.partition.LayerStage.step`."""
        self.cache.set_lengths(held)
        graph = self._graph_of(fed, held, features) if fed.shape[1] == 1 else None
        if graph is None:
            return self._run(fed, features)
        given, lengths, (hidden, streams), captured = graph
        given.copy_(fed)
        lengths.copy_(torch.tensor(held, dtype=torch.int32, device="cpu"))
        captured.replay()
        self.cache.set_lengths([n + 1 for n in held])
        # The next replay of a graph of this stage overwrites them.
        return hidden.clone(), {i: stream.clone() for i, stream in streams.items()}

    def _run(self, fed: torch.Tensor, features: Collection[int]) -> Outputs:
        if self.form.parts.embed is None:
            return self.form.run_layers(fed, self.cache, features)
        embedded = self.form.embed(fed)
        hidden, streams = self.form.run_layers(embedded, self.cache, features)
        return hidden, {0: embedded} | streams if 0 in features else streams

    def _graph_of(self, fed: torch.Tensor, held: Sequence[int], features: Collection[int]) -> Any:
        """The graph of a step: what it is fed, the lengths, the results, and what replays it. None where it cannot be captured."""
        key = frozenset(features)
        if key not in self._graphs:
            from pipespec.schedules.graphs.capture import CaptureResources

            with torch.inference_mode(False), torch.no_grad():
                given = torch.zeros_like(fed)
                # The warm-up writes where the first replay does.
                lengths = torch.tensor(held, dtype=torch.int32, device=fed.device)
                results: list[Outputs] = []

                def run(warm_up: bool) -> None:
                    self.cache.follow(lengths)
                    results[:] = [self._run(given, features)]

                stage: Any = self
                try:
                    self._resources = self._resources or CaptureResources(stage)
                    captured = self._resources.capture([(stage, run)], inside="its layers")
                    self._graphs[key] = given, lengths, results[0], captured
                except NotCapturable as error:
                    self._graphs[key] = error.__cause__ = None  # which holds the memory of the capture
                    warn_of_speed(f"{error}; the host launches each kernel of its steps")
                finally:
                    self.cache.set_lengths(held)
        return self._graphs[key]
