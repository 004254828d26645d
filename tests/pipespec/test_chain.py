"""A chain is a list of stages: a kind of draft is one file and one row, and anything that proposes tokens is a draft."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipespec
from pipespec import NgramDraft, Pipeline, StageFailure
from pipespec.engine.chain import DraftSpec, as_draft
from pipespec.engine.proposer import ProposerStage
from pipespec.registry import DRAFTS, OPTIONS, imported, kind_of
from tests.conftest import always_right, random_prompts
from tests.pipespec import heads
from tests.support.proposers import LastToken

NEW = 24
PACKAGE = Path(pipespec.__file__).parent


def module_file(where: str) -> str:
    return where.partition(":")[0].removeprefix("pipespec.").replace(".", "/") + ".py"


def test_kinds_of_drafts_are_named_in_their_own_file_only() -> None:
    """Drivers, configuration, worker processes, reports and the command line see specs and stages. The package exports what users make themselves."""
    own: dict[str, set[str]] = {}
    for row in DRAFTS:
        for where in filter(None, (row.spec, row.captured)):
            file = module_file(where)
            for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
                is_kind = isinstance(node, ast.ClassDef) and node.name.endswith(("Draft", "Stage", "Head"))
                if is_kind and node.name not in ("Stage", "StaticStage", "GraphedStage", "DraftHead"):
                    own.setdefault(node.name, set()).add(file)
    assert {row.spec.partition(":")[2] for row in DRAFTS} < set(own)
    # A kind of draft may be made out of another one, in the same way.
    files = {file for found in own.values() for file in found}
    for file in PACKAGE.rglob("*.py"):
        path = str(file.relative_to(PACKAGE))
        if path in files | {"__init__.py"}:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = {getattr(node, field, None) for field in ("id", "attr", "name")} & set(own)
            assert not names, f"{path} names {names}"


def test_each_row_is_complete() -> None:
    for row in DRAFTS:
        kind = row.spec_class()
        assert issubclass(kind, DraftSpec)
        assert kind.label.startswith("a")
        if row.captured:
            assert imported(row.captured).__name__ == row.captured.partition(":")[2]
        if row.joins:
            assert kind().source
    assert not set(OPTIONS) & {row.spec_class().name for row in DRAFTS}


def test_what_a_user_gives_for_a_draft(tmp_path: Path) -> None:
    proposer, own = LastToken(), NgramDraft(max_match=4)
    assert as_draft(own) is own
    assert as_draft("ngram").name == "ngram"
    assert as_draft(proposer).proposer is proposer
    assert as_draft(tmp_path).given == tmp_path
    assert not as_draft(tmp_path).reads_target
    heads.write_speculators(tmp_path, heads.make_weights())
    assert as_draft(tmp_path).reads_target


# ---- drafts of the user's


class Repeats(DraftSpec):
    """A kind of the user's, without a row in the registry."""

    label = "a draft that repeats the last token"
    form = "repeats"
    stage_class = ProposerStage
    inline = True

    def propose(self, tokens: np.ndarray, count: int) -> list[int]:
        return [int(tokens[-1])] * count


class Knows:
    """Proposes a text that it knows."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.fails_at = text, -1

    def propose(self, tokens: np.ndarray, count: int) -> list[int]:
        assert tokens.tolist() == self.text[: len(tokens)]
        if 0 <= self.fails_at <= len(tokens):
            raise LookupError("made to fail")
        return self.text[len(tokens) : len(tokens) + count]


def plain(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return random_prompts(1, seed=2, longest=9)[0][None]


@pytest.mark.parametrize("schedule", [None, "lockstep", "workers"])
def test_an_object_that_proposes_tokens_is_a_draft(model, ids, schedule) -> None:
    wanted = plain(model, ids)
    with Pipeline(model, Knows(wanted[0].tolist()), schedule=schedule, lookahead=5, trace=64) as pipe:
        assert torch.equal(wanted, pipe.generate(ids, max_new_tokens=NEW, do_sample=False))
        draft, target = pipe.report.stages
        assert (draft.name, draft.forward) == ("draft 0", "proposer")
        assert (target.steps, target.drafted, target.accepted) == (NEW // 6, 5 * NEW // 6, 5 * NEW // 6)
        assert len(pipe.report.traced()["draft 0"]) > 0


def test_a_proposer_that_fails_costs_no_token(model, ids) -> None:
    wanted = plain(model, ids)
    proposer = Knows(wanted[0].tolist())
    with Pipeline(model, proposer, lookahead=3) as pipe:
        proposer.fails_at = ids.shape[1] + 6
        with pytest.warns(StageFailure, match=r"draft stage 0 failed \(LookupError: made to fail\); this call goes on"):
            assert torch.equal(wanted, pipe.generate(ids, max_new_tokens=NEW, do_sample=False))
        assert 0 < pipe.report.stages[-1].accepted < NEW // 2
        proposer.fails_at = -1
        assert torch.equal(wanted, pipe.generate(ids, max_new_tokens=NEW, do_sample=False))
        assert pipe.report.stages[-1].accepted > NEW // 2


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_a_kind_without_a_row(model, ids, schedule) -> None:
    draft = Repeats()
    assert kind_of(draft) is None
    with Pipeline(model, [draft, "ngram"], schedule=schedule, lookahead=3) as pipe:
        assert torch.equal(plain(model, ids), pipe.generate(ids, max_new_tokens=NEW, do_sample=False))
        first, index, target = pipe.report.stages
        assert (first.forward, index.name, index.forward) == ("repeats", "ngram", "n-gram index")
        assert first.produced > 0
        assert target.drafted > 0
    with pytest.raises(ValueError, match="graphs=True does not support a draft that repeats the last token"):
        Pipeline(model, draft, graphs=True)


def test_an_index_passes_on_what_a_model_drafts(model, ids) -> None:
    """Where it has no match. The text is that of the target, and so are all draft tokens of its copy."""
    wanted = plain(model, ids)
    for drafts in ([always_right(model), NgramDraft(min_match=31, max_match=32)], [always_right(model)]):
        with Pipeline(model, drafts, schedule="lockstep", lookahead=4) as pipe:
            assert torch.equal(wanted, pipe.generate(ids, max_new_tokens=NEW, do_sample=False))
            last = pipe.report.stages[-1]
            assert last.accepted == last.drafted > NEW // 2
