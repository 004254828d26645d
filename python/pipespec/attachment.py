"""attach(): a model whose own ``generate()`` is pipelined, so that code which knows nothing of pipespec runs unchanged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from pipespec.pipeline import Pipeline


class _Generate:
    """Stands in for ``model.generate``. Copies and pickles of the model get their class's own ``generate()`` back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        functools.update_wrapper(self, GenerationMixin.generate)
        parameters = list(inspect.signature(GenerationMixin.generate).parameters.values())[1:]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is self.pipeline:  # ours by its other name
            del kwargs["custom_generate"]
        if kwargs.get("custom_generate") is not None:  # somebody else's loop
            return GenerationMixin.generate(self.pipeline.target, *args, **kwargs)
        return self.pipeline.generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.pipeline.target))
        return _Plain(copy)

    def __reduce__(self) -> Any:
        return _Plain, (self.pipeline.target,)


class _Plain:
    """``generate()`` of a copy of an attached model: plain."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).generate(self.model, *args, **kwargs)


def attach(
    model: PreTrainedModel,
    drafts: Sequence[PreTrainedModel | str | Path] | PreTrainedModel | str | Path,
    **options: Any,
) -> Pipeline:
    """Make ``model.generate()`` a pipeline's: same arguments, same text, faster. Returns the pipeline, whose ``report`` tells.

    ``options``: as for :class:`pipespec.Pipeline`. :func:`detach` restores the model. ``transformers.pipeline``, evaluation harnesses and chat
    templates then run unchanged; what cannot be pipelined is refused by name, as by ``Pipeline.generate``. Model and pipeline know each other from
    here on: detach before dropping the model where its memory is wanted at once and not at the next garbage collection.

    Raises ``ValueError`` if the model is attached already, and what ``Pipeline`` raises.
    """
    if attached(model) is not None:
        raise ValueError("this model is attached already; detach() it first")
    pipeline = Pipeline(model, drafts, **options)
    model.generate = _Generate(pipeline)  # on the instance: other models of its class are not touched
    return pipeline


def attached(model: PreTrainedModel) -> Pipeline | None:
    """The pipeline that ``model`` is attached to, if any."""
    generate = vars(model).get("generate")
    return generate.pipeline if isinstance(generate, _Generate) else None


def detach(model: PreTrainedModel) -> None:
    """Undo :func:`attach`: ``model.generate()`` is transformers' own again, worker processes end. Calls under way come to their ends first.

    Raises ``ValueError`` for a model that is not attached; ``RuntimeError``, and it stays attached, from inside of a call.
    """
    pipeline = attached(model)
    if pipeline is None:
        raise ValueError("this model is not attached to a pipeline")
    generate = model.__dict__.pop("generate")
    try:
        pipeline.close()
    except BaseException:
        model.generate = generate
        raise
