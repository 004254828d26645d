"""What streams and rounds share: stages at fixed addresses, a block that the host reads while others write it, and the way back to lockstep."""

from __future__ import annotations

import pickle
import warnings
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.compat import embedding_size
from pipespec.drivers.base import Policy, Request, StageFailure
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.drivers.step import Attention, FixedStage, why_not
from pipespec.drivers.workers import PATIENCE
from pipespec.placement import NotCapturable, check_streams
from pipespec.progress import level_of_caller, working
from pipespec.sampling import Selection
from pipespec.stage import Stage, Start
from pipespec_kernels.scheduler import Launcher, Scheduler, Steering, TargetFailed
from pipespec_kernels.state import StateBlock

if TYPE_CHECKING:
    from pipespec.drivers.graphs import Graph, Graphs

_AHEAD = 2
"""Steps of a draft on a GPU that may be launched and not ended: the next one begins without asking the host."""


class Mirror(StateBlock):
    """The block as the caller sees it while a scheduler runs its stages: it is they who are told that a row has ended."""

    scheduler: Scheduler | None = None

    def end_row(self, row: int) -> None:
        if self.scheduler is None:
            super().end_row(row)
        else:
            self.scheduler.end_row(row)


class FixedDriver(LockstepDriver):
    """Stages whose steps need no host: captured graphs on GPUs, the same code uncaptured on the CPU.

    While such a driver is open its models have ``attn_implementation="pipespec"``, which gives the text of ``"sdpa"`` and takes row lengths
    instead of masks; :meth:`close` restores what they had. A call that needs the host (see :func:`pipespec.drivers.step.why_not`) is
    run in lockstep, by the same stages.

    On GPUs a step of each stage is captured at once, to see that it can be. ``trace``: steps per stage that :meth:`traces` keeps; 0: none.

    Raises ``ValueError`` for models on GPUs beside others on the CPU; :class:`pipespec.placement.NotCapturable` for what cannot be captured,
    and for a model that takes no other attention.
    """

    block: Mirror
    _stages: Sequence[FixedStage]

    def __init__(self, models: Sequence[PreTrainedModel], policy: Policy, trace: int = 0) -> None:
        check_streams(models)
        self.on_gpu = self._are_on_gpus(models)
        self._devices = [model.device for model in models]
        self._entries = trace
        self._attention: Attention | None = Attention(models)
        self._errors: dict[int, BaseException] = {}  # by stage, of the present call
        self._dead: set[int] = set()
        self._told = 0  # failures of the present call
        self._by_scheduler = False  # whose traces those of the last call are
        self._graphs: Graphs | None = None
        self._scheduler: Scheduler | None = None
        self._scheduler_for: Hashable = None
        super().__init__(models, policy, trace)
        if self.on_gpu:
            try:
                self._try_capture()
            except BaseException:
                self.close()
                raise

    def _are_on_gpus(self, models: Sequence[PreTrainedModel]) -> bool:
        return models[-1].device.type == "cuda"

    def _make_block(self) -> StateBlock:
        if not self.on_gpu:
            return Mirror.create(len(self.models), 1, 64)
        from pipespec.drivers.graphs import PinnedMemory

        return Mirror.create(len(self.models), 1, 64, PinnedMemory())

    def _make_stages(self) -> Sequence[Stage]:
        return [FixedStage(model, self.block, i, self._trace_of(i)) for i, model in enumerate(self.models)]

    @property
    def target(self) -> FixedStage:
        return self._stages[-1]

    # ---- a call

    def run(self, request: Request) -> None:
        if self._attention is None:  # closed, and used again
            self._attention = Attention(self.models)
        if self._devices != [model.device for model in self.models]:
            raise ValueError("a model was moved to another device: close this pipeline and make a new one")
        self._dead.clear()
        self._told = 0
        self._by_scheduler = False
        drafts = replace(request.start, selection=pickle.loads(request.draft_selection))
        # What is made here is used by later calls, too, whatever mode those are made in.
        with torch.inference_mode(False), torch.no_grad():
            self.target.prepare(request.start)
            reason = why_not(request, self.models[-1].device.type)
            for stage in self._stages[:-1]:
                try:
                    stage.prepare(drafts)
                except Exception as error:  # costs speed, not the text: lockstep goes on without it
                    reason = reason or f"{stage.name} cannot be prepared ({type(error).__name__}: {error})"
            reason = reason or self._make_ready(request)
        self.ran_as, self.remarks = self.schedule, ()
        if reason is not None:
            self.ran_as = LockstepDriver.schedule
            self.remarks = (f"this call was run in lockstep, step by step: {reason}",)
            super().run(request)
            return
        self.begin(request)
        try:
            self._run(request)
        finally:
            self._errors.clear()  # they hold on to what the failing frames held
            if self._graphs is not None:
                with suppress(RuntimeError):  # the GPU's own error has been told
                    self._graphs.read_back()
            for stage in self._stages:
                stage.settle()

    def _make_ready(self, request: Request) -> str | None:
        """The block, and on a GPU graphs, for this call. Returns why it cannot be run that way."""
        self._ensure(request)
        if not self.on_gpu:
            return None
        try:
            self._capture()
        except NotCapturable as error:
            warnings.warn(f"{error}; this call is run in lockstep instead", StageFailure, stacklevel=level_of_caller())
            return str(error)
        return None

    @abstractmethod
    def _run(self, request: Request) -> None:
        """Take steps until the target's rows are complete. The rows are laid out, the caches filled."""

    def _failed(self, i: int, error: Exception) -> None:
        self._dead.add(i)
        super()._failed(i, error)

    def _committed(self, request: Request) -> None:
        """After steps of the target's."""
        self.target.check_drawn()
        if request.on_commit is not None:
            request.on_commit()

    # ---- under a scheduler

    def _steering(self) -> Steering:
        # One that has failed rests.
        windows = tuple(0 if i in self._dead else window for i, window in enumerate(self.policy.windows))
        return Steering(windows, self.policy.wait, self.policy.decode_meanwhile)

    def steer(self, policy: Policy) -> None:
        super().steer(policy)
        if self.block.scheduler is not None:
            self.block.scheduler.steer(self._steering())

    def _keep_scheduler(self, key: Hashable, launcher: Launcher, ahead: int) -> None:
        """From here on this one, until another ``key`` is needed."""
        self._scheduler = Scheduler(launcher, self._steering(), ahead=ahead, patience=PATIENCE, trace=self._entries)
        self._scheduler_for = key

    def _drive(self, request: Request) -> None:
        """Let the scheduler run the stages."""
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.steer(self._steering())
        self._by_scheduler = True
        if self.on_gpu:
            for device in {model.device for model in self.models}:
                torch.cuda.synchronize(device)  # the prefill was on torch's stream; the stages have their own

        def on_commit() -> None:
            self._tell_failures(scheduler)
            self._committed(request)

        self.block.scheduler = scheduler
        try:
            scheduler.run(on_commit)
        except TargetFailed as failed:
            self._fail_target(str(failed).split("failed: ", 1)[-1])
        finally:
            self.block.scheduler = None
        self._tell_failures(scheduler)

    def _tell_failures(self, scheduler: Scheduler) -> None:
        failures = scheduler.failures
        for stage, cause in failures[self._told :]:
            self._told += 1
            if stage != self.block.target:
                error = self._errors.get(stage)
                self._failed(stage, error if isinstance(error, Exception) else RuntimeError(cause))

    def _fail_target(self, cause: str) -> NoReturn:
        """Raise ``TargetFailed``, from the error itself where it is known."""
        number = self.block.target
        error = self._errors.get(number)
        if error is not None and not isinstance(error, Exception):
            raise error  # somebody wants to end
        if error is not None:
            cause = f"{type(error).__name__}: {error}"
        raise TargetFailed(f"the target (stage {number}) failed: {cause}") from error

    def traces(self) -> dict[str, np.ndarray]:
        found = super().traces()
        if self._scheduler is not None and self._by_scheduler:
            for i, (name, before) in enumerate(found.items()):  # the prefill is ours
                steps = self._scheduler.trace(i)
                steps["step"] += len(before)
                found[name] = np.concatenate([before, steps])[-self._entries :]
        return found

    # ---- on a GPU

    @abstractmethod
    def _wanted(self) -> list[tuple[FixedStage, Hashable]]:
        """The graphs that the present policy needs: whose, and their names."""

    @abstractmethod
    def _make_graph(self, graphs: Graphs, stage: FixedStage, name: Hashable) -> Graph:
        """Capture one of them."""

    @abstractmethod
    def _launched(self, stage: FixedStage) -> list[tuple[int, Graph]]:
        """Of the graphs captured for the present rooms, those that the stage is launched with: width and graph, ascending."""

    def _rooms_key(self, stage: FixedStage) -> Hashable:
        """What the captured graphs of a stage depend on, beside the name."""
        return stage.room.code

    def _capture(self) -> None:
        """What is missing for the present rooms, once; the launcher for them."""
        from pipespec.drivers.graphs import Graphs

        sizes = self.block.memory.address, self.block.rows, self.block.capacity
        if self._graphs is None or self._graphs.sizes != sizes:
            self._drop_graphs()  # before the new block is allocated
            self._graphs = Graphs(self.block, self._stages, sizes)
        graphs = self._graphs
        wanted = self._wanted()
        missing = [(stage, name) for stage, name in wanted if (self._rooms_key(stage), name) not in stage.room.graphs]
        if missing:
            with working(f"capturing {len(missing)} CUDA graphs (kept for calls of this size)"):
                graphs.neutral()
                for stage, name in missing:
                    stage.room.graphs[self._rooms_key(stage), name] = self._make_graph(graphs, stage, name)
        own = [self._launched(stage) for stage in self._stages]
        key = tuple(tuple((width, graph.handle) for width, graph in entry) for entry in own)
        if self._scheduler is None or self._scheduler_for != key:
            self._scheduler = None
            self._keep_scheduler(key, graphs.launcher(own), ahead=_AHEAD)

    def _drop_graphs(self) -> None:
        self._scheduler = self._scheduler_for = self._graphs = None
        for stage in self._stages:
            for room in stage.rooms():
                room.graphs.clear()

    def _try_capture(self) -> None:
        """The smallest steps there are."""
        start = Start([np.zeros(1, dtype=np.int32)], [1], Selection(), embedding_size(self.models[-1]))
        with torch.inference_mode(False), torch.no_grad():
            for stage in self._stages:
                stage.prepare(start)
            self._capture()
        self.forget()

    def forget(self) -> None:
        self._scheduler = None
        super().forget()

    def spare(self, start: Start, given: RowCache | None) -> None:
        if self.on_gpu:
            self._scheduler = None  # it holds the graphs of the call before
        super().spare(start, given)

    def close(self) -> None:
        self._drop_graphs()
        super().close()
        if self._attention is not None:
            self._attention.close()
            self._attention = None
