"""The caller's code within a call: processors, criteria and streamers. It may change a model or its inputs between two tokens. transformers goes on with
that. A pipeline has already computed later tokens, so it raises an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.generation import logits_process as hf

from pipespec.engine.known import record_within
from pipespec.engine.originals import is_original, is_trusted
from pipespec.engine.sampling import STATELESS
from pipespec.errors import NotKnown, Unsupported, mark_final
from pipespec.models.properties import is_dynamic, rope_type

_ROW_WISE = STATELESS | {hf.SynthIDTextWatermarkLogitsProcessor, hf.WatermarkLogitsProcessor}
"""Exact classes. Of those with something per row, :class:`pipespec.engine.sampler.HostSampler` cuts out the row."""


def check_row_wise(processors: Sequence[Any], rows: int) -> None:
    """Check that the processors of a call can run row by row, with ``[1, n]`` ids and ``[1, V]`` scores.

    Args:
        processors: those that transformers has prepared.
        rows: of the batch. One row is the whole batch, so that any processor gets what transformers would give it.

    Raises:
        NotKnown: one of them may depend on the other rows, or takes more than ids and scores.
    """
    for processor in processors:
        kind = type(processor)
        if kind in _ROW_WISE or is_trusted(kind) or is_trusted(processor):
            continue
        name = getattr(processor, "__name__", kind.__name__)
        if len(inspect.signature(processor.__call__).parameters) > 2:
            raise NotKnown(
                "logits_processor", f"generate(): the logits processor {name} takes more than ids and scores"
            )
        if rows > 1 and kind.__module__ != "xgrammar.contrib.hf":
            raise NotKnown(
                "logits_processor",
                f"generate(): the logits processor {name} may depend on the whole batch of {rows} rows",
            )


def call_with_ids(argument: str, function: Callable[..., Any], ids: torch.Tensor, *arguments: Any) -> Any:
    """Call a processor or a criterion.

    Args:
        argument: of ``generate()``, to which the function belongs.
        function: what is called.
        ids: its first argument. They have a version, so they are no inference tensor.
        *arguments: the others.

    Raises:
        NotImplementedError: it has changed the ids.
    """
    kept, version = ids.clone(), ids._version
    result = function(ids, *arguments)
    if ids._version != version and not torch.equal(ids, kept):
        name = getattr(function, "__name__", type(function).__name__)
        raise _final(argument, f"{name} of {argument} has changed input_ids in place")
    return result


def run_processors(
    processors: Iterable[Callable[..., torch.Tensor]],
    ids: torch.Tensor,
    scores: torch.Tensor,
    *,
    is_sampled: bool,
    has_ends: bool,
) -> torch.Tensor:
    """Scores ``[1, V]`` of a row after its processors, without gradients.

    Args:
        processors: called one after the other.
        ids: ``[1, n]``, as for :func:`call_with_ids`.
        scores: ``[1, V]`` float32.
        is_sampled: whether a token is drawn from them.
        has_ends: whether the call has end tokens.

    Raises:
        NotImplementedError: they change the ids, or return scores of tokens that there are not.

    What they return in another form has the effect, and the error, that it has in transformers' loop.
    """
    count = scores.shape[-1]
    for process in processors:
        scores = call_with_ids("logits_processor", process, ids, scores)
    is_tensor = isinstance(scores, torch.Tensor)
    if not is_tensor or scores.shape[:-1] != (1,) or not scores.numel() or not scores.is_floating_point():
        scores = _as_scores(ids, scores, is_sampled, has_ends)
    if scores.shape[-1] > count:
        raise Unsupported(
            "logits_processor",
            f"generate(): the logits processors return {scores.shape[-1]} scores, and the vocabulary has {count} tokens",
        )
    return scores.detach().contiguous()


def _as_scores(ids: torch.Tensor, scores: Any, is_sampled: bool, has_ends: bool) -> torch.Tensor:
    """What processors return in another form than floating scores ``[1, V]``, in that form. The steps of transformers' loop raise the errors."""
    if is_sampled:
        tokens = torch.multinomial(F.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    else:
        tokens = torch.argmax(scores, dim=-1)
    if has_ends:
        tokens = tokens * tokens.new_ones(1)
    torch.cat([ids, tokens[:, None]], dim=-1)
    return scores.reshape(1, -1).double()


def check_of_model(model: PreTrainedModel, code: Iterable[Any]) -> Callable[[], None] | None:
    """What checks between two steps that a model is what it was.

    Args:
        model: the target.
        code: processors, criteria and a streamer that the call runs.

    Returns:
        A function that raises ``NotImplementedError`` after a change; None where all of ``code`` is that of known packages, which change no model, and
        where the model's own forwards may change it.
    """
    # Objects of a call, and the functions that they hold, as ``prefix_allowed_tokens_fn`` is within a processor of transformers.
    objects = [each for each in code if each is not None]
    held = (value for each in objects for value in getattr(each, "__dict__", {}).values() if callable(value))
    if is_dynamic(rope_type(model)) or all(map(is_original, (*objects, *held))):
        return None  # forwards change dynamic RoPE
    # Not the newest record: a call from inside of this one replaces that.
    record = record_within(model)
    if record is None:
        return None

    def check() -> None:
        nonlocal record
        assert record is not None
        now = record.successor(model)
        if now is None:
            what = "the model has changed while it generated, by a processor, a criterion or a streamer of the call"
            raise _final("model", what)
        record = now

    return check


def _final(argument: str, what: str) -> Unsupported:
    """A refusal after which transformers cannot decode the call again: the change stays."""
    error = Unsupported(
        argument,
        f"generate(): {what}, which a pipeline cannot follow; detach() the model, or call transformers' generate()",
    )
    mark_final(error)
    return error
