"""Drafts with another tokenizer: the target's own text in every chain, and the draft tokens of a draft that differs in nothing else."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pipespec import Pipeline, attach, detach
from pipespec.demo import family_path
from tests.conftest import always_wrong, noisy, random_llama
from tests.pipespec.vocabularies import as_bytes, byte_level, sentencepiece, unigram
from tests.support.processes import kill_worker
from tests.support.texts import own_text, same_text
from tests.waiting import drafts_keep_up

NEW = 24
PROMPTS = ["def mean(values):\n    return sum(val", "na\u00efve = '\U0001f600 \u65e5\u672c", "import os\n\nclass Reader:\n    def __init__(self, na"]  # fmt: skip


def permuted(name: str, seed: int = 0) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A bundled model and its tokenizer with other ids: another vocabulary, and the same text as before."""
    content = json.loads(AutoTokenizer.from_pretrained(family_path(name)).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    new = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(seed))
    content["model"]["vocab"] = {token: int(new[i]) for token, i in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = int(new[token["id"]])
    for token in content["post_processor"]["special_tokens"].values():
        token["ids"] = [int(new[i]) for i in token["ids"]]
    model = AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[new] = weight.clone()
    return model, Tokenizer.from_str(json.dumps(content))


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(family_path("target"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(family_path("target"))


@pytest.fixture(scope="module")
def other():
    """The bundled medium draft with other ids, and its tokenizer."""
    return permuted("medium")


@pytest.fixture(scope="module")
def rows(tokenizer):
    """The prompts, and the last one cut inside of a character."""
    rows = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS]
    return [*rows, tokenizer("ab \U0001f600", return_tensors="pt").input_ids[0, :-1]]


def test_only_the_ids_differ(target, tokenizer, other, rows):
    """The same draft with other ids: the target gets the same draft tokens as from the draft that has its own."""
    same = AutoModelForCausalLM.from_pretrained(family_path("medium"), dtype=torch.float32)
    for row in rows[:3]:
        counts = []
        for options in ({"drafts": same}, {"drafts": other[0], "tokenizer": tokenizer, "draft_tokenizers": [other[1]]}):
            with Pipeline(target, schedule="lockstep", lookahead=4, **options) as pipe:
                pipe.generate(row[None], max_new_tokens=NEW, do_sample=False)
                last = pipe.report.stages[-1]
                counts.append((last.steps, last.drafted, last.accepted))
        assert counts[0] == counts[1]
        assert counts[0][2] > 0
        assert pipe.report.stages[0].lost == 0


def test_a_worker_drafts(target, tokenizer, other, rows):
    wanted = own_text(target, rows[0][None], max_new_tokens=NEW)
    with Pipeline(
        target, other[0], schedule="workers", tokenizer=tokenizer, draft_tokenizers=other[1], trace=64
    ) as pipe:
        with drafts_keep_up(pipe, [len(rows[0]) + NEW]):
            assert torch.equal(wanted, pipe.generate(rows[0][None], max_new_tokens=NEW, do_sample=False))
        first, last = pipe.report.stages
        assert last.accepted > 0
        assert first.translated >= first.produced > 0
        assert len(pipe.report.traced()["draft 0"]) > 0
        assert "draft 0 has another tokenizer" in str(pipe.report)
        # The second call starts from the first one's cache.
        kill_worker(pipe, 0)
        with pytest.warns(match=r"draft stage 0 is lost \(killed by SIGKILL\)"):
            assert torch.equal(wanted, pipe.generate(rows[0][None], max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("made", [byte_level, unigram])
def test_chat(made):
    """Special tokens in the prompt that the draft has, and has not. The texts are those of random models."""
    own = byte_level() if made is unigram else sentencepiece()
    model = random_llama(5, vocabulary=own.get_vocab_size())
    draft = random_llama(6, layers=1, vocabulary=made().get_vocab_size())
    table = as_bytes("byte-level" if made is unigram else "sentencepiece")
    special = list(table.special_ids.values())
    ids = torch.tensor([[special[1], *table.encode("the dog \u65e5".encode()), special[-1], *table.encode(b"\n")]])
    with Pipeline(model, draft, schedule="lockstep", lookahead=4, tokenizer=own, draft_tokenizers=made()) as pipe:
        same_text(pipe, ids, max_new_tokens=60)
        assert pipe.report.stages[0].translated > 0
        same_text(pipe, torch.tensor([[special[-1]]]), max_new_tokens=20)  # no text, and perhaps no token of the draft


# ---- from folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory, other):
    path = tmp_path_factory.mktemp("other")
    other[0].save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=other[1]).save_pretrained(path)
    return path


def test_folders_tell_their_tokenizers(target, folder, rows, tmp_path):
    wanted = own_text(target, rows[0][None], max_new_tokens=NEW)
    with Pipeline(family_path("target"), [folder], schedule="lockstep", lookahead=4, dtype="float32") as pipe:
        assert torch.equal(wanted, pipe.generate(rows[0][None], max_new_tokens=NEW, do_sample=False))
        assert pipe.report.stages[0].translated > 0
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with Pipeline(target, loaded) as pipe:  # by the paths that the objects come from
        assert pipe.schedule in ("lockstep", "workers")
        assert pipe.config.drafts[0].translates
    with Pipeline(target, loaded, schedule="plain") as pipe:
        pipe.generate(rows[0][None], max_new_tokens=2)
        assert [stage.name for stage in pipe.report.stages] == ["target"]
    pipe = attach(target, folder, schedule="lockstep", lookahead=4, dtype="float32")
    try:
        assert torch.equal(wanted, target.generate(rows[0][None], max_new_tokens=NEW, do_sample=False))
        assert pipe.report.stages[-1].accepted > 0
    finally:
        detach(target)


def test_the_targets_tokenizer_is_not_translated(target, tokenizer, tmp_path):
    small = AutoModelForCausalLM.from_pretrained(family_path("small"), dtype=torch.float32)
    with Pipeline(target, small, schedule="lockstep", tokenizer=tokenizer, draft_tokenizers=tokenizer) as pipe:
        assert not pipe.config.drafts[0].translates


def test_a_report_hints_at_another_tokenizer():
    """Two models of one vocabulary size, without any tokenizer, that never agree."""
    model = random_llama(1)
    wrong = always_wrong(model)
    with Pipeline(model, wrong, schedule="lockstep", lookahead=4) as pipe:
        pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
        assert pipe.report.decisions is None  # too few draft tokens to tell
        for _ in range(2):
            pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=40, do_sample=False)
            assert sum("pass tokenizer= and draft_tokenizers=" in note for note in pipe.report.decisions) == 1
    with Pipeline(model, noisy(model, 0.01), schedule="lockstep", lookahead=4) as pipe:
        pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=80, do_sample=False)
        assert pipe.report.decisions is None


# ---- refusals


def test_refused_chains(target, tokenizer, other):
    with pytest.raises(ValueError, match=r"draft_tokenizers: one per draft model .* 1, not 2"):
        Pipeline(target, other[0], tokenizer=tokenizer, draft_tokenizers=[None, other[1]])
    with pytest.raises(TypeError, match="a str cannot be translated: use a fast tokenizer"):
        Pipeline(target, other[0], tokenizer="a name", draft_tokenizers=other[1])
    unknown = random_llama(1, vocabulary=64)
    with pytest.raises(
        ValueError, match="the target was given as a model, which does not name its tokenizer: pass tokenizer="
    ):
        Pipeline(unknown, random_llama(2), draft_tokenizers=other[1])
    words = json.loads(other[1].to_str()) | {"decoder": None}
    with pytest.raises(ValueError, match="cannot be translated: its decoder"):
        Pipeline(target, other[0], tokenizer=tokenizer, draft_tokenizers=Tokenizer.from_str(json.dumps(words)))
