"""The schedules: one row each. Validation, command line, documents and tests read this table.

A new schedule is one file with its driver and one row here. This module imports neither torch nor a driver: the command line reads it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

OPTIONS = {
    "graphs": "graphs=True",
    "ngram": "an n-gram draft",
    "head": "a draft head",
    "translation": "a draft with another tokenizer",
    "acceptance": "rejection sampling (acceptance=)",
}
"""The options of :class:`pipespec.config.SpeculationConfig` that some schedules do not take, and how messages call them."""

UNCAPTURED = frozenset({"ngram", "translation", "acceptance"})
"""Options that no captured step takes."""

EXCLUDED = {"acceptance": ("ngram", "translation", "exact"), "head": ("acceptance",)}
"""By option, those that it excludes: rejection sampling needs the distribution of the one draft that drew a token."""


@dataclass(frozen=True)
class Schedule:
    """One way to run the stages of a chain.

    Attributes:
        name: As users write it.
        driver: Its driver class, ``"module:class"``.
        stages: Where the stages run, in one line.
        purpose: What it is for, in one line.
        options: Those of :data:`OPTIONS` that it takes.
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
    options: frozenset[str]
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

    def driver_class(self, *, captured: bool = False, controlled: bool = False) -> Any:
        """Import the driver class."""
        return _imported(self.captured if captured else self.controlled if controlled else self.driver)

    def join_function(self) -> Any:
        """Import the function that takes this process's place among the others."""
        return _imported(self.join)


def _imported(where: str) -> Any:
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
    frozenset({"graphs", "ngram", "head", "translation", "acceptance"}),
    lookahead=4,  # each draft token is paid for with its own time
    captured="pipespec.schedules.graphs.rounds:RoundsDriver",
    controlled="pipespec.schedules.controlled:ControlledDriver",
)
WORKERS = Schedule(
    "workers",
    "pipespec.schedules.asynchronous.local:LocalDriver",
    "each draft in a process of its own, the target in yours, all at once",
    "stages with a NUMA node or a device each; drafts that must not share a process with the target",
    frozenset({"ngram", "translation"}),
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
    frozenset({"ngram", "translation"}),
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


def table() -> str:
    """The table of schedules in ``docs/how-to/schedules.md``."""
    lines = ["| schedule | where the stages run | use it for |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{row.name}` | {row.stages} | {row.purpose} |" for row in SCHEDULES.values()), ""])


def default_schedule(
    devices: Sequence[str],
    graphs: bool | None = None,
    places: int | None = None,
    *,
    light: bool = False,
    uncaptured: bool = False,
    whole: bool = True,
    coupled: bool = True,
    controlled: bool = False,
) -> tuple[str, bool, bool]:
    """Choose the schedule where the user names none, without measuring.

    All cores with one memory bus are one device: a stage that runs beside another on it slows it down by as much as it works. Processes pay where stages
    have memory buses of their own.

    | stages | schedule |
    |---|---|
    | with rejection sampling | ``"lockstep"`` |
    | no drafts | ``"plain"`` |
    | an n-gram index as the only draft | ``"lockstep"``, as there are no steps to overlap |
    | a draft head, with or without an n-gram index | ``"lockstep"``, with captured rounds on a GPU and without an index |
    | all on one GPU | ``"lockstep"``, captured rounds |
    | all on GPUs, more than one | ``"streams"`` |
    | all on the CPU, and a NUMA node for each stage | ``"workers"`` |
    | the target on a GPU, the drafts on the CPU, and a core for each stage | ``"workers"`` |
    | otherwise, so on a CPU with one node | ``"lockstep"`` |

    Beside an n-gram index or a draft with another tokenizer, and where a model is not whole on one device, no steps are captured. On a CPU an n-gram index
    joins the stages of ``"plain"`` and ``"lockstep"``, in ``"lockstep"``: the controller lets it rest where it does not pay.

    Args:
        devices: Per model, drafts first, target last: ``"cpu"``, ``"cuda:0"``, ...
        graphs: The user's choice of captured steps. None: captured on GPUs, not captured on the CPU.
        places: Where stages do not share a memory bus: NUMA nodes on whose cores this process may run; for a target on a GPU, its cores. None: as the
            operating system reports.
        light: Whether the first draft is an n-gram index, or the only model that drafts is a head, which lies with the target.
        uncaptured: Whether no captured step takes the first draft: an n-gram index, or one with another tokenizer than the target's.
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
    if not drafts:
        row = LOCKSTEP if light else PLAIN
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
            found += not own.isdisjoint(_cores(file.read_text()))
    return max(1, found)


def _cores(text: str) -> set[int]:
    """The cores of a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
