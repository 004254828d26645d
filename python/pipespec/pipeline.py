"""Pipeline: what the user holds. Models in, ``generate()`` out."""

from __future__ import annotations

import functools
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from pipespec import ending
from pipespec.angles import LengthAngles
from pipespec.arguments import ARGUMENTS, How, check_arguments, refusal
from pipespec.checks import check_angles, check_chain, check_schedule
from pipespec.compat import lost_arguments
from pipespec.drivers import Driver, make_driver
from pipespec.drivers.base import Policy, StageFailure
from pipespec.drivers.fixed import FixedDriver
from pipespec.generation import Generation
from pipespec.loading import load_model
from pipespec.observe import Report
from pipespec.placement import Devices, DoesNotFit, NotCapturable, arrange, check_memory, check_placement
from pipespec.planning.auto import Auto
from pipespec.planning.planner import Plan
from pipespec.progress import level_of_caller
from pipespec.stage import stage_names
from pipespec_kernels.trace import MOST_ENTRIES

SCHEDULES = ("auto", "plain", "lockstep", "workers", "streams")

# On CPUs a wide forward costs noticeably more than a narrow one: going on with the hints at hand beat waiting for more.
_DEFAULT_WAIT = 0


class BasePipeline(ABC):
    """The contract of ``generate()``, whatever runs below it. ``models``: all that take part, the target last."""

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        self.models = list(models)
        self.report: Report | None = None
        self.partial: torch.Tensor | None = None
        """After a call that was interrupted or failed: what it had committed, as ``generate()`` would return it."""
        self._graphs = False  # whether caches have all their room from the beginning
        self._copies = False  # whether what is returned of them is a copy
        self._lock = threading.RLock()
        self._owner: int | None = None  # thread that is inside

    @property
    def target(self) -> PreTrainedModel:
        return self.models[-1]

    @abstractmethod
    def _generate(self, generation: Generation) -> Report:
        """Run a prepared call."""

    def _caching(self) -> Sequence[PreTrainedModel]:
        """The models that will hold caches."""
        return self.models

    def _keeps(self, generation: Generation) -> Mapping[str, int]:
        """Bytes per device that a call takes over from earlier ones."""
        return {}

    def _spare(self, generation: Generation) -> None:
        """Give back what a call does not go on with."""

    def _check_angles(self, generation: Generation) -> None:
        """Warn where rotary angles that depend on the length cannot be ``generate()``'s."""
        check_angles(self.target, generation.request.start.most)

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
        **kwargs: Any,
    ) -> Any:
        """``target.generate()``'s arguments and result: LongTensor ``[B, S + new]``, prompt included, finished rows padded.

        ``docs/generate.md`` says of each argument what becomes of it. ``inputs`` and ``input_ids`` (``[B, S]``) mean the same; a batch is
        padded on the left, with ``attention_mask``. ``seed``: one integer, or one per row, see :func:`pipespec.sampling.row_seeds`.
        With ``return_dict_in_generate=True`` the result is a :class:`pipespec.generation.PipelineOutput`.

        Calls from several threads run one after the other. When a call is interrupted or fails, :attr:`partial` holds what was
        committed until then, its streamer has been ended, and the pipeline can be used again.

        Raises as :func:`pipespec.arguments.check_arguments`; ``RuntimeError`` for a call from inside of one (a streamer, a processor).
        """
        with ending.call(), _ends_on_failure(streamer):
            if inputs is not None and input_ids is not None:
                raise ValueError("give inputs or input_ids, not both: they mean the same")
            ids, mask, config = check_arguments(
                self.target, input_ids if inputs is None else inputs, attention_mask, generation_config, kwargs
            )
            for name in [
                n for n in kwargs if n in ARGUMENTS and ARGUMENTS[n].how is How.REFUSED and not hasattr(config, n)
            ]:
                del kwargs[name]  # None or False: asks for nothing
            stopping_criteria = StoppingCriteriaList(stopping_criteria or [])
            if config.stop_strings is not None:
                if tokenizer is None:
                    raise ValueError(
                        "stop_strings needs the tokenizer: pass generate(..., stop_strings=..., tokenizer=tokenizer)"
                    )
                # transformers would drop the tokenizer on the way to us.
                stopping_criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
                kwargs["stop_strings"] = None
            decode = functools.partial(self._decode, own_streamer=streamer, own_cache=past_key_values, seed=seed)
            return GenerationMixin.generate(
                self.target,
                inputs=ids,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                attention_mask=mask.long(),
                custom_generate=decode,
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
        **model_kwargs: Any,
    ) -> Any:
        """For ``model.generate(..., custom_generate=pipe)``; ``model`` must be the target."""
        lost = lost_arguments()
        with ending.call(), _ends_on_failure(lost.get("streamer")):
            if model is not self.target:
                raise ValueError(
                    f"custom_generate: this pipeline generates the text of its own target, not of the {type(model).__name__} whose "
                    "generate() was called"
                )
            for name, value in lost.items():
                if ARGUMENTS[name].how is How.REFUSED and value is not None and value is not False:
                    raise refusal(name, value)
            # transformers makes a cache where the caller gave none.
            prepared = model_kwargs.pop("past_key_values", None)
            cache = lost.get("past_key_values", prepared)
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                own_streamer=lost.get("streamer"),
                own_cache=cache,
                seed=seed,
                prompt_streamed=True,
                **model_kwargs,
            )

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        own_streamer: Any = None,
        own_cache: Cache | None = None,
        seed: int | Sequence[int] | None = None,
        prompt_streamed: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers' ``generate()`` calls when everything is prepared."""
        # Not parameters: transformers takes a callable's own ones out of its keywords, and then passes these twice.
        attention_mask, position_ids = model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None)
        for name in model_kwargs.keys() - {"past_key_values", "logits_to_keep", "use_cache", "cache_position"}:
            if model_kwargs[name] is not None:
                raise NotImplementedError(
                    f"generate(): {name} would be passed to the model's forward(), which drafts do not see"
                )
        with self._turn("generate()", "use another Pipeline there"):
            generation = None
            try:
                ending.check()
                check_placement(self.models)  # they may have been moved or cast since
                generation = Generation(
                    self.target,
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    streamer=own_streamer,
                    seed=seed,
                    cache=own_cache,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                )
                longest, most = max(map(len, generation.prompts)), generation.request.start.most
                self._check_angles(generation)
                names = {id(m): name for m, name in zip(self.models, stage_names(len(self.models)), strict=True)}
                caching = {names[id(model)]: model for model in self._caching()}
                self._check_memory(generation, caching, longest, most)
                self.partial = None
                if own_streamer is not None and not prompt_streamed:
                    own_streamer.put(input_ids.cpu())
                self._run(generation)
                assert self.report is not None
                return generation.output(self.report)
            finally:
                if generation is not None:
                    generation.close()

    def _check_memory(
        self, generation: Generation, caching: Mapping[str, PreTrainedModel], longest: int, most: int
    ) -> None:
        """See :func:`pipespec.placement.check_memory`."""
        check_memory(
            caching,
            len(generation.prompts),
            longest,
            most,
            graphs=self._graphs,
            copied="target" in caching and generation.copies(self._copies),
            kept=functools.partial(self._keeps, generation),
            spare=functools.partial(self._spare, generation),
        )

    @contextmanager
    def _turn(self, what: str, instead: str) -> Iterator[None]:
        """One thread at a time. ``RuntimeError`` for ``what`` from inside of a call: it would wait for itself."""
        with self._lock:
            if self._owner == threading.get_ident():
                raise RuntimeError(f"{what} was called from inside of a call of the same pipeline; {instead}")
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _run(self, generation: Generation) -> None:
        try:
            self.report = self._generate(generation)
        except BaseException as error:
            with suppress(Exception):
                self.partial = error.partial = generation.sequences()  # type: ignore[attr-defined]
                error.add_note("What was generated until then is in the pipeline's .partial")
            raise


