"""Pipeline: what the user holds. Models in, ``generate()`` out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from pipespec.checks import check_chain, check_memory, check_schedule
from pipespec.drivers import Driver, LockstepDriver, Request, WorkersDriver
from pipespec.drivers.base import Policy
from pipespec.generation import prepare
from pipespec.loading import load_model
from pipespec.observe import Report
from pipespec.observe.report import stage_report
from pipespec.stage import WIDTH

SCHEDULES = ("plain", "lockstep", "workers")

# On CPUs a wide forward costs noticeably more than a narrow one: going on with the hints at hand beat waiting for more.
_DEFAULT_WAIT = 0


class Pipeline:
    """A chain of models that generates the last one's text, faster.

    The text depends on the target, the prompt and nothing else: not on the drafts, the schedule, the timing or a draft's death.

    Parameters
    ----------
    target: a LLaMA-family causal language model, or the path of one (a folder with ``config.json`` and safetensors).
    drafts: models or paths, smallest first, all with the target's vocabulary. None: plain decoding.
    schedule: ``"lockstep"`` runs all stages in turn in this process; ``"workers"`` runs each draft in a process of its own, at the
        same time as the target; ``"plain"`` ignores the drafts.
    windows: per draft, how many tokens it may be ahead of the stage after it (an integer: for all).
    wait: drafts that the target awaits if it has fewer, for as long as they are expected to take (``workers`` only).
    dtype, device: for models given as paths. float32 gives exactly the text of ``generate()``; in 16 bits near-ties may fall otherwise.
    trust_remote_code: allow a path's own Python code to run. Never implied.

    Models given as objects are put into eval mode; with ``"workers"`` the drafts' weights move into shared memory (same values, one
    copy). A draft with a shorter position limit than the target is allowed: past it, it only drafts worse.

    Raises ``ValueError``, ``TypeError`` or ``FileNotFoundError``, before any work, for models that cannot form a chain.
    """

    def __init__(
        self,
        target: PreTrainedModel | str | Path,
        drafts: Sequence[PreTrainedModel | str | Path] | None = (),
        *,
        schedule: str = "lockstep",
        windows: int | Sequence[int] | None = None,
        wait: int | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if drafts is None or isinstance(drafts, (str, Path, PreTrainedModel)):
            drafts = [] if drafts is None else [drafts]
        if not isinstance(drafts, Sequence):
            raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
        if wait is not None and (not isinstance(wait, int) or isinstance(wait, bool)):
            raise TypeError(f"wait must be a number of drafts, not {wait!r}")
        check_schedule(schedule, SCHEDULES)
        given = [*drafts, target]
        self.models = [load_model(m, dtype=dtype, device=device, trust_remote_code=trust_remote_code) for m in given]
        check_chain(self.models, given)
        self.schedule = schedule if drafts else "plain"
        self.report: Report | None = None
        self._busy = threading.Lock()
        self._driver = self._make_driver(windows, wait)

    @property
    def target(self) -> PreTrainedModel:
        return self.models[-1]

    def _make_driver(self, windows: int | Sequence[int] | None, wait: int | None) -> Driver:
        if self.schedule == "plain":
            return LockstepDriver(self.models[-1:], Policy())
        policy = Policy(_windows(windows, len(self.models) - 1, self.schedule), _DEFAULT_WAIT if wait is None else wait)
        if policy.wait < 0:
            raise ValueError(f"wait must not be negative, got {wait}")
        if self.schedule == "workers":
            return WorkersDriver(self.models, policy)
        return LockstepDriver(self.models, policy)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``target.generate()``'s arguments and result: LongTensor ``[B, S + new]``, prompt included, finished rows padded.

        ``inputs`` and ``input_ids`` (``[B, S]``) mean the same. A batch is padded on the left, with ``attention_mask``. ``streamer``
        (batch of one) gets the prompt, then tokens as soon as the target has committed them.

        Raises as :func:`pipespec.generation.prepare`; ``RuntimeError`` when another thread is inside this pipeline.
        """
        if inputs is not None and input_ids is not None:
            raise ValueError("give inputs or input_ids, not both: they mean the same")
        prepared = prepare(
            self.target, input_ids if inputs is None else inputs, attention_mask, generation_config, **kwargs
        )
        rows = len(prepared.prompts)
        if streamer is not None and rows > 1:
            raise ValueError(f"a streamer shows one text; the batch has {rows}")
        check_memory(self.models if self.schedule != "plain" else self.models[-1:], rows, max(prepared.limits) + WIDTH)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this pipeline is generating in another thread; use one Pipeline per thread, or a lock")
        try:
            return self._generate(prepared, streamer)
        finally:
            self._busy.release()

    def _generate(self, prepared: Any, streamer: Any) -> torch.Tensor:
        block, target = self._driver.block, self._driver.block.target
        rows = range(len(prepared.prompts))
        starts = [len(p) for p in prepared.prompts]
        streamed = starts[0]
        began = time.perf_counter()
        first: float | None = None

        def on_commit() -> None:
            nonlocal first, streamed
            if first is None:
                first = time.perf_counter() - began
            if streamer is not None:
                length = block.length(target, 0)
                if length > streamed:
                    streamer.put(torch.tensor(block.tokens(target, 0, streamed, length)))
                    streamed = length

        if streamer is not None:
            streamer.put(prepared.input_ids.cpu())
        self._driver.run(Request(prepared.prompts, prepared.limits, prepared.eos, on_commit))
        if streamer is not None:
            streamer.end()
        seconds = time.perf_counter() - began
        generated = [block.tokens(target, row, starts[row], block.length(target, row)) for row in rows]
        names = [f"draft {i}" for i in range(target)] + ["target"]
        self.report = Report(
            schedule=self.schedule,
            rows=len(rows),
            tokens=sum(map(len, generated)),
            seconds=seconds,
            seconds_to_first_token=first if first is not None else seconds,
            stages=tuple(stage_report(name, block, i, len(rows)) for i, name in enumerate(names)),
        )
        return prepared.assemble(generated)

    def close(self) -> None:
        """End worker processes. Also done on leaving a ``with`` block, at exit, and when the pipeline is garbage."""
        self._driver.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _windows(given: int | Sequence[int] | None, drafts: int, schedule: str) -> tuple[int, ...]:
    if given is None:
        # Lockstep pays for every draft with its own time; workers draft while the target works anyway.
        given = 4 if schedule == "lockstep" else 8
    windows = (given,) * drafts if isinstance(given, int) else tuple(given) if isinstance(given, Sequence) else ()
    if not isinstance(given, (int, Sequence)) or not all(isinstance(w, int) for w in windows):
        raise TypeError(f"windows must be an integer, or one integer per draft, not {given!r}")
    if len(windows) != drafts:
        raise ValueError(f"windows: one per draft, {drafts}, not {len(windows)}")
    if any(w < 1 for w in windows):
        raise ValueError(f"windows must be at least 1, got {list(windows)}")
    return windows
