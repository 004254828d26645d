"""``pipespec plan`` and its figure of rates by lookahead."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from pipespec.cli import survey
from pipespec.cli.main import main
from pipespec.cli.survey import SurveyPoint
from pipespec.planning import auto as autos
from pipespec.planning import planner
from pipespec.planning.simulator import Answers
from tests.conftest import noisy, random_llama
from tests.planning.test_planner import chain


@pytest.fixture
def folders(tmp_path, monkeypatch, measured_briefly):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0})
    target = random_llama(0)
    target.save_pretrained(tmp_path / "target")
    noisy(target, 0.02).save_pretrained(tmp_path / "draft")
    return tmp_path


def test_the_table_and_the_picture(folders, capsys):
    svg = folders / "plan.svg"
    given = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--new-tokens", "24"]
    assert main(["plan", *given, "--repeats", "1", "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "draft > target" in out
    assert out.count("\n->") == 1
    assert "predicted" in out
    assert "measured" in out
    root = ElementTree.fromstring(svg.read_text())
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}circle")) >= 4


def test_for_programs(folders, capsys):
    given = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--new-tokens", "16"]
    assert main(["plan", *given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["chosen"]["schedule"] in ("plain", "lockstep")
    assert record["call"]["tokens"] == 16
    assert main(["plan", "--target", str(folders / "target"), "--json"]) == 0  # no draft: plain
    assert json.loads(capsys.readouterr().out)["chosen"]["schedule"] == "plain"


def test_drafts_that_are_made_here(folders, capsys):
    given = ["--target", str(folders / "target"), "--draft", "self:1", "--draft-vocabulary", "100", "--new-tokens", "8"]
    assert main(["plan", *given, "--draft-dtype", "int8"]) == 0
    out, err = capsys.readouterr()
    assert "self:1 > target" in out
    assert "draft 0: layers 0 of the target's 2, drafts 100 of 320 tokens, int8 weights" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--draft", "d"], "needs a --target"),
        (["--new-tokens", "0"], "at least 1"),
        (["--repeats", "0"], "at least 1"),
        (["--target", "./nowhere"], "no folder"),
        (["--prompt-file", "/dev/null"], "empty"),
    ],
)
def test_bad_arguments(given, message, capsys):
    assert main(["plan", *given]) == 2
    assert message in capsys.readouterr().err


def test_refused_before_anything_is_measured(folders, capsys, monkeypatch):
    monkeypatch.setattr("pipespec.planning.auto.AutoDriver", None)
    given = ["plan", "--target", str(folders / "target"), "--draft", str(folders / "draft")]
    assert main([*given, "--new-tokens", "1000000"]) == 2
    assert "1000000 new ones pass the target's limit of 512" in capsys.readouterr().err
    assert main([*given, "--svg", str(folders / "nowhere" / "plan.svg")]) == 2
    assert f"there is no folder {folders / 'nowhere'}" in capsys.readouterr().err


def test_predicted_and_measured_side_by_side():
    profile, answers = chain(1e-3, 2e-3, 1e-2), Answers((0.8, 0.9))
    candidates = survey.settings(profile, lookahead=(2, 4, 8), minima=(0, 2))
    assert len(candidates) == 1 + 3 * 3 * 3
    points = [SurveyPoint(planner.predict(profile, answers, c, planner.CallShape())) for c in candidates]
    for p in points:
        p.measured = [p.candidate.rate * 0.8] * 3
    assert all(p.error == pytest.approx(0.25) for p in points)
    names = ["s<", "m", "t"]
    root = ElementTree.fromstring(survey.picture(points, names, "a & b"))
    panels = 2 * 2  # schedules, numbers of stages; the target alone is a curve in each
    assert len(root.findall(".//{*}polyline")) == 2 * 3 + panels
    assert len(survey.table(points, names).splitlines()) == 1 + len(points)
    with pytest.raises(ValueError, match="nothing to draw"):
        survey.picture(points[:1], names, "")
