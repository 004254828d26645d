"""Perf model: one chain in virtual time, over the engine's own protocol code. ``bench/native/perf_model.cpp`` is compiled on first use.

The schedule ``asynchronous`` runs the protocol code of the engine. Only the duration of a forward and the tokens of each stage are modelled. Each stage has a
device of its own. ``reference`` and ``reference-lockstep`` follow the description of the published system (arXiv 2505.01572).

Not modelled: the duration of a plan, a commit or a publication (part of a measured step time), the growth of a step with the
length of the text (give the mean), and end-of-sequence tokens (give the length instead). The native model checks no setting.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipespec.config import WIDTH

Schedule = Literal["asynchronous", "reference", "reference-lockstep"]
SCHEDULES = ("asynchronous", "reference", "reference-lockstep")

ROOT = Path(__file__).parents[1]
_COUNTS = 4 + 101
"""Numbers of ``StageResult`` of the C++ file: four counters, and the steps by the tokens that they appended, at most 100."""


def _fields(**kinds: str) -> list[tuple[str, Any]]:
    """Fields of a structure, by their types."""
    return [(name, getattr(ctypes, f"c_{kind}")) for kind, names in kinds.items() for name in names.split()]


class _Stage(ctypes.Structure):
    """``StageModel`` of the C++ file."""

    _fields_ = _fields(void_p="step_s", uint32="widths lookahead max_draft_tokens min_draft_tokens", double="start_s")


class _Setting(ctypes.Structure):
    """``Setting`` of the C++ file."""

    _fields_ = _fields(
        void_p="models acceptance table",
        uint64="positions seed",
        uint32="n_stages tokens width lookahead decode_meanwhile preempt",
        double="patience handshake_s",
    )


@functools.cache
def _native() -> Callable[..., float]:
    """The compiled simulation, in ``build/bench``, by the digest of its sources."""
    source = ROOT / "bench" / "native" / "perf_model.cpp"
    files = [source, *sorted((ROOT / "csrc").glob("protocol/*.hpp")), *sorted((ROOT / "csrc").glob("runtime/*.hpp"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    library = ROOT / "build" / "bench" / f"perf_model-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        half = library.with_suffix(f".{os.getpid()}")
        # Without fused multiply-add, so that every machine gives the same numbers.
        flags = ("-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC")
        command = [os.environ.get("CXX", "c++"), *flags, "-I", str(ROOT / "csrc"), str(source), "-o", str(half)]
        subprocess.run(command, check=True)
        half.replace(library)
    function = ctypes.CDLL(str(library)).pipespec_simulate
    function.restype = ctypes.c_double
    return function


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
        return list(map(float, [self.step_s] if isinstance(self.step_s, (int, float)) else self.step_s))


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
        """Lookahead, maximum and minimum number of draft tokens of each stage."""
        drafts = stages - 1
        lookahead = [self.lookahead] * drafts if isinstance(self.lookahead, int) else list(self.lookahead)
        if isinstance(self.min_draft_tokens, int):
            minimum = ([0] * drafts + [self.min_draft_tokens])[-drafts:] if drafts else []
        else:
            minimum = list(self.min_draft_tokens)
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
        bits = [np.asarray(r, dtype=bool) for r in right]
        table = np.stack([np.where(b, 0, i + 1) for i, b in enumerate(bits)], axis=1).astype(np.uint8)
        if same_mistake is not None:
            both = np.asarray(same_mistake, dtype=bool)
            for i in range(len(bits) - 1, 0, -1):
                met = both & ~bits[i] & ~bits[i - 1]
                table[met, i - 1] = table[met, i]
        return Answers(table=table)


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

    ``preempt``, and ``handshake_s`` with ``asynchronous``, are idealisations for checks of closed forms, see the C++ file.

    Raises:
        RuntimeError: The chain waits without a deadline for draft tokens that cannot come.
    """
    if not isinstance(answers, Answers):
        answers = Answers(acceptance=tuple(answers))
    policy = policy or SimulatedPolicy()
    times = [np.array(stage.times()) for stage in stages]
    acceptance = np.array(answers.acceptance, np.float64)
    table = None if answers.table is None else np.ascontiguousarray(answers.table)
    models = (_Stage * len(stages))(
        *(
            _Stage(t.ctypes.data, len(t), *limits, stage.start_s)
            for t, stage, limits in zip(times, stages, policy.per_stage(len(stages)), strict=True)
        )
    )
    setting = _Setting(
        models=ctypes.addressof(models), acceptance=acceptance.ctypes.data, seed=seed, n_stages=len(stages), tokens=tokens,
        width=policy.width, lookahead=lookahead, decode_meanwhile=policy.decode_meanwhile, preempt=preempt,
        patience=policy.patience, handshake_s=handshake_s,
    )  # fmt: skip
    if table is not None:
        setting.table, setting.positions = table.ctypes.data, len(table)
    counts, message = np.zeros((len(stages), _COUNTS), np.uint64), ctypes.create_string_buffer(256)
    counted = ctypes.c_void_p(counts.ctypes.data)
    seconds = _native()(ctypes.c_uint32(SCHEDULES.index(schedule)), ctypes.byref(setting), counted, message)
    if seconds < 0:
        raise RuntimeError(message.value.decode())
    return Simulation(seconds, tokens, tuple(StageCounts(*map(int, c[:4]), c[4:].astype(np.int64)) for c in counts))


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
    """Simulate SPD (arXiv 2605.30852): a target cut into ``len(stage_s)`` stages, one token in each, with a draft module next to them.

    Args:
        stage_s: Seconds of each stage in a cycle.
        answers: Acceptance rate, or bool [positions]: whether the draft token at this position is right.
        tokens: New tokens.
        draft_s: Seconds of the draft module, concurrent with the stages.
        cycle_s: Fixed cost of a cycle in seconds.
        shared: All parts are on one device, so that a cycle takes the sum of their times.
        seed: Of the random answers.
    """
    if isinstance(answers, np.ndarray):
        right = np.resize(answers.astype(bool), tokens)
    else:
        right = np.random.default_rng(seed).random(tokens) < answers
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
