"""The fused form of a draft head: its slots over a static cache, from the operations of :mod:`pipespec_kernels.ops`. For captured steps.

The first layer has two launches more than one of a model: it reads the embeddings of tokens beside the hidden states, each with a norm of its own. ``fc`` is one
product of few rows. See :mod:`pipespec.engine.fused`.
"""

from __future__ import annotations

from typing import Any

import torch

from pipespec.engine.cache import RowCache
from pipespec.engine.fused import FusedForm, _Product, _weight, check_separate, merge
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec_kernels import ops


class FusedHead(FusedForm):
    """A draft head's forward over static caches. :meth:`add_cache` comes before the first forward over a cache.

    Args:
        head: A :class:`pipespec.engine.head.DraftHead`, whose matrices of one input are merged, see :func:`fused_head`.

    Raises:
        NotReadable: A part of the head has no operation here.
    """

    def __init__(self, head: Any) -> None:
        super().__init__(head.layer_parts())
        self._norms_output = bool(head.config.norm_output)
        self._fc = _Product.of((head.fc,))
        if self.has_opaque or self._fc.modules:
            raise NotReadable("its quantised modules, or those with an adapter, are called as they are")
        first = head.layers[0]
        self._side_norms = _weight(first.input_layernorm), _weight(first.hidden_norm)
        self._adds_to_norm = bool(first.norm_before_residual)
        self._norms_of_input = (
            None if head.input_norm is None else _weight(head.input_norm),
            () if head.fc_norm is None else tuple(map(_weight, head.fc_norm)),
        )

    def fuse(self, given: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
        """States ``[rows, q, H]`` of the target's hidden states ``[rows, q, count * target_hidden]``, at most 16 in all.

        ``new``: int32 ``[rows]``: where all are 0, nothing is computed. None: it is.
        """
        whole, parts = self._norms_of_input
        features = given.flatten(0, 1)
        if whole is not None and parts:
            features, whole = ops.add_rms_norm(features, None, whole, **self._norm)[0], None
        if parts:
            normed, size = torch.empty_like(features), features.shape[1] // len(parts)
            for i, weight in enumerate(parts):
                columns = slice(i * size, (i + 1) * size)
                ops.add_rms_norm(features[:, columns], None, weight, out=normed[:, columns], **self._norm)
            features = normed
        norm: dict[str, Any] = {} if whole is None else {"norm": whole, **self._norm}
        fused = ops.linear_small(features, *self._fc.runs[0].whole(), query_lens=new, **norm)
        return fused.view(*given.shape[:2], -1)

    def run(self, embeds: torch.Tensor, states: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Run slots, as :meth:`pipespec.engine.head.DraftHead.forward`, over the cache whose lengths and columns the device sets.

        Args:
            embeds: ``[rows, q, H]``, ``rows * q`` at most 16, like ``states``.
            states: ``[rows, q, H]``.

        Returns:
            ``[rows, q, H]``; rows without new columns have any values.
        """
        rows, q, size = states.shape
        side, given = embeds.reshape(rows * q, size), states.reshape(rows * q, size)
        step = self._step(given, rows, q, cache)
        both = given.new_empty((rows * q, 2 * size))
        ops.add_rms_norm(side, None, self._side_norms[0], out=both[:, :size], **self._norm)
        normed = ops.add_rms_norm(given, None, self._side_norms[1], out=both[:, size:], **self._norm)[0]
        hidden = self._behind_queries(self._queries(both, 0, step), normed if self._adds_to_norm else given, 0, step)
        for i, layer in enumerate(self._layers[1:], 1):
            queries = self._queries(hidden, i, step, norm=layer.norms[0], **self._norm)
            hidden = self._behind_queries(queries, hidden, i, step)
        cache.close()
        if self._norms_output:
            hidden, _ = ops.add_rms_norm(hidden, None, self._last_norm, **self._norm)
        return hidden.view(rows, q, size)

    def logits(self, hidden: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
        """Logits ``[rows, draft_vocabulary]`` of outputs ``[rows, H]``, at most 16 rows."""
        norm: dict[str, Any] = {} if self._norms_output else {"norm": self._last_norm, **self._norm}
        return ops.linear_small(hidden, *self._head.runs[0].whole(), query_lens=new, **norm)


def fused_head(head: Any) -> FusedHead:
    """The fused form of a draft head, after its outputs agreed with those of the head's own modules on probes. It merges the weights of the head.

    Raises:
        NotReadable: A part of the head has no operation here, the outputs do not agree, or its weights cannot be merged.
    """
    parts = head.layer_parts()
    matrices = (matrix for matrices in families.products_of(parts) for matrix in matrices)
    if not all(hasattr(matrix, "weight") or hasattr(matrix, "tiles") for matrix in matrices):
        raise NotReadable("its matrices are in blocks for a CPU")
    groups = families.of_one_input(parts)
    check_separate(head, groups)
    merge(groups)
    form = FusedHead(head)
    try:
        _check(head, form)
    except (TypeError, ValueError) as error:
        raise NotReadable(f"an operation does not take it: {error}") from error
    return form


_AGREES = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest deviation from the head's own modules, as a part of the root mean square of what they give. No text depends on it: a wrong head would only draft badly."""
_AGREES_16_BITS = 0.04


def _check(head: Any, form: FusedHead) -> None:
    """Raise :class:`NotReadable` unless slots with hidden states of a target, and then one without, give what they give in the head's own modules."""
    device, dtype, block = head.device, head.dtype, head.block
    rows, widths, noise = 2, (3, 1), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float32, device="cpu").to(device, dtype)

    with torch.inference_mode():
        caches = [RowCache(block, rows, sum(widths), dtype=dtype, device=device, static=True) for _ in range(2)]
        form.add_cache(caches[1])
        begin = torch.zeros(rows, dtype=torch.int32, device=device)
        states: list[torch.Tensor] = []
        for q in widths:
            new, embeds = torch.full_like(begin, q), draw(rows, q, block.hidden_size)
            for cache in caches:
                cache.follow(begin, new)
            if not states:
                features = draw(rows, q, head.fc.in_features)
                states = [head.fuse(features), form.fuse(features, new)]
                _compare("fc", *states)
            own = head(embeds, states[0], caches[0].positions(q), caches[0].masks(q), caches[0])
            ours = form.run(embeds, states[1], caches[1])
            _compare("outputs", own, ours)
            _compare("logits", head.logits(own[:, -1]), form.logits(ours[:, -1], new))
            states = [own[:, -1:], ours[:, -1:]]
            begin = begin + q


def _compare(what: str, own: torch.Tensor, ours: torch.Tensor) -> None:
    error, size = ((x.double().square().mean().sqrt()) for x in (ours - own, own))
    # Not a number compares false.
    if not bool(error <= _AGREES.get(own.dtype, _AGREES_16_BITS) * size):
        raise NotReadable(f"its {what} differ from those of its modules by {float(error):.2g}, of {float(size):.2g}")
