"""Block drafters: a few layers that draft a block of tokens in one forward over hidden states of the target (DFlash, DSpark).

DFlash (arXiv 2602.06036). With the target's hidden states ``f_p`` of several depths at position ``p``, ``c_p = norm(fc(f_p))``. A block is the newest token
of the text, the anchor, at position ``n``, and mask tokens after it. In each layer the block's columns ask, and the keys and values are those of ``c_0 .. c_(n-1)``
and of the block itself, whose columns see each other. The column of position ``p`` gives the logits of token ``p``, so that the anchor's gives none; or those of
token ``p + 1``, if the drafter samples from the anchor. DSpark adds to them a bias of low rank that depends on the token before, which is known when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.chain import StageInputs
from pipespec.engine.head import HeadDraft, HeadStage
from pipespec.engine.target_reader import (
    CONFIG,
    NativeProduct,
    ReaderConfig,
    TargetReader,
    layer_config,
    read_record,
    read_weights,
)
from pipespec.models.description import embedding_scale
from pipespec.models.families import NotReadable
from pipespec.models.loading import DAMAGE, fill
from pipespec.models.properties import weight_bytes
from pipespec_kernels.state import Action

_KINDS = ("dflash", "dspark")
_BORROWED = "the target's head"
_MARKOV = ("vanilla", "gated", "rnn")
_UNUSED = ("verifier_", "confidence_head.", "rotary_emb.", "t2d", "d2t")
"""Weights that no draft token depends on, the target's own ones, and tables."""


def kind_of_block(draft: Any) -> str | None:
    """``"dflash"`` or ``"dspark"`` for the folder, or the hub name, of a block drafter; None for anything else that a user gave for a draft."""
    return _kind(read_record(draft) or {})


def _kind(record: dict[str, Any]) -> str | None:
    if "speculators_model_type" in record:
        kind = record["speculators_model_type"]
        return kind if kind in _KINDS else None
    names = " ".join(map(str, record.get("architectures") or [])).lower()
    return next((kind for kind in reversed(_KINDS) if kind in names), "dflash" if "dflash_config" in record else None)


@dataclass(frozen=True, kw_only=True)
class BlockConfig(ReaderConfig):
    """The architecture of a block drafter, and the target that it fits.

    Attributes:
        size: columns of a block, the anchor's included.
        mask: id of the mask token.
        from_anchor: whether the anchor's column drafts, too.
        causal: per layer, whether a column of the block sees only those before it.
        windows: per layer, the number of last positions that a column sees, its own included; None: all.
        markov: the kind of the bias that depends on the token before; empty: there is none.
        markov_rank: its rank.
        embedding_scale: of the embeddings' rows.
        logit_scale: of the logits.
        softcap: after it, logits ``x`` become ``softcap * tanh(x / softcap)``; 0: they stay.
    """

    kind = "block drafter"

    size: int
    mask: int
    from_anchor: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    markov: str = ""
    markov_rank: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0

    @property
    def drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.size - (not self.from_anchor)

    @classmethod
    def from_json(cls, record: dict[str, Any], where: str = "the block drafter") -> BlockConfig:
        """The configuration that the object of a ``config.json`` describes, in any of the formats."""
        try:
            return _read(record, where)
        except (ValueError, *DAMAGE) as error:
            raise ValueError(f"{where}: its {CONFIG} describes no block drafter that can be read: {error}") from error


