"""Perf model: one chain in virtual time, over the engine's own protocol code in csrc/runtime/perf_model.cpp.

The schedule ``asynchronous`` runs the protocol code of the engine. Only the duration of a forward and the tokens of each stage are modelled. Each stage has a
device of its own. ``reference`` and ``reference-lockstep`` follow the description of the published system (arXiv 2505.01572).

Not modelled: the duration of a plan, a commit or a publication (part of a measured step time), the growth of a step with the
length of the text (give the mean), and end-of-sequence tokens (give the length instead). Settings out of range raise ``ValueError``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bench.validation import all_positive, non_negative, probability, same_length
from pipespec.config import WIDTH
from pipespec_kernels.state import MAX_STAGES

Schedule = Literal["asynchronous", "reference", "reference-lockstep"]


@dataclass(frozen=True)
class StageModel:
    """Step times of one stage.

    Attributes:
        step_s: Seconds of a step, one number or one per width. ``step_s[i]`` feeds i + 1 columns, the last serves all wider steps.
        start_s: Seconds until the stage has read its prompt.
    """

    step_s: float | Sequence[float]
    start_s: float = 0.0

    def times(self) -> list[float]:
        """Seconds by width."""
        values = [self.step_s] if isinstance(self.step_s, (int, float)) else self.step_s
        if not len(values):
            raise ValueError("a stage needs at least one step time")
        return all_positive(values, "a step time")


@dataclass(frozen=True)
class SimulatedPolicy:
    """Speculation settings of a simulated chain.

    Attributes:
        lookahead: Tokens that each draft may be ahead of the stage downstream of it, one number for all or one per draft.
        min_draft_tokens: Draft tokens that the target waits for when it has fewer, or one number per verifying stage.
        patience: Deadline of that wait, as a multiple of the expected duration.
        decode_meanwhile: A stage with fewer draft tokens decodes one token and leaves the draft tokens alone, instead of sleeping.
            This pays where a one-token step costs much less than a wider one.
        width: Columns of a step.
    """

    lookahead: int | Sequence[int] = 32
    min_draft_tokens: int | Sequence[int] = 0
    patience: float = 1.5
    decode_meanwhile: bool = False
    width: int = WIDTH

    def per_stage(self, stages: int) -> list[tuple[int, int, int]]:
        """Lookahead, most draft tokens and minimum draft tokens of each stage."""
        drafts = stages - 1
        lookahead = [self.lookahead] * drafts if isinstance(self.lookahead, int) else list(self.lookahead)
        same_length("lookahead", lookahead, drafts, "draft")
        if any(w < 1 for w in lookahead):
            raise ValueError(f"a lookahead must be at least 1, not {min(lookahead)}")
        if isinstance(self.min_draft_tokens, int):
            minimum = ([0] * drafts + [self.min_draft_tokens])[-drafts:] if drafts else []
        else:
            minimum = list(self.min_draft_tokens)
        same_length("min_draft_tokens", minimum, drafts, "verifying stage")
        if any(w < 0 for w in minimum):
            raise ValueError(f"min_draft_tokens must not be negative, not {min(minimum)}")
        # As in the drivers, half of a step's columns are left for the stage's own tokens.
        draft_tokens = [min(w, self.width // 2) for w in lookahead]
        return list(zip([*lookahead, 0], [0, *draft_tokens], [0, *minimum], strict=True))


@dataclass(frozen=True)
class StageCounts:
    """One stage: forwards, draft tokens that it verified and accepted, rollbacks, and the steps by the tokens that they appended (int64)."""

    steps: int
    drafted: int
    accepted: int
    rollbacks: int
    histogram: np.ndarray


@dataclass(frozen=True)
class Simulation:
    """Result: ``seconds`` of virtual time for ``tokens`` new tokens. ``stages``: draft 0 first."""

    seconds: float
    tokens: int
    stages: tuple[StageCounts, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Answers:
    """Tokens that the stages choose: independent acceptance rates, or a table that replays a text.

    A table keeps the correlations between stages and along the text.

    Attributes:
        acceptance: ``acceptance[i]`` is the probability that stages i and i + 1 choose the same token after the same text.
        table: uint8 [positions, drafts], 0 where the draft chooses the target's token, otherwise an id of its wrong token. Equal
            numbers in a row are equal tokens. Positions past the end start again.
    """

    acceptance: Sequence[float] = ()
    table: np.ndarray | None = None

    @staticmethod
    def from_bits(*right: np.ndarray, same_mistake: np.ndarray | None = None) -> Answers:
        """Make a table from one bool vector [positions] per draft, smallest first: whether the draft is right there.

        Two drafts that are both wrong choose the same token where ``same_mistake`` (bool [positions]) is true. Default: nowhere.
        """
        if not right:
            raise ValueError("one bool vector per draft is needed, got none")
        bits = [np.asarray(r, dtype=bool) for r in right]
        if len({b.shape for b in bits}) != 1 or bits[0].ndim != 1:
            raise ValueError(f"bool vectors of one length are needed, not of shapes {[b.shape for b in bits]}")
        table = np.stack([np.where(b, 0, i + 1) for i, b in enumerate(bits)], axis=1).astype(np.uint8)
        if same_mistake is not None:
            both = np.asarray(same_mistake, dtype=bool)
            for i in range(len(bits) - 1, 0, -1):
                met = both & ~bits[i] & ~bits[i - 1]
                table[met, i - 1] = table[met, i]
        return Answers(table=table)

    def check(self, stages: int) -> None:
        """Raise ``ValueError`` unless this describes a chain of ``stages`` stages."""
        if self.table is not None:
            if self.acceptance:
                raise ValueError("give either acceptance rates or a table of answers")
            if self.table.ndim != 2 or self.table.shape[1] != stages - 1 or self.table.dtype != np.uint8:
                raise ValueError(
                    f"the table of answers must be uint8 [positions, {stages - 1}], not {self.table.dtype} {self.table.shape}"
                )
            if len(self.table) == 0:
                raise ValueError("the table of answers is empty")
            return
        same_length("acceptance", self.acceptance, stages - 1, "pair of neighbours")
        for a in self.acceptance:
            probability(a, "an acceptance rate")


def simulate(
    schedule: Schedule,
    stages: Sequence[StageModel],
    answers: Answers | Sequence[float],
    tokens: int,
    *,
    policy: SimulatedPolicy | None = None,
    seed: int = 0,
    lookahead: int = 8,
    handshake_s: float = 0.0,
    preempt: bool = False,
) -> Simulation:
    """Run ``stages`` until the target has ``tokens`` new tokens. Equal arguments give equal results.

    Args:
        schedule: ``asynchronous`` is the engine's (workers, streams, ranks), with the settings of ``policy``. ``reference`` and ``reference-lockstep`` are the published ones,
            with ``lookahead`` and ``handshake_s``.
        stages: The target last.
        answers: The tokens of the stages, or only acceptance rates.
        tokens: How many.
        policy: None: the defaults.
        seed: Of the random answers.
        lookahead: Minimum lookahead of the published schedules.
        handshake_s: Fixed cost of an acknowledgement.
        preempt: A corrected draft drops its running step.

    ``preempt``, and ``handshake_s`` with ``asynchronous``, are idealisations for checks of closed forms, see csrc/runtime/perf_model.hpp.

    Raises:
        RuntimeError: The chain waits without a deadline for draft tokens that cannot come.
    """
    names = {"asynchronous": "asynchronous", "reference": "reference_async", "reference-lockstep": "reference_sync"}
    if schedule not in names:
        raise ValueError(f"schedule must be one of {', '.join(names)}, not {schedule!r}")
    if not isinstance(answers, Answers):
        answers = Answers(acceptance=tuple(answers))
    answers.check(len(stages))
    policy = policy or SimulatedPolicy()
    if math.isnan(policy.patience) or policy.patience < 0:
        raise ValueError(f"patience must not be negative, not {policy.patience}")
    # The native module checks nothing.
    if not 1 <= tokens < 2**28 or not 2 <= policy.width <= 4096:
        raise ValueError(f"tokens must be 1 to 2^28 - 1 and width 2 to 4096, not {tokens} and {policy.width}")
    if not 0 <= lookahead < 2**31 or not 0 <= seed < 2**64:
        raise ValueError("lookahead and seed must not be negative")
    least = 1 if schedule == "asynchronous" else 2
    if not least <= len(stages) <= MAX_STAGES:
        raise ValueError(f"{schedule} has {least} to {MAX_STAGES} stages, not {len(stages)}")

    from pipespec_kernels import _native

    setting = _native.SimSetting()
    built = []
    for stage, (ahead, draft_tokens, minimum) in zip(stages, policy.per_stage(len(stages)), strict=True):
        out = _native.SimStage()
        out.step_s = stage.times()
        out.start_s = non_negative(stage.start_s, "start_s")
        out.lookahead, out.max_draft_tokens, out.min_draft_tokens = ahead, draft_tokens, minimum
        built.append(out)
    setting.stages = built
    if answers.table is not None:
        setting.set_table(np.ascontiguousarray(answers.table).tobytes())
    else:
        setting.set_acceptance([float(a) for a in answers.acceptance])
    setting.tokens, setting.width, setting.seed = tokens, policy.width, seed
    setting.patience, setting.decode_meanwhile = policy.patience, policy.decode_meanwhile
    setting.preempt, setting.handshake_s = preempt, non_negative(handshake_s, "handshake_s")
    setting.lookahead = lookahead
    result: dict[str, Any] = getattr(_native, f"simulate_{names[schedule]}")(setting)
    counts = [StageCounts(**s | {"histogram": np.asarray(s["histogram"], dtype=np.int64)}) for s in result["stages"]]
    return Simulation(result["seconds"], result["tokens"], tuple(counts))


@dataclass(frozen=True)
class SpdSimulation:
    """``seconds`` for ``tokens``, in ``cycles``. ``flushes``: rejected draft tokens, each of which empties the pipeline."""

    seconds: float
    tokens: int
    cycles: int
    flushes: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate_spd(
    stage_s: Sequence[float],
    answers: float | np.ndarray,
    tokens: int,
    *,
    draft_s: float = 0.0,
    cycle_s: float = 0.0,
    shared: bool = False,
    seed: int = 0,
) -> SpdSimulation:
    """Simulate SPD (arXiv 2605.30852): a target cut into ``len(stage_s)`` stages, one token in each, with a draft module beside them.

    Args:
        stage_s: Seconds of each stage in a cycle.
        answers: Acceptance rate, or bool [positions]: whether the draft token at this position is right.
        tokens: New tokens.
        draft_s: Seconds of the draft module, concurrent with the stages.
        cycle_s: Fixed cost of a cycle in seconds.
        shared: All parts are on one device, so that a cycle takes the sum of their times.
        seed: Of the random answers.
    """
    stage_s = all_positive(stage_s, "the time of a stage")
    draft_s, cycle_s = non_negative(draft_s, "draft_s"), non_negative(cycle_s, "cycle_s")
    if tokens < 1 or not stage_s:
        raise ValueError(f"tokens and stages must be positive numbers, not {tokens} and {len(stage_s)}")
    if isinstance(answers, np.ndarray):
        if answers.ndim != 1 or len(answers) == 0:
            raise ValueError(f"one bit per position is needed, not an array of shape {answers.shape}")
        right = np.resize(answers.astype(bool), tokens)
    else:
        right = np.random.default_rng(seed).random(tokens) < probability(answers, "the acceptance rate")
    filled = range(1, len(stage_s) + 1)
    cycles = [cycle_s + (draft_s + sum(stage_s[:f]) if shared else max(draft_s, *stage_s[:f])) for f in filled]
    # A token leaves the pipe in each cycle that finds all stages filled. The others fill it, at first and after each wrong draft token.
    fills = 1 + int((~right[:-1]).sum())
    return SpdSimulation(
        seconds=tokens * cycles[-1] + fills * sum(cycles[:-1]),
        tokens=tokens,
        cycles=tokens + fills * (len(stage_s) - 1),
        flushes=int((~right).sum()),
    )
