"""BasePipeline: the contract of ``generate()`` for any decoder.

A call is checked (``generate``), prepared (:class:`pipespec.api.prepare.PreparedCall`), run (:meth:`pipespec.schedules.base.Decoder.run`) and reported. Each
step is one call from here, and only ``GenerationRequest.on_commit`` calls back.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from pipespec.api.arguments import (
    ARGUMENTS,
    How,
    check_arguments,
    check_callables,
    check_penalties,
    for_forward,
    plain_number,
    refusal,
)
from pipespec.api.output import output_of, report_of, warn_of_room
from pipespec.api.prepare import CallOptions, PreparedCall
from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.inputs import stage_names
from pipespec.engine.known import one_call, why_unknown
from pipespec.errors import CallState, DoesNotFit, NotKnown
from pipespec.models.compat import lost_arguments
from pipespec.models.devices import LayerDevices
from pipespec.models.rope import reset_rope
from pipespec.observe import Report
from pipespec.observe.text import notify_reader_of_failure
from pipespec.preflight.checks import check_rope
from pipespec.preflight.memory import check_memory, shortage_explained
from pipespec.preflight.support import check_checkpointing, check_runnable
from pipespec.process import shutdown
from pipespec.process.forks import Lock
from pipespec.process.signals import handlers_watched, is_handlers_error
from pipespec.process.threads import keep_to_one, renew_pool
from pipespec.process.warnings import user_stacklevel
from pipespec.schedules.base import Decoder, Driver, SpeedWarning
from pipespec.schedules.request import GenerationRequest

if TYPE_CHECKING:
    from pipespec.engine.group import ForwardGroup

_FALLBACK = "the cause for which transformers decodes the call"
"""Keyword of :meth:`BasePipeline.generate` that no caller can write as an argument."""


def _or_fall_back(generate_known: Callable[..., Any]) -> Callable[..., Any]:
    """Fall back to transformers' decoding loop on :class:`NotKnown`, and forward any other error to the streamer. ``__wrapped__`` is the bare method."""

    @functools.wraps(generate_known)
    def generate(self: BasePipeline, *args: Any, **kwargs: Any) -> Any:
        with notify_reader_of_failure(kwargs.get("streamer")):
            try:
                return generate_known(self, *args, **kwargs)
            except NotKnown as error:
                self._fall_back(error)
                return generate_known(self, *args, **kwargs, **{_FALLBACK: str(error)})

    return generate


_PREPARED = {
    "past_key_values", "logits_to_keep", "use_cache", "cache_position", "output_hidden_states", "output_attentions",
}  # fmt: skip
"""Arguments of ``forward()`` that transformers adds, and that the call has from elsewhere."""


