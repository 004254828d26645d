"""The schedules and the kinds of drafts: one row each. Validation, command line, documents and tests read these tables.

A new schedule is one file with its driver and one row here, a new kind of draft one file with its spec and one row. This module imports neither torch nor any of
them: the command line reads it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

OPTIONS = {"graphs": "graphs=True", "acceptance": "rejection sampling (acceptance=)"}
"""The options of :class:`pipespec.config.SpeculationConfig` that some schedules do not take, and how messages call them."""


@dataclass(frozen=True)
class DraftKind:
    """One kind of draft.

    Attributes:
        spec: Its :class:`pipespec.engine.chain.DraftSpec`, ``"module:class"``.
        usage: What users give for it, as the command line says it. Empty: nothing, or an object.
        name: What stands for it with its defaults. Empty: nothing.
        captured: The stage class of its captured steps, ``"module:class"``. Empty: it has none.
        joins: Whether it joins the stages on a CPU where the controller chooses the drafts.
    """

    spec: str
    usage: str = ""
    name: str = ""
    captured: str = ""
    joins: bool = False

    def spec_class(self) -> Any:
        """Import the class."""
        return imported(self.spec)


TRANSLATED = DraftKind("pipespec.engine.translation:TranslatedDraft", "the first one may have another tokenizer")
DRAFTS = (
    DraftKind(
        "pipespec.engine.ngram:NgramDraft",
        "ngram: prompt lookup",
        name="ngram",
        captured="pipespec.schedules.graphs.ngram:GraphedNgramStage",
        joins=True,
    ),
    DraftKind("pipespec.engine.block:BlockDraft", "the folder of a DFlash or DSpark drafter, as the first one"),
    DraftKind(
        "pipespec.engine.head:HeadDraft",
        "the folder of an EAGLE-3 head, as the first one",
        captured="pipespec.schedules.graphs.head:GraphedHead",
    ),
    DraftKind(
        "pipespec.engine.mtp:MtpDraft", "mtp: the layer for it in the target's files, as the first one", name="mtp"
    ),
    DraftKind("pipespec.engine.proposer:ProposerDraft"),
    TRANSLATED,
    DraftKind("pipespec.engine.stage:ModelDraft", captured="pipespec.schedules.graphs.stage:GraphedStage"),
)
"""All kinds of drafts. What a user gives for a draft is of the first kind that recognises it, and the last one takes anything."""


def kind_of(draft: Any) -> DraftKind | None:
    """The row of a draft; None for a class of the user's."""
    name = f"{type(draft).__module__}:{type(draft).__qualname__}"
    return next((row for row in DRAFTS if row.spec == name), None)


def has_captured_form(draft: Any) -> bool:
    """Whether the steps of a draft can be captured."""
    row = kind_of(draft)
    return row is not None and bool(row.captured)


@dataclass(frozen=True)
class Schedule:
    """One way to run the stages of a chain.

    Attributes:
        name: As users write it.
        driver: Its driver class, ``"module:class"``.
        stages: Where the stages run, in one line.
        purpose: What it is for, in one line.
        options: Those of :data:`OPTIONS` that it takes.
        in_turn: Whether the drafts run in the target's process, in turn with it.
        lookahead: Default, for each draft.
        captured: The driver class of captured steps, if there is one; the same as ``driver`` where no other steps exist.
        controlled: The driver class in which the controller chooses the number of draft tokens, if there is one.
        needs: What it needs; empty: nothing but the models.
        has_drafts: Whether drafts take part.
        has_processes: Whether each draft runs in a process of its own, which shares its weights.
        join: Where each model is in a process that a launcher has started, the function that takes this one's place, ``"module:function"``.
    """

    name: str
    driver: str
    stages: str
    purpose: str
    options: frozenset[str] = frozenset()
    in_turn: bool = False
    lookahead: int = 0
    captured: str = ""
    controlled: str = ""
    needs: str = ""
    has_drafts: bool = True
    has_processes: bool = False
    join: str = ""

    @property
    def is_captured(self) -> bool:
        """Whether all of its steps are captured."""
        return self.captured == self.driver

    @property
    def needs_ranks(self) -> bool:
        """Whether each model is in a process that a launcher has started."""
        return bool(self.join)

    def takes(self, draft: Any) -> bool:
        """Whether a draft can run in it."""
        runs_here = self.in_turn or not draft.reads_target
        # The stage downstream of an inline one plans after it, which no launch of its own does.
        is_captured = has_captured_form(draft) and not draft.inline
        return self.has_drafts and runs_here and (is_captured or not self.is_captured)