class Pipeline(BasePipeline):
    """A chain of models that generates the last one's text, faster.

    The text depends on the target, the prompt and nothing else: not on the drafts, the schedule, the timing or a draft's death.

    Parameters
    ----------
    target: a LLaMA-family causal language model, or the path of one (a folder with ``config.json`` and safetensors).
    drafts: models or paths, smallest first, all with the target's tokenizer. None: plain decoding. An embedding may be padded to
        another size where ``tokenizer.json`` lies beside the weights of both and is the same.
    schedule: ``"lockstep"`` runs all stages in turn in this process; ``"workers"`` runs each draft in a process of its own, at the
        same time as the target; ``"plain"`` ignores the drafts. ``"auto"`` measures the models (once: the profile is kept on disk) and chooses
        among these, which drafts, and windows and wait; it goes on choosing from what calls show, and decodes plainly where drafts lose. Where all
        models are on GPUs, ``"streams"`` and the graphs of ``"plain"`` and ``"lockstep"`` take part.
        ``"streams"`` is for GPUs: all stages in this process at the same time, each step a captured CUDA graph. (On a CPU the same steps run
        uncaptured, as threads: to try it out; ``"workers"`` is faster there.)
    windows: per draft, how many tokens it may be ahead of the stage after it (an integer: for all).
    wait: drafts that the target awaits if it has fewer, for as long as they are expected to take (``workers``, ``streams``).
    decode_meanwhile: a target with fewer drafts than ``wait`` decodes one token instead of sleeping, and leaves those there are to grow. Pays
        where verifying several tokens costs much more than decoding one.
    dtype: for models given as paths. float32 gives exactly the text of ``generate()``; in 16 bits near-ties may fall otherwise.
    device: where models given as paths are loaded to: one device for all, one per stage (drafts first, target last), ``{"draft 0": "cuda:1"}``,
        or ``"auto"``, see :func:`pipespec.placement.choose`; default: the CPU. Models given as objects stay where they lie. Whether it all
        fits is estimated before any weight is read, and again before each call.
    graphs: run ``"plain"`` and ``"lockstep"`` as captured CUDA graphs, one per round (on a CPU: the same steps, uncaptured); ``"streams"`` always
        does. While such a pipeline is open its models have ``attn_implementation="pipespec"``; :meth:`close` restores theirs. A model that
        cannot be captured is named in a warning, and runs as ``"workers"`` (from ``"streams"``) or without graphs.
    trace: how many of its last steps each stage keeps of a call, for ``report.save_trace()``; 0: none. A stage and step take 72 bytes.
    trust_remote_code: allow a path's own Python code to run. Never implied.

    Models given as objects are put into eval mode; with ``"workers"`` the drafts' weights move into shared memory (same values, one
    copy). A draft with a shorter position limit than the target is allowed: past it, it only drafts worse.

    Raises ``ValueError``, ``TypeError`` or ``FileNotFoundError``, before any work, for models that cannot form a chain or do not fit the memory.
    """

    def __init__(
        self,
        target: PreTrainedModel | str | Path,
        drafts: Sequence[PreTrainedModel | str | Path] | PreTrainedModel | str | Path | None = (),
        *,
        schedule: str = "lockstep",
        windows: int | Sequence[int] | None = None,
        wait: int | None = None,
        decode_meanwhile: bool = False,
        graphs: bool = False,
        trace: int = 0,
        dtype: torch.dtype | str = "auto",
        device: Devices = None,
        trust_remote_code: bool = False,
    ) -> None:
        if drafts is None or isinstance(drafts, (str, Path, PreTrainedModel)):
            drafts = [] if drafts is None else [drafts]
        if not isinstance(drafts, Sequence):
            raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
        if wait is not None and (not isinstance(wait, int) or isinstance(wait, bool)):
            raise TypeError(f"wait must be a number of drafts, not {wait!r}")
        if not isinstance(trace, int) or isinstance(trace, bool):
            raise TypeError(f"trace must be a number of steps per stage, not {trace!r}")
        if not 0 <= trace <= MOST_ENTRIES:
            raise ValueError(f"trace must be 0 to {MOST_ENTRIES} steps per stage, not {trace}")
        check_schedule(schedule, SCHEDULES)
        if graphs and schedule not in ("plain", "lockstep", "streams"):
            raise ValueError(f"graphs=True is for schedule='plain', 'lockstep' or 'streams', not for {schedule!r}")
        given = [*drafts, target]
        loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        devices = arrange(given, device=device, schedule=schedule, graphs=graphs or schedule == "streams", **loading)
        super().__init__([load_model(m, device=d, **loading) for m, d in zip(given, devices, strict=True)])
        check_chain(self.models, given)
        self.schedule = schedule if drafts else "plain"
        self._told_of_angles = False
        self._auto: Auto | None = None
        self._driver: Driver | None = None
        if self.schedule == "auto":
            if windows is not None or wait is not None or decode_meanwhile:
                raise ValueError(
                    "windows, wait and decode_meanwhile are what schedule='auto' chooses: leave them out, or name a schedule"
                )
            self._auto = Auto(self.models, trace=trace)
        else:
            self._driver = self._make_driver(windows, wait, decode_meanwhile, graphs or schedule == "streams", trace)
            self._graphs = self._copies = isinstance(self._driver, FixedDriver)

    @property
    def plan(self) -> Plan | None:
        """With ``schedule="auto"``: what the last call was chosen from, or the next one will be; ``print`` it."""
        return None if self._auto is None else self._auto.plan

    def _make_driver(
        self, windows: int | Sequence[int] | None, wait: int | None, decode_meanwhile: bool, graphs: bool, trace: int
    ) -> Driver:
        if self.schedule == "plain":
            return self._make_or_replace("plain", self.models[-1:], Policy(), trace, graphs)
        wait = _DEFAULT_WAIT if wait is None else wait
        policy = Policy(_windows(windows, len(self.models) - 1, self.schedule), wait, decode_meanwhile)
        if policy.wait < 0:
            raise ValueError(f"wait must not be negative, got {wait}")
        if decode_meanwhile and (self.schedule not in ("workers", "streams") or wait == 0):
            raise ValueError(
                "decode_meanwhile is for schedule='workers' or 'streams' with wait=, the number of drafts worth a verification"
            )
        return self._make_or_replace(self.schedule, self.models, policy, trace, graphs)

    def _make_or_replace(
        self, schedule: str, models: Sequence[PreTrainedModel], policy: Policy, trace: int, graphs: bool
    ) -> Driver:
        """The schedule's driver, or what runs instead of one whose steps cannot be captured."""
        try:
            return make_driver(schedule, models, policy, trace, graphs=graphs)
        except NotCapturable as error:
            reason = str(error)
        if schedule == "streams":
            try:
                driver = make_driver("workers", models, policy, trace)
                _warn_of(f"{reason}; schedule='workers' is used instead")
                return driver
            except (ValueError, RuntimeError) as error:
                reason = f"{reason}; nor are there worker processes ({error})"
        _warn_of(f"{reason}; the steps run one by one, in lockstep, without graphs")
        return make_driver("lockstep", models, policy, trace)

    def _caching(self) -> Sequence[PreTrainedModel]:
        return self.models if self.schedule != "plain" else self.models[-1:]

    def _check_memory(
        self, generation: Generation, caching: Mapping[str, PreTrainedModel], longest: int, most: int
    ) -> None:
        if self._auto is not None:
            self._graphs = self._copies = self._auto.expect(generation.request)
        try:
            super()._check_memory(generation, caching, longest, most)
            return
        except DoesNotFit:
            if self._auto is None or not self._graphs:
                raise
        self._graphs = self._copies = False  # caches that grow may do
        super()._check_memory(generation, caching, longest, most)

    @property
    def _holder(self) -> Driver | Auto:
        """Who has the caches."""
        holder = self._driver or self._auto
        assert holder is not None
        return holder

    def _keeps(self, generation: Generation) -> Mapping[str, int]:
        return self._holder.keeps(generation.request.start, generation.adopted)

    def _spare(self, generation: Generation) -> None:
        self._holder.spare(generation.request.start, generation.adopted)

    def _check_angles(self, generation: Generation) -> None:
        angles, most = LengthAngles.of(self.target), max(generation.limits)
        if angles is None or not generation.follows(angles):
            check_angles(self.target, most)
        elif most > angles.limit and self.schedule != "plain" and not self._told_of_angles:
            self._told_of_angles = True
            warnings.warn(
                f"beyond {angles.limit} tokens the target's rotary angles depend on the length of the text: from there on it decodes one "
                "token per step, as generate() does, and the drafts rest",
                UserWarning,
                stacklevel=level_of_caller(),
            )

    def _generate(self, generation: Generation) -> Report:
        if self._auto is not None:
            return self._auto.run(generation, has_room=self._graphs)
        assert self._driver is not None
        generation.run(self._driver)
        ran_as = self._driver.ran_as if self.schedule != "plain" else self.schedule
        return generation.report(ran_as, decisions=self._driver.remarks or None, traces=self._driver.traces())

    def close(self) -> None:
        """End worker processes, drop graphs, give the models their attention back. Also done on leaving a ``with`` block, at exit, and when the
        pipeline is garbage.

        It takes its turn: a call in another thread, and those that wait for theirs before this, come to their ends first, with their text.
        ``RuntimeError`` from inside of a call (a streamer, a processor). A later call makes anew what it needs.
        """
        with self._turn("close()", "raise there to end the call, and close the pipeline behind it"):
            self._holder.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def _ends_on_failure(streamer: Any) -> Iterator[None]:
    """End the streamer of a call that fails: whoever reads it in another thread would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # the first error counts
                streamer.end()
        raise


def _warn_of(what: str) -> None:
    warnings.warn(f"{what}. The text is not affected, only its speed", StageFailure, stacklevel=level_of_caller())


def _windows(given: int | Sequence[int] | None, drafts: int, schedule: str) -> tuple[int, ...]:
    if given is None:
        # Lockstep pays for every draft with its own time; workers draft while the target works anyway.
        given = 4 if schedule == "lockstep" else 8
    windows = (given,) * drafts if isinstance(given, int) else tuple(given) if isinstance(given, Sequence) else ()
    if not isinstance(given, (int, Sequence)) or not all(isinstance(w, int) for w in windows):
        raise TypeError(f"windows must be an integer, or one integer per draft, not {given!r}")
    if len(windows) != drafts:
        raise ValueError(f"windows: one per draft, {drafts}, not {len(windows)}")
    if any(w < 1 for w in windows):
        raise ValueError(f"windows must be at least 1, got {list(windows)}")
    return windows
