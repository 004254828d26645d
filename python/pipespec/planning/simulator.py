"""The simulator, with names and defaults. The work is done by csrc/runtime/simulator.cpp.

Our schedules run the product's own protocol code in virtual time: only the duration of a forward and the tokens that stages say
are modelled. ``reference`` and ``reference-lockstep`` are the published system (arXiv 2505.01572), from its description.

Not modelled: the duration of a plan, a commit or a publication (part of a measured step time), the growth of a step with the
length of the text (give the mean), end-of-sequence tokens (give the length instead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pipespec.planning._checks import non_negative, positive, probability, same_length

Schedule = Literal["workers", "lockstep", "reference", "reference-lockstep"]

WIDTH = 64
"""Columns of a step, as the engine has it."""

PATIENCE = 1.5
"""The engine's deadline of a wait: this many times what the awaited drafts are expected to take."""


@dataclass(frozen=True)
class StageModel:
    """What the simulator knows of a stage.

    ``step_s``: seconds of a step, one number or one per width (``step_s[i]`` feeds i + 1 columns; the last serves all wider
    steps). ``start_s``: when its prompt is read. ``device``: stages with one number share a device; None: one of its own.
    ``sensitivity``: to others on its device, a factor of the ``contention`` (workers). ``cold_s``: how much longer its first step after
    another stage's lasts; the next one half of that, and so on (lockstep: caches hold what ran last).
    """

    step_s: float | Sequence[float]
    start_s: float = 0.0
    device: int | None = None
    sensitivity: float = 1.0
    cold_s: float = 0.0

    def times(self) -> list[float]:
        """Seconds by width. Raises ``ValueError`` if one is not positive."""
        values = [self.step_s] if isinstance(self.step_s, (int, float)) else list(self.step_s)
        if not values:
            raise ValueError("a stage needs at least one step time")
        return [positive(t, "a step time") for t in values]


