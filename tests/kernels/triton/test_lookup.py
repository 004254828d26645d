"""What the kernel of ``prompt_lookup`` has beyond the operation: divisions of a text, a work space, bad numbers on the device, and the native index's words."""

import pytest
import torch

from pipespec_kernels import ops
from pipespec_kernels._native import NgramIndex
from pipespec_kernels.triton import Config, prompt_lookup

from ..cases import Case, Draw, each

CONFIGS = [Config(8, 1, 1), Config(8, 1, 3), Config(32, 2, 2), Config(16, 1, 100)]


def int32(*values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_division_of_a_text(config: Config, device: torch.device) -> None:
    """Several launches with one work space, in which each leaves zeros."""
    workspace = torch.zeros(2 * 6, dtype=torch.int64, device=device)
    proposed = 0
    for seed in range(12):
        case = Case("prompt_lookup", Draw(seed, torch.float32, kernels=True, rows=4, columns=4))
        given = each(case.arguments, lambda _, x: x.to(device, copy=True))
        corpus = given.pop("corpus")
        selected = torch.full_like(given["tokens"], 7)
        prompt_lookup(**given, corpus=corpus, selected=selected, workspace=workspace, config=config)
        assert torch.equal(selected.cpu(), case.results[0])
        for name, wanted in case.after.items():
            assert torch.equal(given[name].cpu(), wanted), name
        assert not workspace.any()
        proposed += int((selected >= 0).sum())
    assert proposed > 30


def test_bad_numbers_on_the_device_stay_in_their_row(device: torch.device) -> None:
    """Of tokens, of draft tokens, and of the text: a row does nothing, and the next one is right."""
    bad = [(-1, 0, 3), (5, 0, 3), (2, 2, 3), (2, -1, 3), (1, 0, -1), (2, 0, 9), (1, 0, 2**31 - 1)]
    fed, drafted, lengths = (int32(*(numbers[i] for numbers in bad), (1, 0, 7)[i], device=device) for i in range(3))
    tokens = torch.ones((8, 4), dtype=torch.int32, device=device)
    history = torch.tensor([[1, 5, 1, 6, 2, 3, 4, 0, 0, 0]], dtype=torch.int32, device=device).repeat(8, 1)
    before, selects = history.clone(), torch.ones(8, dtype=torch.int32, device=device)
    workspace = torch.zeros(16, dtype=torch.int64, device=device)
    selected = torch.zeros_like(tokens)
    prompt_lookup(tokens, fed, drafted, selects, history, lengths, 2, 1, 4, None, selected, workspace)
    assert selected.tolist() == [[-1] * 4] * 7 + [[6, 2, -1, -1]]
    assert torch.equal(history[:7], before[:7])
    assert history[7].tolist() == [1, 5, 1, 6, 2, 3, 4, 1, 6, 2]
    assert tokens[7].tolist() == [1, 6, 1, 1]
    assert (tokens[:7] == 1).all()
    assert not workspace.any()


def follower(text: list[int], corpus: list[int]) -> int:
    """What follows the latest earlier occurrence of the longest suffix of 2 to 4 tokens; of equally long ones that in the text."""
    for n in range(min(4, len(text)), 1, -1):
        for source in (text, corpus):
            for end in range(len(source) - 1, n - 1, -1):
                if source[end - n : end] == text[-n:]:
                    return source[end]
    return -1


@pytest.mark.parametrize("seed", range(6))
def test_the_native_indexs_words(seed: int, device: torch.device) -> None:
    """One token at a time, the kernel looks up the same as a search, and without a corpus as the native index."""
    text = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    corpus = text[20:] if seed % 2 else None
    index = NgramIndex(2, 4)
    history = torch.zeros((1, 50), dtype=torch.int32, device=device)
    found = 0
    for begin, token in enumerate(text):
        one = int32(1, device=device)
        tokens = torch.tensor([[token]], dtype=torch.int32, device=device)
        given = None if corpus is None else int32(*corpus, device=device)
        lengths = int32(begin, device=device)
        got = ops.prompt_lookup(
            tokens, one, one - one, one.clone(), history, lengths, count=1, min_match=2, max_match=4, corpus=given
        )
        index.write(begin, torch.tensor([token], dtype=torch.int32).numpy())
        assert got.tolist() == [[follower(text[: begin + 1], corpus or [])]]
        assert corpus is not None or got.tolist() == [[index.match()[0]]]
        found += int(got) >= 0
    assert found > 20
