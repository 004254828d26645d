"""SpeculationConfig and the default schedule: a documented rule that measures nothing."""

import ast
import os
from pathlib import Path

import pytest
import torch

import pipespec
from pipespec import Pipeline, config, registry
from pipespec.config import SpeculationConfig
from pipespec.engine.head import HeadDraft
from pipespec.engine.ngram import NgramDraft
from pipespec.engine.stage import ModelDraft
from pipespec.engine.translation import TranslatedDraft
from pipespec.registry import OPTIONS, SCHEDULES, default_schedule, has_captured_form, numa_nodes
from tests.conftest import noisy

MODELS = [ModelDraft(), ModelDraft()]

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def nodes(monkeypatch):
    def have(count):
        monkeypatch.setattr(registry, "numa_nodes", lambda: count)

    return have


@pytest.mark.parametrize(
    ("devices", "cores", "nodes", "expected"),
    [
        (["cpu"], 8, 1, ("plain", False)),
        (["cuda:0"], 8, 1, ("plain", True)),
        (["cpu", "cpu"], 8, 1, ("lockstep", False)),
        (["cpu", "cpu"], 8, 2, ("workers", False)),
        (["cpu", "cpu", "cpu"], 8, 2, ("lockstep", False)),
        (["cpu", "cpu", "cpu"], 8, 3, ("workers", False)),
        (["cuda:0", "cuda:0"], 1, 1, ("lockstep", True)),
        (["cuda:1", "cuda:1", "cuda:1"], 8, 1, ("lockstep", True)),
        (["cuda:1", "cuda:0"], 8, 1, ("streams", True)),
        (["cuda:0", "cuda:1", "cuda:0"], 1, 1, ("streams", True)),
        (["cpu", "cuda:0"], 2, 1, ("workers", False)),
        (["cpu", "cuda:0"], 1, 2, ("lockstep", False)),
        (["cuda:0", "cpu"], 8, 2, ("lockstep", False)),
    ],
)
def test_the_rule(devices, cores, nodes, expected):
    assert default_schedule(devices, places=nodes if devices[-1] == "cpu" else cores) == (*expected, False)


@pytest.mark.parametrize(
    ("devices", "wishes", "expected"),
    [
        (["cpu"], {"graphs": True}, ("plain", True)),
        (["cpu", "cpu"], {"graphs": True}, ("lockstep", True)),
        (["cuda:0", "cuda:0"], {"graphs": False}, ("lockstep", False)),
        (["cuda:0", "cuda:1"], {"graphs": False}, ("lockstep", False)),
        (["cuda:0", "cuda:1"], {"graphs": True}, ("streams", True)),
        # a draft with another tokenizer
        (["cuda:0", "cuda:0"], {"uncaptured": True}, ("lockstep", False)),
        (["cpu", "cpu"], {"uncaptured": True, "places": 1}, ("lockstep", False)),
        # a draft head
        (["cpu"], {"in_turn": True}, ("lockstep", False)),
        (["cuda:0"], {"in_turn": True}, ("lockstep", True)),
        (["cuda:0"], {"in_turn": True, "uncaptured": True}, ("lockstep", False)),
        (["cuda:0", "cuda:1"], {"in_turn": True, "uncaptured": True}, ("lockstep", False)),
        (["cpu", "cpu"], {"in_turn": True, "places": 2}, ("lockstep", False)),
    ],
)
def test_the_rule_with_wishes_of_users_and_drafts(devices, wishes, expected):
    assert default_schedule(devices, **{"places": 8} | wishes) == (*expected, False)


def test_an_index_joins_on_a_cpu_where_the_controller_may_choose():
    for devices in (["cpu"], ["cpu", "cpu"]):
        assert default_schedule(devices, places=1, controlled=True) == ("lockstep", False, True)
        assert not default_schedule(devices, True, 1, controlled=True)[2]
    assert default_schedule(["cpu", "cpu"], places=2, controlled=True) == ("workers", False, False)
    assert default_schedule(["cuda:0"], controlled=True) == ("plain", True, False)
    assert default_schedule(["cuda:0", "cuda:1"], coupled=False) == ("lockstep", False, False)


def test_it_counts_the_nodes_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 6, 9})
    for name, cores in (
        ("node0", "0-3\n"),
        ("node1", "4,6-7\n"),
        ("node2", "8\n"),
        ("node3", "\n"),
        ("node4", "odd\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    (tmp_path / "node5").mkdir()
    assert numa_nodes(tmp_path) == 2
    assert numa_nodes(tmp_path / "none") == 1
    assert numa_nodes() >= 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_pipeline_says_what_was_chosen(model, nodes, count):
    nodes(count)
    chosen = {1: "lockstep", 2: "workers"}[count]
    wanted = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    with Pipeline(model, noisy(model, 0.02)) as pipe:
        assert pipe.schedule == pipe.config.schedule == chosen
        assert ("ngram" in pipe.config.names) == (chosen == "lockstep")
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=9), wanted)
        assert pipe.report.schedule == chosen
    assert Pipeline(model, schedule="plain").schedule == "plain"


def test_drafts_that_no_worker_can_run(model, nodes):
    """They run in lockstep, and the report has the reason."""

    class Own(type(model)):
        pass

    nodes(2)
    draft = Own(model.config)
    wanted = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    with Pipeline(model, draft, trace=16) as pipe:
        assert pipe.schedule == "lockstep"
        assert (pipe.config.lookahead, pipe.config.trace) == ((4,), 16)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=9), wanted)
        assert pipe.report.schedule == "lockstep"
        reason = pipe.report.decisions[0]
        assert "'lockstep' instead of 'workers': draft 0: a worker process cannot import its class" in reason
    with pytest.raises(ValueError, match="cannot import its class"):  # what is named is not replaced
        Pipeline(model, draft, schedule="workers")