class BasePipeline:
    """The contract of ``generate()`` for any decoder. A subclass sets ``_driver``, which runs the calls.

    Args:
        models: All models that take part, the target last.

    Attributes:
        report: What the last call did; None before the first.
        partial: After a call that was interrupted or failed: what it had committed, as ``generate()`` would return it.
    """

    _driver: Decoder
    _captured: Driver | None = None
    """The driver with CUDA graphs, kept while an eager one takes its place because its static caches did not fit."""
    _group: ForwardGroup | None = None
    _is_placed = False
    """Whether the driver moves the target's hidden states between the devices of its parts."""

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        self.models = list(models)
        self.report: Report | None = None
        self.partial: torch.Tensor | None = None
        self._lock = Lock()
        self._owner: int | None = None  # thread that is inside
        self._is_forked = False  # since the last call
        self._causes: set[str] = set()
        _pipelines.add(self)

    @property
    def target(self) -> PreTrainedModel:
        """The model whose text is generated."""
        return self.models[-1]

    def close(self) -> None:
        """End worker processes, drop graphs, and restore the models' attention. A later call starts again what it needs.

        This also happens at the end of a ``with`` block, at exit, and when the pipeline is collected as garbage. Calls of other threads that
        began earlier are completed first.

        Raises:
            RuntimeError: From inside of a call: from a streamer or a processor.
        """
        with self._turn("close()", "raise an error there to end the call, and close the pipeline when it has returned"):
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _caching(self) -> Sequence[PreTrainedModel]:
        """The models with caches in this process."""
        return self.models

    def _without_graphs(self, driver: Driver) -> Driver | None:
        """What runs a call for which the static caches of ``driver`` are too large; None if nothing does."""
        return None

    def _check_request(self, request: GenerationRequest) -> None:
        """Refuse a call that the options of the pipeline exclude."""

    def _report(self, generation: PreparedCall) -> Report:
        """The report of the call that has just run."""
        return report_of(generation, self._driver)

    @_or_fall_back
    @shortage_explained()
    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | Sequence[int] | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Any = None,
        logprobs: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate the text of the target: arguments and result are those of ``target.generate()``.

        Calls from several threads run one after the other. After a call that is interrupted or fails, :attr:`partial` holds what was
        committed, a thread that reads the streamer has the error, and the pipeline can be used again. ``docs/generate.md`` lists all arguments.

        Args:
            inputs: The same as ``input_ids``.
            generation_config: Merged as in transformers: keywords, this, the model's, defaults.
            logits_processor: Called once per generated token and row.
            stopping_criteria: Called token by token, inside of an accepted block, too.
            prefix_allowed_tokens_fn: As in transformers.
            input_ids: int64 ``[B, S]``, or lists. A batch is padded on the left.
            attention_mask: ``[B, S]``, 0 for padding.
            past_key_values: A cache that a call of a pipeline returned, or a ``DynamicCache``. ``input_ids`` is the whole text, or its new
                tokens, with the ``attention_mask`` of the whole text.
            streamer: Gets each token once, in order, as soon as the target has committed it.
            tokenizer: For ``stop_strings``.
            seed: One integer, or one per row, see :func:`pipespec.engine.sampling.row_seeds`.
            presence_penalty: Subtracted from the score of each token that the generated text holds.
            frequency_penalty: Likewise, once per occurrence.
            logit_bias: By token id, what is added to its score; ``-inf`` forbids the token.
            grammar: What constrains the text: a :class:`pipespec.TokenMatcher` such as ``xgrammar.GrammarMatcher``, new for each call, or a list with one
                per row of the batch, None for a free row.
            logprobs: 0: log-probabilities of the generated tokens; ``n``: those of the ``n`` likeliest tokens at each position, too. The result has them as
                ``logprobs``, see :class:`pipespec.api.output.Logprobs`.
            **kwargs: Fields of ``GenerationConfig``, and all else that ``generate()`` takes.

        Returns:
            int64 ``[B, S + new]``, the prompt included, finished rows padded. With ``return_dict_in_generate=True`` a
            :class:`pipespec.api.output.PipelineOutput`.

        Raises:
            ValueError: A value cannot work; the message names the argument.
            TypeError: A value has the wrong type.
            NotImplementedError: An argument of transformers is not supported.
            DoesNotFit: The memory does not suffice.
            RuntimeError: The call comes from inside of a call of this pipeline: from a streamer or a processor.
        """
        leave: str | None = kwargs.pop(_FALLBACK, None)
        with shutdown.call(), handlers_watched(), _errors_of_handlers(), one_call():
            renew_pool()
            if inputs is not None and input_ids is not None:
                raise ValueError("give inputs or input_ids, not both: they mean the same")
            check_callables(logits_processor, stopping_criteria, streamer)
            ids, mask, config = check_arguments(
                self.target,
                input_ids if inputs is None else inputs,
                attention_mask,
                generation_config,
                kwargs,
                has_cache=past_key_values is not None,
            )
            if leave is None:
                self._check_known()
            penalties = check_penalties(presence_penalty, frequency_penalty, logit_bias)
            # The others are checked, and have no effect.
            # transformers ignores a tensor here that is not a number for the computation either: NaN as an identifier.
            kwargs = {
                name: value if ARGUMENTS.get(name) and ARGUMENTS[name].how is How.NO_EFFECT else plain_number(value)
                for name, value in kwargs.items()
                if hasattr(config, name)
            }
            stopping_criteria = StoppingCriteriaList(stopping_criteria or [])
            if config.stop_strings is not None:
                if tokenizer is None:
                    raise ValueError(
                        "stop_strings needs the tokenizer: pass generate(..., stop_strings=..., tokenizer=tokenizer)"
                    )
                # transformers drops the tokenizer before it calls a custom_generate.
                stopping_criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
                kwargs["stop_strings"] = None
            options = CallOptions(
                streamer=streamer,
                cache=past_key_values,
                seed=seed,
                penalties=penalties,
                grammar=grammar,
                logprobs=logprobs,
            )
            decode = functools.partial(self._decode, call_options=options)
            if leave is not None:
                decode = functools.partial(self._decode_fallback, call_options=options, cause=leave)
                if past_key_values is not None:
                    from pipespec.api.fallback import cache_for

                    own = {"input_ids": ids, "attention_mask": mask, "generation_config": generation_config}
                    kwargs["past_key_values"] = cache_for(self.target, past_key_values, **own)
            elif config.cache_implementation is not None:
                # The target's own entry. The pipeline's cache takes its place.
                kwargs["cache_implementation"] = "dynamic"
            return GenerationMixin.generate(
                self.target,
                inputs=ids,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                attention_mask=mask,
                custom_generate=decode,
                **kwargs,
            )

    generate_known: Callable[..., Any] = generate.__wrapped__  # type: ignore[attr-defined]
    """:meth:`generate`, which raises :class:`pipespec.errors.NotKnown` before any work if other people's code takes part in the call."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Any = None,
        logprobs: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run a call of ``model.generate(..., custom_generate=pipe)``. ``ValueError`` if ``model`` is not the target."""
        lost = lost_arguments()
        reader = notify_reader_of_failure(lost.get("streamer"))
        with shutdown.call(), handlers_watched(), reader, shortage_explained(), one_call():
            if model is not self.target:
                raise ValueError(
                    f"custom_generate: this pipeline generates the text of its own target, not of the {type(model).__name__} whose "
                    "generate() was called"
                )
            for name, value in lost.items():
                if ARGUMENTS[name].how is How.REFUSED and value is not None and value is not False:
                    raise refusal(name, value)
            # transformers makes a cache if the caller gave none.
            prepared = model_kwargs.pop("past_key_values", None)
            cache = lost.get("past_key_values", prepared)
            options = CallOptions(
                streamer=lost.get("streamer"),
                cache=cache,
                seed=seed,
                penalties=check_penalties(presence_penalty, frequency_penalty, logit_bias),
                grammar=grammar,
                logprobs=logprobs,
                prompt_streamed=True,
            )
            prepared_call = (model, input_ids, logits_processor, stopping_criteria, generation_config)
            try:
                self._check_known()
                return self._decode(*prepared_call, call_options=options, **model_kwargs)
            except NotKnown as error:
                self._fall_back(error)
                model_kwargs["past_key_values"] = prepared
                return self._decode_fallback(*prepared_call, call_options=options, cause=str(error), **model_kwargs)

    def _check_known(self) -> None:
        """Raise ``NotKnown`` if the target runs other people's code."""
        reason = why_unknown(self.target)
        if reason is not None:
            raise NotKnown("model", f"generate(): drafts cannot speed this model up: {reason}")

    def _fall_back(self, error: NotKnown) -> None:
        """Warn, once for each cause, of a call that transformers decodes."""
        if str(error) not in self._causes:
            self._causes.add(str(error))
            warn_of(f"{error}. transformers' own loop decodes such calls, token by token")

    def _decode_fallback(self, *prepared_call: Any, call_options: CallOptions, cause: str, **model_kwargs: Any) -> Any:
        """Run a call whose arguments transformers has prepared in transformers' loop."""
        from pipespec.api.fallback import decode as decode_by_transformers

        with self._turn("generate()", "use another Pipeline there"):
            self.partial, cache = None, call_options.cache
            held = (list(cache.lengths), cache.text) if isinstance(cache, RowCache) else None

            def keep(text: torch.Tensor | None) -> None:
                self.partial = text
                if isinstance(cache, RowCache) and held is not None:
                    cache.recover(*held)

            result, self.report = decode_by_transformers(
                *prepared_call,
                options=call_options,
                cause=cause.removeprefix("generate(): "),
                on_failure=keep,
                **model_kwargs,
            )
            return result

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        *,
        call_options: CallOptions,
        **model_kwargs: Any,
    ) -> Any:
        """Run a call whose arguments transformers has prepared."""
        # Not parameters: transformers would pass those of a callable twice.
        attention_mask, position_ids = model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None)
        for name in model_kwargs.keys() - _PREPARED:
            if model_kwargs[name] is not None:
                raise refusal(name, model_kwargs[name]) if name in ARGUMENTS else for_forward(name)
        with self._turn("generate()", "use another Pipeline there"):
            shutdown.check()
            self._leave_parent()
            # They may have been moved, cast or hooked since.
            check_runnable(self.models, target_is_placed=self._is_placed)
            check_checkpointing(self.models)
            if len(input_ids) > 1 and mask_kind(self.target.config) is MaskKind.NONE:
                raise NotKnown(
                    "model",
                    f"generate(): {self.target.config._attn_implementation} attention takes no masks for rows of different lengths",
                )
            generation = PreparedCall(
                self.target,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                call_options,
                attention_mask=attention_mask,
                position_ids=position_ids,
            )
            request = generation.request()
            try:
                self._check_call(request)
            except BaseException as error:
                if self._group is not None:
                    self._group.agree(request.inputs.prompts, request.inputs.limits, error)
                raise
            generation.draw_seeds()
            request = generation.request(generation.progress.on_commit)
            if self._group is not None:
                self._group.agree(request.inputs.prompts, request.inputs.limits)
                if not self._group.is_leader:
                    generation.follow()
            self.partial = None
            try:
                if not call_options.prompt_streamed:
                    generation.progress.stream_prompt()
                self._leave_parent()  # the streamer may have forked
                with self._leading(generation):
                    self._driver.run(request)
                    generation.progress.finish()
                self.report = self._report(generation)
                warn_of_room(self._driver)
                return output_of(generation, self.report, functools.partial(request.return_cache, self._driver.target))
            except BaseException as error:
                request.take_back()
                state = CallState.of(error)
                state.is_final |= any(generation.progress.text.counts())
                state.has_streamed, state.generator = generation.progress.has_streamed_prompt, generation.generator
                if call_options.streamer is None or call_options.prompt_streamed or state.has_streamed:
                    with suppress(Exception):
                        self.partial = error.partial = generation.progress.text.sequences()  # type: ignore[attr-defined]
                        error.add_note("What was generated until then is in the pipeline's .partial")
                raise

    def _check_call(self, request: GenerationRequest) -> None:
        """Refuse what the target or the decoder cannot do, and what does not fit the memory."""
        check_rope(self.target, request.inputs.most)
        for model in self._caching():
            reset_rope(model)
        self._check_request(request)
        self._check_memory(request)

    @contextmanager
    def _leading(self, generation: PreparedCall) -> Iterator[None]:
        """Tell the other ranks of a tensor-parallel target how the call has ended, if this one leads them."""
        group = self._group if self._group is not None and self._group.is_leader else None
        try:
            yield
        except BaseException as error:
            if group is not None:
                with suppress(Exception):
                    group.fail(error)
            raise
        if group is not None:
            group.end(generation.progress.text.generated())

    def _leave_parent(self) -> None:
        """In a fork, get a decoder of this process. ``RuntimeError`` where a fork cannot run the models."""
        if not self._is_forked:
            return
        if self._group is not None:
            raise RuntimeError("a tensor-parallel target cannot be used in a forked process: its group is the parent's")
        if any(device.type == "cuda" for model in self.models for device in LayerDevices.of(model).devices):
            raise RuntimeError("CUDA cannot be used in a forked process: make the pipeline in the process that uses it")
        self._driver = self._driver.for_fork()
        self._is_forked = False
        _keep_to_one_thread()

    def _check_memory(self, request: GenerationRequest) -> None:
        """See :func:`pipespec.preflight.memory.check_memory`. A call whose static caches do not fit, and whose growing ones may, runs without graphs."""
        if self._captured is not None:
            captured, self._captured = self._captured, None
            self._driver.close()
            self._driver = captured
        driver = self._driver
        static = driver.has_static_caches(request)
        try:
            _check_caches(self, request, static)
        except DoesNotFit as error:
            if not static or not isinstance(driver, Driver) or (eager := self._without_graphs(driver)) is None:
                raise
            driver.release()
            driver.close()
            self._captured, self._driver = driver, eager
            _check_caches(self, request, False)
            driver.warn_slower(f"static caches do not fit, so calls like this one run without graphs: {error}")

    @contextmanager
    def _turn(self, what: str, instead: str) -> Iterator[None]:
        """Admit one thread at a time. A call of ``what`` from inside a call would wait for itself and raises ``RuntimeError``."""
        with self._lock:
            if self._owner == threading.get_ident():
                raise RuntimeError(f"{what} was called inside a call of the same pipeline; {instead}")
            try:
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = None


