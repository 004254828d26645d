"""BasePipeline: the contract of ``generate()`` for any decoder.

A call is checked (``generate``), prepared (:class:`pipespec.api.prepare.PreparedCall`), run (:meth:`pipespec.schedules.base.Decoder.run`) and reported. Each
step is one call from here, and only ``GenerationRequest.on_commit`` calls back.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel

from pipespec.api.arguments import (
    PREPARED,
    check_arguments,
    check_callables,
    check_options,
    check_others,
    check_penalties,
    passed_on,
)
from pipespec.api.output import Report, complete, output_of, own_report, report_of, warn_of_room
from pipespec.api.prepare import CallOptions, PreparedCall, prepare
from pipespec.checks.calls import check_memory, check_rope, shortage_explained
from pipespec.checks.models import check_checkpointing, check_runnable
from pipespec.engine.chain import stage_names
from pipespec.engine.known import one_call, token_of, unknown_reason
from pipespec.errors import Busy, DoesNotFit, NotKnown, is_final, mark_final, notify_reader_of_failure
from pipespec.models.compat import callers_cache
from pipespec.models.properties import LayerDevices, reset_rope
from pipespec.models.quantized import check_files
from pipespec.process.threads import (
    Lock,
    handlers_watched,
    is_handlers_error,
    keep_to_one,
    program_end_awaited,
    raise_program_end,
    renew_pool,
)
from pipespec.schedules.base import Decoder, GenerationRequest, warn_of_speed, warn_of_stale_text

if TYPE_CHECKING:
    from pipespec.api.text import Progress
    from pipespec.engine.group import ForwardGroup


MAX_SLOTS = 4
"""Of a pipeline. Each keeps caches, and calls that run at the same time share the cores."""


class Slots:
    """The slots of a pipeline, which is the first of them: calls of several threads at the same time.

    The bare model runs such calls side by side, and one may wait for the other: in a streamer, a processor or a criterion. So no call waits until another one
    has ended. Where a decoder costs little more than its caches, further slots are made as they are needed, which share the models and their packed weights. A
    call that finds no free slot is decoded by transformers, beside the others.

    Attributes:
        report: What the call did that has ended last; None before the first.
        partial: After a call that was interrupted or failed: what it had committed, as ``generate()`` would return it.
    """

    _driver: Decoder

    def __init__(self) -> None:
        self.report: Any = None
        self.partial: Any = None
        self._lock = Lock()
        self._owner: int | None = None  # thread whose call is inside
        self._is_forked = False  # since the last call
        self._others: list[Self] = []
        self._first = weakref.ref(self)  # of all slots
        _all.add(self)

    def _another(self) -> Self | None:
        """A further slot; None where its decoder would cost too much."""
        decoder = self._driver.another()
        if decoder is None:
            return None
        slot = copy.copy(self)
        slot._lock, slot._owner, slot._others, slot._driver = Lock(), None, [], decoder
        _all.add(slot)
        return slot

    @property
    def most_slots(self) -> int:
        """How many calls of several threads run at the same time."""
        return MAX_SLOTS if self._others or self._driver.another() is not None else 1

    def _each(self, prompt: np.ndarray | None) -> Iterator[Self]:
        """The slots, that first which has read most of ``prompt`` already, and then further ones."""
        slots = [self, *self._others]
        if prompt is not None and self._others:
            slots.sort(key=lambda slot: slot._driver.tokens_kept(prompt), reverse=True)
        yield from slots
        while len(self._others) < MAX_SLOTS - 1:
            with _growing:
                slot = self._another()
                if slot is None:
                    return
                self._others.append(slot)
                for each in (self, *self._others):
                    each._driver.share_prefixes(len(self._others) + 1)
            yield slot

    def _release(self) -> None:
        """Release the caches of this slot, and of those of the pipeline in which no call runs, with the texts that they keep."""
        self._driver.release()
        first = self._first()
        for slot in () if first is None else (first, *first._others):
            with slot._lock.attempt() as is_free:
                if is_free:
                    slot._driver.release()

    @contextmanager
    def _slot(self, *, waits: bool, prompt: np.ndarray | None = None) -> Iterator[Self]:
        """A free slot, for one call.

        Args:
            waits: If there is none, wait for the first one.
            prompt: int32 ``[P]``, of a call with one row.

        Raises:
            Busy: There is none, or no memory for the caches of a further one.
            RuntimeError: The call would wait for a call of its own thread.
        """
        for slot in self._each(prompt):
            with slot._lock.attempt() as is_free:
                if not is_free:
                    continue
                with slot._inside():
                    slot.report, slot.partial = report, partial = self.report, self.partial
                    try:
                        yield slot
                    except DoesNotFit as error:
                        if slot is self:
                            raise
                        raise Busy(f"the caches of a further call at the same time do not fit: {error}") from error
                    finally:
                        # Another call may have ended meanwhile. One that was refused leaves both as they are.
                        if slot.report is not report or slot.partial is not partial:
                            self.partial = slot.partial
                        if slot.report is not report:
                            self.report = slot.report
                return
        if not waits:
            count = len(self._others) + 1
            calls = "a call runs in this pipeline" if count == 1 else f"{count} calls run in this pipeline"
            raise Busy(f"{calls}, which is as many as it runs at the same time")
        with self._turn("generate()", "use another Pipeline there"):
            yield self

    @contextmanager
    def _turn(self, what: str, instead: str) -> Iterator[None]:
        """Wait for this slot. Where a call of ``what`` would wait for a call of its own thread, it raises ``RuntimeError``."""
        with self._lock:
            self._check_outside(what, instead)
            with self._inside():
                yield

    def _check_outside(self, what: str, instead: str) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{what} was called inside a call of the same pipeline; {instead}")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            self._owner = threading.get_ident()
            yield
        finally:
            self._owner = None

    def close(self) -> None:
        """End worker processes, drop graphs, and restore the models' attention. A later call starts again what it needs.

        This also happens at the end of a ``with`` block, at exit, and when the pipeline is collected as garbage. Calls of other threads that
        began earlier are completed first.

        Raises:
            RuntimeError: From inside of a call: from a streamer or a processor.
        """
        refusal = "close()", "raise an error there to end the call, and close the pipeline when it has returned"
        self._check_outside(*refusal)
        for slot in self._others:
            slot._check_outside(*refusal)
        for slot in self._others:
            slot.close()
        with self._turn(*refusal):
            self._others.clear()
            self._driver.share_prefixes(1)
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_all: weakref.WeakSet[Slots] = weakref.WeakSet()

_growing = Lock()


def _after_fork() -> None:
    """In the child of a fork. Calls of the parent's other threads do not continue here."""
    for slot in _all:
        slot._is_forked = True
        if slot._owner != threading.get_ident():
            slot._owner = None
    if any(slot._owner is not None for slot in _all):
        keep_to_one_thread()  # its next forward comes without a call


