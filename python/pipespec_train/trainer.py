"""Training of a draft module: the frozen target is the teacher, and one pass covers every depth of every position (SPD, section 4)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.process.progress import readable_time, say
from pipespec_spd.draft_module import DraftModule
from pipespec_train.settings import TrainingSettings
from pipespec_train.start import StudentBatch
from pipespec_train.students import PipelineStudent, Student, autocast
from pipespec_train.teacher import KeptStates, TeacherOutput, teacher_forward

CHECKPOINT, RECORD = "training.pt", "training.json"
SAY_EVERY_S = 30.0
"""Seconds between lines of progress."""

_EMPTY_STEPS = 50
"""Consecutive steps without a token to learn after which training ends with an error."""

_START_BATCHES = 200
"""Batches that an initial state may read."""


class TrainingBatch(NamedTuple):
    """A batch of token ids.

    Attributes:
        ids: ``[B, S]`` int64, padded on the right.
        wanted: ``[B, S]`` bool, whether the module learns the token after each position.
        tokens: Tokens without the padding; None: there is none.
    """

    ids: torch.Tensor
    wanted: torch.Tensor
    tokens: int | None = None


# ---- the run


def train(
    target: PreTrainedModel,
    module: DraftModule | Student,
    batch: Callable[[int], TrainingBatch],
    settings: TrainingSettings,
    folder: Path,
    *,
    held_out: Sequence[TrainingBatch] = (),
    extra: Callable[[Any], dict[str, float]] | None = None,
    resume: bool = False,
    data: str = "",
    states: Path | None = None,
    reader: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Train ``module`` and write module, checkpoint and record to ``folder``.

    Several processes (torchrun or accelerate) take different batches and average their gradients. Learning rate, draws and torch's
    generator, which each step seeds, are functions of seed, step and process. So a run that was killed ends with the weights of an
    uninterrupted one, bit for bit, unless it is limited by minutes.

    Args:
        target: The teacher, which does not change.
        module: The draft module, or what stands for another draft, in float32.
        batch: Returns the batch of a number. It depends on the number only.
        settings: Settings of the run.
        folder: Folder of the results.
        held_out: Batches for validation.
        extra: Returns further figures at each validation.
        resume: Continue from the last checkpoint in ``folder``: weights, optimizer, step, position in the data, and time.
        data: Digest of the data. A checkpoint of other data is refused.
        states: Folder in which the target's hidden states are kept, so that no text is read twice.
        reader: Another form of the target, for example out of a GGUF file: its hidden states are those that ``module`` reads. The logits are ``target``'s, over these states. None: ``target``.

    Returns:
        The record: steps, tokens, seconds, settings, and the figures of each validation.

    Raises:
        ValueError: The data has nothing to learn, the checkpoint belongs to another module or to other data, or the module is not float32.
        FileNotFoundError: There is no checkpoint to resume.
        RuntimeError: The loss is not finite.
    """
    run = _Run(target, PipelineStudent(module) if isinstance(module, DraftModule) else module, settings, folder, data)
    reader = (target if reader is None else reader).eval()
    keeps = partial(teacher_forward, reader, anchors=run.student.anchors)
    run.teacher = keeps if states is None else KeptStates(reader, run.student.anchors, states)
    if resume:
        run.resume()
    else:
        run.start(batch)
    return run.run(batch, held_out, extra)


