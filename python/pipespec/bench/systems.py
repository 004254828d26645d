"""Systems of a run: from the kinds that were asked for to rows with keys, and from a row to the contender that generates its texts.

:data:`KINDS` is the table of all kinds. ``bench.baselines`` adds those that only the papers' tables need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipespec.bench.config import BenchConfig
from pipespec.bench.contenders import Contender, HFContender, PipelineContender, chains
from pipespec.bench.results import SystemSettings
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import as_draft
from pipespec.engine.ngram import NGRAM
from pipespec.registry import LOCKSTEP, PLAIN, SCHEDULES

REFERENCE = "hf"

Rows = Callable[[str, BenchConfig, Sequence[str]], Iterator[SystemSettings]]
"""Makes the rows of a kind, given the kind, what was asked for, and the names of the drafts."""


@dataclass(frozen=True)
class Kind:
    """A kind of systems.

    Args:
        about: What it is.
        rows: Makes its rows.
        make: Makes the contender of a row.
        has_drafts: Whether drafts propose tokens. Speed-ups refer to the fastest system without drafts.
    """

    about: str
    rows: Rows
    make: Callable[[SystemSettings], Contender]
    has_drafts: bool = True


def draft_names(paths: Sequence[str]) -> list[str]:
    """Names of models by the last parts of their paths; numbered where these are equal."""
    names = [Path(path).name for path in paths]
    return names if len({*names, "target"}) == len(names) + 1 else [f"draft {i}" for i in range(len(paths))]


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ``ValueError`` for a kind that does not exist."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"no system {', '.join(map(repr, unknown))}: there are {', '.join(KINDS)}")


def systems_of(config: BenchConfig, drafts: Sequence[str]) -> list[SystemSettings]:
    """The rows that a configuration asks for, with ``hf`` first. When sampling, also ``plain``, whose text is the reference then.

    ``drafts``: names of the draft models, smallest first.

    Raises:
        ValueError: A kind does not exist, or needs a draft and there is none, or a draft module is damaged.
        FileNotFoundError: A folder has no draft module.
    """
    check_kinds(config.systems)
    kinds = list(dict.fromkeys([REFERENCE, *([PLAIN.name] if config.temperature is not None else []), *config.systems]))
    found = [system for kind in kinds for system in KINDS[kind].rows(kind, config, drafts)]
    if repeated := sorted({s.key for s in found if sum(o.key == s.key for o in found) > 1}):
        raise ValueError(f"two systems have one key: {', '.join(repeated)}")
    return found


def single(label: str) -> Rows:
    """A kind that is one row."""

    def rows(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
        yield SystemSettings(key=kind, kind=kind, label=label)

    return rows


def each_chain(kind: str, config: BenchConfig, drafts: Sequence[str]) -> list[tuple[str, ...]]:
    """The chains that a configuration asks for. ``ValueError`` without a draft."""
    if not drafts:
        raise ValueError(f"the system {kind!r} needs a draft: give --draft")
    both = chains(drafts)
    if config.chains == "whole":
        return both[-1:]
    return both if config.chains == "both" or len(drafts) == 1 else both[:-1]


def _assisted(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    for (name,) in [c for c in chains(drafts) if len(c) == 1] or each_chain(kind, config, drafts):
        yield SystemSettings(key=f"assisted-{name}", kind=kind, label=f"HF assisted, {name}", drafts=[name])


def _swept(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    """One system per chain and point of the axes."""
    lookaheads: list[int | None] = [n for n in config.lookahead if n >= 1] or [None]
    of_chains = [(NGRAM,)] if kind == "ngram" else each_chain(kind, config, drafts)
    for chain, lookahead in itertools.product(of_chains, lookaheads):
        point = [] if lookahead is None else [f"L{lookahead}"]
        specs = [as_draft(draft) for draft in chain]
        checked = SpeculationConfig.of(specs, schedule=_schedule(kind), lookahead=lookahead)
        how = f", {' '.join(point)}" if point else ""
        yield SystemSettings(
            key="-".join([kind, *([] if kind == "ngram" else ["+".join(chain)]), *point]),
            kind=kind,
            label="lockstep, n-gram" + how if kind == "ngram" else f"{kind}, {' + '.join(chain)}{how}",
            drafts=list(chain),
            lookahead=list(checked.lookahead),
            axes={} if lookahead is None else {"lookahead": lookahead},
        )


def _schedule(kind: str) -> str:
    return LOCKSTEP.name if kind == "ngram" else kind.removesuffix("-graphs")


def _hf(system: SystemSettings) -> Contender:
    return HFContender(system.kind, system.label, system.drafts)


def _pipeline(system: SystemSettings) -> Contender:
    options = dict(system.options)
    if system.lookahead is not None:
        options["lookahead"] = system.lookahead
    if system.kind.endswith("-graphs"):
        options["graphs"] = True
    return PipelineContender(system.key, system.label, _schedule(system.kind), system.drafts, **options)


def contender_of(system: SystemSettings) -> Contender:
    """The contender that generates the texts of a system. ``ValueError`` where it cannot be measured."""
    if system.not_measured is not None:
        raise ValueError(f"the system {system.key!r} cannot be measured: {system.not_measured}")
    contender = KINDS[system.kind].make(system)
    contender.key, contender.label = system.key, system.label
    return contender


KINDS: dict[str, Kind] = {
    REFERENCE: Kind("transformers' generate(): the reference, always measured", single("HF generate()"), _hf, False),
    "assisted": Kind("generate() with an assistant model, tuned", _assisted, _hf),
    "lookup": Kind("generate() with prompt lookup, tuned", single("HF prompt lookup"), _hf),
    PLAIN.name: Kind("pipespec, the target alone", single("target alone"), _pipeline, False),
    "plain-graphs": Kind("the same in captured steps", single("target alone, graphs"), _pipeline, False),
    "ngram": Kind("pipespec, prompt lookup", _swept, _pipeline),
    "lockstep-graphs": Kind("pipespec, captured rounds", _swept, _pipeline),
    **{
        row.name: Kind(f"pipespec, stages {row.stages.partition(';')[0]}", _swept, _pipeline)
        for row in SCHEDULES.values()
        if row.has_drafts and not row.needs_ranks
    },
}
"""The table of kinds."""
