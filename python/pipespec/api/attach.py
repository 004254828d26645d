"""attach(): a pipeline takes over ``model.generate()``, so that existing code runs unchanged."""

from __future__ import annotations

import copyreg
import functools
import warnings
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from pipespec.api.arguments import OWN, plain_number
from pipespec.api.pipeline import Draft, Pipeline
from pipespec.errors import Busy, NotKnown, Unsupported, is_final, notify_reader_of_failure, user_stacklevel
from pipespec.models.properties import without_wrapper
from pipespec.schedules.base import SpeedWarning


class _Generate:
    """The function of the method ``model.generate``."""

    def __init__(self, pipeline: Pipeline, *, is_strict: bool, before: Any) -> None:
        self.pipeline, self.is_strict = pipeline, is_strict
        self.before = before  # the instance's own
        self._warned: set[str] = set()
        functools.update_wrapper(self, type(pipeline.target).generate)

    def __call__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if model is not self.pipeline.target:  # a copy that a copied method has
            return type(model).generate(model, *args, **kwargs)
        if kwargs.get("custom_generate") is self.pipeline:
            del kwargs["custom_generate"]
        if kwargs.get("custom_generate") is not None:  # another decoding loop
            return self._by_transformers(*args, **kwargs)
        # transformers has no arguments of pipespec's own.
        if self.is_strict or any(_has_effect(name, kwargs.get(name)) for name in OWN):
            return self.pipeline.generate(*args, **kwargs)
        with notify_reader_of_failure(kwargs.get("streamer")):
            try:
                self._check_own()
                return self.pipeline.generate(*args, _only_known=True, **kwargs)
            except Exception as error:
                if is_final(error):
                    raise
                is_refused, (cause, message) = isinstance(error, Unsupported), _explained(error)
                if getattr(error, "prompt_streamed", False) and kwargs.get("streamer") is not None:
                    kwargs["streamer"] = _AfterPrompt(kwargs["streamer"])
            # transformers sets is_assistant in its calls for drafts.
            is_news = cause not in self._warned and (cause != "is_assistant" or "is_assistant" in kwargs)
            if is_news and is_refused:
                self._warn(cause, message)
            # If it fails, too, its own error counts.
            result = self._by_transformers(*args, **{name: kwargs[name] for name in kwargs if name not in OWN})
            if is_news and not is_refused:
                self._warn(cause, message)
            return result

    def _warn(self, cause: str, message: str) -> None:
        self._warned.add(cause)
        warnings.warn(message, SpeedWarning, stacklevel=user_stacklevel())

    def _check_own(self) -> None:
        if self.before is not None:
            raise NotKnown("model", "generate(): the model had a generate() of its own when it was attached")
        kind = type(self.pipeline.target)
        for name in ("generate", "_sample"):
            if getattr(kind, name) is not getattr(GenerationMixin, name):
                raise NotKnown("model", f"generate(): {kind.__name__} has its own {name}()")

    def _by_transformers(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.pipeline.target).generate(self.pipeline.target, *args, **kwargs)


class _AfterPrompt:
    """A streamer that has the prompt already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._is_first = streamer, True

    def put(self, value: Any) -> None:
        if not self._is_first:
            self._streamer.put(value)
        self._is_first = False

    def end(self) -> None:
        self._streamer.end()


def _explained(error: Exception) -> tuple[str, str]:
    """Why transformers decodes a call: the argument or the cause, which is named once, and the warning."""
    if not isinstance(error, Unsupported):
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        return (
            cause,
            f"generate(): the pipeline could not begin the call ({cause}), so transformers has decoded it, without drafts",
        )
    if isinstance(error, Busy):
        return str(error), f"{error}. So transformers decodes such calls itself, beside them and without drafts"
    return (
        str(error) if isinstance(error, NotKnown) else error.argument,
        f"{error}. So transformers decodes calls with this {error.argument} itself, without drafts; "
        "attach(..., unsupported='raise') refuses them",
    )


def _has_effect(name: str, value: Any) -> bool:
    """Whether an argument of pipespec's own changes the text or the result: ``logprobs=0`` asks for those of the generated tokens."""
    value = plain_number(value)
    is_empty = isinstance(value, (int, float, Mapping)) and not value
    return value is not None and (name in ("seed", "logprobs") or not is_empty)


