"""``pipespec recommend``: which draft, in which schedule, for a target and the user's prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.cli.options import (
    DTYPES,
    Subparsers,
    add_draft_options,
    at_least_one,
    draft_vocabulary,
    is_model,
    read_text,
)
from pipespec.process.progress import quiet_transformers, say, working

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipespec.planning.drafts import Text
    from pipespec.planning.profile import Profile
    from pipespec.planning.recommend import Draft, Option, Recommendation


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    """Add the command."""
    parser = commands.add_parser(
        "recommend", help="which drafts to use, or none, on your prompts", description=run.__doc__
    )
    parser.set_defaults(command=run)
    parser.add_argument("--target", metavar="PATH", help="model that defines the text (default: the bundled family)")
    parser.add_argument("--candidates", metavar="FOLDER", type=Path, help="every model in this folder is a candidate")
    parser.add_argument("--draft", metavar="PATH", action="append", default=[], help="a candidate; may be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="a text, or prompts as `pipespec bench` reads them: .jsonl, .json, .csv, .parquet, also .gz (default: the target writes from its begin token)",
    )
    parser.add_argument("--new-tokens", metavar="N", type=int, default=96, help="new tokens per prompt (%(default)s)")
    parser.add_argument(
        "--measure", metavar="N", type=int, default=3, help="run the N best options; 0: predictions only (%(default)s)"
    )
    add_draft_options(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="default: as stored; float32 for the bundled family")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Compare candidates for the drafts of a target: models, the target's own layers, an n-gram index, in each schedule of the CPU. Step times and
    agreement on your prompts are measured, rates are predicted from them, and the best options are run. The last line is a command to copy. With
    --draft-dtype int8 and --draft-vocabulary, each draft is compared with its cheaper form, too."""
    at_least_one(args, "new_tokens")
    if args.measure < 0:
        raise ValueError(f"--measure must not be negative, not {args.measure}")
    vocabulary = draft_vocabulary(args)
    target, paths, dtype = _paths(args)
    prompts = None if args.prompts is None else _read_prompts(args.prompts)
    with working("importing torch and transformers"):
        from pipespec.models.derived import INT8
    if args.draft_dtype not in (None, INT8):
        raise ValueError(f"--draft-dtype {args.draft_dtype}: recommend compares drafts as stored with {INT8}")
    with quiet_transformers():
        found = _Survey(args, target, paths, dtype, prompts, vocabulary).recommendation()
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return 0


def _paths(args: argparse.Namespace) -> tuple[str | Path, list[str | Path], str]:
    """Target, candidates and dtype."""
    drafts: list[str | Path] = [d for d in args.draft if is_model(d)]
    if len(drafts) < len(args.draft):
        say("the n-gram index and the target's own layers are always candidates")
    target, dtype = args.target, args.dtype or "auto"
    if target is None:
        from pipespec.demo import family_path

        target, dtype = family_path("target"), args.dtype or "float32"
        drafts += [family_path("small"), family_path("medium")]
    if args.candidates is not None:
        if not args.candidates.is_dir():
            raise FileNotFoundError(f"--candidates: there is no folder {args.candidates}")
        inside = sorted(path.parent for path in args.candidates.glob("*/config.json"))
        drafts += [path for path in inside if path.resolve() != Path(target).resolve()]
        if not inside:
            say(f"--candidates: there is no model in a folder of {args.candidates}")
    return target, list(dict.fromkeys(drafts)), dtype


def _read_prompts(file: Path) -> list[str]:
    """A dataset's prompts (their first turns), as ``pipespec bench`` reads them; any other file is one prompt."""
    from pipespec.bench import datasets

    if not datasets.is_dataset(file):
        return [read_text(file)]
    return [datasets.prompt_text(conversation, 0, ()) for conversation in datasets.read(file)[1]]


