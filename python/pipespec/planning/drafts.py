"""Drafts that are made for a pipeline: out of the target's own layers, trimmed, quantised. What each one is goes into the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from pipespec.engine.inputs import stage_names
from pipespec.models.derived import AUTO, SelfDraft, in_int8, layer_indices, with_layers, with_vocabulary
from pipespec.models.properties import head_size, text_config
from pipespec.preflight.checks import check_architecture


def self_draft(target: PreTrainedModel, layers: int | Sequence[int] | str = AUTO) -> PreTrainedModel:
    """Make a draft out of the target's own layers, with its embedding, norm and head.

    The draft has the target's parameters: the same objects, so that no weight exists twice. Where it consists of the first layers, it also shares the
    target's keys and values in ``schedule="lockstep"``, see :mod:`pipespec.engine.self_draft`.

    Targets that were trained for early exits (LayerSkip, Elhoushi et al. 2024) agree well with their first layers. Other targets do less often, and
    such a draft may not pay.

    Args:
        target: A LLaMA-like model.
        layers: The number of first layers, or ascending indices of layers. ``"auto"``: ``assistant_early_exit`` of the target's
            ``generation_config``.

    Returns:
        A model of the target's class, in eval mode.

    Raises:
        TypeError: The target is not LLaMA-like, or ``layers`` has another type.
        ValueError: The target has too few layers, an index is out of range, or ``"auto"`` and nothing names the layers.
    """
    check_architecture("the target", target)
    if isinstance(layers, str):
        if layers != AUTO:
            raise ValueError(f"layers must be a number of layers, their indices or {AUTO!r}, not {layers!r}")
        layers = _named_exit(target)
    return with_layers(target, layers)


def early_exit(target: PreTrainedModel) -> int | None:
    """``assistant_early_exit`` of a target's ``generation_config``, where it names fewer layers than the target has."""
    found = getattr(target.generation_config, "assistant_early_exit", None)
    is_usable = isinstance(found, int) and 1 <= found < text_config(target.config).num_hidden_layers
    return found if is_usable else None


def _named_exit(target: PreTrainedModel) -> int:
    found = early_exit(target)
    if found is None:
        raise ValueError(
            "drafts='self' does not say which layers, and the target's generation_config has no assistant_early_exit: name them, such as "
            f"'self:{max(1, text_config(target.config).num_hidden_layers // 4)}' (the first ones) or 'self:0,2,4'"
        )
    return found


def make_drafts(
    chosen: Sequence[Any],
    loaded: Sequence[PreTrainedModel],
    target: PreTrainedModel,
    *,
    ids: Sequence[int] | None = None,
    int8: bool = False,
) -> tuple[list[PreTrainedModel], list[str]]:
    """The draft models of a pipeline.

    Args:
        chosen: The drafts as the user named them. Each that is no :class:`SelfDraft` is in ``loaded``, in order.
        loaded: Models.
        target: The target.
        ids: Tokens of trimmed heads, see :func:`pipespec.models.vocabulary.draft_vocabulary`. None: whole heads.
        int8: Whether their matrices are quantised.

    Returns:
        The models, and notes about them for the reports.

    Raises:
        TypeError: As :func:`self_draft`.
        ValueError: Likewise; or a draft cannot be trimmed or quantised.
    """
    drafts, notes, others = [], [], iter(loaded)
    for name, draft in zip(stage_names(len(chosen) + 1), chosen, strict=False):
        model = next(others) if not isinstance(draft, SelfDraft) else None
        said: list[str] = []
        if model is None:
            model, what = _of_itself(target, draft)
            said.append(what)
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


def _of_itself(target: PreTrainedModel, draft: SelfDraft) -> tuple[PreTrainedModel, str]:
    check_architecture("the target", target)
    total = text_config(target.config).num_hidden_layers
    layers, why = draft.layers, ""
    if isinstance(layers, str) and layers == AUTO:
        layers, why = _named_exit(target), " (assistant_early_exit of its generation_config)"
    indices = layer_indices(target, layers)
    return with_layers(target, indices), f"layers {', '.join(_runs(indices))} of the target's {total}{why}"


def _runs(indices: Sequence[int]) -> Iterator[str]:
    """Indices with runs shortened: 0-3, 11."""
    begin = last = indices[0]
    for i in (*indices[1:], None):
        if i is None or i != last + 1:
            yield str(begin) if begin == last else f"{begin}-{last}"
            begin = i  # type: ignore[assignment]
        last = i  # type: ignore[assignment]
