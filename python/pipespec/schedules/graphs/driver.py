"""GraphedDriver: what streams and rounds share. Calls that need no host run in captured steps, all others in lockstep."""

from __future__ import annotations

import functools
import pickle
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.checks.models import check_exact, check_streams
from pipespec.config import WIDTH, SpeculationConfig
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampling import SamplingParams
from pipespec.errors import NotCapturable
from pipespec.models.loading import is_out_of_memory
from pipespec.models.properties import embedding_size, text_config
from pipespec.process.progress import working
from pipespec.process.threads import raise_handlers_error
from pipespec.registry import imported, kind_of
from pipespec.schedules.base import Driver, GenerationRequest
from pipespec.schedules.graphs.attention import BorrowedAttention
from pipespec.schedules.graphs.buffers import GraphKey, StageStep
from pipespec.schedules.graphs.scheduling import HostShadow, PinnedMemory, ScheduledChain
from pipespec.schedules.graphs.stage import GraphedStage, StaticStage
from pipespec.schedules.lockstep import LockstepDriver, advance, prefill_drafts
from pipespec_kernels.state import Action, StateBlock

if TYPE_CHECKING:
    from pipespec.schedules.graphs.capture import CaptureContext, CapturedGraph, CaptureResources

_MAX_GRAPHS = 16
"""Graphs that a stage keeps for one number of rows, beyond those of the present call. One of an 8B model takes about half a megabyte."""

_AHEAD = 2
"""Largest number of steps of a draft in flight on a GPU, so that the next one begins without the host. It also holds for plain decoding and
rounds."""


READY = 2048
"""Positions of the texts of one row whose graphs, of greedy steps and over prompts, are captured with the pipeline, and whose buffers stay; 0: none are."""

_SEEN = 64
"""Steps that the controller sees after those of which it has been told."""


def host_reason(request: GenerationRequest, device: str) -> str | None:
    """Return why the steps of a call need the host, and what avoids it; None if they do not. ``device``: type of the target's device."""
    if torch.is_autocast_enabled(device):
        return "autocast belongs to the calling thread; load the models in the dtype that is wanted"
    sampling_params = request.inputs.sampling_params
    if request.inputs.grammar is not None:
        return "the matchers of a grammar run on the host, between the steps; leave the grammar out"
    if sampling_params.stepwise:
        names = ", ".join(dict.fromkeys(getattr(p, "__name__", type(p).__name__) for p in sampling_params.processors))
        return (
            f"these logits processors run on the host, position by position: {names}; leave them out, or use temperature, top_k, top_p, "
            "min_p, penalties and biases of single tokens"
        )
    return None


def wait_for_prefill(models: Sequence[PreTrainedModel]) -> None:
    """Wait for torch's streams, which have run the prefill: the stages have streams of their own.

    A wait for the whole device would invalidate the capture of another thread.
    """
    for device in {model.device for model in models}:
        torch.cuda.current_stream(device).synchronize()


def ends_at_once(target: GraphedStage, request: GenerationRequest) -> bool:
    """Take the target's first step if the forward over its prompt gives the logits: before the drafts read theirs. Whether the text ends with it."""
    if not target.has_prompt_logits:
        return False
    target.step(0, 0)
    block, ended = target.block, []
    request.committed(block)
    for row, limit in enumerate(request.inputs.limits):
        n = block.length(target.index, row)
        ended.append(n >= limit or block.tokens(target.index, row, n - 1, n)[0] in request.eos)
    return all(ended)


def capture_with_pipeline(driver: GraphedDriver) -> None:
    """Capture what calls of one row and up to :data:`READY` positions launch; where there is no memory for that, the smallest steps, whose buffers do not stay.

    Raises:
        NotCapturable: A step cannot become a CUDA graph, or there is no memory for the smallest ones.
    """
    configs = [text_config(model.config) for model in driver.models if isinstance(model, PreTrainedModel)]
    longest = min([READY, *(getattr(config, "max_position_embeddings", None) or READY for config in configs)])
    for positions in dict.fromkeys((max(1, longest), 1)):
        try:
            driver.capture_ready(positions)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, NotCapturable) or not is_out_of_memory(error):
                raise
            if positions == 1:
                raise NotCapturable("the chain", "its static buffers and graphs", str(error)) from error
            driver.drop_graphs()
        else:
            if positions > 1:
                return
        driver.release()