def _check_caches(pipeline: BasePipeline, request: GenerationRequest, static: bool) -> None:
    driver, inputs = pipeline._driver, request.inputs
    names = {id(m): name for m, name in zip(pipeline.models, stage_names(len(pipeline.models)), strict=True)}
    caching = {names[id(model)]: model for model in pipeline._caching()}
    check_memory(
        caching,
        rows=len(inputs.prompts),
        longest=max(map(len, inputs.prompts)),
        limit=inputs.most,
        graphs=static,
        copied="target" in caching and request.copies_cache(static or driver.keeps_cache),
        distributions=driver.distribution_bytes(request),
        reusable_bytes=lambda: driver.reusable_bytes(request),
        release_unused=lambda: driver.release_unused(request),
    )


@contextmanager
def _errors_of_handlers() -> Iterator[None]:
    """Mark the errors of signal handlers: they end the call."""
    try:
        yield
    except Exception as error:
        if is_handlers_error(error):
            CallState.of(error).is_final = True
        raise


_pipelines: weakref.WeakSet[BasePipeline] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child of a fork. Calls of the parent's other threads do not continue here."""
    for pipeline in _pipelines:
        pipeline._is_forked = True
        if pipeline._owner != threading.get_ident():
            pipeline._owner = None
    if any(pipeline._owner is not None for pipeline in _pipelines):
        _keep_to_one_thread()  # its next forward comes without a call


def _keep_to_one_thread() -> None:
    """In a fork, before its first forward."""
    if keep_to_one():
        warn_of(
            "a forked process computes with one thread, as torch's threads do not survive a fork; to use more, start the process with "
            "multiprocessing's method 'spawn' and make the pipeline there"
        )


os.register_at_fork(after_in_child=_after_fork)


def warn_of(what: str) -> None:
    warnings.warn(f"{what}. The text is not affected, only its speed", SpeedWarning, stacklevel=user_stacklevel())