class _Survey:
    """The measurements behind one recommendation."""

    def __init__(
        self,
        args: argparse.Namespace,
        target: str | Path,
        paths: list[str | Path],
        dtype: str,
        prompts: list[str] | None,
        vocabulary: Any,
    ) -> None:
        from pipespec.models.loading import load_model
        from pipespec.preflight.checks import check_chain

        self.args, self.path, self.dtype = args, target, dtype
        loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
        with working("loading the models"):
            self.target = load_model(target, **loading)
            check_chain([self.target], [target])
            self.models: dict[str, PreTrainedModel] = {}
            for path in paths:
                try:
                    model = load_model(path, **loading)
                    check_chain([model, self.target], [path, target])
                    if model.num_parameters() >= self.target.num_parameters():
                        raise ValueError("it is no smaller than the target")
                    self.models[str(path)] = model
                except (ValueError, TypeError, OSError) as error:
                    if str(path) in args.draft:
                        raise
                    say(f"skipped {path}: {' '.join(str(error).split())}")
        self.vocabulary = vocabulary
        self.prompts = self._encoded(prompts)

    def _encoded(self, prompts: list[str] | None) -> list[Any] | None:
        from pipespec.demo import FAMILY, family_path
        from pipespec.demo import prompts as function_heads
        from pipespec.models.tokenizers import load_tokenizer

        if prompts is None and Path(self.path) in [family_path(name) for name in FAMILY]:
            prompts = function_heads(4)
        if prompts is None:
            return None
        tokenizer = load_tokenizer(self.path, trust_remote_code=self.args.trust_remote_code)
        found = [tokenizer(prompt).input_ids for prompt in prompts]
        limit = getattr(self.target.config, "max_position_embeddings", None)
        longest = max(map(len, found))
        if limit is not None and longest + self.args.new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {self.args.new_tokens} new ones pass the target's limit of {limit}: give shorter "
                "prompts, or fewer --new-tokens"
            )
        return found

    def recommendation(self) -> Recommendation:
        """Measure, predict, and run the best options."""
        from pipespec.planning import planner
        from pipespec.planning.drafts import written_by
        from pipespec.planning.recommend import Recommendation, mean_context, measure_options

        with working("generating the target's texts"):
            texts = written_by(self.target, self.prompts, self.args.new_tokens)
        self.call = planner.CallShape(1, *mean_context(texts))
        self._add_self(texts)
        self._add_cheaper()
        options = self._predicted(texts)
        with working(f"running the best {self.args.measure} options"):
            measured = measure_options(options, lambda option: self._run(option, texts), self.args.measure)
        given = [*(["--dtype", self.dtype] if self.dtype != "auto" else [])]
        given += ["--trust-remote-code"] * self.args.trust_remote_code
        return Recommendation(measured, str(self.path), tuple(given))

    def _add_self(self, texts: list[Text]) -> None:
        from pipespec.models.derived import with_layers
        from pipespec.models.properties import text_config
        from pipespec.planning.drafts import measure_layers

        if text_config(self.target.config).num_hidden_layers < 2:
            return
        with working("measuring which of the target's layers draft best"):
            survey = measure_layers(self.target, texts=texts)
        if not self.args.json:
            print(survey, end="\n\n")
        self.models[survey.best.name] = with_layers(self.target, survey.best.layers)

    def _add_cheaper(self) -> None:
        """With ``--draft-dtype`` and ``--draft-vocabulary``: each draft as it is, trimmed, quantised, and both."""
        from pipespec.models.derived import in_int8, with_vocabulary
        from pipespec.models.vocabulary import draft_vocabulary as ids_of

        self.options: dict[str, tuple[str, ...]] = dict.fromkeys(self.models, ())
        self.given = {name: name for name in self.models}
        words = tuple(map(str, self.args.draft_vocabulary or ()))
        ids = None if self.vocabulary is None else ids_of(self.vocabulary, self.path, self.target)
        for name, model in list(self.models.items()):
            forms: list[tuple[tuple[str, ...], PreTrainedModel]] = []
            if ids is not None:
                forms.append((("--draft-vocabulary", *words), with_vocabulary(model, ids)))
            if self.args.draft_dtype is not None:
                whole: list[tuple[tuple[str, ...], PreTrainedModel]] = [((), model), *forms]
                forms += [((*o, "--draft-dtype", self.args.draft_dtype), in_int8(m)) for o, m in whole]
            for options, changed in forms:
                changed_name = " ".join([name, *(o.removeprefix("--draft-") for o in options)])
                self.models[changed_name], self.options[changed_name], self.given[changed_name] = changed, options, name

    def _predicted(self, texts: list[Text]) -> list[Option]:
        """Plain decoding, options with one draft each, those of the best two drafts together, and all of them over the n-gram index."""
        import os
        from dataclasses import replace

        from pipespec.engine.ngram import NGRAM, NgramDraft
        from pipespec.planning import measure, planner
        from pipespec.planning.drafts import agreement_with
        from pipespec.planning.recommend import Draft, Option, best_drafts, ngram_agreement, options_of
        from pipespec.planning.simulator import Answers

        names, models = list(self.models), list(self.models.values())
        labels = {given: Path(given).name for given in self.given.values()}
        if len(set(labels.values())) < len(labels):
            labels = {given: given for given in labels}
        cores = len(os.sched_getaffinity(0))
        with working(f"measuring {len(models)} drafts"):
            profile = measure.measure_stages(
                [*models, self.target], [*names, "target"], budget_s=1.0 + 0.7 * len(models)
            )
            table = agreement_with(models, self.target, texts, NgramDraft())
            index = measure.measure_ngram(NgramDraft())
        drafts = [
            Draft(
                self.given[name],
                float((table[:, 1 + i] == 0).mean()),
                stage.seconds(1, threads=profile.threads, context=self.call.context),
                self.options[name],
                labels[self.given[name]],
            )
            for i, (name, stage) in enumerate(zip(names, profile.stages[:-1], strict=True))
        ]
        ngram = Draft(NGRAM, ngram_agreement(table[:, 0]), index.seconds(1, threads=1))

        def planned(some: list[int], of: Profile) -> list[Option]:
            columns = table[:, [0, *(1 + i for i in some)]].copy()
            plan = planner.plan(replace(of, stages=(index, *of.stages)), Answers(table=columns), self.call, cores=cores)
            found = options_of(plan, [ngram, *(drafts[i] for i in some)], plain.rate)
            return [o for o in found if not some or o.drafts != (ngram,)]

        plain = planner.plan(replace_stages(profile, [len(names)]), Answers(), self.call).plain

        alone = planned([], replace_stages(profile, [len(names)]))
        options = [o for i in range(len(names)) for o in planned([i], replace_stages(profile, [i, len(names)]))]
        best = [drafts.index(draft) for draft in best_drafts(options, 2)]
        best.sort(key=lambda i: drafts[i].step_s)
        if len(best) == 2 or (best and cores > 1):
            with working("measuring the best drafts beside the target"):
                own = self._beside([models[i] for i in best], [names[i] for i in best], cores)
            # Replaces the predictions without the slowdown of concurrent stages.
            again = [drafts[i] for i in best]
            options = [o for o in options if o.drafts[-1] not in again] + planned(
                best, own or replace_stages(profile, [*best, len(names)])
            )
        return [*alone, *options, Option((), "plain", rate=plain.rate)]

    def _beside(self, models: list[PreTrainedModel], names: list[str], cores: int) -> Profile | None:
        """The profile of a chain with the slowdown of its worker processes; None where there are none."""
        from pipespec.config import SpeculationConfig
        from pipespec.drivers import WorkersDriver
        from pipespec.planning import measure
        from pipespec.process.signals import pass_on

        if cores < 2:
            return None
        config = SpeculationConfig(schedule="workers", lookahead=(8,) * len(models))
        try:
            driver = WorkersDriver([*models, self.target], config)
        except (ValueError, RuntimeError) as error:
            pass_on(error)
            say(f"no worker processes here: {error}")
            return None
        try:
            return measure.measure_stages(
                [*models, self.target], [*names, "target"], budget_s=2.0 * len(models), beside=driver
            )
        finally:
            driver.close()

    def _reports(self, pipe: Any, texts: list[Text]) -> Iterator[Any]:
        import torch

        for text, first in texts:
            ids = torch.from_numpy(text[None, :first].astype("int64")).to(self.target.device)
            pipe.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.args.new_tokens, do_sample=False
            )
            yield pipe.report

    def _run(self, option: Option, texts: list[Text]) -> tuple[int, float]:
        """New tokens and seconds of one option on all prompts."""
        from pipespec.pipeline import Pipeline

        drafts = [self._model(draft) for draft in option.drafts]
        numbers: dict[str, Any] = {}
        if drafts:
            numbers = {"lookahead": list(option.lookahead), "min_draft_tokens": option.min_draft_tokens}
            numbers["decode_meanwhile"] = option.decode_meanwhile
        with Pipeline(self.target, drafts, schedule=option.schedule, **numbers) as pipe:
            for _ in self._reports(pipe, texts[:1]):
                pass  # caches, processes and packed weights are there from now on
            reports = list(self._reports(pipe, texts))
        return sum(r.tokens for r in reports), sum(r.seconds for r in reports)

    def _model(self, draft: Draft) -> Any:
        if draft.given == "ngram":
            return "ngram"
        return next(
            model
            for name, model in self.models.items()
            if (self.given[name], self.options[name]) == (draft.given, draft.options)
        )


def replace_stages(profile: Profile, stages: list[int]) -> Profile:
    """The profile of some of the stages."""
    from dataclasses import replace

    return replace(profile, stages=tuple(profile.stages[i] for i in stages))