def test_defaults_of_each_schedule():
    assert SpeculationConfig.of(MODELS, schedule="lockstep").lookahead == (4, 4)
    assert SpeculationConfig.of(MODELS, schedule="workers").lookahead == (8, 8)
    streams = SpeculationConfig.of(MODELS[:1], schedule="streams", lookahead=[3])
    assert (streams.lookahead, streams.graphs) == ((3,), True)
    assert SpeculationConfig.of([], schedule="streams") == SpeculationConfig(schedule="plain", graphs=True)
    assert SpeculationConfig.of(MODELS, schedule="plain", lookahead=9) == SpeculationConfig(schedule="plain")


def test_numbers_of_a_stage():
    numbers = SpeculationConfig(lookahead=(3, 50))
    assert [numbers.lookahead_of(i) for i in range(3)] == [3, 50, 0]
    assert [numbers.max_draft_tokens(i) for i in range(3)] == [0, 3, config.WIDTH // 2]


# ---- the table of schedules


VALUES = {"graphs": True, "acceptance": "rejection"}
KINDS = {"n-gram draft": NgramDraft(), "draft head": HeadDraft("folder"), "draft with another tokenizer": TranslatedDraft(target=None, own=None)}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_the_options_of_its_row(name, option):
    """Any other is refused, and the message names the schedules that take it."""
    given = {"schedule": name, option: VALUES[option]}
    if option in SCHEDULES[name].options:
        assert SpeculationConfig.of(MODELS[:1], **given).schedule in (name, registry.PLAIN.name)
        return
    takers = [row.name for row in registry.with_option(option)]
    with pytest.raises(ValueError, match=f"is for schedule=.*not for '{name}'") as caught:
        SpeculationConfig.of(MODELS[:1], **given)
    assert all(repr(taker) in str(caught.value) for taker in takers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_what_runs_where_its_stages_are(name, kind):
    """A draft that reads the target's hidden states runs in turn with it, and captured steps need a captured form."""
    row, draft = SCHEDULES[name], KINDS[kind]
    if row.takes(draft) or not row.has_drafts:
        assert SpeculationConfig.of([draft], schedule=name).schedule in (name, registry.PLAIN.name)
    else:
        takers = [each.name for each in registry.with_draft(draft)]
        with pytest.raises(ValueError, match=f"{kind} is for schedule=.*not for '{name}'") as caught:
            SpeculationConfig.of([draft], schedule=name)
        assert all(repr(taker) in str(caught.value) for taker in takers)
    assert row.takes(draft) <= (has_captured_form(draft) or not row.is_captured)


def test_the_stages_of_a_chain():
    index, model = NgramDraft(), ModelDraft()
    mixed = SpeculationConfig.of([index, model, index, index, model, index], lookahead=3)
    assert mixed.names == ["ngram", "draft 0", "ngram 2", "ngram 3", "draft 1", "ngram 5", "target"]
    assert mixed.model_stages == [1, 4, 6]
    assert [list(mixed.stages_of(i)) for i in mixed.model_stages] == [[0, 1], [2, 3, 4], [5, 6]]
    assert not mixed.controlled
    # Under the controller the inline draft offers its tokens next to those of the models.
    controlled = SpeculationConfig.of([index, model])
    assert (controlled.controlled, controlled.drafts, controlled.lookahead) == (True, (model, index), (4, 8))
    assert not SpeculationConfig.of([index, index]).controlled


@pytest.mark.parametrize("kind", ["draft head", "draft with another tokenizer"])
def test_what_verifies_nothing_is_the_first_of_the_drafts(kind):
    draft, index, model = KINDS[kind], NgramDraft(), ModelDraft()
    assert SpeculationConfig.of([index, draft]).drafts == (draft, index)
    assert SpeculationConfig.of([draft, index, model], lookahead=3).drafts == (draft, index, model)
    for before, label in ((model, "a draft model"), (index, "an n-gram draft: .* so that the controller chooses")):
        with pytest.raises(ValueError, match=f"can only be the first of the drafts, .* of {label}"):
            SpeculationConfig.of([before, draft], lookahead=3)


def test_captured_rounds_of_a_draft_that_reads_hidden_states():
    head, model = KINDS["draft head"], ModelDraft()
    assert SpeculationConfig.of([head], graphs=True).graphs
    with pytest.raises(ValueError, match="only as the last of the drafts"):
        SpeculationConfig.of([head, model], graphs=True)


def test_names_of_schedules_are_literals_in_the_table_and_in_their_drivers():
    """Other modules read the table."""
    package, found = Path(pipespec.__file__).parent, set()
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[0] == "registry.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.keyword) or (
                isinstance(node, ast.Assign) and "schedule" in ast.unparse(node)
            ):
                values = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)}
                if values & set(SCHEDULES) and "unsupported" not in ast.unparse(node):
                    found.add(str(file.relative_to(package / "schedules")) if "schedules" in file.parts else file.name)
    drivers = {row.driver for row in SCHEDULES.values()} | {row.captured for row in SCHEDULES.values()} - {""}
    assert found == {
        place.partition(":")[0].removeprefix("pipespec.schedules.").replace(".", "/") + ".py" for place in drivers
    }
