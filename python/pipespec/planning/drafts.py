"""Drafts that are made for a pipeline: out of the target's own layers, trimmed, quantised. What each one is goes into the report."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.drivers import Driver, GenerationRequest, make_driver
from pipespec.drivers.base import SpeedWarning
from pipespec.engine.forward import release
from pipespec.engine.ngram import NgramDraft
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import StageInputs, stage_names
from pipespec.models.derived import AUTO, SelfDraft, in_int8, layer_indices, with_layers, with_vocabulary
from pipespec.models.properties import end_tokens, head_size, text_config
from pipespec.planning import agreement, measure, planner
from pipespec.planning.profile import Profile, StageProfile
from pipespec.planning.simulator import Answers
from pipespec.preflight.checks import check_architecture
from pipespec.process.progress import working
from pipespec.process.table import aligned
from pipespec.process.warnings import user_stacklevel

TEXT_TOKENS = 64
"""Tokens that the target writes behind each prompt of a measurement."""

_PARTS = (12, 8, 6, 4, 3, 2)
"""Self-drafts of one such part of the layers are tried."""
_WIDTHS = (1, 2, 4, 9)
_BUDGET_S = 2.0

Text = tuple[np.ndarray, int]
"""Token ids of a text, int32 ``[positions]``, and the position from which on the target has written it."""


@dataclass(frozen=True)
class MeasuredLayers:
    """A self-draft that was measured.

    Attributes:
        layers: Indices of its layers.
        agreement: Share of the target's tokens that it chooses, teacher-forced.
        step_s: Seconds of its step.
        gain: Predicted rate in lockstep with the best lookahead, divided by that of plain decoding.
    """

    layers: tuple[int, ...]
    agreement: float
    step_s: float
    gain: float

    @property
    def name(self) -> str:
        """How ``drafts`` and ``--draft`` name it."""
        is_first = self.layers == tuple(range(len(self.layers)))
        return f"self:{len(self.layers)}" if is_first else f"self:{','.join(map(str, self.layers))}"


@dataclass(frozen=True)
class LayerSurvey:
    """Measured self-drafts of a target, the best first. ``target_step_s``: seconds of the target's step."""

    measured: tuple[MeasuredLayers, ...]
    target_step_s: float

    @property
    def best(self) -> MeasuredLayers:
        """The one with the largest predicted gain."""
        return self.measured[0]

    def __str__(self) -> str:
        lines = [("draft", "agreement", "step", "of the target's", "predicted")]
        lines += [
            (
                m.name,
                f"{m.agreement:.2f}",
                f"{1e3 * m.step_s:.2f} ms",
                f"{m.step_s / self.target_step_s:.2f}",
                f"{m.gain:.2f}x",
            )
            for m in self.measured
        ]
        return aligned(lines)


def self_draft(
    target: PreTrainedModel, layers: int | Sequence[int] | str = AUTO, *, prompts: Sequence[Any] | None = None
) -> PreTrainedModel:
    """Make a draft out of the target's own layers, with its embedding, norm and head.

    The draft has the target's parameters: the same objects, so that no weight exists twice. Where it consists of the first layers, it also shares the
    target's keys and values in ``schedule="lockstep"``, see :mod:`pipespec.engine.self_draft`.

    Targets that were trained for early exits (LayerSkip, Elhoushi et al. 2024) agree well with their first layers. Other targets do less often, and
    such a draft may not pay. No field of a configuration says how a target was trained, so ``"auto"`` measures.

    Args:
        target: A LLaMA-like model.
        layers: The number of first layers, or ascending indices of layers. ``"auto"``: ``assistant_early_exit`` of the target's
            ``generation_config`` where it is set; otherwise the best of :func:`measure_layers`.
        prompts: For ``"auto"``: token ids of prompts, each a sequence or a tensor. None: the target writes from its begin token.

    Returns:
        A model of the target's class, in eval mode.

    Raises:
        TypeError: The target is not LLaMA-like, or ``layers`` has another type.
        ValueError: The target has too few layers, or an index is out of range.
    """
    check_architecture("the target", target)
    if isinstance(layers, str):
        if layers != AUTO:
            raise ValueError(f"layers must be a number of layers, their indices or {AUTO!r}, not {layers!r}")
        exit_layer = early_exit(target)
        layers = exit_layer if exit_layer is not None else measure_layers(target, prompts).best.layers
    return with_layers(target, layers)


def early_exit(target: PreTrainedModel) -> int | None:
    """``assistant_early_exit`` of a target's ``generation_config``, where it names fewer layers than the target has."""
    found = getattr(target.generation_config, "assistant_early_exit", None)
    is_usable = isinstance(found, int) and 1 <= found < text_config(target.config).num_hidden_layers
    return found if is_usable else None


