"""``pipespec recommend``: the choice from fixed numbers, the command line that it prints, and a run on tiny models."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from pipespec.cli import recommend as command
from pipespec.cli.main import _parser, main
from pipespec.planning import measure, planner
from pipespec.planning.planner import CallShape
from pipespec.planning.recommend import (
    Draft,
    Option,
    Recommendation,
    best_drafts,
    mean_context,
    measure_options,
    ngram_agreement,
    options_of,
)
from pipespec.planning.simulator import NOTHING, Answers
from tests.conftest import noisy, random_llama
from tests.pipespec.test_cli import byte_tokenizer
from tests.planning.test_planner import chain

SMALL, LARGE = Draft("small", 0.6, 1e-3), Draft("a folder/large", 0.8, 3e-3, label="large")
INT8 = Draft("small", 0.6, 5e-4, ("--draft-dtype", "int8"))
PLAIN = Option((), "plain", rate=100.0)


def of(*options: Option) -> Recommendation:
    return Recommendation((*options, PLAIN), "the target", ("--dtype", "float32"))


def parsed(words: str):
    """The arguments of a printed command line."""
    program, *rest = shlex.split(words)
    assert program == "pipespec"
    return _parser().parse_args(rest)


def test_the_fastest_prediction_is_chosen():
    found = of(
        Option((SMALL,), "lockstep", (4,), rate=120.0),
        Option((SMALL, LARGE), "workers", (8, 4), 2, True, 2.5, rate=150.0),
    )
    assert found.speculates
    assert found.chosen.rate == 150.0
    assert found.why == "small > large, workers: predicted 1.50x of plain decoding"
    args = parsed(found.command)
    assert (args.target, args.draft, args.schedule) == ("the target", ["small", "a folder/large"], "workers")
    assert (args.lookahead, args.min_draft_tokens, args.decode_meanwhile) == ([8, 4], 2, True)
    assert args.dtype == "float32"
    first = str(found).splitlines()[1]
    assert first.startswith("->")
    assert "0.60/0.80" in first
    assert "1.50x" in first


def test_options_that_change_the_drafts_are_in_the_command():
    found = of(Option((INT8,), "lockstep", (3,), rate=200.0))
    args = parsed(found.command)
    assert (args.draft_dtype, args.lookahead) == ("int8", [3])
    assert "small dtype int8" in str(found)
    trimmed = Draft("self:3", 0.5, 1e-3, ("--draft-vocabulary", "500", "text"))
    args = parsed(of(Option((trimmed,), "lockstep", (3,), rate=200.0)).command)
    assert (args.draft, args.draft_vocabulary) == (["self:3"], ["500", "text"])


def test_measurements_overrule_predictions():
    measured = Option((LARGE,), "lockstep", (4,), rate=130.0, measured=90.0)
    plain = Option((), "plain", rate=100.0, measured=60.0)
    unmeasured = Option((SMALL,), "workers", (8,), rate=900.0)
    found = Recommendation((unmeasured, plain, measured), "t")
    assert found.chosen == measured
    assert found.why == "large, lockstep: measured 1.50x of plain decoding"
    assert found.gain(unmeasured) == 9.0
    # Measured options come first.
    assert str(found).splitlines()[1].split()[1] == "large"
    assert json.loads(json.dumps(found.to_dict()))["options"][-1]["name"] == "small"


@pytest.mark.parametrize("rate", [80.0, 104.0])
def test_do_not_speculate(rate):
    found = of(Option((SMALL,), "workers", (8,), rate=rate))
    assert not found.speculates
    assert found.why.startswith("do not speculate: the best drafts (small, workers) reach")
    assert f"{rate / 100:.2f}x" in found.why
    args = parsed(found.command)
    assert (args.schedule, args.draft) == ("plain", [])
    assert of().why == "do not speculate: there is no draft to choose from"


def test_predictions_of_different_profiles_are_scaled_to_one():
    """A second profile, measured while the machine was half as fast, changes no rate."""
    answers = Answers(acceptance=(0.8,))
    fast, slow = (planner.plan(chain(s * 1e-3, s * 1e-2), answers, CallShape()) for s in (1, 2))
    a, b = (options_of(found, [SMALL], 100.0) for found in (fast, slow))
    assert {o.schedule for o in a} == {"lockstep", "workers"}
    by_schedule = {o.schedule: o.rate for o in a}
    for option in b:
        assert option.rate == pytest.approx(by_schedule[option.schedule], rel=0.05)


def test_an_option_has_all_threads():
    """A plan compares lockstep with one thread and with all. Who follows a recommendation has all."""
    found = planner.plan(replace(chain(1e-3, 1e-2), threads=2), Answers(acceptance=(0.8,)), schedules=("lockstep",))
    both = [c for c in found.candidates if c.schedule == "lockstep"]
    assert {c.threads for c in both} == {1, 2}
    (option,) = options_of(found, [SMALL], found.plain.rate)
    assert option.rate == pytest.approx(next(c.rate for c in both if c.threads == 2))


def test_the_order_follows_agreement_and_step_time():
    """Of equally fast drafts the one that agrees more is faster, and of equally good ones the one with the shorter step."""

    def rate(step_s: float, acceptance: float) -> float:
        found = planner.plan(chain(step_s, 1e-2), Answers(acceptance=(acceptance,)), schedules=("lockstep",))
        return max(o.rate for o in options_of(found, [SMALL], 100.0))

    rates = [rate(1e-3, 0.9), rate(1e-3, 0.7), rate(1e-3, 0.4), rate(4e-3, 0.4)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 200 > 110 > rates[-1]


def test_an_n_gram_index_alone_and_under_a_draft():
    answers = np.array([0, 0, 1, NOTHING, NOTHING], np.uint8)
    assert ngram_agreement(answers) == pytest.approx(2 / 3)
    assert np.isnan(ngram_agreement(answers[-2:]))
    ngram = Draft("ngram", 0.5, 1e-7)
    under = Option((ngram, INT8), "lockstep", (8, 3), rate=150.0)
    assert of(under).why.startswith("ngram > small dtype int8, lockstep")
    args = parsed(of(under).command)
    assert (args.draft, args.draft_dtype, args.lookahead) == (["ngram", "small"], "int8", [8, 3])
    nothing = Option((Draft("ngram", float("nan"), 1e-7),), "lockstep", (8,), rate=100.0)
    assert "-" in of(nothing)._row(nothing, "")


def test_the_best_predictions_are_measured():
    options = [PLAIN, *(Option((Draft(str(r), 0.5, 1e-3),), "lockstep", (4,), rate=float(r)) for r in (5, 9, 7, 8))]
    ran = []

    def run(option):
        ran.append(option.rate)
        return 50, 0.5

    found = measure_options(options, run, 2)
    assert "2 more" not in Recommendation(found, "t").why  # their predictions are slower than plain decoding
    better = [replace(o, rate=200.0, measured=None) for o in found[1:3]]
    assert Recommendation((*better, found[0], found[2]), "t").why.endswith(
        "; 2 more with better predictions were not measured (--measure)"
    )
    assert sorted(ran) == [8.0, 9.0, 100.0]
    assert [o.measured for o in found] == [100.0, None, 100.0, None, 100.0]
    assert measure_options(options, run, 0) == tuple(options)
    assert len(ran) == 3


def test_a_chain_has_drafts_with_the_same_options():
    options = [
        Option((INT8,), "lockstep", (1,), rate=9.0),
        Option((SMALL,), "lockstep", (1,), rate=8.0),
        Option((INT8,), "workers", (1,), rate=7.0),
        Option((Draft("other", 0.5, 1e-3, INT8.options),), "workers", (1,), rate=6.0),
    ]
    assert [d.given for d in best_drafts(options, 2)] == ["small", "other"]
    assert best_drafts([], 2) == []
    assert mean_context([(np.zeros(10), 4), (np.zeros(20), 8)]) == (6, 9)


# ---- the command


@pytest.fixture
def folders(tmp_path, monkeypatch):
    own = measure.measure_stages
    monkeypatch.setattr(measure, "measure_stages", lambda *args, **how: own(*args, **(how | {"budget_s": 0.0})))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    target = random_llama(0, layers=2)
    models = {"target": target, "draft": noisy(random_llama(0, layers=1), 0.01)}
    models["strange"] = random_llama(1, layers=1, vocabulary=300)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    # A tokenizer of other tokens.
    text = (tmp_path / "strange" / "tokenizer.json").read_text()
    (tmp_path / "strange" / "tokenizer.json").write_text(text.replace('"<begin>"', '"<start>"'))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc abc"}\n\n"def f():"\n')
    return tmp_path


def test_the_command(folders, capsys):
    given = ["--target", str(folders / "target"), "--candidates", str(folders)]
    given += ["--prompts", str(folders / "prompts.jsonl"), "--new-tokens", "12", "--measure", "1"]
    assert main(["recommend", *given, "--draft-dtype", "int8", "--draft-vocabulary", "200"]) == 0
    out, err = capsys.readouterr()
    assert "strange: draft 0 has another tokenizer" in err
    for name in ("self:1", "draft", "draft vocabulary 200 dtype int8", "ngram", "ngram > draft", "none"):
        assert re.search(f"^(->|  )  {re.escape(name)}  ", out, re.MULTILINE), name
    assert out.count("\n->") == 1
    last = parsed(out.strip().splitlines()[-1])
    assert last.target == str(folders / "target")
    assert main(["recommend", *given, "--json", "--measure", "0"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {o["schedule"] for o in record["options"]} == {"plain", "lockstep"}
    assert all(o["measured"] is None for o in record["options"])
    assert record["command"].startswith("pipespec generate --target")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--candidates", "nowhere"], "there is no folder nowhere"),
        (["--new-tokens", "0"], "at least 1"),
        (["--measure", "-1"], "must not be negative"),
        (["--draft-dtype", "int4"], "compares drafts as stored with int8"),
        (["--draft-vocabulary", "3", "4"], "a number, a file, or a number and a file"),
        (["--prompts", "nowhere"], "nowhere"),
    ],
)
def test_what_is_refused(capsys, given, message):
    assert main(["recommend", *given]) == 2
    assert message in capsys.readouterr().err


def test_prompts(tmp_path):
    file = tmp_path / "p.jsonl"
    for line, message in (("{", "line 1, column 2"), ("[1]", "entry 1"), ('{"prompt": 3}', "entry 1"), ('""', "empty")):
        file.write_text(line)
        with pytest.raises(ValueError, match=message):
            command._read_prompts(file)
    file = tmp_path / "question.json"
    file.write_text(json.dumps([{"question_id": 81, "turns": ["first", "second"]}]))
    assert command._read_prompts(file) == ["first"]
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert command._read_prompts(text) == ["one\n\ntwo"]
