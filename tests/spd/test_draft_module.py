"""The draft module: anchors and types, files and refusals, and that drafting and training compute the same."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from pipespec_spd.draft_module import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    DraftModule,
    DraftModuleConfig,
    LayerRanges,
    anchors_for,
    target_digest,
    types_for,
)
from pipespec_spd.machine import DraftRequest
from pipespec_spd.module_drafter import ModuleDrafter
from pipespec_spd.partition import Partition
from pipespec_train.students import simulate
from tests.conftest import VOCABULARY, random_llama
from tests.spd.replay import Machine

# ---- anchors, types


@pytest.mark.parametrize(
    ("stages", "anchors", "types"),
    [
        (Partition.uniform(32, 4).ranges, (0, 8, 16, 24, 31), (0, 1, 2, 3, 4)),
        (Partition.uniform(12, 4).ranges, (0, 3, 6, 9, 11), (0, 1, 2, 3, 4)),
        (Partition.uniform(28, 2).ranges, (0, 14, 27), (0, 1, 2)),
        (
            ((0, 1), (1, 7), (7, 8)),
            (0, 1, 7),
            (0, 1, 2, 2),
        ),  # the last stage has one layer: its input is the last anchor
        (Partition.uniform(32, 8).ranges, (0, 8, 16, 24, 31), (0, 0, 1, 1, 2, 2, 3, 3, 4)),  # fewer types than depths
        (Partition.uniform(4, 4).ranges, (0, 1, 2, 3), (0, 1, 2, 3, 3)),
        (Partition.uniform(16, 1).ranges, (0, 15), (0, 1)),
        (Partition.uniform(2, 1).ranges, (0, 1), (0, 1)),
        (Partition.uniform(1, 1).ranges, (0, 1), (0, 1)),  # nothing below L but the embedding
    ],
)
def test_anchors_come_from_the_real_ranges(
    stages: LayerRanges, anchors: tuple[int, ...], types: tuple[int, ...]
) -> None:
    assert anchors_for(stages, len(anchors)) == anchors
    assert types_for(stages, anchors) == types
    with pytest.raises(ValueError, match="at least 2 anchors"):
        anchors_for(stages, 1)


def test_every_split_has_anchors_that_exist_when_they_are_read() -> None:
    draw = random.Random(0)
    for _ in range(200):
        layers = draw.randint(1, 40)
        n = draw.randint(1, layers)
        ends = [*sorted(draw.sample(range(1, layers), n - 1)), layers]
        stages = tuple(zip([0, *ends[:-1]], ends, strict=True))
        for limit in (None, 2, 3, 5):
            anchors = anchors_for(stages, limit)
            assert anchors[0] == 0
            assert anchors[-1] == max(1, layers - 1)
            assert len(anchors) <= (n + 1 if limit is None else limit)
            for depth, kind in enumerate(types_for(stages, anchors)):
                assert anchors[kind] <= (stages[depth - 1][1] if depth else 0)
                assert kind == len(anchors) - 1 or anchors[kind + 1] > (stages[depth - 1][1] if depth else 0)


# ---- drafting computes what training trained


def filled(module: DraftModule, seed: int) -> DraftModule:
    """A module whose weights make every part matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
    return module.eval()


def make(layers: int, stages: LayerRanges, blocks: int, seed: int, **how) -> DraftModule:
    target = random_llama(seed, layers=layers, kv_heads=1 + seed % 2)
    return filled(DraftModule(DraftModuleConfig.for_target(target, stages, layers=blocks, **how)), seed)


class Row:
    """One row's machine, its tokens and their features. A token that replaces a flushed one gets new features."""

    def __init__(self, n: int, prompt: int, anchors: int, table: torch.Tensor, generator: torch.Generator) -> None:
        self.machine, self.table, self.generator = Machine(n, prompt), table, generator
        self.tokens = [0] * 160
        self.features = torch.zeros(160, anchors, table.shape[1])
        self.redraw(0)

    def redraw(self, start: int) -> None:
        self.tokens[start:] = torch.randint(len(self.table), (160 - start,), generator=self.generator).tolist()
        self.features[start:] = torch.randn(self.features[start:].shape, generator=self.generator)
        self.features[start:, 0] = self.table[self.tokens[start:]]