def _read(record: dict[str, Any], where: str) -> BlockConfig:
    own = dict(record) | dict(record.get("dflash_config") or {})
    is_speculators = "speculators_model_type" in record
    if any("dflash2" in str(name).lower() for name in record.get("architectures") or []) or "selector_rank" in own:
        raise ValueError("it is of DFlash2, whose convolutions and choice of candidates are not read")
    if own.get("projector_type") not in (None, *_KINDS):
        raise ValueError(f"its projector_type is {own['projector_type']!r}; {' and '.join(map(repr, _KINDS))} are read")
    block = layer_config(record["transformer_layer_config"] if is_speculators else record, "qwen3")
    # Speculators count hidden states (0: the embedding), the others layers, whose outputs they mean (-1: the embedding).
    features = own["aux_hidden_state_layer_ids"] if is_speculators else [int(k) + 1 for k in own["target_layer_ids"]]
    size, mask = int(own.get("block_size", 16)), int(own["mask_token_id"])
    if size < 2 or not 0 <= mask < block.vocab_size:
        raise ValueError(f"a block of {size} columns, with the mask token {mask} of {block.vocab_size}")
    types = getattr(block, "layer_types", None) or ["full_attention"] * block.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in types]
    if unread := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"it has layers of the types {', '.join(map(repr, sorted(unread)))}; those with attention are read"
        )
    if any(sliding) and not block.sliding_window:
        raise ValueError("it has sliding_attention layers and no sliding_window")
    is_causal = False if own.get("sliding_window_non_causal") else own.get("is_causal")
    rank = int(own.get("markov_rank") or 0)
    markov = str(own.get("markov_head_type") or _MARKOV[0]).lower() if rank else ""
    if rank and markov not in _MARKOV:
        raise ValueError(f"its markov_head_type is {markov!r}; {', '.join(map(repr, _MARKOV))} are read")
    return BlockConfig(
        block=block,
        draft_vocabulary=int((own.get("draft_vocab_size") if is_speculators else 0) or block.vocab_size),
        features=tuple(map(int, features)),
        target_hidden=int(own.get("target_hidden_size") or block.hidden_size),
        where=where,
        size=size,
        mask=mask,
        from_anchor=_from_anchor(record, own, size),
        causal=tuple(slides if is_causal is None else bool(is_causal) for slides in sliding),
        windows=tuple(block.sliding_window if slides else None for slides in sliding),
        markov=markov,
        markov_rank=rank,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        logit_scale=float(own.get("output_multiplier") or 1.0),
        softcap=float(own.get("final_logit_softcapping") or 0.0),
    )


