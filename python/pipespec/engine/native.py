"""The native form of a model's forward: one call into C++ per step, on packed copies of the weights.

A model of :data:`pipespec.models.families.FAMILIES` on the CPU takes this form after its logits were compared with the model's own forward. The
native sums are independent of the number of rows and columns, so a text does not depend on batch, drafts or schedule, in bfloat16 either.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec_kernels.decoder import NativeDecoder
from pipespec_kernels.env import host_memory

NATIVE = "native"
"""The value in the report for a stage in this form."""

TOLERANCE = 1e-5
"""Largest deviation of float32 logits on the probes, relative to the largest logit: some ten times what another order of summation makes."""

BY_CHANCE = 1.1
"""In 16 bits, the ratio of the errors of two forwards that round equally often, but not in the same places."""

_ROWS = 8192
"""Rows of the head that the reference computes at a time."""


class Form:
    """One way to call a model. It returns the logits of the last ``keep`` columns, and the cache grows.

    Attributes:
        identity: what the form depends on, when it was chosen.
        reason: why the model's form is not native; None where it is.
    """

    identity: object = None
    reason: str | None = None

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        raise NotImplementedError

    def is_current(self) -> bool:
        """Whether what the form has copied is still the model's."""
        return True


class NativeForm(Form):
    """A model packed for the native decoder.

    Args:
        model: one that :func:`pipespec.models.families.identity` accepts.
        like: a cache of the model.

    Raises:
        NotReadable: the decoder cannot take the model, or the copy would take more than half of the free memory.
    """

    def __init__(self, model: PreTrainedModel, like: RowCache) -> None:
        read = families.read(model)
        need, (total, free) = families.packed_bytes(model) + like.nbytes, host_memory()
        # The other half is for caches that grow, and for the rest of the machine.
        if total and need > free // 2:
            raise NotReadable(
                f"there is no room for a packed copy ({need >> 20} MiB with its cache, {free >> 20} are free)"
            )
        try:
            self.decoder = NativeDecoder(
                read.shape,
                read.layers,
                embedding=read.embedding,
                norm=read.norm,
                head=read.head,
                head_bias=read.head_bias,
            )
        except (ValueError, TypeError) as error:
            raise NotReadable(f"the decoder does not take it: {error}") from error
        self._scaled, self._rotary = read.scaled, read.rotary
        self._samples = families.samples(model)
        self._sampled = torch.cat(self._samples)
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        """Cosines and sines, float32 ``[positions, rotary_dim]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.decoder.nbytes

    def is_current(self) -> bool:
        # Samples of the weights. The versions of the weights are part of the identity.
        return torch.equal(torch.cat(self._samples), self._sampled)

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        keys, values, lengths = cache.open_storage(tokens.shape[1])
        cos, sin = self._rope(cache.capacity)
        if self._scaled is None:
            logits = self.decoder.step(tokens, keys, values, lengths, cos, sin, keep=keep)
        else:
            hidden = self.decoder.run_layers(self._scaled(tokens).float(), keys, values, lengths, cos, sin)
            logits = self.decoder.logits(hidden[:, hidden.shape[1] - keep :])
        cache.close()
        return logits

    def _rope(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table for at least ``capacity`` positions, from the model's own rotary embedding."""
        table = self._table
        if table is None or table[0].shape[0] < capacity:
            like, positions = torch.empty(0, dtype=torch.float32, device="cpu"), torch.arange(capacity, device="cpu")
            cos, sin = self._rotary(like, position_ids=positions[None])
            self._table = table = cos[0].contiguous(), sin[0].contiguous()
        return table


def native_signature(model: PreTrainedModel) -> tuple[Any, ...]:
    """What the native form of a model depends on. Raises :class:`NotReadable`, with the reason, where it has none."""
    if mask_kind(model.config) is MaskKind.NONE:
        raise NotReadable(f"its attention is {model.config._attn_implementation!r}")
    return (*families.identity(model), model.config._attn_implementation)