class _Run:
    """A training run: what is trained, and how far it is. Arguments as for :func:`train`."""

    def __init__(
        self,
        target: PreTrainedModel,
        student: Student,
        settings: TrainingSettings,
        folder: Path,
        data: str,
    ) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.target, self.student, self.module = target.eval().requires_grad_(False), student, student.module
        self.settings, self.folder, self.data = settings, folder, data
        self.weight = next(student.head.parameters())
        self.device = self.weight.device
        student.head.requires_grad_(not settings.freeze_head)
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        if low := {str(p.dtype) for p in self.trained} - {"torch.float32"}:
            raise ValueError(
                f"a module in {', '.join(sorted(low))} cannot be trained, small updates would be rounded away: train it in float32 (amp computes "
                "products in bfloat16)"
            )
        self.optimizers = _optimizers(student, settings)
        self.columns = student.columns.to(self.device)
        self.teacher: Callable[[torch.Tensor], TeacherOutput]
        self.step = self.tokens = self.position = 0
        self.rate, self.mean = settings.rate, math.nan
        self.history: list[dict[str, Any]] = []
        self._empty = 0  # consecutive steps without a token to learn
        self._before = self._saved_at = 0.0
        self._begun = time.monotonic()

    def run(
        self,
        batch: Callable[[int], TrainingBatch],
        held_out: Sequence[TrainingBatch],
        extra: Callable[[Any], dict[str, float]] | None,
    ) -> dict[str, Any]:
        """Train to the end, and return the record."""
        settings = self.settings
        self.module.train()
        if self.step == 0 and held_out:
            self._validate(held_out, extra)
        began_at, said = self.fraction(), self.elapsed
        while (done := self.fraction()) < 1:
            self._step(done, batch)
            if self.step % settings.validate_every == 0:
                self._validate(held_out, extra)
                said = self.elapsed
            elif self.rank == 0 and self.elapsed - said >= SAY_EVERY_S:
                said, share = self.elapsed, self.fraction()
                left = readable_time(max(0.0, (said - self._before) * (1 - share) / (share - began_at)))
                say(f"{self._so_far()}, about {left} left: loss {self.mean:.3f}")
            is_due = settings.save_every is not None and self.step % settings.save_every == 0
            if is_due or self.elapsed - self._saved_at >= 60 * settings.save_minutes:
                self.save()
        if not self.history or self.history[-1]["step"] != self.step:
            self._validate(held_out, extra)
        self.save()
        self.module.eval()
        return self.record()

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self._before + time.monotonic() - self._begun

    def fraction(self) -> float:
        """The share of the run that is done."""
        settings = self.settings
        if settings.steps is not None:
            return self.step / settings.steps
        if settings.tokens is not None:
            return self.tokens / settings.tokens
        assert settings.minutes is not None
        now = torch.tensor(self.elapsed / (60 * settings.minutes), device=self.device)
        if self.world > 1:
            dist.broadcast(now, 0)  # all must stop at the same step
        return float(now)

    def _so_far(self) -> str:
        return f"step {self.step}, {self.tokens:,} tokens, {readable_time(self.elapsed)}"

    def start(self, batch: Callable[[int], TrainingBatch]) -> None:
        """Give what is trained its initial state."""
        self.student.start(self._student_batch(batch(number)) for number in range(_START_BATCHES))

    def _student_batch(self, which: TrainingBatch) -> StudentBatch:
        """Both heads compute no position but those to learn: for a large vocabulary they are the larger part of a step and of its memory."""
        valid, ids = which.wanted.to(self.device), which.ids.to(self.device)
        head: Any = self.target.get_output_embeddings()
        with torch.no_grad(), autocast(self.device, self.settings.amp):
            anchors, last, choices = self.teacher(ids)
            wanted = last.to(self.device)[valid].to(self.target.dtype)
            if choices is None or type(head) is not nn.Linear:
                logits = head(wanted)
                trained = torch.isin(logits.argmax(-1), self.columns)
                logits = logits[trained][:, self.columns]
            else:
                trained = torch.isin(choices[valid], self.columns)
                bias = None if head.bias is None else head.bias[self.columns]
                logits = F.linear(wanted[trained], head.weight[self.columns], bias)
        valid = valid.masked_scatter(valid, trained)
        return StudentBatch(ids, anchors.to(self.device, self.weight.dtype), valid, logits, last)

    def _step(self, done: float, batch: Callable[[int], TrainingBatch]) -> None:
        """One step of the optimizers, after ``done`` of the run."""
        settings = self.settings
        self.rate = settings.rate * learning_rate(done, settings.warmup_share, settings.rate_schedule)
        # For dropout.
        torch.manual_seed(int(np.random.default_rng([settings.seed, self.step, self.rank]).integers(2**62)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate
            optimizer.zero_grad(set_to_none=True)
        loss, trained, fed = self._gradients(batch)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {self.step}: a smaller rate may help")
        self._empty = 0 if trained else self._empty + 1
        if self._empty == _EMPTY_STEPS:
            raise ValueError(
                f"nothing to learn in {_EMPTY_STEPS} steps: no token is the assistant's and in the draft vocabulary"
            )
        if trained:
            nn.utils.clip_grad_norm_(self.trained, settings.clip)
            for optimizer in self.optimizers:
                optimizer.step()
            self.mean = loss if math.isnan(self.mean) else 0.98 * self.mean + 0.02 * loss
        self.step, self.tokens = self.step + 1, self.tokens + int(fed)
        self.position += settings.accumulate * self.world

    def _gradients(self, batch: Callable[[int], TrainingBatch]) -> tuple[float, float, float]:
        """Compute the gradients of a step. Returns loss, positions trained and tokens fed of all processes."""
        settings = self.settings
        value = trained = fed = 0.0
        for part in range(settings.accumulate):
            which = batch(self.position + part * self.world + self.rank)
            given = self._student_batch(which)
            with autocast(self.device, settings.amp):
                loss = self.student.loss(given, settings, self.step) / settings.accumulate
            loss.backward()
            value, trained = value + loss.item(), trained + len(given.teacher_logits)
            fed += which.ids.numel() if which.tokens is None else which.tokens
        if self.world == 1:
            return value, trained, fed
        for p in self.trained:
            if p.grad is not None:  # the same parameters in all processes, since the fill is the same
                dist.all_reduce(p.grad)
                p.grad /= self.world
        sums = torch.tensor([value / self.world, trained, fed], device=self.device, dtype=torch.float64)
        dist.all_reduce(sums)
        value, trained, fed = sums.tolist()
        return value, trained, fed

    def _validate(self, held_out: Sequence[TrainingBatch], extra: Callable[[Any], dict[str, float]] | None) -> None:
        if self.rank:
            return
        figures: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "seconds": self.elapsed}
        figures |= {"rate": self.rate} | ({"loss": self.mean} if self.step else {})
        self.module.eval()
        if held_out:
            figures |= self.student.figures(map(self._student_batch, held_out), self.settings)
        if extra is not None:
            figures |= extra(self.module)
        self.module.train()
        self.history.append(figures)
        shown = (f"{k} {v:.3f}" for k, v in figures.items() if isinstance(v, float) and k not in ("seconds", "rate"))
        say(f"{self._so_far()}: {', '.join(shown)}")

    def record(self) -> dict[str, Any]:
        """What :func:`train` returns."""
        done = {"steps": self.step, "tokens": self.tokens, "seconds": self.elapsed, "processes": self.world}
        parameters = sum(p.numel() for p in self.trained)
        return done | {"settings": asdict(self.settings), "parameters": parameters, "history": self.history}

    _KEPT = ("step", "tokens", "position", "mean")  # attributes that a checkpoint has

    def save(self) -> None:
        """Write checkpoint, module and record. A run that is killed here keeps the previous checkpoint."""
        self._saved_at = self.elapsed
        if self.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {name: getattr(self, name) for name in self._KEPT} | {
            "config": self.student.identity(),
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "data": self.data,
            "trained": len(self.trained),
            "optimizer": self.settings.optimizer,
            "seconds": self.elapsed,
            "history": json.dumps(self.history),
        }
        checkpoint = self.folder / CHECKPOINT
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, checkpoint)
        self.student.save(self.folder)
        (self.folder / RECORD).write_text(json.dumps(self.record(), indent=1) + "\n")

    def resume(self) -> None:
        """Continue from the checkpoint in the folder. Raises the errors of :func:`train`."""
        checkpoint = self.folder / CHECKPOINT
        if not checkpoint.is_file():
            raise FileNotFoundError(f"nothing to resume: {checkpoint} does not exist")
        state = torch.load(checkpoint, weights_only=True, map_location=self.device)
        if state["config"] != self.student.identity():
            raise ValueError(f"{checkpoint} belongs to another module (target, stages, layers or vocabulary differ)")
        if state["data"] != self.data:
            raise ValueError(
                f"{checkpoint} belongs to other data: resume with the same --data, --length, --batch and --seed, or begin in another folder"
            )
        if state["trained"] != len(self.trained) or state["optimizer"] != self.settings.optimizer:
            raise ValueError(
                f"{checkpoint} was written with another optimizer, or with a head that is trained or frozen"
            )
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in self._KEPT:
            setattr(self, name, state[name])
        self._before = self._saved_at = state["seconds"]
        self.history = json.loads(state["history"])
        say(f"resumed at step {self.step} after {self._before / 60:.1f} min")


