"""The models of a chain: what users give, loaded, made and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.checks.devices import Devices, arrange, weights_of_each
from pipespec.checks.models import check_chain
from pipespec.checks.tokenizers import translation_for
from pipespec.config import SpeculationConfig
from pipespec.engine.head import DraftHead, HeadConfig, is_head
from pipespec.engine.inputs import stage_names
from pipespec.engine.ngram import NgramDraft
from pipespec.models.adapters import without_wrapper
from pipespec.models.devices import tensor_parallel_size
from pipespec.models.loading import load_config, load_model
from pipespec.models.quantizing import Weights, quantized
from pipespec.registry import SCHEDULES

if TYPE_CHECKING:
    from pipespec.engine.translation import Translation


Draft: TypeAlias = PreTrainedModel | NgramDraft | str | Path


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
        models: Drafts first, target last.
        notes: About the models that were quantised.
        translation: For a first draft with another tokenizer.
        is_known: Whether it is known that the others have the target's tokenizer.
        head: The draft head, which is not among the models.
    """

    models: list[PreTrainedModel]
    notes: list[str]
    translation: Translation | None
    is_known: bool
    head: DraftHead | None = None


def given_drafts(drafts: Any) -> list[Any]:
    """The drafts that a user names, as a list without wrappers. Raises ``TypeError`` for what is no list of drafts."""
    drafts = without_wrapper(drafts)
    if drafts is None or isinstance(drafts, (str, Path, PreTrainedModel, NgramDraft)):
        drafts = [] if drafts is None else [drafts]
    if not isinstance(drafts, Sequence):
        raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
    return [without_wrapper(draft) for draft in drafts]


def head_of(drafts: Sequence[Any]) -> tuple[str | Path | None, list[Any]]:
    """Split the drafts without an n-gram index into the draft head, if there is one, and the models. ``ValueError`` for a head beside others."""
    heads = [draft for draft in drafts if is_head(draft)]
    if not heads:
        return None, list(drafts)
    if len(drafts) > 1:
        raise ValueError(
            f"{heads[0]} is a draft head, which reads the target's hidden states: beside it there can be an n-gram draft, and no other draft"
        )
    return heads[0], []


def load_chain(
    target: PreTrainedModel | str | Path, drafts: Sequence[Any], config: SpeculationConfig, loading: Loading
) -> Chain:
    """Load the models of a chain, make those that are made here, and check that they form one. ``drafts``: without an n-gram index."""
    given = [*drafts, target]
    names, remote = stage_names(len(given)), loading.trust_remote_code
    of_head = None
    if config.head is not None:
        names = stage_names(2)
        known = target.config if isinstance(target, PreTrainedModel) else load_config(target, trust_remote_code=remote)
        HeadConfig.load(config.head).require(known)
        of_head, *formats = weights_of_each(loading.weights, names)
        names = names[1:]
    else:
        formats = weights_of_each(loading.weights, names)
    devices = arrange(given, device=loading.device, dtype=loading.dtype, trust_remote_code=remote)
    models = [
        load_model(m, dtype=loading.dtype, device=d, trust_remote_code=remote)
        for m, d in zip(given, devices, strict=True)
    ]
    translation = translation_for(
        models,
        given,
        loading.tokenizer,
        loading.draft_tokenizers,
        has_ngram=config.ngram is not None,
        trust_remote_code=remote,
    )
    translated = translation is not None
    check_chain(models, given, translated=translated)
    is_known = any(x is not None for x in (translation, loading.tokenizer, loading.draft_tokenizers))
    notes = [f"{name}: {form} weights" for name, form in zip(names, formats, strict=True) if form is not None]
    head = None
    if config.head is not None:
        if tensor_parallel_size(models[-1]) > 1:
            raise ValueError(
                f"{config.head} is a draft head, and the target is sharded over processes (tp_plan): leave one out"
            )
        head = DraftHead.load(config.head, models[-1], loading.dtype)
    for i, form in enumerate(formats):
        if form is not None:
            models[i] = quantized(models[i], form)
    if head is not None:
        head.borrow(models[-1])  # the embedding of the target that runs
        if of_head is not None:
            notes.insert(0, f"draft 0: {head.quantize(of_head)} weights")
    return Chain(models, notes, translation, is_known, head)


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
