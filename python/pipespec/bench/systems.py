"""Systems of a run: from the kinds that were asked for to rows with keys, and from a row to the contender that generates its texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipespec.bench.config import BenchConfig
from pipespec.bench.contenders import Contender, HFContender, PipelineContender, StagedContender, chains
from pipespec.bench.results import SystemSettings
from pipespec.bench.rivals import CompiledContender, EarlyExitContender, OwnLayersContender, PublishedContender
from pipespec.config import SpeculationConfig
from pipespec.engine.ngram import NGRAM, NgramDraft
from pipespec.spd.draft_module import DraftModuleConfig

KINDS = {
    "hf": "transformers' generate(): the reference, always measured",
    "static": "generate() with a static cache and a compiled forward",
    "assisted": "generate() with an assistant model, tuned",
    "lookup": "generate() with prompt lookup, tuned",
    "draft-verify": "Draft&Verify: the target without some of its layers drafts",
    "layerskip": "LayerSkip's schedule: the target's first layers draft",
    "plain": "pipespec, the target alone",
    "plain-graphs": "the same in captured steps",
    "ngram": "pipespec, prompt lookup",
    "lockstep": "pipespec, the stages take turns",
    "lockstep-graphs": "the same in captured rounds",
    "workers": "pipespec, a process per draft",
    "streams": "pipespec, a CUDA stream per stage",
    "spd": "pipespec, the target in stages with one token in each",
    "published-lockstep": "the lockstep baseline as published with PipeSpec",
    "published-asynchronous": "PipeSpec as published",
    "ppsd": "PPSD's schedule: the target in stages, and what the first one has read drafts",
    "eagle3": "not measured",
}
"""Kinds of systems, and what they are."""

NOT_MEASURED = {
    "eagle3": "its draft head has to be trained for each target, and the published figures come from another engine (SGLang)",
}
"""Kinds that have a row without figures, and the reason."""

REFERENCE, PLAIN = "hf", "plain"
ASYNCHRONOUS = ("workers", "streams")
STAGED = ("spd", "ppsd")
"""Kinds that run the target in layer stages."""

EARLY_EXIT = "exit"
"""The drafter of PPSD."""

_PUBLISHED = {"published-lockstep": "lockstep", "published-asynchronous": "asynchronous"}


def draft_names(paths: Sequence[str]) -> list[str]:
    """Names of models by the last parts of their paths; numbered where these are equal."""
    names = [Path(path).name for path in paths]
    return names if len({*names, "target"}) == len(names) + 1 else [f"draft {i}" for i in range(len(paths))]


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ``ValueError`` for a kind that does not exist."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"no system {', '.join(map(repr, unknown))}: there are {', '.join(KINDS)}")


def systems_of(config: BenchConfig, drafts: Sequence[str]) -> list[SystemSettings]:
    """The rows that a configuration asks for.

    Args:
        config: The kinds and the axes.
        drafts: Names of the draft models, smallest first.

    Returns:
        With ``hf`` first. When sampling, also ``plain``, whose text is the reference then.

    Raises:
        ValueError: A kind does not exist, or needs a draft and there is none, or a draft module is damaged.
        FileNotFoundError: A folder has no draft module.
    """
    check_kinds(config.systems)
    kinds = list(dict.fromkeys([REFERENCE, *([PLAIN] if config.temperature is not None else []), *config.systems]))
    found = [system for kind in kinds for system in _systems(kind, config, drafts)]
    if repeated := sorted({s.key for s in found if sum(o.key == s.key for o in found) > 1}):
        raise ValueError(f"two systems have one key: {', '.join(repeated)}")
    return found


def _systems(kind: str, config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    if kind in NOT_MEASURED:
        yield SystemSettings(key=kind, kind=kind, label=kind, not_measured=NOT_MEASURED[kind])
    elif kind == "assisted":
        for name in _required(drafts, kind):
            yield SystemSettings(key=f"assisted-{name}", kind=kind, label=f"HF assisted, {name}", drafts=[name])
    elif kind in ("hf", "static", "lookup", "draft-verify", "layerskip", "plain", "plain-graphs"):
        yield SystemSettings(key=kind, kind=kind, label=_LABELS[kind])
    elif kind == "ngram":
        yield from _swept(kind, [NGRAM], config)
    elif kind == "spd":
        yield from _staged(config, drafts)
    elif kind == "ppsd":
        for stages in config.stages:
            options = {"stages": stages, "drafter": EARLY_EXIT}
            label = f"PPSD, {stages} stages, the target's own head"
            yield SystemSettings(key=f"ppsd-n{stages}", kind=kind, label=label, options=options, axes=dict(options))
    else:
        for chain in _chains(config, _required(drafts, kind)):
            yield from _swept(kind, chain, config)


_LABELS = {
    "hf": "HF generate()",
    "static": "HF static cache, compiled",
    "lookup": "HF prompt lookup",
    "draft-verify": "HF assisted, skipped layers (Draft&Verify)",
    "layerskip": "HF early exit (LayerSkip)",
    "plain": "target alone",
    "plain-graphs": "target alone, graphs",
}


def _required(drafts: Sequence[str], kind: str) -> Sequence[str]:
    if not drafts:
        raise ValueError(f"the system {kind!r} needs a draft: give --draft")
    return drafts


def _chains(config: BenchConfig, drafts: Sequence[str]) -> list[tuple[str, ...]]:
    both = chains(drafts)
    if config.chains == "whole":
        return both[-1:]
    return both if config.chains == "both" or len(drafts) == 1 else both[:-1]


def _swept(kind: str, chain: Sequence[str], config: BenchConfig) -> Iterator[SystemSettings]:
    """One system per point of the axes."""
    published, schedule = kind in _PUBLISHED, _schedule(kind)
    least = 0 if kind == "published-asynchronous" else 1
    lookaheads: list[int | None] = [n for n in config.lookahead if n >= least] or [None]
    minima: list[int | None] = list(config.min_draft_tokens) if kind in ASYNCHRONOUS else []
    further = {} if published else config.pipeline
    for lookahead, minimum, *values in itertools.product(lookaheads, minima or [None], *further.values()):
        options = dict(zip(further, values, strict=True))
        axes: dict[str, Any] = {name: value for name, value in options.items() if len(further[name]) > 1}
        parts = [kind, "+".join(chain)] if kind != "ngram" else [kind]
        if lookahead is not None:
            parts.append(f"L{lookahead}")
            axes["lookahead"] = lookahead
        if minimum is not None:
            parts.append(f"w{minimum}")
            axes["min_draft_tokens"] = minimum
        parts += [f"{name}={value}" for name, value in options.items() if name in axes]
        if published:
            per_draft = None if lookahead is None else [lookahead] * len(chain)
        else:
            ngram = NgramDraft() if kind == "ngram" else None
            checked = SpeculationConfig.of(len(chain), schedule=schedule, lookahead=lookahead, ngram=ngram)
            per_draft = list(checked.lookahead)
        how = "" if len(parts) < 3 or kind == "ngram" else f", {' '.join(parts[2:])}"
        label = f"{kind}, {' + '.join(chain)}{how}" if kind != "ngram" else " ".join(["lockstep, n-gram", *parts[1:]])
        yield SystemSettings(
            key="-".join(parts),
            kind=kind,
            label=label,
            drafts=list(chain),
            lookahead=per_draft,
            min_draft_tokens=minimum,
            options=options,
            axes=axes,
        )


def _schedule(kind: str) -> str:
    return "lockstep" if kind == "ngram" else kind.removesuffix("-graphs")


def _staged(config: BenchConfig, drafts: Sequence[str]) -> Iterator[SystemSettings]:
    """SPD: one system per number of stages and drafter, and one per draft module, which belongs to one split."""
    needs = {"module": "a draft module that was trained for the target: --module", "chain": "a draft: --draft"}
    possible = {"module": bool(config.module), "ngram": True, "chain": bool(drafts)}
    wanted = config.drafters or tuple(name for name, is_possible in possible.items() if is_possible)
    if unknown := [name for name in wanted if name not in possible]:
        raise ValueError(f"no drafter {', '.join(map(repr, unknown))} for spd: there are {', '.join(possible)}")
    if "module" in wanted:
        yield from map(_with_module, config.module, _module_names(config.module))
    for stages, drafter in itertools.product(config.stages, wanted):
        if drafter == "module" and config.module:
            continue
        names = list(drafts) if drafter == "chain" else []
        by = "+".join(names) or drafter
        yield SystemSettings(
            key=f"spd-{by}-n{stages}",
            kind="spd",
            label=f"spd, {stages} stages, {by}",
            drafts=names,
            options={"stages": stages, "drafter": drafter},
            axes={"stages": stages, "drafter": drafter},
            not_measured=None if possible[drafter] else f"it needs {needs[drafter]}",
        )


def _module_names(folders: Sequence[str]) -> list[str]:
    """Names of draft modules: those of their folders, numbered where these are equal."""
    names = [Path(folder).name for folder in folders] if len(folders) > 1 else ["module"]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _with_module(folder: str, name: str) -> SystemSettings:
    """SPD with a draft module, in the stages that it was trained for. Its anchors are an axis: which stages feed the module."""
    trained = DraftModuleConfig.load(folder)
    return SystemSettings(
        key=f"spd-{name}-n{trained.n}",
        kind="spd",
        label=f"spd, {trained.n} stages, {'' if name == 'module' else 'module '}{name}",
        options={"stages": [end - begin for begin, end in trained.stages], "drafter": folder},
        axes={"stages": trained.n, "drafter": name, "anchors": list(trained.anchors)},
    )


def contender_of(system: SystemSettings) -> Contender:
    """The contender that generates the texts of a system.

    Args:
        system: One that is measured.

    Raises:
        ValueError: The system is none that can be measured.
    """
    kind, key, label = system.kind, system.key, system.label
    if kind in ("hf", "assisted", "lookup"):
        contender: Contender = HFContender(kind, label, system.drafts)
    elif kind == "static":
        contender = CompiledContender()
    elif kind == "draft-verify":
        contender = OwnLayersContender()
    elif kind == "layerskip":
        contender = EarlyExitContender()
    elif kind in _PUBLISHED:
        contender = PublishedContender(
            _PUBLISHED[kind], system.drafts, None if system.lookahead is None else system.lookahead[0]
        )
    elif kind in STAGED:
        contender = StagedContender(key, label, system.options["stages"], system.options["drafter"], system.drafts)
    elif kind in NOT_MEASURED:
        raise ValueError(f"the system {key!r} cannot be measured: {NOT_MEASURED[kind]}")
    else:
        options = dict(system.options)
        if system.lookahead is not None:
            options["lookahead"] = system.lookahead
        if system.min_draft_tokens is not None:
            options["min_draft_tokens"] = system.min_draft_tokens
        if kind.endswith("-graphs"):
            options["graphs"] = True
        contender = PipelineContender(key, label, _schedule(kind), system.drafts, **options)
    contender.key, contender.label = key, label
    return contender
