"""Ranks: the processes of a program that torchrun, or another launcher with its environment variables, has started."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

START_S = 300.0
"""Longest time for importing and loading. If a rank ends meanwhile, torchrun ends the others at once."""

_stores: dict[tuple[str | None, ...], tuple[Any, int, int]] = {}
"""The store of each torchrun environment: one per process for all groups, which follow each other."""

_groups = itertools.count()
"""Number of the next group. All ranks make their groups in the same order, and each has its own prefix in the store."""


class RankError(RuntimeError):
    """Another rank has ended, is late, or has failed. The group of ranks cannot be used any more."""


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks. Raises ``ValueError`` where no launcher has set them."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "there are no ranks: start this with torchrun --nproc-per-node ... (RANK and WORLD_SIZE are not set)"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join_store(start_s: float) -> tuple[Any, int, int]:
    """Join the store of the launcher's environment variables.

    Returns:
        The part of the store for a new group, this rank, and the number of ranks.

    Raises:
        RankError: Not all ranks have come within ``start_s`` seconds, or one has ended, or MASTER_ADDR or MASTER_PORT cannot be used.
    """
    here = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    try:
        if here not in _stores:
            _stores[here] = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))
    except dist.DistError as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            what = f"MASTER_PORT={port} is in use on this machine: choose another one"
        elif not _is_known(address):
            what = f"MASTER_ADDR={address} is no address that this machine knows"
        else:
            what = f"not all ranks have come within {start_s:g} s, or one has ended"
        raise RankError(f"{what}: {str(error).splitlines()[0]}") from error
    whole, rank, world = _stores[here]
    return dist.PrefixStore(f"pipespec/{next(_groups)}", whole), rank, world


def _is_known(address: str | None) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is too long
        return False
    return True


def own_device(device: torch.device | str, local_rank: int) -> torch.device:
    """The device of a machine's rank number ``local_rank``. Raises ``ValueError`` if the device does not exist."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={str(device)!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: ranks compute on 'cpu' or 'cuda'")
    if found.type == "cpu":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"device={str(device)!r}: torch finds no GPU on this machine; use device='cpu'")
    index = local_rank if found.index is None else found.index
    if index >= count:
        raise ValueError(
            f"device={str(device)!r}: GPU {index} is wanted and this machine has {count}: start fewer ranks here, or let them share one "
            "with device='cuda:0'"
        )
    return torch.device("cuda", index)
