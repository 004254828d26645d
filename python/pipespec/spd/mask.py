"""Who sees whom in training: all depths of all positions in one pass, each row seeing exactly what it sees in decoding."""

from __future__ import annotations

import torch


def depths(fill: int, n: int) -> tuple[int, ...]:
    """The depths that exist with ``fill`` tokens in flight in ``n`` stages, deepest first: complete (n), then fill - 1 .. 0.

    One block of rows per depth, not per type: two depths of the same type fuse the same anchors, but see other rows.
    ValueError unless 1 <= fill <= n.
    """
    if not 1 <= fill <= n:
        raise ValueError(f"{fill} tokens cannot be in flight in {n} stages")
    return (n, *range(fill - 1, -1, -1))


def visible(length: int, fill: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool ``[(fill + 1) * length, same]``: may the row of (depth, time) see that one? Blocks in the order of ``depths``.

    A query of depth d at time t existed when the newest position was t + d (or, complete, at any later time). The token at u <= t then has
    lag d + t - u: with a lag below ``fill`` it is in flight and its depth is its lag, otherwise it is complete. So each query
    sees one row per earlier position, and itself (SPD section 4.2; the lag counts from the newest token, not from the query).
    """
    kinds = torch.tensor(depths(fill, n), device=device)
    time = torch.arange(length, device=device)
    since = time[:, None] - time  # [query time, key time]
    lag = kinds[:, None, None] + since  # [query depth, query time, key time]
    wanted = torch.where(lag < fill, lag, n)
    seen = (wanted[:, :, None, :] == kinds[None, None, :, None]) & (since >= 0)[None, :, None, :]
    rows = len(kinds) * length
    return seen.reshape(rows, rows)
