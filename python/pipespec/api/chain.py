"""The models of a chain: what users give, loaded, made and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.checks.devices import Devices, arrange, weights_of_each
from pipespec.checks.models import check_chain
from pipespec.checks.tokenizers import with_translations
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import DraftSpec, as_draft
from pipespec.engine.inputs import stage_names
from pipespec.models.adapters import without_wrapper
from pipespec.models.devices import tensor_parallel_size
from pipespec.models.loading import load_config, load_model
from pipespec.models.quantizing import Weights, quantized
from pipespec.registry import SCHEDULES

Draft: TypeAlias = PreTrainedModel | DraftSpec | Any
"""A draft as users give it: a model, its path, the name of a kind, or an object, see :data:`pipespec.registry.DRAFTS`."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How models are loaded and drafts are made: arguments of :class:`pipespec.Pipeline`."""

    dtype: torch.dtype | str = "auto"
    weights: Weights = None
    device: Devices = None
    tokenizer: Any = None
    draft_tokenizers: Any = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype != "auto" and not isinstance(getattr(torch, str(self.dtype), self.dtype), torch.dtype):
            raise ValueError(
                f"dtype={self.dtype!r} is not a dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'"
            )


@dataclass(frozen=True)
class Chain:
    """A chain whose models are loaded.

    Attributes:
        drafts: The spec of each draft.
        models: Of the drafts that have one, in their order, and of the target.
        notes: About the models that were quantised.
        is_known: Whether it is known that the others have the target's tokenizer.
    """

    drafts: list[DraftSpec]
    models: list[Any]
    notes: list[str]
    is_known: bool


def given_drafts(drafts: Any) -> list[DraftSpec]:
    """The drafts that a user names, without wrappers. Raises ``TypeError`` for what is no list of drafts."""
    drafts = without_wrapper(drafts)
    if drafts is None:
        return []
    if isinstance(drafts, Sequence) and not isinstance(drafts, str):
        return [as_draft(without_wrapper(draft)) for draft in drafts]
    single = as_draft(drafts)
    if single.own_model and not isinstance(drafts, (str, Path, PreTrainedModel, DraftSpec)):
        raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
    return [single]


def load_chain(
    target: PreTrainedModel | str | Path, drafts: Sequence[DraftSpec], config: SpeculationConfig, loading: Loading
) -> Chain:
    """Load the models of a chain, make those that are made here, and check that they form one."""
    remote = loading.trust_remote_code
    if not config.schedule_row.has_drafts:
        drafts = [draft for draft in drafts if draft.own_model]
    own = [draft for draft in drafts if draft.own_model]
    with_model = [draft for draft in drafts if not draft.inline]
    names = stage_names(len(with_model) + 1)
    formats = weights_of_each(loading.weights, names)
    if len(own) < len(with_model):
        known = target.config if isinstance(target, PreTrainedModel) else load_config(target, trust_remote_code=remote)
        for draft in with_model:
            draft.check(known)
    given = [*(draft.given for draft in own), target]
    devices = arrange(given, device=loading.device, dtype=loading.dtype, trust_remote_code=remote)
    loaded = [
        load_model(m, dtype=loading.dtype, device=d, trust_remote_code=remote)
        for m, d in zip(given, devices, strict=True)
    ]
    own = with_translations(own, loaded, given, loading.tokenizer, loading.draft_tokenizers, trust_remote_code=remote)
    translated = [i for i, draft in enumerate(own) if draft.translates]
    check_chain(loaded, given, translated=translated)
    is_known = bool(translated) or loading.tokenizer is not None or loading.draft_tokenizers is not None
    own_drafts = iter(zip(own, loaded, strict=False))
    specs, models = [], []
    for draft in drafts:
        model = None
        if draft.own_model:
            draft, model = next(own_drafts)
        elif not draft.inline:
            model = draft.load(loaded[-1], loading.dtype)
        specs.append(draft.for_target(target, loaded[-1]))
        models += [model] * (not draft.inline)
    models.append(loaded[-1])
    if formats[-1] is not None:
        models[-1] = quantized(models[-1], formats[-1])
    for i, draft in enumerate(draft for draft in specs if not draft.inline):
        models[i], formats[i] = draft.fit(models[i], models[-1], formats[i])
    notes = [f"{name}: {form} weights" for name, form in zip(names, formats, strict=True) if form is not None]
    return Chain(specs, models, notes, is_known)


def check_group_drafts(drafts: Sequence[Any], schedule: str | None) -> None:
    """Refuse what a tensor-parallel target excludes, in each of its processes: those that do not lead have no drafts."""
    if drafts and schedule is not None and schedule in SCHEDULES and SCHEDULES[schedule].needs_ranks:
        raise ValueError(
            "the target is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: use 'plain', 'lockstep' or "
            "'workers'"
        )


def check_rank_drafts(drafts: Sequence[Any], loading: Loading) -> None:
    """Refuse drafts that are made out of other models: a rank loads its own model alone."""
    for name in ("weights", "tokenizer", "draft_tokenizers"):
        if getattr(loading, name) is not None:
            raise ValueError(
                f"{name} is not for schedule='ranks', where each rank loads its own model as its folder or GGUF file has it: leave it out"
            )
    if any(tensor_parallel_size(draft) > 1 for draft in drafts if isinstance(draft, PreTrainedModel)):
        raise ValueError(
            "a draft is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: load it whole"
        )