def _captured_stage(driver: GraphedDriver, i: int) -> Any:
    """Stage ``i`` of a driver. One without a model is on the device of the target."""
    config, place, is_target = driver.config, (driver.block, i, driver._trace_of(i)), i == driver.block.target
    make: Any = GraphedStage
    if not is_target:
        row = kind_of(config.drafts[i])
        assert row is not None
        make = imported(row.captured)
        if config.drafts[i].inline:
            device, count = driver.models[-1].device, min(config.lookahead[i], WIDTH // 2)
            return make(config.drafts[i], *place, device=device, count=count)
    stage = make(driver._model_of(i), *place, native=config.native, exact=config.exact and is_target)
    stage.kept_in = driver.static_caches
    stage.needs_same_bits = is_target
    stage.keep_prefixes(config.prefix_cache)
    return stage


class GraphedDriver(Driver):
    """Runs steps that need no host: captured graphs on GPUs, the same code without capture on a CPU.

    Its models borrow an attention until :meth:`close`. A call that needs the host (see :func:`host_reason`) runs in lockstep, on the same stages. On GPUs the
    constructor captures the smallest steps, so that a model that cannot be captured is found before the first call. Where one cannot, or there
    are no kernels over the block, the host plans and commits: each step of the other models is a graph of its own.

    Attributes:
        on_gpu: Whether the models are on GPUs.
        failed_drafts: Drafts that failed in the present call.
        scheduled: The scheduler, from call to call.
        context: What the present graphs were captured with; None on a CPU, before the first capture, and where the host takes part.
        refused: By index, why a model's steps run without graphs.

    Raises:
        ValueError: Some models are on GPUs and others on the CPU, or with ``exact`` the target has no exact form.
        NotCapturable: No step can become a CUDA graph, or a model does not accept the attention.
    """

    block: HostShadow

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        # What is no model of transformers is where the target is, and its own attention is the one that its graphs need.
        self._whole = [model for model in models if isinstance(model, PreTrainedModel)]
        check_streams(self._whole)
        self.static_caches = True if config.kv_dtype is None else getattr(torch, config.kv_dtype)
        self.on_gpu = self._runs_on_gpu(models)
        self._devices = [model.device for model in models]
        self._attention: BorrowedAttention | None = BorrowedAttention(self._whole)
        self.context: CaptureContext | None = None
        self._resources: list[CaptureResources] = []
        self._by_host = not self.on_gpu
        self.refused: dict[int, NotCapturable] = {}
        self._ran_captured = self._is_ahead = False
        self.failed_drafts: set[int] = set()
        super().__init__(models, config)
        self._stages: list[Any] = [_captured_stage(self, i) for i in range(self.block.target + 1)]
        for stage in self._stages:
            self.block.set_alive(stage.index, True)
            stage.read_from(self.target)
        # The controller sees the last steps.
        self.scheduled = ScheduledChain(self.block, config.trace or _SEEN * config.controlled)
        try:
            if config.exact:
                check_exact(self.models[-1], captured=True)
            if self.on_gpu:
                capture_with_pipeline(self)
        except BaseException:
            self.close()
            raise

    def _runs_on_gpu(self, models: Sequence[PreTrainedModel]) -> bool:
        return models[-1].device.type == "cuda"

    def _make_block(self) -> StateBlock:
        return HostShadow.create(self._stage_count, 1, 64, PinnedMemory() if self.on_gpu else None)

    @property
    def target(self) -> GraphedStage:
        found: GraphedStage = self._stages[-1]
        return found

    @property
    def stages(self) -> Sequence[Any]:
        """All of them, those without a model too."""
        return self._stages

    # ---- what subclasses define

    @abstractmethod
    def graph_keys(self) -> list[GraphKey]:
        """The graphs that a call with the present configuration launches, those of one stage by ascending width."""

    @abstractmethod
    def _run_on_host(self, request: GenerationRequest) -> None:
        """Take the steps of a call where the host plans and commits, after the prefill."""

    def _graph_key(self, steps: Sequence[StageStep], lookahead: tuple[int, ...] = ()) -> GraphKey:
        return GraphKey.of(steps, [stage.buffers for stage in self._stages], lookahead)

    def _lookahead(self) -> tuple[int, ...]:
        """That of the configuration, while failed drafts rest."""
        return tuple(0 if i in self.failed_drafts else n for i, n in enumerate(self.config.lookahead))

    # ---- a call

    def _generate(self, request: GenerationRequest) -> None:
        # After close().
        if self._attention is None:
            self._attention = BorrowedAttention(self._whole)
        if self._devices != [model.device for model in self.models]:
            raise ValueError("a model was moved to another device: close this pipeline and make a new one")
        self._settle()
        self.failed_drafts.clear()
        self._ran_captured = False
        reason = self._make_ready(request)
        self.ran_as, self.remarks = self._name_of(self.schedule), ()
        if reason is not None:
            self.ran_as = self._name_of(LockstepDriver.schedule)
            self.remarks = (f"this call was run in lockstep, step by step: {reason}",)
            self.warn_slower(f"calls like this one run in lockstep, step by step: {reason}")
        self._prepare(request)
        self.target.prefill(request.inputs, request.record)
        if ends_at_once(self.target, request):
            return
        prefill_drafts(self, request)
        if reason is not None:
            while advance(self, self.block.target) != Action.FINISHED:
                request.committed(self.block)
            return
        self._ran_captured = True
        try:
            if self.on_gpu:
                wait_for_prefill(self.models)
            if self._by_host:
                self._run_on_host(request)
            else:
                self._run_scheduled(request)
            self._read_record(request)
        finally:
            # A step that was launched ahead may be about to follow the end of the text: in the block alone, and in no row of the target.
            self._is_ahead = self.context is not None
            self._read_back([self.target] if self._is_ahead else self._stages)

    def _read_back(self, stages: Sequence[StaticStage]) -> None:
        """Take over from the block what the steps of the last call have done, of some stages what their caches hold."""
        if self.context is not None:
            # The error of a GPU has been raised before.
            with suppress(RuntimeError):
                self.context.read_back()
        for stage in stages:
            stage.sync_lengths()

    def _settle(self) -> None:
        """Wait for a step that the last call has left behind. Before anything that its graph refers to changes."""
        if self._is_ahead:
            self._is_ahead = False
            self.scheduled.settle()
            # The target may have got a cache of the caller since.
            self._read_back(self._stages[:-1])

    def _make_ready(self, request: GenerationRequest) -> str | None:
        """Prepare static buffers, block and graphs for a call. Returns why it cannot run in captured steps."""
        *drafts, _ = self._stages
        draft_inputs = request.inputs
        if drafts:
            draft_inputs = replace(draft_inputs, sampling_params=pickle.loads(request.draft_sampling_params))
        # What is allocated here also serves later calls, in any inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.target.prepare(request.inputs)
            reason = host_reason(request, self.models[-1].device.type)
            for stage in drafts:
                try:
                    stage.prepare(draft_inputs)
                except Exception as error:
                    raise_handlers_error()
                    reason = reason or f"{stage.name} cannot be prepared ({type(error).__name__}: {error})"
            if reason is not None:
                return reason
            self._ensure(request)
            purpose = "to record the logits of all tokens at fixed addresses"
            try:
                if request.record is not None:
                    self.target.buffers.sampler.keep(request.record, request.inputs)
                purpose = "for the graphs"
                if self.on_gpu:
                    self.capture()
            except NotCapturable as error:
                return str(error)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                return f"no memory {purpose} ({error}); lower max_new_tokens or the batch"
        return None

    def _run_scheduled(self, request: GenerationRequest) -> None:
        """Let the scheduler run the stages."""
        self.scheduled.run(self._lookahead(), lambda: self._committed(request), self.draft_failed)

    def _committed(self, request: GenerationRequest) -> None:
        """Called after steps of the target."""
        self.target.buffers.sampler.check_distributions()
        self._read_record(request)
        request.committed(self.block)

    def _read_record(self, request: GenerationRequest) -> None:
        """Take over what captured steps have recorded of committed tokens."""
        if request.record is not None:
            target, prompts = self.block.target, request.inputs.prompts
            new = [self.block.length(target, row) - len(prompt) for row, prompt in enumerate(prompts)]
            self.target.buffers.sampler.read(request.record, new)

    def draft_failed(self, i: int, error: Exception) -> None:
        super().draft_failed(i, error)
        self.failed_drafts.add(i)

    def traces(self) -> dict[str, np.ndarray]:
        found = super().traces()
        if found and self._ran_captured:
            self._settle()
            for i, (name, prefill_steps) in enumerate(found.items()):
                found[name] = self.scheduled.trace(i, prefill_steps)
        return found

    # ---- graphs

    def capture(self) -> None:
        """Capture the graphs that a call lacks, and make the scheduler that launches them. After :meth:`GraphedStage.prepare` of each stage.

        Raises:
            NotCapturable: A step cannot become a CUDA graph.
        """
        from pipespec.schedules.graphs.capture import CaptureContext

        if self._by_host:
            self._capture_bodies()
            return
        layout = self.block.memory.address, self.block.rows, self.block.capacity
        if self.context is None or self.context.layout != layout:
            # The old copy of the block is released before the allocation.
            self.drop_graphs()
            self.context = CaptureContext(self.block, self._stages, layout)
        context = self.context
        # Graphs over another stage's static buffers that have been replaced. The launcher may hold them.
        buffers = [buffers for stage in self._stages for buffers in stage.all_buffers()]
        versions = {b.version for b in buffers}
        stale = [(b.graphs, key) for b in buffers for key in b.graphs if not versions.issuperset(key.versions)]
        for graphs, key in stale:
            del graphs[key]
        if stale:
            self.scheduled.drop()
        keys = self.graph_keys()
        missing = [key for key in keys if key not in self._graphs_launched_with(key)]
        if missing:
            with working(f"capturing {len(missing)} CUDA graphs (kept for calls of this size)"):
                context.deactivate_rows()
                for key in missing:
                    self._graphs_launched_with(key)[key] = context.capture(key)
        launched: list[list[tuple[int, CapturedGraph]]] = [[] for _ in self._stages]
        for key in keys:
            graphs = self._graphs_launched_with(key)
            # The last used one last.
            graphs[key] = graph = graphs.pop(key)
            launched[key.launched.stage].append((key.launched.width, graph))
        handles = tuple(tuple((width, graph.handle) for width, graph in own) for own in launched)
        self.scheduled.use(handles, lambda: context.launcher(launched), self._lookahead(), ahead=_AHEAD)
        self._keep_last([len(own) for own in launched], context.resources)

    def _capture_bodies(self) -> None:
        """Capture the steps that a call lacks, each as a graph of its own. A model that cannot be captured runs without."""
        from pipespec.schedules.graphs.capture import CaptureResources, capture_bodies

        self._resources = self._resources or [CaptureResources(stage) for stage in self._stages]
        steps = list(dict.fromkeys(step for key in self.graph_keys() for step in key.steps))
        capture_bodies(self._resources, self._stages, steps, self.refused)
        if len(self.refused) == len(self.models):
            raise self.refused[len(self._stages) - 1]
        for refusal in self.refused.values():
            self.warn_slower(f"{refusal}; its steps run without a graph between the graphs of the others")
        self._keep_last([sum(step.stage == i for step in steps) for i in range(len(self._stages))], self._resources)

    def _keep_last(self, present: Sequence[int], resources: Sequence[CaptureResources]) -> None:
        """Drop the graphs that were launched long ago, but for those of the present call, so many per stage."""
        from pipespec.schedules.graphs.capture import CapturedPrompt

        for stage, number, own in zip(self._stages, present, resources, strict=True):
            if not isinstance(stage, GraphedStage):
                continue
            stage.capture_prompt = None if stage.index in self.refused else functools.partial(CapturedPrompt, own)
            reason = stage.by_modules_reason() if stage.capture_prompt is not None and self.config.native else None
            if reason is not None:
                self.warn_slower(reason)
            for key in list(stage.buffers.graphs)[: -max(_MAX_GRAPHS, number)]:
                del stage.buffers.graphs[key]

    def _graphs_launched_with(self, key: GraphKey) -> dict[GraphKey, CapturedGraph]:
        return self._stages[key.launched.stage].buffers.graphs

    def drop_graphs(self) -> None:
        """Forget all graphs. While none runs."""
        self.scheduled.drop()
        self.context = None
        for buffers in (buffers for stage in self._stages for buffers in stage.all_buffers()):
            buffers.graphs.clear()
            buffers.prompt_graphs.clear()

    def capture_ready(self, positions: int) -> None:
        """Capture what calls of one row and up to so many positions launch, beside the smallest steps their parts of prompts."""
        vocabulary = embedding_size(self.models[-1])
        inputs = StageInputs([np.zeros(1, dtype=np.int32)], [positions], SamplingParams(), vocabulary)
        with torch.inference_mode(False), torch.no_grad():
            for stage in self._stages:
                stage.prepare(inputs)
            self.block.ensure(1, positions + 2)
            try:
                self.capture()
            except NotCapturable as error:
                self._by_host = True
                self.drop_graphs()
                self.capture()
                if not self.refused:
                    self.warn_slower(f"{error}; the host plans and commits each step, whose forward alone is a graph")
            if positions > 1:
                with working(f"capturing the graphs over prompts (kept for calls of up to {positions} positions)"):
                    for stage in self._stages:
                        stage.capture_prompts()

    def release(self) -> None:
        self._is_ahead = False
        self.scheduled.drop()
        super().release()

    def close(self) -> None:
        self._is_ahead = False
        self.drop_graphs()
        super().close()
        if self._attention is not None:
            self._attention.close()
            self._attention = None
