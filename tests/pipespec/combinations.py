"""Random combinations of targets, drafts, options and calls: ``python -m tests.pipespec.combinations FIRST COUNT`` runs those of some seeds.

Each text is compared with that of transformers, or, for sampled calls, with that of the target alone, chosen position by position.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import pipespec
from pipespec import Pipeline
from pipespec.engine.sampling import OutputPenaltyLogitsProcessor
from tests.conftest import left_pad, noisy
from tests.pipespec.test_adapters import Lora
from tests.pipespec.tiny_models import TINY_MODELS, VOCABULARY, make

NEW = 14
IN_THIS_PROCESS = ("lockstep", "lockstep", "lockstep", "streams", "rounds", "plain")
CHEAP = (*IN_THIS_PROCESS, None)


class Same:
    """A processor that changes nothing. As it is not known, all of a call's processors run position by position."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class EndsWith(StoppingCriteria):
    """Ends a row whose last two tokens have a sum that a number divides."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return ids[:, -2:].sum(1) % self.divisor == 0


@dataclass
class Trial:
    """What one seed stands for."""

    seed: int
    family: str = ""
    adapters: str = ""
    drafts: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    attach: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    saves: bool = False

    @classmethod
    def of(cls, seed: int, schedules: tuple[Any, ...] = CHEAP) -> Trial:
        r = random.Random(seed)
        trial = cls(seed, r.choice(["llama", "llama", "llama", "qwen2", *TINY_MODELS]))
        trial.adapters = r.choice(["", "", "target", "draft", "both"]) if trial.family == "llama" else ""
        acceptance = r.choice(["coupled"] * 4 + ["rejection"] * 2)
        kinds = ["noisy", "noisy", "other"]
        trial.drafts = [r.choice(kinds) for _ in range(1 if acceptance != "coupled" else r.choice([1, 1, 2, 3]))]
        if acceptance == "coupled" and r.random() < 0.2:
            trial.drafts.insert(0, "ngram")
        schedule = r.choice(schedules) if acceptance == "coupled" else "lockstep"
        options = trial.options
        options["schedule"] = schedule
        if schedule == "rounds":
            options |= {"schedule": "lockstep", "graphs": True}
        if acceptance != "coupled":
            options["acceptance"] = acceptance
        if r.random() < 0.4:
            options["weights"] = {"drafts": "int8"}
        if r.random() < 0.3 and schedule != "plain":
            options["lookahead"] = r.randint(1, 7)
        if r.random() < 0.2:
            options["native"] = False
        elif r.random() < 0.15 and acceptance == "coupled":
            options["exact"] = True
        trial.attach = r.choice(["", "", "", "plain", "raise"])
        trial.calls = [_call(r) for _ in range(r.randint(1, 3))]
        trial.saves = r.random() < 0.15
        return trial


def _call(r: random.Random) -> dict[str, Any]:
    call: dict[str, Any] = {
        "lengths": [r.randint(1, 12) for _ in range(r.choice([1, 1, 2, 3, 4]))],
        "prompt_seed": r.randint(0, 10**6),
        "max_new_tokens": r.randint(1, NEW),
    }
    if r.random() < 0.5:
        call |= {"do_sample": True, "seed": r.randint(0, 10**6), "top_k": 0}
        call |= r.choice([{}, {"temperature": 0.7}, {"temperature": 1.6}])
        call |= r.choice([{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9}])
        if r.random() < 0.3:
            call["num_return_sequences"] = r.randint(2, 3)
    else:
        call["do_sample"] = False
    if r.random() < 0.3:
        call["repetition_penalty"] = r.choice([0.8, 1.4])
    if r.random() < 0.25:
        call |= {"presence_penalty": r.choice([-0.7, 0.8]), "frequency_penalty": r.choice([0.0, 0.6])}
    if r.random() < 0.25:
        call["logit_bias"] = {r.randint(2, VOCABULARY - 1): r.choice([2.5, -3.0, float("-inf")]) for _ in range(4)}
    if r.random() < 0.1:
        call["no_repeat_ngram_size"] = 2
    if r.random() < 0.1:
        call["min_new_tokens"] = 3
    if r.random() < 0.35:
        call["eos_token_id"] = r.sample(range(2, VOCABULARY), 6)
    if r.random() < 0.2:
        call["criterion"] = r.choice([3, 7])
    if r.random() < 0.1:
        call["output_logits"] = True
    if r.random() < 0.1:
        call["output_scores"] = True
    return call


REFUSED = (
    "an n-gram draft is for schedule",
    "graphs=True does not support",
    "runs position by position, which acceptance",
    "exact=True",
    "cannot be captured",
    "is quantised already",
)


def run(trial: Trial, counts: Counter[str] | None = None) -> None:
    """Make the trial's pipeline and run its calls. ``AssertionError`` where a text is not the target's."""
    counts = Counter() if counts is None else counts
    counts["trials"] += 1
    target = make(trial.family, seed=trial.seed % 5)
    drafts = [_draft(kind, target, i) for i, kind in enumerate(trial.drafts)]
    if trial.adapters in ("target", "both"):
        _adapt(target, 1)
    if trial.adapters in ("draft", "both"):
        for draft in drafts:
            if not isinstance(draft, str):
                _adapt(draft, 2)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    draft_tensors = [{} if isinstance(d, str) else {n: t.clone() for n, t in d.state_dict().items()} for d in drafts]
    wanted = [_expected(target, call) for call in trial.calls]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if trial.attach:
                pipe = pipespec.attach(target, drafts, unsupported=trial.attach, **trial.options)
            else:
                pipe = Pipeline(target, drafts, **trial.options)
        except (ValueError, NotImplementedError) as error:
            if not any(known in str(error) for known in REFUSED):
                raise
            counts[f"refused: {str(error)[:60]}"] += 1
            return
        try:
            for i in (*range(len(trial.calls)), 0):
                try:
                    got = _generate(target if trial.attach else pipe, trial.calls[i])
                except NotImplementedError as error:
                    if not any(known in str(error) for known in REFUSED):
                        raise
                    counts[f"refused: {str(error)[:60]}"] += 1
                    continue
                counts["calls"] += 1
                if pipe.report is not None and len(pipe.report.stages) > 1:
                    counts["accepted"] += pipe.report.stages[-1].accepted
                    counts[f"calls, {pipe.schedule}"] += 1
                _compare(trial, i, got, wanted[i])
        finally:
            if trial.attach:
                pipespec.detach(target)
            pipe.close()
    _check_restored(trial, target, before)
    for draft, tensors in zip(drafts, draft_tensors, strict=True):
        if tensors:
            _check_restored(trial, draft, tensors)
    with torch.no_grad():
        again = [_expected(target, call) for call in trial.calls[:1]]
    _compare(trial, 0, again[0], wanted[0], always=True)
    if trial.saves and not trial.adapters:
        with tempfile.TemporaryDirectory() as folder:
            target.save_pretrained(folder)
            back = AutoModelForCausalLM.from_pretrained(folder)
            for name, tensor in back.state_dict().items():
                assert torch.equal(tensor, before[name]), f"{trial}: {name} of the saved target"
        counts["saved"] += 1


def _draft(kind: Any, target: Any, index: int) -> Any:
    if kind == "noisy":
        return noisy(target, 0.03, index)
    if kind == "other":
        return make("llama", seed=7 + index)
    return kind


def _adapt(model: Any, seed: int) -> None:
    for i, layer in enumerate(model.model.layers):
        for module, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            setattr(module, name, Lora(getattr(module, name), seed + i))


def _arguments(call: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    given = {k: v for k, v in call.items() if k not in ("lengths", "prompt_seed", "criterion")}
    generator = torch.Generator().manual_seed(call["prompt_seed"])
    ids, mask = left_pad([torch.randint(2, VOCABULARY, (n,), generator=generator) for n in call["lengths"]])
    given |= {"attention_mask": mask, "pad_token_id": 0, "return_dict_in_generate": True}
    if "criterion" in call:
        given["stopping_criteria"] = StoppingCriteriaList([EndsWith(call["criterion"])])
    return ids, given


def _expected(target: Any, call: dict[str, Any]) -> Any:
    ids, given = _arguments(call)
    if not call["do_sample"]:
        own = [given.pop(name, 0.0) for name in ("presence_penalty", "frequency_penalty")]
        bias = given.pop("logit_bias", None)
        if bias:
            given["sequence_bias"] = {(i,): b for i, b in bias.items()}
        if any(own):
            given["logits_processor"] = LogitsProcessorList([OutputPenaltyLogitsProcessor(ids.shape[1], *own)])
        return type(target).generate(target, ids, **given)
    return Pipeline(target, schedule="plain", native=False).generate(
        ids, logits_processor=LogitsProcessorList([Same()]), **given
    )


def _generate(pipe: Any, call: dict[str, Any]) -> Any:
    ids, given = _arguments(call)
    return pipe.generate(ids, **given)


def _compare(trial: Trial, i: int, got: Any, wanted: Any, *, always: bool = False) -> None:
    call = trial.calls[i]
    said = f"{trial}\ncall {i}: {call}\n{got.sequences.tolist()}\n{wanted.sequences.tolist()}"
    if call["do_sample"] and trial.options.get("acceptance") and not always:
        assert got.sequences.shape[0] == wanted.sequences.shape[0], said
        assert bool(((got.sequences >= 0) & (got.sequences < VOCABULARY)).all()), said
        forbidden = [t for t, b in call.get("logit_bias", {}).items() if b == float("-inf")]
        new = got.sequences[:, max(call["lengths"]) :]
        assert not torch.isin(new, torch.tensor(forbidden, dtype=torch.long)).any(), said
        return
    assert torch.equal(got.sequences, wanted.sequences), said
    for name in ("logits", "scores"):
        theirs, ours = getattr(wanted, name, None), getattr(got, name, None)
        assert (theirs is None) == (ours is None), f"{name}: {said}"
        if theirs is not None:
            if len(wanted.sequences) > 1 and ("criterion" in call or "eos_token_id" in call):
                continue  # a row that has ended has no scores
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b.float(), atol=2e-3, rtol=2e-3)


def _check_restored(trial: Trial, model: Any, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys(), trial
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), f"{trial}: {name} has changed"
    assert "generate" not in vars(model), trial


def main(first: int, count: int, schedules: tuple[Any, ...] = CHEAP) -> None:
    import traceback

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        trial = Trial.of(seed, schedules)
        try:
            run(trial, counts)
        except Exception as error:
            counts["failed"] += 1
            frames = traceback.format_exc().splitlines()[-14:]
            print(
                f"FAILED seed {seed}: {type(error).__name__} {str(error)[:1500]}\n  {trial}\n" + "\n".join(frames),
                flush=True,
            )
        if seed % 20 == 19:
            print(seed, dict(counts), flush=True)
            gc.collect()
    print(dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]) or CHEAP)