@dataclass(frozen=True)
class Policy:
    """The numbers that steer a chain, as the drivers have them.

    ``windows``: how far each draft may be ahead of the stage downstream of it, one for all or one each. ``wait``: hints that
    the target awaits when it has fewer; ``waits``: the same for each verifying stage, instead. ``patience``: the deadline, in
    expected durations. ``decode_meanwhile``: a stage with fewer hints than its wait decodes one token and leaves the hints alone,
    instead of sleeping; pays where a one-token step costs much less than a wider one. ``wake_s``: from
    a publication to the look of a stage that slept; ``late_s``: the same where the others have all cores (None: no longer).
    """

    windows: int | Sequence[int] = 32
    wait: int = 0
    waits: Sequence[int] | None = None
    patience: float = PATIENCE
    decode_meanwhile: bool = False
    wake_s: float = 0.0
    late_s: float | None = None
    width: int = WIDTH

    def per_stage(self, stages: int) -> list[tuple[int, int, int]]:
        """Window, most hints and wait of each stage. Raises ``ValueError`` for a wrong number of them."""
        drafts = stages - 1
        windows = [self.windows] * drafts if isinstance(self.windows, int) else list(self.windows)
        same_length("windows", windows, drafts, "draft")
        if any(w < 1 for w in windows):
            raise ValueError(f"a window must be at least 1, not {min(windows)}")
        waits = [0] * max(drafts - 1, 0) + [self.wait] * min(drafts, 1) if self.waits is None else list(self.waits)
        same_length("waits", waits, drafts, "verifying stage")
        if any(w < 0 for w in waits):
            raise ValueError(f"a wait must not be negative, not {min(waits)}")
        # As drivers.base.Policy.max_hints: half a step's columns are left for the stage's own tokens.
        hints = [min(w, self.width // 2) for w in windows]
        return list(zip([*windows, 0], [0, *hints], [0, *waits], strict=True))


@dataclass(frozen=True)
class StageCounts:
    """What one stage did. ``steps`` forwards (per row), ``drafted`` hints fed, ``accepted`` of them, ``adopted`` tokens taken
    over from downstream, ``truncated`` taken back, ``rollbacks`` times that happened, ``busy_s`` seconds in forwards,
    ``histogram[n]``: steps that appended n tokens."""

    steps: int
    drafted: int
    accepted: int
    adopted: int
    truncated: int
    rollbacks: int
    busy_s: float
    histogram: np.ndarray


@dataclass(frozen=True)
class Simulation:
    """The result. ``seconds`` of virtual time for ``tokens`` new tokens (all rows); ``stages``: draft 0 first."""

    seconds: float
    tokens: int
    stages: tuple[StageCounts, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens per row and step of the target."""
        return self.tokens / self.stages[-1].steps


@dataclass(frozen=True)
class Answers:
    """Which tokens the stages say: independent ``acceptance`` rates between neighbours, or a ``table`` that replays a text.

    ``acceptance[i]``: probability that stages i and i + 1 say the same after the same text. ``table``: uint8 [positions,
    drafts], 0 where the draft says what the target says, otherwise a name for its wrong token: equal numbers in a row are equal
    tokens. A table keeps correlations between stages and along the text; positions past its end begin again.
    """

    acceptance: Sequence[float] = ()
    table: np.ndarray | None = field(default=None)

    @staticmethod
    def from_bits(*right: np.ndarray, same_mistake: np.ndarray | None = None) -> Answers:
        """A table from one bit vector per draft, smallest first: is it right at this position? Two drafts that are both wrong
        say the same where ``same_mistake`` is true (default: nowhere)."""
        if not right:
            raise ValueError("no bits: one vector per draft is needed")
        bits = [np.asarray(r, dtype=bool) for r in right]
        if len({b.shape for b in bits}) != 1 or bits[0].ndim != 1:
            raise ValueError(f"bit vectors of one length are needed, not of shapes {[b.shape for b in bits]}")
        table = np.zeros((len(bits[0]), len(bits)), dtype=np.uint8)
        for i, b in enumerate(bits):
            table[:, i] = np.where(b, 0, i + 1)
        if same_mistake is not None:
            both = np.asarray(same_mistake, dtype=bool)
            for i in range(len(bits) - 1, 0, -1):
                met = both & ~bits[i] & ~bits[i - 1]
                table[met, i - 1] = table[met, i]
        return Answers(table=table)

    def check(self, stages: int) -> None:
        """``ValueError`` unless this describes a chain of ``stages`` stages."""
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
    policy: Policy | None = None,
    rows: int = 1,
    seed: int = 0,
    contention: float = 1.0,
    cores: int | None = None,
    lookahead: int = 8,
    handshake_s: float = 0.0,
    preempt: bool = False,
) -> Simulation:
    """Run ``stages``, the target last, until the target has ``tokens`` new tokens in each of ``rows`` rows.

    ``schedule``: ``workers`` and ``lockstep`` are ours, steered by ``policy``; ``reference`` and ``reference-lockstep`` the
    published ones, steered by ``lookahead``, with ``handshake_s`` the fixed cost of an acknowledgement (one row only).
    ``answers``: ``Answers``, or just acceptance rates. ``contention``: of ``workers``, how much stages on one device slow each
    other down; n at once last 1 + contention (n - 1) times as long each (0: not at all; 1: they share what one alone has).
    ``cores`` of each device: so many run at once; of more, the target keeps one and the drafts share the others in turn, as the engine's
    priorities have it (one core: all share it; None: enough for all).
    ``preempt``, and ``handshake_s`` with ``workers``: idealisations for checks of closed forms, no driver has them; see
    csrc/runtime/simulator.hpp.

    Deterministic: one seed, one result. Raises ``ValueError`` for a setting that makes no sense, ``RuntimeError`` for a chain
    that waits for what cannot come without a deadline.
    """
    functions = {
        "workers": "simulate_asynchronous",
        "lockstep": "simulate_lockstep",
        "reference": "simulate_reference_async",
        "reference-lockstep": "simulate_reference_sync",
    }
    if schedule not in functions:
        raise ValueError(f"schedule must be one of {', '.join(functions)}, not {schedule!r}")
    if not isinstance(answers, Answers):
        answers = Answers(acceptance=tuple(answers))
    answers.check(len(stages))
    policy = policy or Policy()
    if math.isnan(policy.patience) or policy.patience < 0:
        raise ValueError(f"patience must not be negative, not {policy.patience}")
    # The native module lacks bounds of its own for what does not fit its integers.
    for name, value in (
        ("tokens", tokens),
        ("rows", rows),
        ("width", policy.width),
        ("cores", 1 if cores is None else cores),
    ):
        if not 1 <= value < 2**31:
            raise ValueError(f"{name} must be a positive number, not {value}")
    if not 0 <= lookahead < 2**31 or not 0 <= seed < 2**64:
        raise ValueError("lookahead and seed must not be negative")

    from pipespec_kernels import _native

    setting = _native.SimSetting()
    own_device = 1 + max((s.device for s in stages if s.device is not None), default=-1)
    built = []
    for i, (stage, (window, hints, wait)) in enumerate(zip(stages, policy.per_stage(len(stages)), strict=True)):
        out = _native.SimStage()
        out.step_s = stage.times()
        out.start_s = non_negative(stage.start_s, "start_s")
        out.sensitivity = non_negative(stage.sensitivity, "sensitivity")
        out.cold_s = non_negative(stage.cold_s, "cold_s")
        out.device = own_device + i if stage.device is None else stage.device
        out.window, out.max_hints, out.wait = window, hints, wait
        built.append(out)
    setting.stages = built
    if answers.table is not None:
        setting.set_table(np.ascontiguousarray(answers.table).tobytes())
    else:
        setting.set_acceptance([float(a) for a in answers.acceptance])
    setting.tokens, setting.rows, setting.width, setting.seed = tokens, rows, policy.width, seed
    setting.contention, setting.cores = non_negative(contention, "contention"), cores or 0
    setting.patience, setting.decode_meanwhile = policy.patience, policy.decode_meanwhile
    setting.wake_s = non_negative(policy.wake_s, "wake_s")
    setting.late_s = setting.wake_s if policy.late_s is None else non_negative(policy.late_s, "late_s")
    setting.preempt, setting.handshake_s = preempt, non_negative(handshake_s, "handshake_s")
    setting.lookahead = lookahead
    result: dict[str, Any] = getattr(_native, functions[schedule])(setting)
    counts = tuple(
        StageCounts(**{**stage, "histogram": np.asarray(stage["histogram"], dtype=np.int64)})
        for stage in result["stages"]
    )
    return Simulation(result["seconds"], result["tokens"], counts)


@dataclass(frozen=True)
class SpdSimulation:
    """``seconds`` for ``tokens`` (all rows), in ``cycles``; ``flushes``: rejected drafts, each empties the pipe."""

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
    rows: int = 1,
    seed: int = 0,
) -> SpdSimulation:
    """Speculative pipeline decoding: a target cut into ``len(stage_s)`` stages, one token in each, a draft module beside them.

    ``stage_s``: seconds of each stage in a cycle; ``draft_s``: of the draft module, beside the stages; ``cycle_s``: fixed cost
    of a cycle. ``shared``: all on one device, so that a cycle lasts as long as its parts together. ``answers``: acceptance rate,
    or a bit vector: is the draft right at this position? Rows of a batch go through their cycles together. Raises
    ``ValueError`` for a setting that makes no sense.
    """
    table = b""
    if isinstance(answers, np.ndarray):
        if answers.ndim != 1 or len(answers) == 0:
            raise ValueError(f"one bit per position is needed, not an array of shape {answers.shape}")
        table = (~answers.astype(bool)).astype(np.uint8).tobytes()
        rate = 0.0
    else:
        rate = probability(answers, "the acceptance rate")
    for name, value in (("tokens", tokens), ("rows", rows)):
        if not 1 <= value < 2**31:
            raise ValueError(f"{name} must be a positive number, not {value}")

    from pipespec_kernels import _native

    result = _native.simulate_spd(
        [positive(t, "the time of a stage") for t in stage_s],
        non_negative(draft_s, "draft_s"),
        non_negative(cycle_s, "cycle_s"),
        shared,
        rate,
        table,
        tokens,
        rows,
        seed,
    )
    return SpdSimulation(**result)
