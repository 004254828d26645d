"""Pipeline: models in, ``generate()`` out.

A call is checked (``generate``), prepared (:class:`pipespec.api.prepare.Generation`), run (:meth:`pipespec.drivers.Decoder.run`) and reported. Each
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

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
from pipespec.api.output import output_of, report_of
from pipespec.api.prepare import CallOptions, Generation, without_features
from pipespec.config import SpeculationConfig, default_schedule, takes_ngram
from pipespec.drivers import Driver, make_driver
from pipespec.drivers.base import Decoder, GenerationRequest, SpeedWarning
from pipespec.drivers.follower import FollowerDriver
from pipespec.drivers.graphed.attention import own_attention
from pipespec.drivers.ranks.draft import DraftRank
from pipespec.drivers.ranks.membership import join
from pipespec.engine.group import ForwardGroup
from pipespec.engine.ngram import NgramDraft, first_of
from pipespec.engine.stage import stage_names
from pipespec.engine.translation import Translation
from pipespec.errors import DoesNotFit, NotCapturable, UnsupportedInput
from pipespec.models.adapters import without_wrapper
from pipespec.models.compat import lost_arguments
from pipespec.models.derived import INT8, SelfDraft
from pipespec.models.devices import LayerDevices, input_device, tensor_parallel_size, why_not_whole
from pipespec.models.loading import load_model
from pipespec.models.rope import DynamicRope
from pipespec.models.vocabulary import draft_vocabulary as vocabulary_ids
from pipespec.observe import Report
from pipespec.observe.text import notify_reader_of_failure
from pipespec.planning.drafts import make_drafts
from pipespec.preflight.checks import check_chain, check_exact, check_recurrent, check_rope
from pipespec.preflight.devices import Devices
from pipespec.preflight.memory import check_memory, shortage_explained
from pipespec.preflight.placement import arrange
from pipespec.preflight.support import check_checkpointing, check_runnable
from pipespec.preflight.tokenizers import tokenizer_digest, translation_for
from pipespec.process import shutdown
from pipespec.process.forks import Lock
from pipespec.process.signals import pass_on
from pipespec.process.threads import keep_to_one, renew_pool
from pipespec.process.warnings import user_stacklevel


def _notifying_reader(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the error of a failed call to its streamer. ``__wrapped__`` is the function without that."""

    @functools.wraps(generate)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        with notify_reader_of_failure(kwargs.get("streamer")):
            return generate(*args, **kwargs)

    return notifying


