"""Prompts of one row, and the comparison of a pipeline with its target's own ``generate()``."""

from collections.abc import Callable
from typing import Any

import torch

from tests.conftest import random_prompts


def one_prompt(seed: int, shortest: int = 8, longest: int | None = None) -> torch.Tensor:
    """``[1, P]``, of ``shortest`` tokens unless ``longest`` is given."""
    return random_prompts(1, seed=seed, shortest=shortest, longest=longest or shortest)[0][None]


def text_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.sequences


def own_text(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The target's own text, greedy unless the arguments say otherwise."""
    return text_of(target.generate(*args, **{"do_sample": False} | kwargs))


def same_text(pipe: Any, *args: Any, fresh: Callable[[], dict[str, Any]] = dict, **kwargs: Any) -> torch.Tensor:
    """The pipeline's text, after a comparison with the target's own. ``fresh`` makes arguments that have a state, new ones for each of the two."""
    wanted = own_text(pipe.target, *args, **kwargs, **fresh())
    got = text_of(pipe.generate(*args, **kwargs, **fresh()))
    assert (got.dtype, got.device) == (torch.long, wanted.device)
    assert torch.equal(got, wanted), f"wanted {wanted.tolist()}, got {got.tolist()}"
    return got


def chunk(ids: torch.Tensor, mask: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A text and its mask, with more columns."""
    ids = torch.cat([ids, more], 1)
    return ids, torch.cat([mask, mask.new_ones((len(ids), ids.shape[1] - mask.shape[1]))], 1)