def layer_choices(total: int) -> list[tuple[int, ...]]:
    """Layers of the self-drafts that are tried: of several numbers of layers the first ones, the first and last ones, and evenly spaced ones."""
    found = []
    for count in sorted({max(1, total // part) for part in _PARTS} & set(range(1, total))):
        begin = (count + 1) // 2
        spaced = np.linspace(0, total - 1, count).round().astype(int).tolist()
        found += [range(count), [*range(begin), *range(total - (count - begin), total)], spaced]
    return list(dict.fromkeys(tuple(layers) for layers in found))


def written_by(target: PreTrainedModel, prompts: Sequence[Any] | None = None, tokens: int = TEXT_TOKENS) -> list[Text]:
    """Texts that the target writes, greedily, up to its end token.

    Args:
        target: The model.
        prompts: Token ids, each a sequence or a tensor. None: its begin token.
        tokens: New tokens per prompt.

    Raises:
        ValueError: The target writes nothing.
    """
    config, vocabulary = target.generation_config, head_size(target)
    if prompts is None:
        begin = config.bos_token_id if isinstance(config.bos_token_id, int) else 1
        prompts = [[min(begin, vocabulary - 1)]]
    driver = make_driver([target], SpeculationConfig(schedule="plain"))
    try:
        found = [written(driver, p, tokens, vocabulary, end_tokens(target)) for p in prompts]
    finally:
        driver.close()
    found = [(text, first) for text, first in found if len(text) > first]
    if not found:
        raise ValueError("no agreement can be measured: the target ends these prompts at once")
    return found


def written(driver: Driver, prompt: Any, tokens: int, vocabulary: int, ends: Sequence[int] = ()) -> Text:
    """What the target of a driver writes behind ``prompt``, greedily: at most ``tokens`` tokens, up to one of ``ends``."""
    ids = np.asarray(torch.as_tensor(prompt).flatten().cpu(), dtype=np.int32)
    inputs = StageInputs([ids], [len(ids) + tokens], SamplingParams(), vocabulary)
    driver.run(GenerationRequest(inputs, list(ends)))
    target = driver.block.target
    new = driver.block.tokens(target, 0, len(ids), driver.block.length(target, 0))
    return np.concatenate([ids, np.array(new, dtype=np.int32)]), len(ids)


def agreement_with(
    drafts: Sequence[PreTrainedModel], target: PreTrainedModel, texts: Sequence[Text], ngram: NgramDraft | None = None
) -> np.ndarray:
    """Table of agreement of ``drafts``, behind ``ngram``, with the texts of the target, see :class:`pipespec.planning.simulator.Answers`."""
    how: dict[str, Any] = {"own_text": True, "ngram": ngram}
    tables = [agreement.agreement_on([*drafts, target], text, first, **how) for text, first in texts]
    return np.concatenate(tables)[: agreement.MOST_POSITIONS]


def measure_layers(
    target: PreTrainedModel, prompts: Sequence[Any] | None = None, *, texts: Sequence[Text] | None = None
) -> LayerSurvey:
    """Measure self-drafts of a target: agreement with its own texts, and step times.

    Steps of the smallest and the largest one are timed. A step's time grows linearly with its layers.

    Args:
        target: A LLaMA-like model.
        prompts: As for :func:`self_draft`.
        texts: Of the target, see :func:`written_by`, instead of prompts.

    Raises:
        ValueError: The target has one layer, or writes nothing.
    """
    choices = layer_choices(text_config(target.config).num_hidden_layers)
    if not choices:
        raise ValueError("a self-draft needs a target of at least 2 layers")
    texts = written_by(target, prompts) if texts is None else texts
    tables = []
    for layers in choices:
        draft = with_layers(target, layers)
        tables.append(agreement_with([draft], target, texts))
        release(draft)  # packed weights of each draft would add up
    few, many = len(choices[0]), len(choices[-1])
    ends = [with_layers(target, few), with_layers(target, many)]
    profile = measure.measure_stages([*ends, target], ["few", "many", "target"], widths=_WIDTHS, budget_s=_BUDGET_S)
    for draft in ends:
        release(draft)
    found = []
    for layers, table in zip(choices, tables, strict=True):
        share = (len(layers) - few) / max(1, many - few)
        stage = _between(profile.stages[0], profile.stages[1], share)
        gain = lockstep_gain(replace(profile, stages=(stage, profile.target)), Answers(table=table))
        step_s = stage.seconds(1, threads=profile.threads)
        found.append(MeasuredLayers(layers, float((table == 0).mean()), step_s, gain))
    found.sort(key=lambda m: (-m.gain, len(m.layers)))
    return LayerSurvey(tuple(found), profile.target.seconds(1, threads=profile.threads))


def lockstep_gain(profile: Profile, answers: Answers) -> float:
    """Predicted rate of a draft and its target in lockstep, with the best lookahead, divided by that of plain decoding."""

    plan = planner.plan(profile, answers, schedules=("lockstep",))
    return max(c.rate for c in plan.candidates if c.schedule == "lockstep") / plan.plain.rate


def _between(few: StageProfile, many: StageProfile, share: float) -> StageProfile:
    """The times at ``share`` of the way from one stage to another, measured alike."""
    times = tuple(
        replace(
            a,
            seconds=tuple(x + share * (y - x) for x, y in zip(a.seconds, b.seconds, strict=True)),
            prefill_s=a.prefill_s + share * (b.prefill_s - a.prefill_s),
        )
        for a, b in zip(few.times, many.times, strict=True)
    )
    return replace(few, name="self", times=times)


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
        exits_at = early_exit(target)
        if exits_at is not None:
            layers, why = exits_at, " (assistant_early_exit of its generation_config)"
        else:
            with working("measuring which of the target's layers draft best"):
                survey = measure_layers(target)
            best = survey.best
            layers = best.layers
            if best.gain < 1:
                warnings.warn(
                    f"a draft out of the target's own layers does not pay: the best of {len(survey.measured)} choices ({best.name}) is "
                    f"predicted to give {best.gain:.2f}x of plain decoding. The text is not affected, only its speed",
                    SpeedWarning,
                    stacklevel=user_stacklevel(),
                )
            why = (
                f" (measured: agreement {best.agreement:.2f}, a step takes {best.step_s / survey.target_step_s:.2f} of the target's, "
                f"predicted {best.gain:.2f}x in lockstep)"
            )
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