def native_form(model: PreTrainedModel, like: RowCache) -> NativeForm:
    """Pack a model, and compare its logits with those of the model's own forward.

    In float32 no logit may differ by more than :data:`TOLERANCE` of the largest. In bfloat16 both forwards are compared with a computation in
    float32, and the native one's root mean square error must not be larger, see :func:`check_logits`.

    Args:
        model: one that has a :func:`native_signature`.
        like: a cache of the model.

    Raises:
        NotReadable: the decoder cannot take the model, or the logits do not agree.
    """
    form = NativeForm(model, like)
    texts = probe_texts(model)
    cache = RowCache(model.config, 2, 16, dtype=like.dtype, device=like.device)
    check_logits(model, texts, _probed(model(input_ids=texts, use_cache=False).logits), probe(form, cache, texts))
    return form


def check_logits(model: PreTrainedModel, texts: torch.Tensor, own: torch.Tensor, ours: torch.Tensor) -> None:
    """Compare the logits of a form on the probes with those of the model's own forward.

    In float32 no logit may differ by more than :data:`TOLERANCE` of the largest. In 16 bits both forwards are compared with a computation in
    float32, and the form's root mean square error must not be larger by more than :data:`BY_CHANCE`.

    Args:
        model: the model.
        texts: of :func:`probe_texts`.
        own: logits of the model's own forward, ``[12, V]`` as from :func:`probe`.
        ours: likewise, of the form.

    Raises:
        NotReadable: the logits do not agree.
    """
    if own.dtype == torch.float32:
        error, allowed = (ours - own).abs().amax(), TOLERANCE * own.abs().amax()
    elif torch.equal(ours, own):
        return
    else:
        exact = _probed(_in_float32(model, texts))
        error, allowed = ((logits.float() - exact).square().mean().sqrt() for logits in (ours, own))
        allowed = BY_CHANCE * allowed
    # Not a number compares false.
    if not bool(error <= allowed):
        raise NotReadable(
            f"its logits differ from the model's own by {float(error):.2g}, more than {float(allowed):.2g}"
        )


def probe_texts(model: PreTrainedModel) -> torch.Tensor:
    """Two texts of 14 tokens, int64 ``[2, 14]``."""
    return (
        torch.arange(2 * 14, device=model.device).view(2, 14) * 7919 + 11
    ) % model.get_output_embeddings().weight.shape[0]


def _probed(logits: torch.Tensor) -> torch.Tensor:
    """The columns ``[12, V]`` of logits ``[2, 14, V]`` that :func:`probe` computes, in its order."""
    rows = [*[0] * 4, *[1] * 4, 0, 1, 0, 1]
    return logits[rows, [5, 7, 8, 9, 5, 7, 8, 9, 12, 9, 13, 10]]


def probe(form: Form, cache: RowCache, texts: torch.Tensor) -> torch.Tensor:
    """Logits ``[12, V]`` of a prefill, a block and a single token, with equal and with different lengths. ``cache``: 2 rows, empty."""
    first = [form(texts[:, :6], cache, 1), form(texts[:, 6:9], cache, 2), form(texts[:, 9:10], cache, 1)]
    cache.truncate([10, 7])
    uneven = [form(torch.stack([texts[0, 10:13], texts[1, 7:10]]), cache, 1)]
    uneven.append(form(torch.stack([texts[0, 13:14], texts[1, 10:11]]), cache, 1))
    return torch.cat([torch.cat(first, 1).flatten(0, 1), torch.cat([x.flatten(0, 1) for x in uneven])])


def _in_float32(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """Logits ``[rows, q, V]`` of a model of 16 bits, by its own modules on its weights in float32, one layer at a time."""
    base, columns = model.model, texts.shape[1]
    hidden = base.embed_tokens(texts).float()
    positions = torch.arange(columns, device=texts.device)[None]
    rope = base.rotary_emb(hidden, position_ids=positions)
    mask = torch.full((columns, columns), -torch.inf, dtype=torch.float32, device=texts.device).triu(1)[None, None]
    shared = {id(model.config): model.config}

    def wide(module: Any) -> Any:
        return copy.deepcopy(module, dict(shared)).float()

    for layer in base.layers[: model.config.num_hidden_layers]:
        hidden = wide(layer)(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
    hidden, head = wide(base.norm)(hidden), model.lm_head
    logits = torch.cat([F.linear(hidden, part.float()) for part in head.weight.split(_ROWS)], -1)
    return logits if head.bias is None else logits + head.bias.float()
