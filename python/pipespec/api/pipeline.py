"""Pipeline: models in, ``generate()`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import PreTrainedModel

from pipespec.api.base import BasePipeline
from pipespec.api.output import Report
from pipespec.api.prepare import CallOptions, PreparedCall
from pipespec.checks.devices import Devices, Weights, arrange, weights_of_each
from pipespec.checks.models import check_chain, check_exact, cost_of_width, vocabulary_of
from pipespec.config import SpeculationConfig, can_be_captured, can_be_controlled
from pipespec.engine.cached_text import forward_group
from pipespec.engine.chain import DraftSpec, as_draft, stage_names
from pipespec.errors import DoesNotFit, NotCapturable, NotKnown, UnsupportedInput, mark_final
from pipespec.models.loading import gguf_path, load_config, load_model
from pipespec.models.properties import input_device, not_whole_reason, tensor_parallel_size, without_wrapper
from pipespec.models.quantized import with_kv_of
from pipespec.process.threads import handlers_watched, raise_handlers_error
from pipespec.registry import DRAFTS, LOCKSTEP, SCHEDULES, WORKERS, default_schedule, imported
from pipespec.schedules.base import Driver, GenerationRequest, make_driver, warn_of_speed

if TYPE_CHECKING:
    from pipespec.schedules.lockstep import FollowerDriver

Draft: TypeAlias = PreTrainedModel | DraftSpec | Any
"""A draft as users give it: a model, its path, the name of a kind, or an object, see :data:`pipespec.registry.DRAFTS`."""

_MIN_DRAFTED, _MAX_MISMATCH_RATE = 64, 0.02
"""Draft tokens after which, and acceptance rate up to which, a draft probably has another tokenizer."""


class Pipeline(BasePipeline):
    """A chain of models that generates the text of the last one, faster.

    The text depends on the target, the prompt and the seed. It depends neither on the drafts nor on the schedule, the timing or the failure of a draft,
    but for ``acceptance``.

    Args:
        target: A LLaMA-family causal language model, its path (a folder with ``config.json`` and safetensors), or its name
            on the Hugging Face Hub, or the path of a GGUF file.
        drafts: Models or paths, smallest first, with the target's tokenizer. On a CPU an n-gram index joins them, unless ``schedule`` or ``lookahead`` is
            given. An embedding may be
            padded to another size if the folders of both have the same ``tokenizer.json``. A draft may also be
            ``"ngram"`` or a :class:`pipespec.NgramDraft`: prompt lookup, without a model; or an object of yours with ``propose(tokens, count)``, see
            :class:`pipespec.engine.proposer.Proposer`. The first draft
            may have another tokenizer: its draft tokens are translated by way of the text. It may also be the folder of an EAGLE-3 head, which reads the target's
            hidden states, in ``"lockstep"``.
        schedule: How the stages run. None: the rule of :func:`pipespec.registry.default_schedule`; :attr:`schedule` holds its choice.
            ``"plain"`` ignores the drafts. ``"lockstep"`` runs all stages one after the other in this process. ``"workers"`` runs each draft in a
            process of its own, at the same time as the target. ``"streams"`` is for GPUs: all stages run at the same time in this process, each step
            a captured CUDA graph. ``"ranks"`` runs each stage in a process that torchrun has
            started, on any machine: rank 0 has the target and ``generate()``, rank 1 the first draft, and so on; they call :meth:`serve`. Each
            rank loads its own model only.
        lookahead: Tokens that a draft may be ahead of the next stage: an integer, or one per draft. Default: in lockstep, the controller chooses before each
            round which draft proposes tokens and how many (see :mod:`pipespec.engine.controller`); 4 where it cannot: in captured rounds of several draft models and with
            ``acceptance`` other than coupled. In other schedules 8.
        graphs: Run ``"plain"`` and ``"lockstep"`` as captured CUDA graphs, one per round; for GPUs. Default:
            only where the default rule chooses it. An open pipeline with graphs sets ``attn_implementation="pipespec"`` in its models;
            :meth:`close` restores theirs. A model that cannot be captured runs without graphs, and a :class:`pipespec.SpeedWarning` names it.
        trace: Steps per stage that the trace of a call keeps (``report.save_trace()``; 72 bytes each). 0: no trace.
        dtype: For models given as paths. Default: the one in which they are stored. Models in blocks compute in float32 on a CPU, with keys and values in bfloat16
            unless this is ``"float32"``. In float32 the text differs from that of ``generate()`` only at rare
            near-ties, in 16 bits more often.
        weights: Formats in which matrices are held, so that a step reads less: ``"q8_0"``, ``"q4_k"`` or another of
            :data:`pipespec_kernels.formats.FORMATS`, or ``"int8"`` with one scale per row. One for all stages, one per stage (drafts first; None: as it is),
            or by stage: ``{"target": "q4_k", "draft 0": "q8_0"}``, ``{"drafts": "int8"}``. Models are quantised when the pipeline is made, adapters are
            merged before. A model given as an object stays as it is, and the pipeline has a copy that shares the rest. The text is that of the quantised
            target. For models on a CPU; those out of GGUF files are in blocks already.
        device: For models given as paths: one device for all, one per stage (drafts first, target last), ``{"draft 0": "cuda:1"}``, or
            ``"auto"``, see :func:`pipespec.checks.devices.arrange`. ``{"target": ["cuda:1", "cuda:2"]}`` splits a stage over several GPUs, which
            needs the package accelerate. Default: the CPU. Models given as objects stay where they are, also over several devices and offloaded
            (``device_map``).
        gguf_file: The name of a GGUF file in the target's folder or repository, as ``from_pretrained`` takes it.
        trust_remote_code: Allow the Python code in a model's folder to run.
        native: Run the steps of LLaMA-like models on the CPU as one call into C++, on packed copies of their weights. A model does so after a comparison with its own layers on probes, in float32 within
            1e-5 of their range, of deep models at the beginning, in the middle and at the end; ``report.stages[i].forward`` says which forward ran. Captured steps run fused kernels after the same comparison. False: forwards with the bits of transformers' own.
        tokenizer: The target's, for a first draft with another one; transformers' object. Default: the one in its folder.
        draft_tokenizers: The drafts' tokenizers: a list with one entry per draft model, or one tokenizer for a single draft. None, as the argument or as an entry: the tokenizer in the draft's folder, or the target's if there is none.
        exact: Refuse whatever would let the target's bits depend on anything but target, prompt and seed. Then a text in bfloat16, too, is the
            same in every batch, with every draft, in every schedule on this machine. For targets on the CPU that run in the native form, and for
            captured steps of targets that run in the fused form. The two forms round differently.
        acceptance: How the target accepts draft tokens in sampled calls. ``"coupled"``: both draw with the same noise, and one seed gives one
            text. ``"rejection"`` accepts, in expectation, at least as many draft tokens: rejection sampling (Leviathan et al. 2023). The text has the
            target's distribution, too, but depends on the draft and on ``lookahead``. It is for one draft model in ``schedule="lockstep"``, which it
            chooses by default. The distributions take ``4 * rows * (lookahead + 1) * vocabulary`` bytes.
        prefix_cache: Bytes of keys and values of earlier texts that each model keeps: a call reads only what its prompt adds to the longest prefix of them. The text is the same. The last text always stays. 0: nothing is kept. Default: an eighth of the free memory. Concurrent calls share it equally.
        kv_dtype: ``"float8_e4m3fn"``: captured steps keep keys and values of all models but draft heads in 8 bits, which halves what a step reads of them. They are rounded, so the text is another one, the same in all captured schedules. Default: the model's dtype.

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

    _captured: Driver | None = None
    """The driver with CUDA graphs, kept while an eager one takes its place because its static caches did not fit."""

    @torch.inference_mode(False)  # models that are loaded here may be trained later
    def __init__(
        self,
        target: PreTrainedModel | str | Path,
        drafts: Sequence[Draft] | Draft | None = (),
        *,
        schedule: str | None = None,
        lookahead: int | Sequence[int] | None = None,
        graphs: bool | None = None,
        trace: int = 0,
        dtype: torch.dtype | str = "auto",
        weights: Weights = None,
        device: Devices = None,
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
        native: bool = True,
        exact: bool = False,
        acceptance: str = "coupled",
        prefix_cache: int | None = None,
        kv_dtype: str | None = None,
        tokenizer: Any = None,
        draft_tokenizers: Any = None,
    ) -> None:
        given, target = given_drafts(drafts), gguf_path(without_wrapper(target), gguf_file)
        self._group = forward_group(target) if isinstance(target, PreTrainedModel) else None
        self._follows = self._group is not None and not self._group.is_leader
        if self._group is not None:
            if given and schedule is not None and schedule in SCHEDULES and SCHEDULES[schedule].needs_ranks:
                raise ValueError(
                    "the target is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: use 'plain', "
                    "'lockstep' or 'workers'"
                )
            if self._follows:
                given, draft_tokenizers = [], None  # rank 0 runs them
        loading = Loading(
            dtype=dtype,
            weights=weights,
            device=device,
            tokenizer=tokenizer,
            draft_tokenizers=draft_tokenizers,
            trust_remote_code=trust_remote_code,
        )
        options: dict[str, Any] = {
            "lookahead": lookahead,
            "graphs": graphs,
            "trace": trace,
            "native": native,
            "exact": exact,
            "acceptance": acceptance,
            "prefix_cache": prefix_cache,
            "kv_dtype": kv_dtype,
        }
        # 1. The configuration: the options are checked before any model is read.
        config = SpeculationConfig.of(given, schedule=schedule or LOCKSTEP.name, **options)
        self._notes: tuple[str, ...] = ()  # for every report
        self._unchecked: list[Any] = []  # models of which nothing tells that they have one tokenizer
        if config.schedule_row.needs_ranks:
            self._join([*(draft.given for draft in given if not draft.inline), target], config, loading)
            return
        # 2. The models.
        chain = load_chain(target, given, config, loading)
        super().__init__([model for model in chain.models if isinstance(model, PreTrainedModel)])
        self._notes += tuple(chain.notes)
        with_model = [draft for draft in given if not draft.inline]
        if with_model and not chain.is_known and all(draft.own_model for draft in with_model):
            self._unchecked = [*(draft.given for draft in with_model), target]
        # 3. The driver.
        with handlers_watched():
            self._driver = self._choose_driver(chain, schedule, options)
        # A driver that takes the place of another one has its own configuration.
        self.config: SpeculationConfig = self._driver.config
        self.schedule = self.config.schedule

    def _join(self, given: Sequence[Any], config: SpeculationConfig, loading: Loading) -> None:
        """Take this rank's place in a chain whose models are in other processes."""
        for name in ("weights", "tokenizer", "draft_tokenizers"):
            if getattr(loading, name) is not None:
                raise ValueError(
                    f"{name} is not for schedule='ranks', where each rank loads its own model as its folder or GGUF file has it: leave it out"
                )
        if any(tensor_parallel_size(draft) > 1 for draft in given[:-1] if isinstance(draft, PreTrainedModel)):
            raise ValueError(
                "a draft is sharded over processes (tp_plan), and schedule='ranks' has a model in each process: load it whole"
            )
        model, self._driver = imported(config.schedule_row.join)(
            given, config, device=loading.device, dtype=loading.dtype, trust_remote_code=loading.trust_remote_code
        )
        super().__init__([model])
        self.config, self.schedule = config, config.schedule
        if self.has_target:
            _check_form(self.models, config)

    def _choose_driver(self, chain: Chain, schedule: str | None, options: dict[str, Any]) -> Driver | FollowerDriver:
        """The driver of the named schedule, or of the default one."""
        is_named, drafts = schedule is not None, chain.drafts
        if schedule is None:
            schedule, options["graphs"], drafts = self._default_schedule(chain, options)
        config = SpeculationConfig.of(drafts, schedule=schedule, **options)
        _check_form(chain.models, config)
        on_gpu = input_device(chain.models[-1]).type == "cuda"
        if on_gpu and config.schedule_row.has_drafts and (cost := cost_of_width(chain.models[-1])) is not None:
            warn_of_speed(cost)
        if self._follows:
            from pipespec.schedules.lockstep import FollowerDriver

            return FollowerDriver(chain.models, config)
        if is_named or not config.schedule_row.has_processes:
            return _make_driver_or_fallback(chain.models, config)
        try:
            return make_driver(chain.models, config)
        except (ValueError, RuntimeError) as error:
            raise_handlers_error()
            fallback = SpeculationConfig.of(drafts, schedule=LOCKSTEP.name, **options)
            self._notes += (f"schedule={fallback.schedule!r} instead of {config.schedule!r}: {error}",)
            return make_driver(chain.models, fallback)

    def _default_schedule(self, chain: Chain, options: dict[str, Any]) -> tuple[str, bool, list[DraftSpec]]:
        """The schedule by the default rule, whether its steps are captured, and the drafts with those that join."""
        drafts = chain.drafts
        in_turn = SpeculationConfig.of(drafts, schedule=LOCKSTEP.name, **options)
        joining = [row.spec_class()() for row in DRAFTS if row.joins]
        may_join = in_turn.controlled if drafts else options["lookahead"] is None
        schedule, captured, joins = default_schedule(
            [str(input_device(model)) for model in self.models],
            options["graphs"],
            in_turn=_run_in_turn(drafts),
            uncaptured=not _can_be_captured(self.models, drafts),
            whole=all(not_whole_reason(model) is None for model in self.models),
            coupled=options["acceptance"] == "coupled",
            controlled=may_join and can_be_controlled([*drafts, *joining]) and self._group is None,
        )
        if joins:
            drafts = [*drafts, *(draft.for_target(chain.given, chain.models[-1]) for draft in joining)]
        return schedule, captured, list(drafts)

    @property
    def has_target(self) -> bool:
        """Whether this process has the target, and so ``generate()``. False on the ranks of drafts, which call :meth:`serve`."""
        return not self._driver.serves

    @property
    def target(self) -> PreTrainedModel:
        """The model whose text is generated. Raises ``RuntimeError`` on the rank of a draft."""
        if self._driver.serves:
            _ = self._driver.target  # raises
        return super().target

    def serve(self) -> None:
        """With ``schedule="ranks"``, on the rank of a draft: take part in the calls of rank 0 until it closes.

        Raises:
            RuntimeError: This process has the target.
            pipespec.process.ranks.RankError: Rank 0 has ended.
        """
        self._driver.serve()

    def _caching(self) -> Sequence[PreTrainedModel]:
        return self.models if self.config.schedule_row.has_drafts else self.models[-1:]

    def _check_memory(self, request: GenerationRequest) -> None:
        """A call whose static caches do not fit, and whose growing ones may, runs without graphs."""
        if self._captured is not None:
            captured, self._captured = self._captured, None
            self._driver.close()
            self._driver = captured
        driver = self._driver
        try:
            super()._check_memory(request)
        except DoesNotFit as error:
            # Growing caches have other addresses, and the exact form has other bits than the modules.
            if self.config.own_text or not isinstance(driver, Driver) or not driver.static_caches:
                raise
            driver.close()
            self._captured, self._driver = driver, make_driver(driver.models, _eager(driver.config))
            super()._check_memory(request)
            driver.warn_slower(f"static caches do not fit, so calls like this one run without graphs: {error}")

    def _another(self) -> Pipeline | None:
        return None if self._captured is not None else super()._another()

    def _must_run(self, options: CallOptions) -> bool:
        # transformers' own loop has other bits.
        return self.config.own_text is not None or super()._must_run(options)

    def _check_known(self) -> None:
        try:
            super()._check_known()
        except NotKnown as error:
            if (option := self.config.own_text) is None:
                raise
            failed = ValueError(f"{option}: {error}; transformers' own loop has other bits")
            mark_final(failed)
            raise failed from error

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
        if self.config.exact:
            _check_form(self.models, self.config)

    def _report(self, call: PreparedCall) -> Report:
        report = super()._report(call)
        given, last = self._unchecked, report.stages[-1]
        if given and last.drafted >= _MIN_DRAFTED and last.acceptance_rate <= _MAX_MISMATCH_RATE:
            # A note is made once, if nothing says that the tokenizers are the same.
            self._unchecked = []
            if None in (vocabulary_of("", *stage).digest for stage in zip(self.models, given, strict=True)):
                self._notes += (
                    "hardly any draft token was accepted, and no tokenizer.json tells whether the models have one tokenizer: if they have not, "
                    "pass tokenizer= and draft_tokenizers=",
                )
        return replace(report, decisions=(*self._notes, *(report.decisions or ())) or None)