def imported(where: str) -> Any:
    """Import ``"module:name"``."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


PLAIN = Schedule(
    "plain",
    "pipespec.schedules.lockstep:LockstepDriver",
    "the target alone, through the same loop; drafts are ignored",
    "comparison",
    frozenset(OPTIONS),  # those of drafts have no effect
    captured="pipespec.schedules.graphs.rounds:RoundsDriver",
    has_drafts=False,
)
LOCKSTEP = Schedule(
    "lockstep",
    "pipespec.schedules.lockstep:LockstepDriver",
    "one after the other, in one process; with `graphs=True` a round is one captured CUDA graph",
    "a CPU, one GPU",
    frozenset(OPTIONS),
    in_turn=True,
    lookahead=4,  # each draft token is paid for with its own time
    captured="pipespec.schedules.graphs.rounds:RoundsDriver",
    controlled="pipespec.schedules.lockstep:ControlledDriver",
)
WORKERS = Schedule(
    "workers",
    "pipespec.schedules.asynchronous.local:LocalDriver",
    "each draft in a process of its own, the target in yours, all at once",
    "stages with a NUMA node or a device each; drafts that must not share a process with the target",
    lookahead=8,
    has_processes=True,
)
STREAMS = Schedule(
    "streams",
    "pipespec.schedules.graphs.streams:StreamsDriver",
    "in one process, a thread and a CUDA stream per stage, each step a captured graph",
    "several GPUs",
    frozenset({"graphs"}),
    lookahead=8,
    captured="pipespec.schedules.graphs.streams:StreamsDriver",
    needs="GPUs",
)
RANKS = Schedule(
    "ranks",
    "pipespec.schedules.asynchronous.remote:RemoteDriver",
    "each stage in a process that torchrun has started, on any machine",
    "[several machines](several-machines.md)",
    lookahead=8,
    needs="processes that torchrun starts",
    join="pipespec.schedules.asynchronous.membership:join",
)

SCHEDULES: Mapping[str, Schedule] = {row.name: row for row in (LOCKSTEP, WORKERS, STREAMS, RANKS, PLAIN)}
"""All schedules by name, in the order in which documents list them."""


def names(rows: Sequence[Schedule]) -> str:
    """The names of schedules as messages list them."""
    *first, last = [repr(row.name) for row in rows]
    return f"{', '.join(first)} or {last}" if first else last


def with_option(option: str) -> list[Schedule]:
    """The schedules in which an option has an effect."""
    return [row for row in SCHEDULES.values() if option in row.options and (row.has_drafts or option == "graphs")]


def with_draft(draft: Any) -> list[Schedule]:
    """The schedules in which a draft can run."""
    return [row for row in SCHEDULES.values() if row.takes(draft)]


def table() -> str:
    """The table of schedules in ``docs/how-to/schedules.md``."""
    lines = ["| schedule | where the stages run | use it for |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{row.name}` | {row.stages} | {row.purpose} |" for row in SCHEDULES.values()), ""])


def default_schedule(
    devices: Sequence[str],
    graphs: bool | None = None,
    places: int | None = None,
    *,
    in_turn: bool = False,
    uncaptured: bool = False,
    whole: bool = True,
    coupled: bool = True,
    controlled: bool = False,
) -> tuple[str, bool, bool]:
    """Choose the schedule where the user names none, without measuring.

    All cores with one memory bus are one device: a stage that runs at the same time as another slows it down by as much as it works. Processes pay where
    stages have memory buses of their own.

    | stages | schedule |
    |---|---|
    | with rejection sampling | ``"lockstep"`` |
    | no drafts | ``"plain"`` |
    | only drafts without a model, such as an n-gram index | ``"lockstep"``, as there are no steps to overlap |
    | a draft that reads the target's hidden states, such as a draft head | ``"lockstep"``, captured rounds on a GPU |
    | all on one GPU | ``"lockstep"``, captured rounds |
    | all on GPUs, more than one | ``"streams"`` |
    | all on the CPU, and a NUMA node for each stage | ``"workers"`` |
    | the target on a GPU, the drafts on the CPU, and a core for each stage | ``"workers"`` |
    | otherwise, so on a CPU with one node | ``"lockstep"`` |

    With a draft without a captured form, as one with another tokenizer, and where a model is not whole on one device, no steps are
    captured. On a CPU an n-gram index joins the stages of ``"plain"`` and ``"lockstep"``, in ``"lockstep"``: the controller does not use it where it does not pay.

    Args:
        devices: Per model of transformers, drafts first, target last: ``"cpu"``, ``"cuda:0"``, ...
        graphs: The user's choice of captured steps. None: captured on GPUs, not captured on the CPU.
        places: Where stages do not share a memory bus: NUMA nodes on whose cores this process may run; for a target on a GPU, its cores. None: as the
            operating system reports.
        in_turn: Whether the drafts run in turn with the target wherever they are: one of them reads its hidden states, or none has a model.
        uncaptured: Whether a draft has no captured form, or none on these devices.
        whole: Whether each model lies whole on one device: not split, offloaded or sharded over processes.
        coupled: Whether the target accepts draft tokens by coupled sampling.
        controlled: Whether the controller may choose the number of draft tokens in ``"lockstep"``, so that an n-gram index may join.

    Returns:
        The name of the schedule, whether ``"plain"`` and ``"lockstep"`` run in captured steps, and whether an n-gram index joins the stages.
    """
    *drafts, target = devices
    on_gpus, on_cpu = (all(device.startswith(kind) for device in devices) for kind in ("cuda", "cpu"))
    captured = (on_gpus and whole if graphs is None else graphs) and not uncaptured
    if not coupled:
        return LOCKSTEP.name, bool(graphs), False
    if places is None:
        places = len(os.sched_getaffinity(0)) if target != "cpu" else numa_nodes()
    if in_turn:
        row = LOCKSTEP
    elif not drafts:
        row = PLAIN
    elif captured:
        row = STREAMS if target.startswith("cuda") and len(set(devices)) > 1 else LOCKSTEP
    else:
        apart = graphs is None and set(drafts) == {"cpu"} and places >= len(devices)
        row = WORKERS if apart else LOCKSTEP
    joins = on_cpu and controlled and not captured and row is not WORKERS
    return (LOCKSTEP if joins else row).name, captured, joins


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """Number of nodes on whose cores this process may run, at least 1. The kernel lists each as ``node*`` in ``folder``, with a file ``cpulist``."""
    own, found = os.sched_getaffinity(0), 0
    for file in folder.glob("node[0-9]*/cpulist"):
        with suppress(ValueError):  # a container may change it
            cores: set[int] = set()
            for part in filter(None, file.read_text().strip().split(",")):  # such as 0-3 or 8
                first, _, last = part.partition("-")
                cores.update(range(int(first), int(last or first) + 1))
            found += not own.isdisjoint(cores)
    return max(1, found)