def attach(
    model: PreTrainedModel,
    drafts: Sequence[Draft] | Draft | None = (),
    *,
    unsupported: str = "plain",
    **options: Any,
) -> Pipeline:
    """Let a pipeline run ``model.generate()``: same arguments, same text, faster.

    ``transformers.pipeline``, evaluation harnesses and chat templates then run unchanged. Model and pipeline refer to each other. To free a model's
    memory at once, call :func:`detach` before dropping the model.

    Args:
        model: The target; of a ``PeftModel``, the model within is attached, which its ``generate()`` calls.
        drafts: As for :class:`pipespec.Pipeline`, smallest first. Without any, an n-gram index drafts where that pays.
        unsupported: The treatment of a call that a pipeline cannot run (beam search, for example). ``"plain"``: transformers decodes it, and a
            :class:`pipespec.SpeedWarning` names the argument, once. ``"raise"``: it is refused by name, as by :meth:`pipespec.Pipeline.generate`.
        **options: As for :class:`pipespec.Pipeline`, except ``weights`` and ``kv_dtype``, whose text is another one.

    Returns:
        The pipeline, whose ``report`` describes the last call.

    Raises:
        ValueError: The model is attached already, the models cannot form a chain, ``unsupported`` is neither, or ``weights`` or ``kv_dtype`` is given.
        TypeError: As for :class:`pipespec.Pipeline`.
    """
    model = without_wrapper(model)
    if attached(model) is not None:
        raise ValueError("this model is attached already; detach() it first")
    if unsupported not in ("plain", "raise"):
        raise ValueError(f"unsupported must be 'plain' or 'raise', not {unsupported!r}")
    if options.get("weights") is not None:
        raise ValueError(
            f"attach(): weights={options['weights']!r} makes another model, whose text differs from model.generate(): use "
            f"pipespec.Pipeline(model, weights={options['weights']!r})"
        )
    if options.get("kv_dtype") is not None:
        raise ValueError(
            f"attach(): with kv_dtype={options['kv_dtype']!r} the text differs from model.generate(): use "
            f"pipespec.Pipeline(model, kv_dtype={options['kv_dtype']!r})"
        )
    pipeline = Pipeline(model, drafts, **options)
    before = vars(model).get("generate")
    if getattr(before, "__func__", None) is type(model).generate:
        before = None
    copyreg.dispatch_table.setdefault(type(model), _reduced)
    # On the instance: other models of its class are not touched.
    model.generate = MethodType(_Generate(pipeline, is_strict=unsupported == "raise", before=before), model)
    return pipeline


def _reduced(model: PreTrainedModel) -> Any:
    """The state of a model without its attachment: what ``copy`` and ``pickle`` make of it is not attached, and needs no pipespec."""
    make, arguments, state, *more = model.__reduce_ex__(4)
    if isinstance(state, dict) and (generate := _generate_of(state)) is not None:
        before = generate.before
        state = {name: value for name, value in state.items() if name != "generate"}
        state |= {} if before is None else {"generate": before}
    return make, arguments, state, *more


def _generate_of(state: Mapping[str, Any]) -> _Generate | None:
    """What runs the calls of a model with these attributes, where it is attached."""
    function = getattr(state.get("generate"), "__func__", None)
    return function if isinstance(function, _Generate) else None


def attached(model: PreTrainedModel) -> Pipeline | None:
    """Return the pipeline that ``model`` is attached to, or None."""
    generate = _generate_of(vars(without_wrapper(model)))
    return None if generate is None else generate.pipeline


def detach(model: PreTrainedModel) -> None:
    """Undo :func:`attach`: ``model.generate()`` is what it was before, and worker processes end. Running calls are completed first.

    Raises:
        ValueError: The model is not attached.
        RuntimeError: From inside of a call; the model stays attached.
    """
    model = without_wrapper(model)
    generate = _generate_of(vars(model))
    if generate is None:
        raise ValueError("this model is not attached to a pipeline")
    method = model.__dict__.pop("generate")
    try:
        generate.pipeline.close()
    except BaseException:
        model.generate = method
        raise
    if generate.before is not None:
        model.generate = generate.before