def _run_in_turn(drafts: Sequence[DraftSpec]) -> bool:
    """Whether drafts are for the target's process, or for an order that only the controller gives them."""
    without_models = bool(drafts) and all(draft.inline for draft in drafts)
    return without_models or any(draft.reads_target or (i > 0 and not draft.verifies) for i, draft in enumerate(drafts))


def _check_form(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
    """Check the target's form for ``exact``, and that there are captured steps for ``kv_dtype``. A driver of captured steps checks its own form."""
    if config.exact and not config.graphs:
        check_exact(models[-1])
    if config.kv_dtype is not None and not config.graphs:
        raise ValueError(
            f"kv_dtype={config.kv_dtype!r} is for captured steps on a GPU: leave it out, or use graphs=True there"
        )


def _can_be_captured(models: Sequence[PreTrainedModel], drafts: Sequence[DraftSpec]) -> bool:
    """Whether the steps of drafts can be captured where the models are. A draft without a model runs in the graph of the stage after it: in rounds, which are of
    one device."""
    is_apart = len({input_device(model) for model in models}) > 1
    return can_be_captured(drafts) and not (is_apart and any(draft.inline for draft in drafts))


def _make_driver_or_fallback(models: Sequence[PreTrainedModel], config: SpeculationConfig) -> Driver:
    """The driver of ``config``, or what runs instead of one whose steps cannot be captured."""
    try:
        return make_driver(models, config)
    except NotCapturable as error:
        reason = str(error)
        if config.own_text is not None:
            # The steps that run instead have other bits.
            instead = "pass graphs=False or exact=False" if config.exact else "leave the option out"
            raise ValueError(f"{config.own_text}: {reason}; {instead}") from error
    if config.schedule_row.is_captured:
        try:
            driver = make_driver(models, replace(_eager(config), schedule=WORKERS.name))
            warn_of_speed(f"{reason}; schedule={WORKERS.name!r} is used instead")
            return driver
        except (ValueError, RuntimeError) as error:
            raise_handlers_error()
            reason = f"{reason}; worker processes cannot be used either ({error})"
    warn_of_speed(f"{reason}; the steps run one by one, in lockstep, without graphs")
    return make_driver(models, _eager(config))


def _eager(config: SpeculationConfig) -> SpeculationConfig:
    """The same without graphs."""
    schedule = LOCKSTEP.name if config.schedule_row.is_captured else config.schedule
    return replace(config, schedule=schedule, graphs=False, kv_dtype=None)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How models are loaded and drafts are made: arguments of :class:`pipespec.Pipeline`."""

    dtype: torch.dtype | str = "auto"
    weights: Weights = None
    device: Devices = None
    tokenizer: Any = None
    draft_tokenizers: Any = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype != "auto" and not isinstance(getattr(torch, str(self.dtype), self.dtype), torch.dtype):
            raise ValueError(
                f"dtype={self.dtype!r} is not a dtype of torch; use 'float32', 'bfloat16', 'float16' or 'auto'"
            )


@dataclass(frozen=True)
class Chain:
    """A chain whose models are loaded.

    Attributes:
        drafts: The spec of each draft.
        models: Of the drafts that have one, in their order, and of the target.
        given: What the user passed for the target.
        notes: About the models that were quantised.
        is_known: Whether it is known that the others have the target's tokenizer.
    """

    drafts: list[DraftSpec]
    models: list[Any]
    given: Any
    notes: list[str]
    is_known: bool


def given_drafts(drafts: Any) -> list[DraftSpec]:
    """The drafts that a user names, without wrappers. Raises ``TypeError`` for what is no list of drafts."""
    drafts = without_wrapper(drafts)
    if drafts is None:
        return []
    if isinstance(drafts, Sequence) and not isinstance(drafts, str):
        return [as_draft(without_wrapper(draft)) for draft in drafts]
    single = as_draft(drafts)
    if single.own_model and not isinstance(drafts, (str, Path, PreTrainedModel, DraftSpec)):
        raise TypeError(f"drafts must be a list of models or paths, not {type(drafts).__name__}")
    return [single]


def _fitted(draft: Any, model: Any, target: PreTrainedModel, weights: str | None, name: str, given: Weights) -> Any:
    """What :meth:`DraftSpec.fit` makes. A draft that reads the target chooses its format where ``given``, which is ``weights=``, does not name it."""
    is_named = bool({name, "drafts"} & given.keys()) if isinstance(given, Mapping) else given is not None
    if draft.reads_target and not is_named:
        weights = draft.default_weights(model, target)
    return draft.fit(model, target, weights)


def load_chain(
    target: PreTrainedModel | str | Path, drafts: Sequence[DraftSpec], config: SpeculationConfig, loading: Loading
) -> Chain:
    """Load the models of a chain, make those that are made here, and check that they form one."""
    remote = loading.trust_remote_code
    if not config.schedule_row.has_drafts:
        drafts = [draft for draft in drafts if draft.own_model]
    own = [draft for draft in drafts if draft.own_model]
    with_model = [draft for draft in drafts if not draft.inline]
    names = stage_names(len(with_model) + 1)
    formats = weights_of_each(loading.weights, names)
    if len(own) < len(with_model):
        known = target.config if isinstance(target, PreTrainedModel) else load_config(target, trust_remote_code=remote)
        for draft in with_model:
            draft.check(known)
    given = [*(draft.given for draft in own), target]
    devices = arrange(given, device=loading.device, dtype=loading.dtype, trust_remote_code=remote)
    loaded = [
        load_model(m, dtype=loading.dtype, device=d, trust_remote_code=remote)
        for m, d in zip(given, devices, strict=True)
    ]
    is_known = loading.tokenizer is not None or loading.draft_tokenizers is not None
    if own or is_known:
        from pipespec.checks.tokenizers import with_translations

        tokenizers = loading.tokenizer, loading.draft_tokenizers
        own = with_translations(own, loaded, given, *tokenizers, trust_remote_code=remote)
    translated = [i for i, draft in enumerate(own) if draft.translates]
    check_chain(loaded, given, translated=translated)
    is_known |= bool(translated)
    own_drafts = iter(zip(own, loaded, strict=False))
    specs, models = [], []
    for draft in drafts:
        model = None
        if draft.own_model:
            draft, model = next(own_drafts)
        elif not draft.inline:
            model = draft.load(loaded[-1], loading.dtype)
        specs.append(draft.for_target(target, loaded[-1]))
        models += [model] * (not draft.inline)
    models.append(loaded[-1])
    if formats[-1] is not None:
        from pipespec.models.quantizing import quantized

        models[-1] = quantized(models[-1], formats[-1])
    for i, draft in enumerate(draft for draft in specs if not draft.inline):
        models[i], formats[i] = _fitted(draft, models[i], models[-1], formats[i], names[i], loading.weights)
    for made, form in zip(models, formats, strict=True):
        if not any(made is each for each in given):
            with_kv_of(loading.dtype, made, form)
    notes = [f"{name}: {form} weights" for name, form in zip(names, formats, strict=True) if form is not None]
    return Chain(specs, models, target, notes, is_known)