def differences(
    module: DraftModule, prompts: list[int], cycles: int, seed: int, fills: set[int] | None = None
) -> tuple[list[float], int]:
    """Decode on random features with random flushes. Returns the largest difference of each draft's logits from ``simulate``, and the widest span.

    The rows are ragged, and some rows rest in some cycles.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = module.config
    table = torch.randn(VOCABULARY, config.hidden, generator=generator)
    drafter = ModuleDrafter(module, table.__getitem__)
    assert drafter.features == config.anchors[1:]
    rows = [Row(config.n, p, len(config.anchors), table, generator) for p in prompts]
    stage_of = {k: next((s for s, (b, e) in enumerate(config.stages) if b < k <= e), 0) for k in config.anchors}
    given: list[torch.Tensor] = []

    def select(logits: torch.Tensor, which: list[int], positions: list[int]) -> list[int]:
        given.append(logits)
        assert positions == [len(r.tokens) for r in requests]
        return [7] * len(which)

    drafter.start([row.tokens[:p] for row, p in zip(rows, prompts, strict=True)], 160, select)
    for column, index in enumerate(config.anchors):
        for r, row in enumerate(rows):
            at = list(range(prompts[r]))
            drafter.observe(index, [r] * len(at), at, row.features[at, column])
    found, span = [], 0
    for _ in range(cycles):
        active = [r for r in range(len(rows)) if draw.random() < 0.8] or [0]
        requests, flights = [], {}
        for r in active:
            machine = rows[r].machine
            flights[r] = dict(machine.depth)
            newest = max(machine.depth)
            requests.append(DraftRequest(r, rows[r].tokens[: newest + 1], len(machine.depth)))
        assert drafter.draft(requests) == [7] * len(requests)
        for i, request in enumerate(requests):
            anchors = rows[request.row].features[: len(request.tokens)]
            with torch.no_grad():
                expected = simulate(module, anchors[None], request.fill)[0, -1]
            got = given[-1][i] if config.vocabulary is None else given[-1][i, list(config.vocabulary)]
            found.append(float((got - expected).abs().max()))
            if fills is not None:
                fills.add(request.fill)
        for column, index in enumerate(config.anchors):
            crossed = [(r, p) for r in active for p, depth in flights[r].items() if depth == stage_of[index]]
            if crossed:
                values = torch.stack([rows[r].features[p, column] for r, p in crossed])
                drafter.observe(index, [r for r, _ in crossed], [p for _, p in crossed], values)
        for r in active:
            oldest, full = min(flights[r]), len(flights[r]) == config.n
            right = draw.random() < 0.75
            rows[r].machine.cycle(right)
            if full and not right:
                drafter.truncate(r, oldest + 1)
                rows[r].redraw(oldest + 1)
        span = max(span, drafter.span)
    drafter.finish()
    return found, span


CASES = [
    (4, Partition.uniform(4, 1).ranges, 1, None),
    (6, Partition.uniform(6, 2).ranges, 2, None),
    (5, Partition.uniform(5, 3).ranges, 1, None),
    (8, Partition.uniform(8, 4).ranges, 2, None),
    (6, ((0, 1), (1, 4), (4, 5), (5, 6)), 1, None),
    (3, Partition.uniform(3, 3).ranges, 1, None),
    (8, Partition.uniform(8, 8).ranges, 2, 4),  # fewer types than depths: two depths share a projection
]


@pytest.mark.parametrize(("layers", "stages", "blocks", "types"), CASES)
def test_drafting_computes_what_training_computes(
    layers: int, stages: LayerRanges, blocks: int, types: int | None
) -> None:
    module = make(layers, stages, blocks, len(stages), types=types)
    fills: set[int] = set()
    with torch.inference_mode():
        found, _ = differences(module, [3, 1, 9], 12 * len(stages), seed=layers, fills=fills)
    assert fills == set(range(1, len(stages) + 1))
    assert max(found) < 1e-4


@pytest.mark.parametrize(
    ("stages", "prompts", "how"),
    [(3, [30], {"vocabulary": range(3, VOCABULARY, 7)}), (4, [90, 2], {})],
    ids=["one row and a part of the vocabulary", "a long prompt"],
)
def test_memory_does_not_grow_with_the_text(stages, prompts, how) -> None:
    """The first draft releases the anchors of a long prompt. Later there are never more than the stages need."""
    module = make(12, Partition.uniform(12, stages).ranges, 1, 2, **how)
    found, span = differences(module, prompts, 40, seed=5)  # outside of inference mode, as a caller may be
    assert max(found) < 1e-4
    assert span == 2 * (module.config.n + 1)


def test_tokens_outside_of_the_draft_vocabulary_are_impossible() -> None:
    ids = [5, 9, 300]
    module = make(4, Partition.uniform(4, 2).ranges, 1, 0, vocabulary=ids)
    seen = []

    def select(logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        seen.append(logits)
        return logits.argmax(-1).tolist()

    drafter = ModuleDrafter(module, torch.randn(VOCABULARY, 64).__getitem__)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        drafter.draft([DraftRequest(0, [1], 1)])
    drafter.start([[1, 2]], 20, select)
    for index in drafter.features:
        drafter.observe(index, [0, 0], [0, 1], torch.randn(2, 64))
    with pytest.raises(RuntimeError, match=r"anchor 2 of row 0, position 2 was not observed"):
        drafter.draft([DraftRequest(0, [1, 2, 3, 4], 1)])
    (token,) = drafter.draft([DraftRequest(0, [1, 2, 3], 1)])
    assert seen[0].shape == (1, VOCABULARY)
    assert torch.isfinite(seen[0]).nonzero()[:, 1].tolist() == ids
    assert token in ids


def test_narrow_last_block_equals_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipespec_train import students

    module = make(6, Partition.uniform(6, 3).ranges, 2, 1)  # grouped heads
    anchors = torch.randn(2, 11, len(module.config.anchors), module.config.hidden)
    with torch.no_grad():
        narrow = simulate(module, anchors, 3)
        monkeypatch.setattr(students, "_LIKE_LLAMA", ())
        assert torch.allclose(simulate(module, anchors, 3), narrow, atol=1e-5)


# ---- files


@pytest.fixture(scope="module")
def big() -> LlamaForCausalLM:
    return random_llama(4, layers=4)


@pytest.fixture
def saved(big: LlamaForCausalLM, tmp_path: Path) -> Path:
    stages = Partition.uniform(4, 2).ranges
    filled(DraftModule.of_target(big, DraftModuleConfig.for_target(big, stages)), 0).save(tmp_path)
    return tmp_path


def test_round_trip(big: LlamaForCausalLM, saved: Path) -> None:
    module = DraftModule.load(saved, target=big, stages=Partition.uniform(4, 2).ranges)
    again = filled(DraftModule.of_target(big, module.config), 0)
    assert module.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())
    assert torch.equal(module.norm.weight, big.model.norm.weight)
    assert {f.name for f in saved.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}


def test_begins_with_the_targets_weights(big: LlamaForCausalLM) -> None:
    config = DraftModuleConfig.for_target(big, Partition.uniform(4, 2).ranges, layers=2, vocabulary=[7, 3, 11])
    module = DraftModule.of_target(big, config)
    assert config.vocabulary == (3, 7, 11)
    assert torch.equal(module.head.weight, big.lm_head.weight[[3, 7, 11]])
    for own, theirs in zip(module.layers, big.model.layers[2:], strict=True):
        assert torch.equal(own.mlp.up_proj.weight, theirs.mlp.up_proj.weight)


def test_digest_of_files_is_the_models(big: LlamaForCausalLM, tmp_path: Path) -> None:
    digest = target_digest(big)
    big.save_pretrained(tmp_path / "one")
    big.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert target_digest(tmp_path / "one") == target_digest(tmp_path / "many") == digest
    tied = random_llama(4, layers=2)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    assert target_digest(tmp_path / "tied") == target_digest(tied)
    assert target_digest(random_llama(4, layers=4).to(torch.bfloat16)) == digest


def test_digest_sees_every_parameter(big: LlamaForCausalLM) -> None:
    digests = {target_digest(big)}
    names = [name for name, _ in big.named_parameters()]
    for name in names:
        other = random_llama(4, layers=4)
        with torch.no_grad():
            other.get_parameter(name).mul_(1.5)
        digests.add(target_digest(other))
    assert len(digests) == len(names) + 1


def test_another_target_or_split_is_refused_before_weights_are_read(big: LlamaForCausalLM, saved: Path) -> None:
    (saved / WEIGHTS_FILE).unlink()
    for target, message in [
        (random_llama(5, layers=4), "trained for another target"),
        (random_llama(4, layers=3), "target with 4 layers; this one has 3"),
        (random_llama(4, layers=4, hidden=32), "target with 64 hidden units"),
        (random_llama(4, layers=4, vocabulary=400), "target with 320 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            DraftModule.load(saved, target=target)
    with pytest.raises(ValueError, match=r"trained for the stages 0-1 2-3, not for 0-0 1-3"):
        DraftModule.load(saved, target=big, stages=((0, 1), (1, 4)))
    with pytest.raises(FileNotFoundError, match="no draft module's weights"):
        DraftModule.load(saved, target=big)


def test_damaged_files(saved: Path) -> None:
    file = saved / WEIGHTS_FILE
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if k != "head.weight"}, file)
    with pytest.raises(ValueError, match=r"(?s)does not fit.*head\.weight"):
        DraftModule.load(saved)
    save_file(weights | {"head.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(ValueError, match=r"(?s)does not fit.*head\.weight"):
        DraftModule.load(saved)
    for damaged, text, message in (
        (file, "x" * 40, "damaged"),
        (saved / CONFIG_FILE, "{", "damaged"),
        (saved / CONFIG_FILE, '{"stages": []}', "lacks the fields anchors"),
    ):
        damaged.write_text(text)
        with pytest.raises(ValueError, match=message):
            DraftModule.load(saved)
    (saved / CONFIG_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="no draft module"):
        DraftModule.load(saved)


def test_configs_from_which_no_module_can_be_made(saved: Path) -> None:
    """Each error names the file."""
    good = json.loads((saved / CONFIG_FILE).read_text())
    for name, value in [
        ("stages", [[]]),
        ("stages", "x"),
        ("anchors", "x"),
        ("anchors", [1, 2]),
        ("vocabulary", ["x"]),
        ("target", [[]]),
        ("target", good["target"] | {"rms_norm_eps": "x"}),
        ("target", good["target"] | {"num_attention_heads": 0}),
        ("target", good["target"] | {"model_type": "x"}),
        ("target", good["target"] | {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}),
    ]:
        (saved / CONFIG_FILE).write_text(json.dumps(good | {name: value}))
        with pytest.raises(ValueError, match=re.escape(str(saved / CONFIG_FILE))):
            DraftModule.load(saved)
    (saved / CONFIG_FILE).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        DraftModule.load(saved)


def test_contradictory_configs(big: LlamaForCausalLM) -> None:
    good = DraftModuleConfig.for_target(big, Partition.uniform(4, 2).ranges)
    assert DraftModuleConfig.from_json(json.loads(json.dumps(good.to_json()))) == good
    for wrong, message in [
        ({"stages": ((0, 2), (2, 3))}, "cover all 4"),
        ({"stages": ((0, 2), (3, 4))}, "consecutive"),
        ({"stages": ()}, "consecutive"),
        ({"anchors": (1, 2)}, "ascend from 0"),
        ({"anchors": (0, 5)}, "anchor 5 does not exist"),
        ({"layers": 0}, "of 0 layers"),
        ({"vocabulary": (3, 3)}, "ascending"),
        ({"vocabulary": (3, 320)}, "ascending token ids of the target's 320"),
        ({"version": 2}, "format 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(good, **wrong)
