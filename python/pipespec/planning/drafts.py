"""Drafts that are made for a pipeline: trimmed, quantised. What each one is goes into the report."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from pipespec.engine.inputs import stage_names
from pipespec.models.derived import in_int8, with_vocabulary
from pipespec.models.properties import head_size


def make_drafts(
    loaded: Sequence[PreTrainedModel],
    *,
    ids: Sequence[int] | None = None,
    int8: bool = False,
) -> tuple[list[PreTrainedModel], list[str]]:
    """The draft models of a pipeline.

    Args:
        loaded: Models.
        ids: Tokens of trimmed heads, see :func:`pipespec.models.vocabulary.draft_vocabulary`. None: whole heads.
        int8: Whether their matrices are quantised.

    Returns:
        The models, and notes about them for the reports.

    Raises:
        ValueError: A draft cannot be trimmed or quantised.
    """
    drafts, notes = [], []
    for name, model in zip(stage_names(len(loaded) + 1), loaded, strict=False):
        said: list[str] = []
        if ids is not None:
            size = head_size(model)
            model = with_vocabulary(model, [i for i in ids if i < size])
            said.append(f"drafts {len(ids)} of {size} tokens")
        if int8:
            model = in_int8(model)
            said.append("int8 weights")
        drafts.append(model)
        if said:
            notes.append(f"{name}: {', '.join(said)}")
    return drafts, notes
