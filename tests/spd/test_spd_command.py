"""``pipespec generate --system spd`` in one process. Under torchrun: ``test_ranks.py``."""

import pytest

import pipespec_spd as spd
from pipespec.cli.main import main
from pipespec.demo import draft_module_path, family_path, load_family
from pipespec_spd import SpeculativePipeline
from pipespec_spd.link import TIMEOUT_S

PROMPT = "def mean(values):"


def generate(*arguments: str) -> int:
    return main(["generate", "--system", "spd", "--prompt", PROMPT, "--max-new-tokens", "16", *arguments])


@pytest.fixture(scope="module")
def family():
    return load_family()


def text_of(family, **options) -> str:
    ids = family.encode(PROMPT)
    pipe = SpeculativePipeline(family.target, stages=1)
    out = pipe.generate(ids, max_new_tokens=16, **({"do_sample": False} | options))
    return family.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_bundled_target_and_its_module(family, capsys):
    assert generate("--report") == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(family) + "\n"
    assert "stages of 3, 3, 3, 3 layers, drafts by ModuleDrafter" in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--draft", "ngram", "--stages", "3,9", "--device", "cpu"), "stages of 3, 9 layers, drafts by NgramDrafter"),
        (("--draft", "{medium}", "--stages", "2", "--no-stream"), "stages of 6, 6 layers, drafts by ModelDrafter"),
        (("--draft", "{module}",), "stages of 3, 3, 3, 3 layers, drafts by ModuleDrafter"),
    ],
)  # fmt: skip
def test_drafts_and_stages_sampled(family, capsys, arguments, said):
    """The text is the target's, sampled with a seed, whatever drafts."""
    names = {"medium": family_path("medium"), "module": draft_module_path()}
    given = ["--target", str(family_path("target")), "--dtype", "float32"]
    given += ["--temperature", "0.8", "--top-p", "0.9", "--seed", "4", "--report"]
    assert generate(*given, *(part.format(**names) for part in arguments)) == 0
    captured = capsys.readouterr()
    wanted = text_of(family, do_sample=True, temperature=0.8, top_p=0.9, top_k=0, seed=4)
    assert captured.out == wanted + "\n"
    assert said in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lookahead", "4", "--exact"), "--lookahead, --exact: not with --system spd"),
        (("--acceptance", "rejection"), "--acceptance: not with --system spd"),
        (("--schedule", "workers"), "--schedule: not with --system spd"),
        (("--stages", "four"), "--stages four: give a number, or the layers of each stage"),
        (("--stages", "13"), "a model of 12 layers can be cut into 1 to 12 stages, not 13"),
        (("--timeout", "60"), "--timeout is for ranks: start this with torchrun"),
        (("--draft", "ngram", "--device", "cpu", "cpu"), "--device: one with --system spd"),
        (("--draft", "ngram", "--draft", "{medium}", "--target", "{medium}"), "--draft: one with --system spd, not 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(capsys, arguments, message):
    assert generate(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("arguments", "given"), [((), {}), (("--timeout", "60"), {"timeout_s": 60.0})])
def test_options_of_ranks(capsys, monkeypatch, arguments, given):
    def made(target, drafter, **options):
        assert {k: v for k, v in options.items() if k == "timeout_s"} == given
        raise ValueError("made")

    monkeypatch.setattr(spd, "RanksPipeline", made)
    monkeypatch.setenv("RANK", "0")
    assert generate("--draft", "ngram", *arguments) == 2
    assert "error: made" in capsys.readouterr().err
    assert generate("--draft", "ngram", "--timeout", "0") == 2
    assert "--timeout must be a number of seconds above 0, not 0" in capsys.readouterr().err


def test_the_help_names_the_default_of_the_timeout(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split()).rpartition("--timeout SECONDS")[2]
    assert f"chunk of the prompt (default: {TIMEOUT_S:g})" in said


def test_options_of_the_other_system(capsys, tmp_path):
    assert main(["generate", "--prompt", PROMPT, "--stages", "2"]) == 2
    assert "--stages and --timeout are options of --system spd" in capsys.readouterr().err
    assert main(["trace", "--system", "spd", "--prompt", PROMPT, "--out", str(tmp_path / "t.json")]) == 2
    assert "--system spd keeps no trace" in capsys.readouterr().err
