"""The attention mask of training: one pass over all depths of all positions, in which each row sees what it sees in decoding."""

from __future__ import annotations

import torch


def depths(fill: int, n: int) -> tuple[int, ...]:
    """The depths that exist with ``fill`` tokens in flight in ``n`` stages, deepest first: n (complete), then fill - 1 to 0.

    Training has one block of rows per depth and not per type: two depths of one type fuse the same anchors but see different rows.

    Raises:
        ValueError: Not 1 <= fill <= n.
    """
    if not 1 <= fill <= n:
        raise ValueError(f"{fill} tokens cannot be in flight in {n} stages")
    return (n, *range(fill - 1, -1, -1))


def visible(length: int, fill: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of one pass, with blocks of rows in the order of :func:`depths`.

    A query of depth d at position t existed when the newest position was t + d, or at any later time if it is complete. The token at
    position u <= t then has the lag d + t - u. With a lag below ``fill`` it is in flight, and its depth is its lag. Otherwise it is
    complete. So each query sees one row per earlier position, and itself (SPD, section 4.2; the lag counts from the newest token).

    Returns:
        For S = ``length`` positions bool ``[(fill + 1) S, (fill + 1) S]``, true where the row of the first index sees the row of the second.
    """
    kinds = torch.tensor(depths(fill, n), device=device)
    time = torch.arange(length, device=device)
    since = time[:, None] - time  # [query time, key time]
    lag = kinds[:, None, None] + since  # [query depth, query time, key time]
    wanted = torch.where(lag < fill, lag, n)
    seen = (wanted[:, :, None, :] == kinds[None, None, :, None]) & (since >= 0)[None, :, None, :]
    rows = len(kinds) * length
    return seen.reshape(rows, rows)
