""":func:`prompt_lookup`: the step of an n-gram index over texts that lie where the steps of the models do."""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.arguments import INT32, INT64

MAX_MATCH = 32
"""Maximum number of tokens that are compared: that of the compiled index, which the operations do not need."""


def prompt_lookup(
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    n_select: Tensor,
    history: Tensor,
    lengths: Tensor,
    *,
    count: int,
    min_match: int = 2,
    max_match: int = 8,
    corpus: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The step of an n-gram index that plan has filled: append its tokens to the text, and propose those that follow.

    Row ``b`` has the text ``history[b, :lengths[b]]``. The step feeds ``query_lens[b]`` tokens, the last ``num_draft_tokens[b]`` of them draft tokens of
    another draft. The others are appended to the text. Where ``n_select[b] > 0``, the row proposes the tokens that followed the latest earlier occurrence of the longest
    suffix of the text that has one, at most ``count``. Past its own end the text goes on with what is proposed. Without an occurrence of at least ``min_match`` tokens the row
    passes on the draft tokens, and without these it proposes nothing.

    ``query_lens``, ``num_draft_tokens`` and ``tokens`` then say that all proposed tokens but the last one were draft tokens, so that commit, which compares them with the
    result, appends all of them; or 0 where the row proposes nothing. What is proposed is also written to ``history``, behind the text.

    All tensors are contiguous, on one device.

    Args:
        tokens: int32 ``[B, Q]``, the tokens fed. Written to.
        query_lens: int32 ``[B]``, of ``tokens``; 0: the row does nothing. Written to.
        num_draft_tokens: int32 ``[B]``, less than ``query_lens``. Written to.
        n_select: int32 ``[B]``; 0: the row appends its tokens and proposes nothing.
        history: int32 ``[B, S]``. Written to.
        lengths: int32 ``[B]``, ``0 <= lengths <= S - query_lens``. On a GPU a row with other numbers does nothing.
        count: Maximum number of tokens that a row proposes, at least 1.
        min_match: Minimum number of tokens that must occur earlier, at least 1.
        max_match: Maximum number of tokens that are compared, ``min_match`` to 32.
        corpus: int32 ``[N]``: more text to look in, for all rows. Of equally long occurrences, those in the row's own text come first.
        out: int32 ``[B, Q]`` for the result.
        workspace: On a GPU, int64 of at least ``2 * B`` entries, all zero, as it is again afterwards: saves an allocation and a launch. Calls that may run at the same
            time need different ones. Ignored elsewhere.

    Returns:
        int32 ``[B, Q]``: the proposed tokens of each row, then -1.

    Raises:
        TypeError: Not a tensor, or not of that dtype.
        ValueError: Shapes, strides, devices, or numbers that do not fit; on the CPU also those in tensors. Nothing has been written then.

    Example::

        >>> history = torch.tensor([[7, 1, 2, 3, 4, 1, 0, 0, 0]], dtype=torch.int32)
        >>> tokens = torch.tensor([[2, 0, 0]], dtype=torch.int32)
        >>> one, none, lengths = (torch.tensor([n], dtype=torch.int32) for n in (1, 0, 6))
        >>> prompt_lookup(tokens, one, none, one.clone(), history, lengths, count=2)
        tensor([[ 3,  4, -1]], dtype=torch.int32)
        >>> tokens, one, none
        (tensor([[2, 3, 0]], dtype=torch.int32), tensor([2], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    batch, width = _check_all(tokens, query_lens, num_draft_tokens, n_select, history, lengths, corpus)
    for name, number in (("count", count), ("min_match", min_match), ("max_match", max_match)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be a number of tokens, got {type(number).__name__}")
    if count < 1:
        raise ValueError(f"count must be at least 1, is {count}")
    if not 1 <= min_match <= max_match <= MAX_MATCH:
        raise ValueError(f"need 1 <= min_match <= max_match <= {MAX_MATCH}, got {min_match} and {max_match}")
    count = min(count, width)
    selected = arguments.result(out, (batch, width), "out", tokens.device)
    if tokens.is_cpu:
        _check_values(query_lens, num_draft_tokens, lengths, width, history.shape[1])
    given = tokens, query_lens, num_draft_tokens, n_select, history, lengths, count, min_match, max_match, corpus
    kernels = dispatch.kernels(tokens)
    if kernels is None:
        reference.prompt_lookup(*given, selected)
        return selected
    if workspace is None:
        workspace = torch.zeros(2 * batch, dtype=INT64, device=tokens.device)
    else:
        arguments.check_contiguous(workspace, "workspace", INT64, (None,), tokens.device, "the tokens")
        if len(workspace) < 2 * batch:
            raise ValueError(f"workspace has {len(workspace)} entries, 2 * B is {2 * batch}")
    kernels.prompt_lookup(*given, selected, workspace)
    return selected


def _check_all(
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    n_select: Tensor,
    history: Tensor,
    lengths: Tensor,
    corpus: Tensor | None,
) -> tuple[int, int]:
    """The sizes ``B`` and ``Q``."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise TypeError(f"tokens must be a tensor [B, Q], got {type(tokens).__name__}")
    batch, width = tokens.shape
    counts = {"query_lens": query_lens, "num_draft_tokens": num_draft_tokens, "n_select": n_select, "lengths": lengths}
    shapes: dict[str, tuple[int | None, ...]] = {"tokens": (batch, width), "history": (batch, None)}
    for name, tensor in {"tokens": tokens, "history": history, **counts}.items():
        arguments.check_contiguous(tensor, name, INT32, shapes.get(name, (batch,)), tokens.device, "the tokens")
    if history.shape[1] == 0:
        raise ValueError("history has no room for a token")
    if corpus is not None:
        arguments.check_contiguous(corpus, "corpus", INT32, (None,), tokens.device, "the tokens")
        if len(corpus) == 0:
            raise ValueError("corpus is empty: pass None")
    return batch, width


def _check_values(query_lens: Tensor, num_draft_tokens: Tensor, lengths: Tensor, width: int, capacity: int) -> None:
    arguments.check_count_values(query_lens, num_draft_tokens, width)
    for row, (n, fed) in enumerate(zip(lengths.tolist(), query_lens.tolist(), strict=True)):
        if not 0 <= n <= capacity - fed:
            raise ValueError(f"row {row}: lengths must be 0 .. {capacity - fed}, so that {fed} tokens fit, is {n}")