def _from_anchor(record: dict[str, Any], own: dict[str, Any], size: int) -> bool:
    """Whether the anchor's column drafts: as the configuration says; else by the number of tokens that it proposes; else by its kind."""
    if (said := own.get("sample_from_anchor")) is not None:
        return bool(said)
    methods = (record.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposed = methods[0].get("speculative_tokens")
    if proposed in (size - 1, size):
        return bool(proposed == size)
    return "dspark" in (_kind(record), own.get("projector_type"))


class MarkovHead(nn.Module):
    """A bias of the logits of low rank, by the token before: ``W2 e`` with its row ``e = W1[token]`` (``"vanilla"``), which a gate of the hidden state and ``e`` may
    multiply (``"gated"``), or out of a state that has read the columns before, too (``"rnn"``).

    Args:
        config: of the drafter.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.block.hidden_size
        self.kind = config.markov
        self.markov_w1 = nn.Embedding(config.block.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocabulary, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if self.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if self.kind == "rnn" else None

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The bias ``[draft_vocabulary]`` of the last one of some columns of a block, the first one included. ``tokens``: int64 ``[columns]``, the token before each;
        ``hidden``: ``[columns, H]``, the drafter's last hidden states."""
        before = self.markov_w1(tokens)
        if self.gate_proj is not None:
            bias = before[-1] * self.gate_proj(torch.cat([hidden[-1], before[-1]])).sigmoid()
        elif self.joint_proj is not None:
            state = torch.zeros_like(before[0])
            for row, column in zip(before, hidden, strict=True):
                gate, candidate, bias = self.joint_proj(torch.cat([state, row, column])).chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            bias = bias.tanh()
        else:
            bias = before[-1]
        found: torch.Tensor = self.markov_w2(bias)
        return found


class BlockDrafter(TargetReader):
    """A block drafter.

    Args:
        config: its architecture. Weights are random until they are loaded.
        has_embedding: whether it has an embedding of its own, and does not use the target's.
        has_head: likewise for the matrix that gives the logits.
    """

    def __init__(self, config: BlockConfig, *, has_embedding: bool = False, has_head: bool = False) -> None:
        super().__init__(config)
        hidden = self.block.hidden_size
        self.fc = nn.Linear(config.count * config.target_hidden, hidden, bias=False)
        self.hidden_norm = type(self.norm)(hidden, eps=self.block.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.block.vocab_size, hidden) if has_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False) if has_head else None
        self.markov_head = MarkovHead(config) if config.markov else None

    @classmethod
    def load(cls, folder: str | Path, target: PreTrainedModel, dtype: torch.dtype | str = "auto") -> BlockDrafter:
        """Load a block drafter for a target, on its device, in eval mode. Arguments and errors are those of :meth:`pipespec.engine.head.DraftHead.load`."""
        config = BlockConfig.load(folder)
        config.require(target.config)
        weights = read_weights(folder)
        named = {name: value for name, value in weights.items() if not name.startswith(_UNUSED)}
        own = {"has_embedding": "embed_tokens.weight" in weights, "has_head": "lm_head.weight" in weights}
        try:
            drafter = cls(config, **own)
        except DAMAGE as error:
            raise ValueError(
                f"{config.where}: its {CONFIG} describes no block drafter that can be read: {type(error).__name__}: {error}"
            ) from error
        fill(drafter, named, f"{config.where}: its weights are not those of its {CONFIG}")
        drafter.choose_tokens(weights.get("d2t"), weights.get("t2d"))
        drafter.place(target, dtype, weights["fc.weight"].dtype)
        return drafter

    @property
    def step_bytes(self) -> int:
        rows = 0 if self.markov_head is None else weight_bytes(self.markov_head.markov_w1)
        return super().step_bytes - rows

    def pack(self) -> None:
        """Use native products for the linear modules, the target's head included. Matrices in blocks have them already. Raises :class:`NotReadable` as
        :class:`NativeProduct` does, before anything has changed."""
        modules = dict(self.named_modules())
        if self.lm_head is None:
            modules[_BORROWED] = self.head
        plain = {name: each for name, each in modules.items() if type(each) is nn.Linear and each.bias is None}
        for name, product in {name: NativeProduct(each) for name, each in plain.items()}.items():
            if name == _BORROWED:
                self._borrowed[1] = product
            else:
                self.set_submodule(name, product)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        module = self.get_input_embeddings()
        return self.config.embedding_scale / embedding_scale(module) * module(tokens).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., draft_vocabulary]`` of outputs ``[..., H]``, without the bias of :class:`MarkovHead`."""
        config, logits = self.config, self.head(hidden).to(self.dtype)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        found: torch.Tensor = config.softcap * torch.tanh(logits / config.softcap) if config.softcap else logits
        return found

    def read(self, features: torch.Tensor, cache: RowCache) -> None:
        """Append the keys and values of positions, of which all but the last may be padding in a row. Lengths grow by ``q``.

        Args:
            features: ``[rows, q, count * target_hidden]``, of the target.
            cache: of this drafter.
        """
        states, q = self.hidden_norm(self.fc(features.to(self.dtype))), features.shape[1]
        rope = self.rotary_emb(states, position_ids=cache.positions(q))
        begin, stores = cache.open(q)
        for i, layer in enumerate(self.layers):
            _store(stores, i, begin, *_keys_and_values(layer.self_attn, states, rope))
        cache.close()

    def forward(self, anchors: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Run a block per row behind what the cache holds, which stays as it is.

        Args:
            anchors: int64 ``[rows]``, the tokens with which the blocks begin.
            cache: of this drafter, with room for a block.

        Returns:
            ``[rows, size, H]``, after the last norm.
        """
        size, at = self.config.size, torch.tensor(cache.lengths, device=anchors.device)
        tokens = anchors.new_full((len(anchors), size), self.config.mask)
        tokens[:, 0] = anchors
        hidden, positions = self.embed(tokens), cache.positions(size)
        rope = self.rotary_emb(hidden, position_ids=positions)
        begin, stores = cache.open(size)
        key = torch.arange(max(begin) + size, device=anchors.device)
        for i, layer in enumerate(self.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            keys, values = _store(stores, i, begin, *_keys_and_values(attention, normed, rope))
            query = _heads(attention, "q", normed, rope)
            mask = _visible(key, positions, at + size, self.config.causal[i], self.config.windows[i])
            mixed = F.scaled_dot_product_attention(
                query,
                keys.to(query.dtype),
                values.to(query.dtype),
                attn_mask=mask[:, None],
                scale=attention.scaling,
                enable_gqa=True,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        cache.close()
        cache.truncate(begin)
        found: torch.Tensor = self.norm(hidden)
        return found


def _visible(
    key: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, causal: bool, window: int | None
) -> torch.Tensor:
    """What columns at ``positions [rows, q]`` see of the keys ``key [K]``, of which a row has ``ends [rows]``: bool ``[rows, q, K]``."""
    apart = positions[:, :, None] - key
    seen = (key < ends[:, None])[:, None] & (apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool))
    return seen if window is None else seen & (apart.abs() < window)


def _heads(attention: Any, name: str, states: torch.Tensor, rope: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """Queries, keys or values ``[rows, heads, q, head_dim]`` of ``states [rows, q, H]``; those that are rotated have ``rope``."""
    heads = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    found: torch.Tensor = (heads if norm is None else norm(heads)).transpose(1, 2)
    if rope is None:
        return found
    (cos, sin), half = (part[:, None] for part in rope), attention.head_dim // 2
    return found * cos + torch.cat([-found[..., half:], found[..., :half]], -1) * sin


def _keys_and_values(
    attention: Any, states: torch.Tensor, rope: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return _heads(attention, "k", states, rope), _heads(attention, "v", states, None)


def _store(
    stores: Sequence[torch.Tensor], layer: int, begin: Any, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values of a layer behind ``begin[r]``. Returns what the cache holds of it. ``stores``: of :meth:`pipespec.engine.cache.RowCache.open`."""
    held = stores[layer], stores[len(stores) // 2 + layer]
    for store, new in zip(held, (keys, values), strict=True):
        for row, at in enumerate(begin):
            store[row, :, at : at + new.shape[2]] = new[row]
    return held


class BlockStage(HeadStage):
    """The first stage of a chain, if that is a block drafter, see :mod:`pipespec.engine.block`. It runs in turn with the target, in its process.

    Its cache holds the keys and values of the positions that have features. In the first step of a round it reads those that the target has committed since, and
    runs a block behind them. Each further step takes the logits of the next column. Past the block's last column it drafts nothing.

    Args:
        model: the drafter.
        others: see :class:`pipespec.engine.stage.Stage`.
    """

    model: BlockDrafter

    form = "block drafter"
    _wanted = 1
    """Draft tokens of the round, for which the logits are computed together."""
    _blocks: list[tuple[int, int]]
    """Per row, the length of the target's text and its newest token when its block ran."""
    _hidden: torch.Tensor
    """The blocks' outputs ``[rows, size, H]``."""
    _bases: torch.Tensor
    """The logits of their first columns that draft, ``[rows, columns, draft_vocabulary]``."""

    def pack(self) -> None:
        """Use native products on a CPU. The rest of a layer runs in torch's operations, since the native form has no attention over columns behind one's own."""
        if self._packed:
            return
        self._packed = True
        if self._native and self.model.device.type == "cpu":
            try:
                with torch.inference_mode():
                    self.model.pack()
                self.form = f"{BlockStage.form}, native products"
            except NotReadable as error:
                self.form = f"{BlockStage.form}: {error}"

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        cache, known = super()._open(inputs)
        self._blocks = [(0, -1)] * cache.rows
        return cache, known

    def _plan(self, lookahead: int, max_draft_tokens: int) -> Action:
        self._wanted = min(lookahead, self.model.config.drafted)
        action = super()._plan(lookahead, max_draft_tokens)
        if action == Action.STEP and (self._n_select > 0).any():
            # A row whose newest token no column drafts commits nothing, and the next plan gives its tokens once more.
            outside = [not 0 <= n < self.model.config.drafted for n in self._columns()]
            self._query_lens[(self._n_select > 0) & np.array(outside)] = 0
            if not self._query_lens.any():
                return Action.IDLE
        return action

    def _columns(self) -> list[int]:
        """Per row, how many tokens are between the target's text and what the step drafts."""
        ends = (self._kv + self._query_lens).tolist()
        return [end - self.block.length(self.block.target, row) for row, end in enumerate(ends)]

    def _score(self, fed: torch.Tensor, cache: RowCache) -> tuple[torch.Tensor, int]:
        """Take the logits of the next column of each row that selects, after a new block where the target has committed tokens."""
        selects = ((self._n_select > 0) & (self._query_lens > 0)).tolist()
        columns = [n if chosen else 0 for n, chosen in zip(self._columns(), selects, strict=True)]
        lengths = [self.block.length(self.block.target, row) for row in range(cache.rows)]
        blocks = [(n, int(self._text[row, n - 1])) for row, n in enumerate(lengths)]
        if any(chosen and self._blocks[row] != blocks[row] for row, chosen in enumerate(selects)):
            self._read_features(cache, [n - 1 - skipped for n, skipped in zip(lengths, self._skipped, strict=True)])
            self._grow(cache, max(cache.lengths) + self.model.config.size)
            anchors = torch.tensor([token for _, token in blocks], device=self._device)
            self._hidden, self._blocks = self.model(anchors, cache), blocks
            self._bases = self._logits_of(max(self._wanted, max(columns) + 1))
        elif max(columns) >= self._bases.shape[1]:
            self._bases = self._logits_of(self.model.config.drafted)
        logits = self._bases[torch.arange(cache.rows), columns]
        if self.model.markov_head is not None:
            logits = logits + self._bias(lengths, columns)
        return logits, self._first_selecting()

    def _logits_of(self, count: int) -> torch.Tensor:
        """The logits of the first ``count`` columns that draft."""
        first = self.model.config.size - self.model.config.drafted
        return self.model.logits(self._hidden[:, first : first + count])

    def _bias(self, lengths: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
        """What the tokens before the next columns add to their logits, ``[rows, draft_vocabulary]``."""
        head, first = self.model.markov_head, self.model.config.size - self.model.config.drafted
        assert head is not None
        biases = []
        for row, (n, column) in enumerate(zip(lengths, columns, strict=True)):
            # An anchor's column that drafts nothing has the anchor itself before it.
            before = [self._text[row, n - 1]] * first + self._text[row, n - 1 : n + column].tolist()
            tokens = torch.tensor(before, dtype=torch.int64, device=self._device)
            biases.append(head(tokens, self._hidden[row, : len(tokens)]))
        return torch.stack(biases)

    def _read_features(self, cache: RowCache, known: Sequence[int]) -> None:
        """Read the positions of each row up to ``known[r]``."""
        features = self._features()
        # A row whose features begin later than those of the kept text that it goes on from begins again.
        cache.truncate([min(pair) for pair in zip(cache.lengths, self._known, strict=True)])
        while counts := [n - at for n, at in zip(known, cache.lengths, strict=True)]:
            if max(counts) <= 0:
                break
            begin, q = cache.lengths, min(self._chunk, max(counts))
            self._grow(cache, max(begin) + q)
            spans = [(at, max(0, min(n, q))) for at, n in zip(begin, counts, strict=True)]
            columns = torch.nn.utils.rnn.pad_sequence(
                [
                    features.read(row, at + skipped, at + skipped + n)
                    for row, ((at, n), skipped) in enumerate(zip(spans, self._skipped, strict=True))
                ],
                batch_first=True,
            )
            self.model.read(columns.to(self._device), cache)
            cache.truncate([at + n for at, n in spans])
        self._known = list(cache.lengths)


@dataclass(frozen=True, eq=False)
class BlockDraft(HeadDraft):
    """A block drafter, DFlash or DSpark.

    Args:
        folder: Its folder, or its name on the hub.
    """

    label = "a block drafter"
    stage_class = BlockStage
    config_class = BlockConfig
    model_class = BlockDrafter
    beside_blocks = None  # not measured
    drafts_at_once = True

    @classmethod
    def recognise(cls, given: Any) -> BlockDraft | None:
        return None if kind_of_block(given) is None else cls(given)