_PREPARED = {
    "past_key_values",
    "logits_to_keep",
    "use_cache",
    "cache_position",
    "output_hidden_states",
    "output_attentions",
}
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
        with self._turn("close()", "raise there to end the call, and close the pipeline behind it"):
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _caching(self) -> Sequence[PreTrainedModel]:
        """The models with caches in this process."""
        return self.models

    def _check_rope(self, generation: Generation) -> None:
        """Warn where RoPE that depends on the length cannot be that of ``generate()``."""
        check_rope(self.target, max(generation.limits))

    def _check_request(self, request: GenerationRequest) -> None:
        """Refuse a call that the options of the pipeline exclude."""

    def _report(self, generation: Generation) -> Report:
        """The report of the call that has just run."""
        return report_of(generation, self._driver)

    @_notifying_reader
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
        with shutdown.call():
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
            return GenerationMixin.generate(
                self.target,
                inputs=ids,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                attention_mask=mask,
                custom_generate=functools.partial(self._decode, call_options=options),
                **kwargs,
            )

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
        with shutdown.call(), notify_reader_of_failure(lost.get("streamer")), shortage_explained():
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
            return self._decode(*prepared_call, call_options=options, **model_kwargs)

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
            check_recurrent(self.models, target_is_placed=self._is_placed)
            check_checkpointing(self.models)
            generation = Generation(
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
                self._check_call(generation, request)
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
            if not call_options.prompt_streamed:
                generation.progress.stream_prompt()
            self._leave_parent()  # the streamer may have forked
            try:
                with self._leading(generation):
                    self._driver.run(request)
                    generation.progress.finish()
                self.report = self._report(generation)
                return output_of(generation, self.report, functools.partial(request.return_cache, self._driver.target))
            except BaseException as error:
                request.take_back()
                with suppress(Exception):
                    self.partial = error.partial = generation.progress.text.sequences()  # type: ignore[attr-defined]
                    error.add_note("What was generated until then is in the pipeline's .partial")
                raise

    def _check_call(self, generation: Generation, request: GenerationRequest) -> None:
        """Refuse what the target or the decoder cannot do, and what does not fit the memory."""
        if request.inputs.right_padding is not None and not (self._driver.continues_padding and self._group is None):
            where = "in stages" if self._group is None else "sharded over processes"
            raise UnsupportedInput(
                "attention_mask",
                f"attention_mask: a row ends with padding, which a target {where} does not continue; pad on the left",
            )
        self._check_features(generation.features, request)
        self._check_rope(generation)
        self._check_request(request)
        self._check_memory(request)

    @contextmanager
    def _leading(self, generation: Generation) -> Iterator[None]:
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

    def _check_features(self, features: Sequence[str], request: GenerationRequest) -> None:
        """Check that the target computes in this process what the options ``features`` ask for."""
        if features and not self._driver.holds_target:
            raise without_features(features[0], "a target whose layers are in other processes")
        # Captured steps may also be those of another pipeline.
        own, now = own_attention(self.target), self.target.config._attn_implementation
        replaces = now != own or self._driver.has_static_caches(request)
        if "output_attentions" in features and own == "eager" and replaces:
            raise without_features(
                "output_attentions", "captured steps, which replace the attention 'eager'; set graphs=False"
            )

    def _check_memory(self, request: GenerationRequest) -> None:
        """Check that the call fits the memory, see :func:`pipespec.preflight.memory.check_memory`."""
        driver, inputs = self._driver, request.inputs
        names = {id(m): name for m, name in zip(self.models, stage_names(len(self.models)), strict=True)}
        caching = {names[id(model)]: model for model in self._caching()}

        def check(static: bool) -> None:
            check_memory(
                caching,
                len(inputs.prompts),
                max(map(len, inputs.prompts)),
                inputs.most,
                graphs=static,
                copied="target" in caching and request.copies_cache(static or driver.keeps_cache),
                distributions=driver.distribution_bytes(request),
                in_targets_cache=[names[id(model)] for model in driver.in_targets_cache],
                reusable_bytes=lambda: driver.reusable_bytes(request),
                release_unused=lambda: driver.release_unused(request),
            )

        static = driver.has_static_caches(request)
        try:
            check(static)
        except DoesNotFit:
            if not (static and driver.forgo_graphs()):
                raise
            check(False)  # caches that grow may fit

    @contextmanager
    def _turn(self, what: str, instead: str) -> Iterator[None]:
        """Admit one thread at a time. A call of ``what`` from inside a call would wait for itself and raises ``RuntimeError``."""
        with self._lock:
            if self._owner == threading.get_ident():
                raise RuntimeError(f"{what} was called inside a call of the same pipeline; {instead}")
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


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
        _warn_of(
            "a forked process computes with one thread, as torch's threads do not survive a fork; to use more, start the process with "
            "multiprocessing's method 'spawn' and make the pipeline there"
        )


os.register_at_fork(after_in_child=_after_fork)


_ENOUGH, _HARDLY = 64, 0.02
"""Draft tokens after which, and acceptance rate up to which, a draft probably has another tokenizer."""


class Pipeline(BasePipeline):
    """A chain of models that generates the text of the last one, faster.

    The text depends on the target, the prompt and the seed. It depends neither on the drafts nor on the schedule, the timing or the failure of a draft,
    but for ``acceptance``.

    Args:
        target: A LLaMA-family causal language model, its path (a folder with ``config.json`` and safetensors), or its name
            on the Hugging Face Hub.
        drafts: Models or paths, smallest first, with the target's tokenizer. On a CPU an n-gram index joins them, unless ``schedule`` or ``lookahead`` is
            given. An embedding may be
            padded to another size if ``tokenizer.json`` lies beside the weights of both and is the same. The first, or only, draft may be
            ``"ngram"`` or a :class:`pipespec.NgramDraft`: prompt lookup, without a model. ``"self"`` is a draft out of the target's own layers,
            see :func:`pipespec.self_draft`: ``"self:4"`` of its first four, ``"self:0,1,11"`` of these three, ``"self"`` of as many as the
            target's ``generation_config`` names as ``assistant_early_exit``. It shares the target's weights, lies where the target does, and has no entry in ``device``. The first draft
            may have another tokenizer: its draft tokens are translated by way of the text.
        schedule: How the stages run. None: the rule of :func:`pipespec.config.default_schedule`; :attr:`schedule` holds its choice.
            ``"plain"`` ignores the drafts. ``"lockstep"`` runs all stages one after the other in this process. ``"workers"`` runs each draft in a
            process of its own, at the same time as the target. ``"streams"`` is for GPUs: all stages run at the same time in this process, each step
            a captured CUDA graph; on a CPU, threads run the same steps uncaptured. ``"ranks"`` runs each stage in a process that torchrun has
            started, on any machine: rank 0 has the target and ``generate()``, rank 1 the first draft, and so on; they call :meth:`serve`. Each
            rank loads its own model only.
        lookahead: Tokens that a draft may be ahead of the next stage: an integer, or one per draft. Default: in lockstep, the controller chooses before each
            round which draft proposes tokens and how many (see :mod:`pipespec.engine.controller`); 4 where it cannot: in captured rounds and with
            ``acceptance`` other than coupled. In other schedules 8.
        min_draft_tokens: Draft tokens that the target waits for if it has fewer, for at most the time that they should take. For ``"workers"``,
            ``"streams"`` and ``"ranks"``.
        decode_meanwhile: During that wait, the target decodes one token at a time. This pays if a verification costs much more than a
            one-token step.
        graphs: Run ``"plain"`` and ``"lockstep"`` as captured CUDA graphs, one per round; on a CPU, the same steps uncaptured. Default:
            only where the default rule chooses it. An open pipeline with graphs sets ``attn_implementation="pipespec"`` in its models;
            :meth:`close` restores theirs. A model that cannot be captured runs without graphs, and a :class:`pipespec.SpeedWarning` names it.
        trace: Steps per stage that the trace of a call keeps (``report.save_trace()``; 72 bytes each). 0: no trace.
        dtype: For models given as paths. Default: the one in which they are stored. In float32 the text differs from that of ``generate()`` only at rare
            near-ties, in 16 bits more often.
        draft_dtype: Of the drafts. A dtype is for those given as paths. ``"int8"``: the matrices of all drafts in 8 bits, with a scale per row. A
            draft given as an object stays as it is, and the pipeline has a copy that shares the rest.
        draft_vocabulary: Tokens that drafts may propose, so that their heads take less time: a number N (the N lowest ids), a text (its tokens),
            ``(N, text)`` (the N commonest of it), or token ids. The target's end tokens are always among them. The text does not depend on it.
        device: For models given as paths: one device for all, one per stage (drafts first, target last), ``{"draft 0": "cuda:1"}``, or
            ``"auto"``, see :func:`pipespec.preflight.placement.arrange`. ``{"target": ["cuda:1", "cuda:2"]}`` splits a stage over several GPUs, which
            needs the package accelerate. Default: the CPU. Models given as objects stay where they are, also over several devices and offloaded
            (``device_map``).
        trust_remote_code: Allow the Python code in a model's folder to run.
        native: Run the steps of LLaMA-like models on the CPU as one call into C++, on packed copies of their weights. A model does so after its
            logits agreed with transformers' on probes, in float32 within 1e-5 of their range; ``report.stages[i].forward`` says which forward ran.
            Captured steps run fused kernels after the same comparison. False: forwards with the bits of transformers' own.
        tokenizer: The target's, for a first draft with another one; transformers' object. Default: the one beside its weights.
        draft_tokenizers: The drafts' tokenizers: a list with one entry per draft model, or one tokenizer for a single draft. None, as the argument or as
            an entry: the tokenizer beside the draft's weights, or the target's if there is none.
        exact: Refuse whatever would let the target's bits depend on anything but target, prompt and seed. Then a text in bfloat16, too, is the
            same in every batch, with every draft, in every schedule on this machine. For targets on the CPU that run in the native form, and for
            captured steps of targets that run in the fused form. The two forms round differently.
        acceptance: How the target accepts draft tokens in sampled calls. ``"coupled"``: both draw with the same noise, and one seed gives one
            text. ``"rejection"`` and ``"block"`` accept, in expectation, at least as many draft tokens: rejection sampling (Leviathan et al. 2023) and block verification (Sun
            et al. 2024). The text has the target's distribution, too, but depends on the draft and on ``lookahead``. They are for one draft model
            in ``schedule="lockstep"``, which they choose by default, or ``"workers"``. There the text depends on timing, too, so one seed does not give
            one text, and the distributions take ``4 * rows * (lookahead + 1) * vocabulary`` bytes of shared memory.
        confidence: Drafts publish how sure they are of each token. How often tokens of such a confidence are kept is learned while texts are generated.
            A draft stops where the next token would cost more than it is expected to gain, and the target verifies, decodes one token, or waits for
            more draft tokens, whichever gains most; ``lookahead`` (default 16) and ``min_draft_tokens`` remain as bounds. The text does not depend on it.
            For ``"lockstep"`` and ``"workers"``; ``report.stages[i].calibration`` has what was learned.

    A target that transformers has sharded over processes (``tp_plan``) runs in all of them: every rank builds the same pipeline and makes the same
    calls, and each returns the text. Rank 0 runs the drafts.

    Models given as objects are put into eval mode. With ``"workers"`` the drafts' weights move into shared memory (same values, one copy). A
    draft may have a shorter position limit than the target; past it, the draft is only less accurate.

    Attributes:
        schedule: The schedule that runs: as named or chosen, or the one in its place if steps cannot be captured.
        config: The validated configuration.
        report: What the last call did, see :class:`pipespec.Report`.
        partial: After a call that was interrupted or failed: what it had committed.

    Raises:
        ValueError: The models cannot form a chain, or an option does not fit.
        TypeError: An option has the wrong type, or a model has the wrong architecture.
        FileNotFoundError: A path holds no model.
        DoesNotFit: The models do not fit the memory.
    """

    def __init__(
        self,
        target: PreTrainedModel | str | Path,
        drafts: Sequence[PreTrainedModel | NgramDraft | SelfDraft | str | Path]
        | PreTrainedModel
        | NgramDraft
        | SelfDraft
        | str
        | Path
        | None = (),
        *,
        schedule: str | None = None,
        lookahead: int | Sequence[int] | None = None,
        min_draft_tokens: int | None = None,
        decode_meanwhile: bool = False,
        graphs: bool | None = None,
        trace: int = 0,
        dtype: torch.dtype | str = "auto",
        draft_dtype: torch.dtype | str | None = None,
        draft_vocabulary: int | str | Path | tuple[int, str | Path] | Sequence[int] | None = None,
        device: Devices = None,
        trust_remote_code: bool = False,
        native: bool = True,
        exact: bool = False,
        acceptance: str = "coupled",
        confidence: bool = False,
        tokenizer: Any = None,
        draft_tokenizers: Any = None,
    ) -> None:
        drafts, target = without_wrapper(drafts), without_wrapper(target)
        if drafts is None or isinstance(drafts, (str, Path, PreTrainedModel, NgramDraft, SelfDraft)):
            drafts = [] if drafts is None else [drafts]
        if not isinstance(drafts, Sequence):
            raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
        drafts = [without_wrapper(draft) for draft in drafts]
        self._group = ForwardGroup.of(target) if isinstance(target, PreTrainedModel) else None
        if self._group is not None:
            _check_group_drafts(drafts, schedule)
        follows = self._group is not None and not self._group.is_leader
        if follows:
            drafts, draft_tokenizers = [], None  # rank 0 runs them
        ngram, draft_models = first_of(drafts)
        options: dict[str, Any] = {
            "lookahead": lookahead,
            "min_draft_tokens": min_draft_tokens,
            "decode_meanwhile": decode_meanwhile,
            "graphs": graphs,
            "trace": trace,
            "native": native,
            "exact": exact,
            "ngram": ngram,
            "acceptance": acceptance,
            "confidence": confidence,
        }
        if acceptance != "coupled" and schedule is None:
            schedule = "lockstep"
        configure = functools.partial(SpeculationConfig.of, len(drafts))
        config = configure(schedule=schedule or "lockstep", **options)  # checks the options before any model is read
        self._notes: tuple[str, ...] = ()  # for every report
        self._warned_of_rope = False
        self._unchecked: list[Any] = []  # models of which nothing tells that they have one tokenizer
        if config.schedule == "ranks":
            made = {"draft_dtype": draft_dtype, "draft_vocabulary": draft_vocabulary}
            _check_rank_drafts(draft_models, **made, tokenizer=tokenizer, draft_tokenizers=draft_tokenizers)
            loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
            model, self._driver = join([*draft_models, target], config, device=device, **loading)
            super().__init__([model])
            self.config: SpeculationConfig = config
            self.schedule = config.schedule
            if self.is_controller:
                _check_form(self.models, config)
            return
        models, notes, translation = load_chain(
            target,
            draft_models,
            schedule=config.schedule,
            dtype=dtype,
            draft_dtype=draft_dtype,
            draft_vocabulary=draft_vocabulary,
            device=device,
            tokenizer=tokenizer,
            draft_tokenizers=draft_tokenizers,
            has_ngram=ngram is not None,
            trust_remote_code=trust_remote_code,
        )
        self._notes += tuple(notes)
        if translation is not None:
            options["translation"] = translation
            config = configure(schedule=schedule or "lockstep", **options)
        is_known = translation is not None or tokenizer is not None or draft_tokenizers is not None
        is_known |= any(isinstance(SelfDraft.of(draft), SelfDraft) for draft in draft_models)
        self._unchecked = [] if is_known else [*draft_models, target]
        if config.ngram is not None:
            options["ngram"] = config.ngram.for_target(target, models[-1])
            config = replace(config, ngram=options["ngram"])
        super().__init__(models)
        if schedule is None:
            places = [str(input_device(model)) for model in models]
            is_whole = all(why_not_whole(model) is None for model in models)
            schedule, options["graphs"] = default_schedule(
                places, graphs, ngram=ngram is not None, translated=translation is not None, whole=is_whole
            )
            on_cpu = all(place == "cpu" for place in places) and self._group is None
            if on_cpu and takes_ngram(schedule, options):
                schedule, options["ngram"] = "lockstep", NgramDraft()
                configure = functools.partial(SpeculationConfig.of, len(drafts) + 1)
            config = configure(schedule=schedule, **options)
            _check_form(models, config)
            if follows:
                self._driver = FollowerDriver(models, config)
            else:
                self._driver, reasons = _default_driver(models, config, configure(schedule="lockstep", **options))
                self._notes += reasons
        else:
            _check_form(models, config)
            self._driver = FollowerDriver(models, config) if follows else _make_driver(models, config)
        # A driver in place of another has its own.
        self.config = getattr(self._driver, "config", config)
        self.schedule = self.config.schedule

    @property
    def is_controller(self) -> bool:
        """Whether this process has the target, and so ``generate()``. False on the ranks of drafts, which call :meth:`serve`."""
        return not isinstance(self._driver, DraftRank)

    @property
    def target(self) -> PreTrainedModel:
        """The model whose text is generated. Raises ``RuntimeError`` on the rank of a draft."""
        if isinstance(self._driver, DraftRank):
            raise self._driver.refusal()
        return super().target

    def serve(self) -> None:
        """With ``schedule="ranks"``, on the rank of a draft: take part in the calls of rank 0 until it closes.

        Raises:
            RuntimeError: This process has the target.
            pipespec.process.ranks.RankError: Rank 0 has ended.
        """
        if not isinstance(self._driver, DraftRank):
            raise RuntimeError("serve() is for the ranks of drafts, with schedule='ranks': call generate() here")
        self._driver.serve()

    def _caching(self) -> Sequence[PreTrainedModel]:
        return self.models if self.schedule != "plain" else self.models[-1:]

    def _check_rope(self, generation: Generation) -> None:
        rope, most = DynamicRope.of(self.target), max(generation.limits)
        if rope is None or not generation.follows(rope):
            check_rope(self.target, most)
        elif most > rope.limit and len(self._caching()) > 1 and not self._warned_of_rope:
            self._warned_of_rope = True
            warnings.warn(
                f"beyond {rope.limit} tokens the target's RoPE depends on the length of the text: from there on it decodes one "
                "token per step, as generate() does, and the drafts rest",
                UserWarning,
                stacklevel=user_stacklevel(),
            )

    def _check_request(self, request: GenerationRequest) -> None:
        sampling_params = request.inputs.sampling_params
        is_drawn = self.config.acceptance != "coupled" and sampling_params.seeds is not None
        if is_drawn and sampling_params.stepwise:
            names = ", ".join(type(processor).__name__ for processor in sampling_params.processors)
            raise UnsupportedInput(
                "logits_processor",
                f"generate(): {names}: runs position by position, which acceptance={self.config.acceptance!r} does not support: use "
                "Pipeline(..., acceptance='coupled')",
            )
        if not self.config.exact:
            return
        if request.inputs.right_padding is not None:
            raise ValueError("exact=True: a row of attention_mask ends with padding; pad on the left")
        _check_form(self.models, self.config)

    def _report(self, generation: Generation) -> Report:
        report = super()._report(generation)
        self._note_other_tokenizers(report)
        if not self._notes:
            return report
        return replace(report, decisions=(*self._notes, *(report.decisions or ())))

    def _note_other_tokenizers(self, report: Report) -> None:
        """Note, once, that a draft which is hardly ever accepted may have another tokenizer, if nothing tells that it has not."""
        given, last = self._unchecked, report.stages[-1]
        if not given or last.drafted < _ENOUGH or last.acceptance_rate > _HARDLY:
            return
        self._unchecked = []
        if any(tokenizer_digest(source, model) is None for source, model in zip(given, self.models, strict=True)):
            self._notes += (
                "hardly any draft token was accepted, and no tokenizer.json tells whether the models have one tokenizer: if they have not, pass "
                "tokenizer= and draft_tokenizers=",
            )


def load_chain(
    target: PreTrainedModel | str | Path,
    drafts: Sequence[Any],
    *,
    schedule: str = "lockstep",
    dtype: torch.dtype | str = "auto",
    draft_dtype: torch.dtype | str | None = None,
    draft_vocabulary: Any = None,
    device: Devices = None,
    tokenizer: Any = None,
    draft_tokenizers: Any = None,
    has_ngram: bool = False,
    trust_remote_code: bool = False,
) -> tuple[list[PreTrainedModel], list[str], Translation | None]:
    """Load the models of a chain, make those that are made here, and check that they form one.

    Args:
        target: As for :class:`Pipeline`, as for all that follow.
        drafts: Without an n-gram index.
        schedule: How they are to run.
        dtype: See :class:`Pipeline`.
        draft_dtype: See :class:`Pipeline`.
        draft_vocabulary: See :class:`Pipeline`.
        device: See :class:`Pipeline`.
        tokenizer: See :class:`Pipeline`.
        draft_tokenizers: See :class:`Pipeline`.
        has_ngram: Whether an n-gram index is before the drafts.
        trust_remote_code: See :class:`Pipeline`.

    Returns:
        The models, the target last; notes about the drafts that were made; the translation for a first draft with another tokenizer.
    """
    chosen = [SelfDraft.of(draft) for draft in drafts]
    if schedule == "plain":  # which ignores the drafts
        chosen = [draft for draft in chosen if not isinstance(draft, SelfDraft)]
    given = [*(draft for draft in chosen if not isinstance(draft, SelfDraft)), target]
    int8 = draft_dtype == INT8
    dtypes = [*[dtype if draft_dtype is None or int8 else draft_dtype] * (len(given) - 1), dtype]
    devices = arrange(
        given, device=device, shares_weights=schedule == "workers", dtype=dtypes, trust_remote_code=trust_remote_code
    )
    models = [
        load_model(m, dtype=t, device=d, trust_remote_code=trust_remote_code)
        for m, t, d in zip(given, dtypes, devices, strict=True)
    ]
    is_behind = has_ngram or (bool(chosen) and isinstance(chosen[0], SelfDraft))
    translation = translation_for(
        models, given, tokenizer, draft_tokenizers, has_ngram=is_behind, trust_remote_code=trust_remote_code
    )
    translated = translation is not None
    check_chain(models, given, translated=translated)
    if translated and draft_vocabulary is not None:
        raise ValueError(
            "draft_vocabulary names tokens of the target, and draft 0 has another tokenizer: leave one of the two out"
        )
    is_derived = int8 or draft_vocabulary is not None
    if not chosen or not (is_derived or any(isinstance(draft, SelfDraft) for draft in chosen)):
        return models, [], translation
    *loaded, its_target = models
    ids = None if draft_vocabulary is None else vocabulary_ids(draft_vocabulary, target, its_target)
    made, notes = make_drafts(chosen, loaded, its_target, ids=ids, int8=int8)
    models = [*made, its_target]
    check_chain(models, [its_target] * len(models), translated=translated)
    return models, notes, translation


def _check_group_drafts(drafts: Sequence[Any], schedule: str | None) -> None:
    """Refuse what a tensor-parallel target excludes, in each of its processes: those that do not lead have no drafts."""
    if schedule == "ranks" and drafts:
        raise ValueError(
            "the target is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: use 'plain', 'lockstep' or "
            "'workers'"
        )
    if any(isinstance(SelfDraft.of(draft), SelfDraft) for draft in drafts):
        raise ValueError("drafts='self' needs a target that is whole on one device, and it is sharded over processes")


def _check_rank_drafts(drafts: Sequence[Any], **options: Any) -> None:
    """Refuse drafts that are made out of other models: a rank loads its own model alone."""
    for name, value in options.items():
        if value is not None:
            # A dtype can be saved, int8 and a trimmed head cannot.
            instead = (
                "save such a draft and give its path" if name == "draft_dtype" and value != INT8 else "leave it out"
            )
            raise ValueError(
                f"{name} is not for schedule='ranks', where each rank loads its own model as its folder has it: {instead}"
            )
    if any(tensor_parallel_size(draft) > 1 for draft in drafts if isinstance(draft, PreTrainedModel)):
        raise ValueError(
            "a draft is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: load it whole"
        )
    if any(isinstance(SelfDraft.of(draft), SelfDraft) for draft in drafts):
        raise ValueError("drafts='self' is not for schedule='ranks', where no rank but the target's has its weights")


def _check_form(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
    """Check the target's form for ``exact``. A driver of captured steps checks its own."""
    if config.exact and not config.graphs:
        check_exact(models[-1])


def _warn_of(what: str) -> None:
    warnings.warn(f"{what}. The text is not affected, only its speed", SpeedWarning, stacklevel=user_stacklevel())


def _default_driver(
    models: Sequence[PreTrainedModel], config: SpeculationConfig, otherwise: SpeculationConfig
) -> tuple[Driver, tuple[str, ...]]:
    """The driver of the default schedule, and notes for the reports. ``otherwise``: where no worker process can run a draft."""
    if config.schedule != "workers":
        return _make_driver(models, config), ()
    try:
        return make_driver(models, config), ()
    except (ValueError, RuntimeError) as error:
        pass_on(error)
        note = f"schedule='lockstep' instead of 'workers': {error}"
        return make_driver(models, otherwise), (note,)


def _make_driver(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> Driver:
    """The driver of ``config``, or what runs instead of one whose steps cannot be captured."""
    try:
        return make_driver(models, config)
    except NotCapturable as error:
        reason = str(error)
        if config.exact:
            # The steps that run instead have other bits.
            raise ValueError(f"exact=True: {reason}; without graphs or without exact=True the pipeline runs") from error
    eager = replace(config, graphs=False)
    if config.schedule == "streams":
        try:
            driver = make_driver(models, replace(eager, schedule="workers"))
            _warn_of(f"{reason}; schedule='workers' is used instead")
            return driver
        except (ValueError, RuntimeError) as error:
            pass_on(error)
            reason = f"{reason}; worker processes cannot be used either ({error})"
        eager = replace(eager, schedule="lockstep")
    _warn_of(f"{reason}; the steps run one by one, in lockstep, without graphs")
    return make_driver(models, eager)