def learning_rate(done: float, warmup: float, schedule: str = "cosine") -> float:
    """Share of the peak rate at the share ``done`` of a run: a linear rise, then ``linear`` down to 0 or half a ``cosine`` down to 1 %."""
    if done < warmup:
        return max(done / warmup, 0.05)
    if schedule == "linear":
        return max(0.0, (1.0 - done) / (1.0 - warmup))
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (done - warmup) / (1.0 - warmup)))


def _optimizers(student: Student, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """AdamW without decay of the norms' gains. With muon, Muon for the matrices of projections and blocks."""
    head = [p for p in student.head.parameters() if p.requires_grad]
    in_head = {id(p) for p in head}
    rest = [p for p in student.module.parameters() if p.requires_grad and id(p) not in in_head]
    matrices, gains = [p for p in rest if p.dim() == 2], [p for p in rest if p.dim() != 2]
    muon = settings.optimizer == "muon"
    groups: list[dict[str, Any]] = [
        {"params": head if muon else head + matrices, "weight_decay": settings.decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (0.9, 0.95) if muon else (0.9, 0.999)
    groups = [group for group in groups if group["params"]]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=settings.rate, betas=betas)]
    if muon:
        found.append(
            torch.optim.Muon(matrices, lr=settings.rate, weight_decay=settings.decay, adjust_lr_fn="match_rms_adamw")
        )
    return found