def keep_to_one_thread() -> None:
    """In a fork, before its first forward."""
    if keep_to_one():
        warn_of_speed(
            "a forked process computes with one thread, as torch's threads do not survive a fork; to use more, start the process with "
            "multiprocessing's method 'spawn' and make the pipeline there"
        )


os.register_at_fork(after_in_child=_after_fork)


class BasePipeline(Slots):
    """The contract of ``generate()`` for any decoder. A subclass sets ``_driver``, which runs the calls.

    Args:
        models: All models that take part, the target last.

    Attributes:
        report: What the call did that has ended last; None before the first.
        partial: After a call that was interrupted or failed: what it had committed, as ``generate()`` would return it.
    """

    report: Report | None
    partial: torch.Tensor | None
    _group: ForwardGroup | None = None

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        super().__init__()
        self.models = list(models)
        self._causes: set[str] = set()
        self._runnable: list[object] = []

    @property
    def target(self) -> PreTrainedModel:
        """The model whose text is generated."""
        return self.models[-1]

    def __repr__(self) -> str:
        driver = getattr(self, "_driver", None)
        if driver is None:
            return f"<{type(self).__name__} that runs no models>"
        names = [model.config._name_or_path or type(model).__name__ for model in self.models]
        drafts = f", drafts {', '.join(names[:-1])}" if names[1:] else ""
        return f"<{type(self).__name__} of {names[-1]}{drafts}: {driver.ran_as}>"

    def _caching(self) -> Sequence[PreTrainedModel]:
        """The models with caches in this process."""
        return self.models

    def _check_request(self, request: GenerationRequest) -> None:
        """Refuse a call that the options of the pipeline exclude."""

    def _report(self, call: PreparedCall) -> Report:
        """The report of the call that has just run."""
        return report_of(call, self._driver)

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
        _only_known: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Generate the text of the target: arguments and result are those of ``target.generate()``.

        Calls from several threads run at the same time, see :class:`Slots`. After a call that is interrupted or fails, :attr:`partial` holds what was
        committed, a thread that reads the streamer has the error, and the pipeline can be used again. ``docs/generate.md`` lists all arguments.

        Args:
            inputs: The same as ``input_ids``: int64 ``[B, S]``, or lists. A batch is padded on the left.
            logits_processor: Called once per generated token and row.
            stopping_criteria: Called token by token, inside of an accepted block, too.
            past_key_values: A ``DynamicCache``, which grows in place. The ids are the whole text, or its new tokens, with the ``attention_mask`` of the
                whole text. transformers decodes calls with other caches.
            streamer: Gets the prompt, then each token once, in order, as soon as the target has committed it.
            tokenizer: For ``stop_strings``.
            seed: One integer, or one per row, see :func:`pipespec.engine.sampling.row_seeds`.
            presence_penalty: Subtracted from the score of each token that the generated text holds.
            frequency_penalty: Likewise, once per occurrence.
            logit_bias: By token id, what is added to its score; ``-inf`` forbids the token.
            grammar: What constrains the text: a :class:`pipespec.TokenMatcher` such as ``xgrammar.GrammarMatcher``, new for each call, or a list with one
                per row of the batch, None for a free row.
            logprobs: 0: log-probabilities of the generated tokens; ``n``: those of the ``n`` likeliest tokens at each position, too. The result has them as
                ``logprobs``, see :class:`pipespec.api.output.Logprobs`.
            _only_known: Of :func:`pipespec.attach` only: raise ``NotKnown`` where transformers' loop would decode.
            **kwargs: Fields of ``GenerationConfig``, and all else that ``generate()`` takes.

        Returns:
            int64 ``[B, S + new]``, the prompt included, finished rows padded. With ``return_dict_in_generate=True`` transformers'
            ``GenerateDecoderOnlyOutput``; with ``logprobs`` a :class:`pipespec.api.output.LogprobsOutput`.

        Raises:
            ValueError: A value cannot work; the message names the argument.
            TypeError: A value has the wrong type.
            NotImplementedError: An argument of transformers is not supported.
            DoesNotFit: The memory does not suffice.
            RuntimeError: Only the pipeline can run the call, no slot is free, and a call of this thread has the first one.
        """
        with _around_call(None if _only_known else streamer):
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
            options = CallOptions(
                streamer=streamer,
                cache=past_key_values,
                seed=seed,
                penalties=check_penalties(presence_penalty, frequency_penalty, logit_bias),
                grammar=grammar,
                logprobs=logprobs,
                only_known=_only_known,
            )
            return GenerationMixin.generate(
                self.target,
                inputs=ids,
                generation_config=generation_config,
                logits_processor=logits_processor,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                attention_mask=mask,
                custom_generate=functools.partial(self._decode, call_options=options),
                **passed_on(config, kwargs, stopping_criteria, tokenizer),
            )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        seed: int | Sequence[int] | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Any = None,
        logprobs: int | None = None,
        **prepared: Any,
    ) -> Any:
        """Run a call of ``model.generate(..., custom_generate=pipe)``. ``ValueError`` if ``model`` is not the target.

        transformers passes neither ``streamer`` nor ``assistant_model`` nor ``synced_gpus`` to it, without an error: :func:`pipespec.attach` has them.
        """
        with _around_call(None):
            if model is not self.target:
                raise ValueError(
                    f"custom_generate: this pipeline generates the text of its own target, not of the {type(model).__name__} whose "
                    "generate() was called"
                )
            check_options(prepared["generation_config"], model.generation_config)
            check_others({name: value for name, value in prepared.items() if name not in PREPARED})
            options = CallOptions(
                cache=callers_cache(prepared.get("past_key_values")),
                seed=seed,
                penalties=check_penalties(presence_penalty, frequency_penalty, logit_bias),
                grammar=grammar,
                logprobs=logprobs,
            )
            return self._decode(model, input_ids, call_options=options, **prepared)

    def _decode(
        self, model: PreTrainedModel, input_ids: torch.Tensor, *, call_options: CallOptions, **prepared: Any
    ) -> Any:
        """Run a call whose arguments transformers has prepared; in transformers' loop where unknown code takes part, or all slots are taken."""
        prompt = input_ids[0].to("cpu", torch.int32).numpy() if len(input_ids) == 1 else None
        try:
            with self._slot(waits=self._must_run(call_options), prompt=prompt) as slot:
                return slot._decode_here(input_ids, call_options, prepared)
        except NotKnown as error:
            if call_options.only_known:
                raise
            cause = str(error)
        if cause not in self._causes:
            self._causes.add(cause)
            warn_of_speed(f"{cause}. transformers' own loop decodes such calls, token by token")
        from pipespec.api.fallback import decode as decode_by_transformers

        self.partial, cause = None, cause.removeprefix("generate(): ")
        try:
            result, report = decode_by_transformers(model, input_ids, options=call_options, cause=cause, **prepared)
            self._keep_report(report)
        except BaseException as error:
            self.partial = getattr(error, "partial", None)
            raise
        return result

    def _must_run(self, options: CallOptions) -> bool:
        """Whether transformers' loop cannot decode a call of these options."""
        return self._group is not None or options.grammar is not None or options.logprobs is not None

    def _decode_here(self, input_ids: torch.Tensor, call_options: CallOptions, prepared: dict[str, Any]) -> Any:
        """Run a call in this slot. Raises ``NotKnown`` where unknown code takes part."""
        raise_program_end()
        self._leave_parent()
        check_files(self.models)
        self._check_known()
        if (tokens := list(map(token_of, self.models))) != self._runnable:  # they may have been moved, cast or hooked
            check_runnable(self.models)
            check_checkpointing(self.models)
            self._runnable = tokens
        is_drawn = prepared["generation_config"].do_sample and call_options.seed is None
        with _generator_restored() if is_drawn else nullcontext():
            call = prepare(self.target, input_ids, call_options, **prepared)
            self._check_call(call)
            return self._run(call)

    def _check_known(self) -> None:
        """Raise ``NotKnown`` if the target runs unknown code."""
        if (reason := unknown_reason(self.target)) is not None:
            raise NotKnown("model", f"generate(): drafts cannot speed this model up: {reason}")

    def _run(self, call: PreparedCall) -> Any:
        progress, request = call.progress, call.request
        self.partial = None
        try:
            progress.stream_prompt()
            self._leave_parent()  # the streamer may have forked
            with _leading(self._group, progress):
                self._driver.run(request)
                progress.finish()
                cache = complete(call, self._driver.target)
            self._keep_report(self._report(call))
            warn_of_room(self._driver)
            if self._driver.forget_stale():
                warn_of_stale_text()
            return output_of(call, cache)
        except BaseException as error:
            if any(progress.text.counts()):
                mark_final(error)
            with suppress(Exception):
                self.partial = error.partial = progress.text.sequences()  # type: ignore[attr-defined]
                error.prompt_streamed = progress.has_prompt  # type: ignore[attr-defined]
                error.add_note("What was generated until then is in the pipeline's .partial")
            raise
        finally:
            self._driver.end_call()
            if request.cache is not None:
                self._driver.target.forget()

    def _keep_report(self, report: Report) -> None:
        self.report = report
        own_report.set(report)

    def _check_call(self, call: PreparedCall) -> None:
        """Refuse what the target or the decoder cannot do, and what does not fit the memory, on all ranks of a tensor-parallel target."""
        request, error = call.request, None
        try:
            check_rope(self.target, request.inputs.most)
            for model in self._caching():
                reset_rope(model)
            self._check_request(request)
            self._check_memory(request)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._group is not None:
                self._group.agree(request.inputs.prompts, request.inputs.limits, error)
        if self._group is not None and not self._group.is_leader:
            call.follow()

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
        keep_to_one_thread()

    def _check_memory(self, request: GenerationRequest) -> None:
        """See :func:`pipespec.checks.calls.check_memory`. The caches of a call are there already if the one before had its size."""
        driver, inputs, static = self._driver, request.inputs, self._driver.static_caches
        rows, longest, limit = len(inputs.prompts), max(map(len, inputs.prompts)), inputs.most
        is_kept = request.cache is None
        if is_kept and rows == driver.checked[0] and longest <= driver.checked[1] and limit <= driver.checked[2]:
            return
        names = {id(m): name for m, name in zip(self.models, stage_names(len(self.models)), strict=True)}
        caching = {names[id(model)]: model for model in self._caching()}
        if request.cache is not None and request.cache.fits(rows, inputs.capacity) and not static:
            caching.pop("target", None)
        check_memory(caching, rows=rows, longest=longest, limit=limit, static=static, release=self._release)
        driver.checked = (rows, longest, limit) if is_kept else (0, 0, 0)


@contextmanager
def _around_call(streamer: Any) -> Iterator[None]:
    """Around a call of ``generate()``, whose errors go to the reader of ``streamer``, too."""
    with (
        notify_reader_of_failure(streamer),
        shortage_explained(),
        program_end_awaited(),
        handlers_watched(),
        one_call(),
    ):
        renew_pool()
        try:
            yield
        except Exception as error:
            if is_handlers_error(error):  # it ends the call
                mark_final(error)
            raise


@contextmanager
def _generator_restored() -> Iterator[None]:
    """After a failure before the first token, transformers finds torch's generator as it was."""
    before = torch.get_rng_state()
    try:
        yield
    except BaseException as error:
        if not is_final(error):
            torch.set_rng_state(before)
        raise


@contextmanager
def _leading(group: ForwardGroup | None, progress: Progress) -> Iterator[None]:
    """Tell the other ranks of a tensor-parallel target how the call has ended, if this one leads them."""
    if group is None or not group.is_leader:
        yield
        return
    try:
        yield
    except BaseException as error:
        with suppress(Exception):
            group.fail(error)
        raise
    group.end(progress.text.generated())
