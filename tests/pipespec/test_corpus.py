"""The corpus of answers: it joins the n-gram index where a tokenizer lies beside the weights, and its ids are kept."""

import gzip
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pipespec import NgramDraft, Pipeline, attach
from pipespec.demo import family_path
from pipespec.engine import ngram
from pipespec.engine.ngram import ANSWERS, corpus_ids, ids_of_answers
from pipespec.models.loading import load_model
from tests.conftest import random_llama

FOLDER = family_path("small")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipespec"


def index_of(pipe: Pipeline) -> NgramDraft:
    (draft,) = (draft for draft in pipe.config.drafts if isinstance(draft, NgramDraft))
    return draft


def encoded(text: str) -> list[int]:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_the_answers_join_by_default():
    answers = encoded(gzip.decompress(ANSWERS.read_bytes()).decode())
    assert len(answers) > 50_000
    for made in (Pipeline(FOLDER), Pipeline(FOLDER, "ngram"), Pipeline(load_model(FOLDER), NgramDraft())):
        with made as pipe:
            assert np.array_equal(index_of(pipe).ids, answers)
    with Pipeline(FOLDER, NgramDraft(corpus=None)) as pipe:
        assert index_of(pipe).ids is None
    # No tokenizer, and no wish for one.
    with Pipeline(random_llama(3)) as pipe:
        assert index_of(pipe).ids is None
    # A tokenizer with more tokens than the model.
    assert ids_of_answers(FOLDER, max(answers)) is None
    assert ids_of_answers(FOLDER, max(answers) + 1) is not None


def test_a_text_of_the_corpus_is_drafted():
    """A model that is made to say what the corpus says accepts its tokens, and says nothing else."""
    model, ids = load_model(FOLDER), torch.tensor([encoded("def mean(values):")])
    text = model.generate(ids, max_new_tokens=40, do_sample=False)
    with Pipeline(model, NgramDraft(corpus=text[0].tolist()), lookahead=8) as pipe:
        assert torch.equal(pipe.generate(ids, max_new_tokens=40, do_sample=False), text)
        assert pipe.report.stages[-1].accepted >= 30
    model = attach(model)
    assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), text)


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_what_a_pipeline_has_generated_is_known(schedule, monkeypatch):
    """Sampled text of one seed and position comes again in a call that has read nothing else than its prompt."""
    monkeypatch.setattr(ngram, "_UNSORTED", 64)
    model, ids = random_llama(3), torch.arange(5, 12)[None]
    sampled = {"max_new_tokens": 70, "do_sample": True, "seed": 11}
    with Pipeline(model, schedule="plain") as pipe:
        wanted = pipe.generate(ids, **sampled)
    accepted = {}
    for history in (0, 8, 1000):
        draft = NgramDraft(corpus=None, history=history)
        with Pipeline(model, draft, schedule=schedule, lookahead=6) as pipe:
            accepted[history] = []
            for _ in range(3):
                assert torch.equal(pipe.generate(ids, **sampled), wanted)
                accepted[history].append(pipe.report.stages[-1].accepted)
    assert max(accepted[0]) < 20
    assert accepted[0][0] == accepted[0][2] == accepted[1000][0]
    assert max(accepted[8]) < 20
    # The first text is known in the second call; a single earlier occurrence counts from a few tokens on.
    assert min(accepted[1000][1:]) > 45


def test_ids_are_kept_by_text_and_tokenizer(tmp_path, cache, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("def mean(values):\n    return sum(values)\n")
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    ids = corpus_ids(text, folder)
    assert ids.dtype == np.int32
    assert ids.tolist() == encoded(text.read_text())
    (file,) = cache.iterdir()

    def count(found: list[str]):
        real = ngram._encoded
        monkeypatch.setattr(ngram, "_encoded", lambda *args: found.append(args[0]) or real(*args))

    reads: list[str] = []
    count(reads)
    assert np.array_equal(corpus_ids(text, folder), ids)
    assert not reads
    # A file that was cut is made again.
    assert file.stat().st_mode & 0o077 == 0
    for content in (file.read_bytes()[:-5], b"PK\3\4garbage"):
        file.write_bytes(content)
        assert np.array_equal(corpus_ids(text, folder), ids)
    reads.clear()
    file.write_bytes(file.read_bytes()[:-5])
    assert np.array_equal(corpus_ids(text, folder), ids)
    assert len(reads) == 1
    assert np.array_equal(corpus_ids(text, folder), ids)
    assert len(reads) == 1
    # Another text, and another tokenizer.
    text.write_text("return values\n")
    assert corpus_ids(text, folder).tolist() == encoded("return values\n")
    assert len(reads) == 2
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n")
    assert corpus_ids(text, folder).tolist() == encoded("return values\n")
    assert len(reads) == 3
    gz = tmp_path / "text.txt.gz"
    gz.write_bytes(gzip.compress(b"return values\n"))
    assert corpus_ids(gz, folder).tolist() == encoded("return values\n")


def test_nothing_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    for _ in range(2):
        ids = ids_of_answers(FOLDER, 10**6)
        assert ids is not None
        assert len(ids) > 50_000


def test_a_damaged_corpus(tmp_path):
    text = tmp_path / "text.gz"
    for content in (gzip.compress(b"return values")[:-9], b"return values"):
        text.write_bytes(content)
        with pytest.raises(ValueError, match=r"text\.gz is not a whole gzip file"):
            corpus_ids(text, FOLDER)


def test_nothing_is_kept_with_the_prefixes():
    with Pipeline(FOLDER, prefix_cache=0) as pipe:
        assert index_of(pipe).history == 0
    with Pipeline(FOLDER, "ngram", prefix_cache=0) as pipe:
        assert index_of(pipe).history == 0
    with Pipeline(FOLDER) as pipe:
        assert index_of(pipe).history > 0


def test_a_damaged_tokenizer_is_no_matter_of_the_default(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert ids_of_answers(folder, 10**6) is None
