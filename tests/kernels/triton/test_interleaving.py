"""The tickets by which the programs of a launch combine their results, in random orders under a weak memory model, with planted faults."""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from pipespec_kernels.noise import Noise
from pipespec_kernels.triton.launch import INTERPRETED, Config, Workspace
from tests.support.interleaving import interleaved
from tests.trials import trials

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="orders are chosen in the interpreter only")

ORDERS = trials(ci=4, nightly=1000)
LAUNCHES = 2
"""In one order. The second one finds the tickets that the first one has left."""


class Greedy:
    """A row whose draft tokens are right and one whose first is rejected; two blocks per column."""

    module = import_module("pipespec_kernels.triton.verify")

    def __init__(self) -> None:
        self.logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
        choices = self.logits.argmax(-1)
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        tokens[:, 1:] = choices[:, :-1]
        tokens[1, 1] = (tokens[1, 1] + 1) % 16
        self.given = tokens, torch.tensor([3, 3]), torch.tensor([2, 2])
        self.workspace = Workspace(2, 3, "cpu")
        self.noise: Noise | None = None

    def __call__(self, module: ModuleType) -> tuple[torch.Tensor, ...]:
        kwargs = {"noise": self.noise, "exact": True, "workspace": self.workspace, "config": Config(8, 1, 2)}
        return (*module.verify(self.logits, *self.given, **kwargs), self.workspace.words.clone())


class Coupled(Greedy):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise(torch.tensor([3, 4]), torch.tensor([7, 8]), torch.ones(2))


class Rejection(Coupled):
    module = import_module("pipespec_kernels.triton.rejection_sample")

    def __init__(self) -> None:
        super().__init__()
        self.draft = self.logits + torch.randn(self.logits.shape, generator=torch.Generator().manual_seed(2))

    def __call__(self, module: ModuleType) -> tuple[torch.Tensor, ...]:
        kwargs = {"exact": True, "workspace": self.workspace, "config": Config(8, 1, 2)}
        found = module.rejection_sample(self.logits, *self.given, self.draft, self.noise, **kwargs)
        return (*found, self.workspace.words.clone())


class Attention:
    """Three blocks share the keys of a row, of which two form a group."""

    module = import_module("pipespec_kernels.triton.attention")

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.q, self.keys, self.values = (
            torch.randn(shape, generator=random) for shape in ((2, 2, 2, 16), *[(2, 1, 48, 16)] * 2)
        )
        # One ticket per row, and one of each group. attention_tickets() reckons with longer spans, and too few would take two launches.
        self.workspace = torch.zeros(2 * (1 + 2), dtype=torch.int32)

    def __call__(self, module: ModuleType) -> tuple[torch.Tensor, ...]:
        given = self.q, self.keys, self.values, torch.tensor([46, 20])
        with mock.patch.multiple(module, GROUPED=2, INVARIANT_SPAN=16):
            found = module.verify_attention(*given, invariant=True, workspace=self.workspace)
        return found, self.workspace.clone()


class Lookup:
    """Three blocks share the text of a row, and one has the corpus. One row proposes tokens of its text, one of the corpus, and one passes on a draft token."""

    module = import_module("pipespec_kernels.triton.lookup")

    def __init__(self) -> None:
        self.history = torch.tensor([[7, 8, 9, 1, 2, 8, 3, 4, 5, 6, 0, 7] + 8 * [0]] * 3, dtype=torch.int32)
        self.tokens = torch.tensor([[8, 0, 0, 0], [5, 5, 0, 0], [1, 3, 0, 0]], dtype=torch.int32)
        self.counts = torch.tensor([[1, 2, 2], [0, 0, 1]], dtype=torch.int32)
        self.workspace = torch.zeros(6, dtype=torch.int64)

    def __call__(self, module: ModuleType) -> tuple[torch.Tensor, ...]:
        fed, drafted = self.counts.clone()
        tokens, history, selected = self.tokens.clone(), self.history.clone(), torch.full((3, 4), -7, dtype=torch.int32)
        lengths, corpus = torch.full((3,), 12, dtype=torch.int32), torch.tensor([5, 5, 4], dtype=torch.int32)
        given = tokens, fed, drafted, torch.ones(3, dtype=torch.int32), history, lengths, 3, 2, 4, corpus
        module.prompt_lookup(*given, selected, self.workspace, Config(8, 1, 3))
        return tokens, fed, drafted, history, selected, self.workspace.clone()


KINDS = (Greedy, Coupled, Rejection, Attention, Lookup)


def differs(kind: Callable[[], Any], module: ModuleType, orders: Iterable[int]) -> int | None:
    """The first order in which the results are not those of one program after the other; None: there is none."""
    wanted = kind()(kind.module)  # type: ignore[attr-defined]
    for seed in orders:
        case = kind()
        with interleaved(seed) as order:
            found = [case(module) for _ in range(LAUNCHES)]
        assert order.switches > 0
        if not all(torch.equal(a, b) for results in found for a, b in zip(results, wanted, strict=True)):
            return seed
    return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_order_changes_a_result(kind: type) -> None:
    assert differs(kind, kind.module, range(ORDERS)) is None


def planted(module: ModuleType, right: str, wrong: str, path: Path) -> ModuleType:
    """A copy of a module with ``wrong`` in the place of ``right``."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) >= 1, right
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[path.stem]
    return made


ORDER = 'sem="acq_rel"'
CONTROL = [(kind, "import triton", "import triton", 0) for kind in (Greedy, Rejection, Attention, Lookup)]
FAULTS = [
    (Greedy, ORDER, 'sem="release"', 0),  # the words of others may be old
    (Greedy, "(draft_tokens + 1) * splits - 1", "(draft_tokens + 1) * splits - 2", 0),
    (Greedy, "tl.store(ticket + row, 0)", "pass", 0),
    (Greedy, "tl.store(words, 0, mask=columns <= draft_tokens)", "pass", 0),
    (Greedy, "known <= width - column", "known < width - column", 12),  # a column is skipped too early
    (Rejection, ORDER, 'sem="release"', 0),
    (Rejection, ORDER, 'sem="acquire"', 18),
    (Rejection, "== splits - 1", "== splits - 2", 0),
    (Attention, ORDER, 'sem="relaxed"', 0),
    (Attention, ORDER, 'sem="release"', 0),
    (Attention, ORDER, 'sem="acquire"', 0),  # our sums may come after our ticket
    (Attention, "== stop - begin - 1", "== 0", 0),
    (Attention, "== groups - 1", "== groups - 2", 0),
    (Attention, "tl.store(ticket, 0)", "pass", 0),
    (Attention, "tl.store(ticket + 1 + group, 0)", "pass", 0),
    (Lookup, ORDER, 'sem="release"', 0),
    (Lookup, "tl.num_programs(0) - 1", "tl.num_programs(0) - 2", 0),
    (Lookup, "tl.store(best + row, 0)", "pass", 0),
    (Lookup, "tl.store(ticket + row, 0)", "pass", 0),
]
"""The last one: an order from which on one shows it soon."""


@pytest.mark.parametrize(("kind", "right", "wrong", "begin"), [*FAULTS, *CONTROL])
def test_a_planted_fault_is_found(
    kind: type, right: str, wrong: str, begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a fault reads before it is there must lead nowhere, where it is a place in memory.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    made = planted(kind.module, right, wrong, tmp_path / "planted_kernel.py")
    found = differs(kind, made, range(begin, begin + (200 if right != wrong else 1)))
    assert (found is None) == (right == wrong)
