"""Drafts with a draft module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipespec.engine.cache import RowCache
from pipespec.models.parts import ModelParts
from pipespec_spd.draft_module import DraftModule
from pipespec_spd.drafting import Drafter, SampleTokens
from pipespec_spd.machine import DraftRequest
from pipespec_spd.sections import ModelSection, open_sections

_CHUNK = 64
"""Most columns of one forward over the prompt."""


class ModuleDrafter(Drafter):
    """Drafts with a :class:`DraftModule`, for all rows of a batch in one forward, each at its own length.

    A forward runs two kinds of positions. Complete positions that are not cached yet, at most one after the prompt, stay in the cache.
    Positions in flight are rolled back after the forward. So the cache holds complete positions only, and a flush needs no rollback of it.
    The anchors of a position are kept until it is cached: beside the cache, memory depends on the stages and not on the text.

    Args:
        module: The draft module.
        embedding: The target's embedding, from ids ``[...]`` to ``[..., H]``. The drafter computes stream 0 with it, since a token that
            has just entered has passed no stage.
    """

    def __init__(self, module: DraftModule, embedding: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module, self.embedding = module.eval(), embedding
        config = module.config
        self.features = config.anchors[1:]
        weight = module.head.weight
        self._blocks = ModelSection(ModelParts(module.block_config, list(module.layers), rotary=module.rotary_emb))
        self._head = ModelSection(ModelParts(module.block_config, norm=module.norm, head=module.head))
        self._device, self._dtype = weight.device, weight.dtype
        self._column = {index: i for i, index in enumerate(self.features)}
        ids = config.vocabulary
        self._ids = None if ids is None else torch.tensor(ids, device=self._device)
        self._cache: RowCache | None = None
        self._select: SampleTokens | None = None

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        rows, n = len(prompts), self.module.config.n
        room = capacity + max(_CHUNK, n + 1)
        if self._cache is not None and self._cache.fits(rows, room):
            self._cache.reset()
        else:
            self._cache = RowCache(self.module.block_config, rows, room, dtype=self._dtype, device=self._device)
        open_sections([self._blocks, self._head], beside=self._cache.nbytes)
        self._select = select
        self._small = 2 * (n + 1)
        self._allocate(rows, self._small)

    def _allocate(self, rows: int, span: int) -> None:
        """Allocate the anchors of positions that are not cached. Position p of a row has slot p % span."""
        k, hidden = len(self.features), self.module.config.hidden
        self.span = span
        with torch.inference_mode(False):  # inference tensors are read-only outside of inference mode
            self._held = torch.zeros((rows, span, k, hidden), dtype=self._dtype, device=self._device)
        self._of = np.full((rows, span, k), -1, dtype=np.int64)  # position whose anchor a slot holds

    def _resize(self, span: int) -> None:
        held, of = self._held, self._of
        self._allocate(len(of), span)
        row, slot, column = np.nonzero(of >= 0)
        positions = of[row, slot, column]
        self._of[row, positions % span, column] = positions
        self._held[row, positions % span, column] = held[row, slot, column]

    @torch.no_grad()
    def observe(self, index: int, rows: list[int], positions: list[int], values: torch.Tensor) -> None:
        column = self._column.get(index)
        if column is None:
            return
        cache = self._running()
        lengths = cache.lengths
        keep = [i for i, (row, at) in enumerate(zip(rows, positions, strict=True)) if at >= lengths[row]]
        if not keep:
            return
        need = max(positions[i] - lengths[rows[i]] for i in keep) + 1
        if need > self.span:
            self._resize(1 << (need - 1).bit_length())
        row, at = np.asarray(rows)[keep], np.asarray(positions)[keep]
        self._of[row, at % self.span, column] = at
        given = values if len(keep) == len(rows) else values[torch.tensor(keep, device=values.device)]
        slot = torch.from_numpy(at % self.span).to(self._device)
        self._held[torch.from_numpy(row).to(self._device), slot, column] = given.to(self._device, self._dtype)

    @torch.inference_mode()
    def draft(self, requests: list[DraftRequest]) -> list[int]:
        """Return one token per request. Raises RuntimeError if a required anchor was never observed."""
        cache, n = self._running(), self.module.config.n
        begin, done, newest = list(cache.lengths), list(cache.lengths), list(cache.lengths)
        for request in requests:
            newest[request.row] = len(request.tokens)
            done[request.row] = len(request.tokens) - request.fill
        tokens = {request.row: request.tokens for request in requests}
        while max(d - b for b, d in zip(begin, done, strict=True)) > _CHUNK:  # prompts
            until = [min(d, b + _CHUNK) for b, d in zip(begin, done, strict=True)]
            self._feed(tokens, begin, until, until)
            begin = until
        rows = self._feed(tokens, begin, done, newest)
        last = [newest[request.row] - 1 - begin[request.row] for request in requests]
        picked = rows[[request.row for request in requests], last]
        logits = self._head.logits(picked[:, None])[:, 0]
        if self._ids is not None:
            full = logits.new_full((len(requests), int(self.module.config.target["vocab_size"])), -torch.inf)
            logits = full.index_copy_(1, self._ids, logits)
        if self.span > self._small and all(len(r.tokens) - cache.lengths[r.row] <= n + 1 for r in requests):
            self._resize(self._small)
        assert self._select is not None
        return self._select(
            logits.float(), [request.row for request in requests], [len(request.tokens) for request in requests]
        )

    def _feed(
        self, tokens: dict[int, Sequence[int]], begin: list[int], done: list[int], end: list[int]
    ) -> torch.Tensor:
        """Run positions ``begin`` to ``end - 1`` of each row, ``[rows, q, H]``. The cache keeps those below ``done``."""
        cache, module, config = self._running(), self.module, self.module.config
        width = max(e - b for b, e in zip(begin, end, strict=True))
        places: dict[int, list[tuple[int, int, int]]] = {}
        for row, (b, d, e) in enumerate(zip(begin, done, end, strict=True)):
            for at in range(b, e):
                kind = config.types[config.n if at < d else e - 1 - at]
                places.setdefault(kind, []).append((row, at - b, at))
        fused = self._held.new_zeros((len(begin), width, config.hidden))
        for kind, found in places.items():
            row, column, at = np.asarray(found).T
            have = self._of[row, at % self.span, :kind] == at[:, None]
            if not have.all():
                i, j = np.argwhere(~have)[0]
                raise RuntimeError(f"anchor {self.features[j]} of row {row[i]}, position {at[i]} was not observed")
            ids = torch.tensor([tokens[r][p] for r, p in zip(row.tolist(), at.tolist(), strict=True)])
            entered = self.embedding(ids.to(self._device)).to(self._dtype)
            where, slots, columns = (torch.from_numpy(x).to(self._device) for x in (row, at % self.span, column))
            anchors = torch.cat([entered[:, None], self._held[where, slots, :kind]], dim=1)
            fused[where, columns] = module.fuse(anchors, kind)
        out, _ = self._blocks.run_layers(fused, cache)
        cache.truncate(done)
        return out

    def truncate(self, row: int, length: int) -> None:
        cache = self._running()
        if cache.lengths[row] > length:
            cache.truncate([length if i == row else held for i, held in enumerate(cache.lengths)])
        self._of[row][self._of[row] >= length] = -1

    def finish(self) -> None:
        """Release the anchors. The cache stays and is reused by a call that it has room for."""
        self._select = None
        self._allocate(0, self._small)

    def _running(self) -> RowCache:
        if self._cache is None or self._select is None:
            raise RuntimeError("no call is under way: call start() first")
        return self._cache
