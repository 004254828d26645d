"""Draft heads: a decoder layer over hidden states of the target, in the two formats of EAGLE-3 checkpoints.

EAGLE-3 (arXiv 2503.01840). With the target's hidden states ``f_p`` of three depths at position ``p``, ``g_p = fc(f_p)``. The head's slot ``p`` reads
``g_p`` and the embedding of token ``p + 1``, and gives the logits of token ``p + 2``. For a slot whose position the target has not computed, the head's
own output at the slot before takes the place of ``g``. Each slot attends to those before it. Its rotary position is relative, so that the slot's index serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.chain import DraftSpec, StageInputs
from pipespec.engine.known import NATIVE
from pipespec.engine.native import NativeForm
from pipespec.engine.prefixes import Origin, Source
from pipespec.engine.sampling import float32_copy
from pipespec.engine.stage import Stage
from pipespec.engine.target_reader import (
    CONFIG,
    WEIGHTS,
    NativeProduct,
    ReaderConfig,
    TargetReader,
    layer_config,
    read_record,
    read_weights,
)
from pipespec.models.families import NotReadable
from pipespec.models.loading import DAMAGE, fill
from pipespec.models.parts import ModelParts
from pipespec.models.properties import tensor_parallel_size
from pipespec.models.quantized import has_blocks
from pipespec_kernels import ops
from pipespec_kernels.state import Action

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""The target's own weights, which the trainer of ``speculators`` may have stored."""


def is_head(draft: Any) -> bool:
    """Whether what a user gave for a draft is the folder, or the hub name, of a draft head."""
    record = read_record(draft) or {}
    is_named = any("eagle3" in str(name).lower() for name in record.get("architectures") or [])
    return is_named or "draft_vocab_size" in record or "speculators_model_type" in record


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ReaderConfig):
    """The architecture of a draft head, and the target that it fits.

    Without ``features``, :meth:`layers_of` is EAGLE-3's rule.

    Attributes:
        norm_before_residual: the first layer adds to the normalised state instead of to the state.
        norm_before_fc: one norm over all hidden states in front of ``fc``.
        fc_norm: one norm for each of them.
        norm_output: the next slot reads the output after the last norm.
    """

    kind = "draft head"

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_json(cls, record: dict[str, Any], where: str = "the draft head") -> HeadConfig:
        """The configuration that the object of a ``config.json`` describes."""
        kind = record.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(
                f"{where} is a draft of the kind {kind!r}; of the speculators format, EAGLE-3 heads and the block drafters 'dflash' and 'dspark' are read"
            )
        described = record.get("transformer_layer_config", record)
        try:
            name = "eagle_aux_hidden_state_layer_ids"
            ids = record.get(name) or (record.get("eagle_config") or {}).get(name)
            block = layer_config(described, "llama")
            return cls(
                block=block,
                draft_vocabulary=int(record.get("draft_vocab_size") or block.vocab_size),
                features=None if ids is None else tuple(map(int, ids)),
                target_hidden=int(record.get("target_hidden_size") or block.hidden_size),
                **{name: bool(record.get(name, False)) for name in _FLAGS},
                where=where,
            )
        except (ValueError, *DAMAGE) as error:
            raise ValueError(f"{where}: its {CONFIG} describes no EAGLE-3 head: {error}") from error

    def to_json(self, target: str, architectures: Sequence[str], lookahead: int) -> dict[str, Any]:
        """The object of a ``config.json`` in the format of ``speculators``.

        Args:
            target: path or name of the target.
            architectures: the target's, as its own config names them.
            lookahead: draft tokens per round that the head was trained for.
        """
        layer = self.block.to_diff_dict()
        head_dim = getattr(self.block, "head_dim", None) or self.block.hidden_size // self.block.num_attention_heads
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": lookahead}],
                "verifier": {"name_or_path": target, "architectures": list(architectures)},
            },
            "transformer_layer_config": layer | {"model_type": self.block.model_type, "head_dim": int(head_dim)},
            "draft_vocab_size": self.draft_vocabulary,
            "eagle_aux_hidden_state_layer_ids": None if self.features is None else list(self.features),
            "target_hidden_size": None if self.target_hidden == self.block.hidden_size else self.target_hidden,
            **{name: getattr(self, name) for name in _FLAGS},
            "tie_word_embeddings": False,
        }

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The features of a target with ``depth`` layers; without a choice 2, the middle, and the third from the end, as EAGLE-3 has them."""
        return (2, depth // 2, depth - 3) if self.features is None else self.features


class DraftHead(TargetReader):
    """An EAGLE-3 head.

    Args:
        config: its architecture. Weights are random until they are loaded.
    """

    def __init__(self, config: HeadConfig, *, has_embedding: bool = False) -> None:
        super().__init__(config)
        block, hidden, norm = self.block, self.block.hidden_size, type(self.norm)
        first = self.layers[0]
        first.hidden_norm = norm(hidden, eps=block.rms_norm_eps)
        first.norm_before_residual = config.norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None))
        inputs = config.count * config.target_hidden
        self.fc = nn.Linear(inputs, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False)
        self.input_norm = norm(inputs, eps=block.rms_norm_eps) if config.norm_before_fc else None
        norms = [norm(config.target_hidden, eps=block.rms_norm_eps) for _ in range(config.count * config.fc_norm)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.embed_tokens = nn.Embedding(config.block.vocab_size, hidden) if has_embedding else None

    @classmethod
    def load(cls, folder: str | Path, target: PreTrainedModel, dtype: torch.dtype | str = "auto") -> DraftHead:
        """Load a head for a target, on its device, in eval mode.

        Args:
            folder: of either format, or a hub name.
            target: whose embedding it uses where it has none of its own.
            dtype: of its weights; ``"auto"``: as they are stored, or the target's where that is smaller.

        Raises:
            FileNotFoundError: the folder holds no head.
            ValueError: the head does not fit the target, or its files are damaged or incomplete.
        """
        config = HeadConfig.load(folder)
        config.require(target.config)
        weights = read_weights(folder)
        d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
        head = cls(config, has_embedding="embed_tokens.weight" in weights)
        named = {name.replace("midlayer.", "layers.0.", 1): value for name, value in weights.items()}
        named = {name: x for name, x in named.items() if name not in _UNUSED and not name.endswith("inv_freq")}
        fill(head, named, f"{config.where}: its weights are not those of its {CONFIG}")
        head.choose_tokens(d2t, t2d)
        head.place(target, dtype, weights["fc.weight"].dtype)
        return head

    def save(self, folder: str | Path, target: PreTrainedModel, lookahead: int = 3) -> None:
        """Write the head in the format of ``speculators``.

        Args:
            folder: is made if there is none.
            target: the model that it was trained for.
            lookahead: see :meth:`HeadConfig.to_json`.
        """
        config, folder = self.config, Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        if self.embed_tokens is None:
            # That package stores the target's embedding with each head.
            embedding = self._borrowed[0](torch.arange(config.block.vocab_size, device=target.device))
            weights["embed_tokens.weight"] = embedding.detach().to("cpu", self.fc.weight.dtype).contiguous()
        if config.draft_vocabulary != config.block.vocab_size:
            ids, inside = self.ids.cpu(), torch.zeros(config.block.vocab_size, dtype=torch.bool)
            inside[ids] = True
            weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": inside}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        record = config.to_json(
            target.config._name_or_path, target.config.architectures or [type(target).__name__], lookahead
        )
        (folder / CONFIG).write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")

    def parts(self) -> ModelParts:
        """What the native decoder runs. Raises :class:`NotReadable` where the head has something that it does not have."""
        if self.config.norm_output:
            raise NotReadable("its next slot reads the output after the last norm")
        return self.layer_parts()

    def layer_parts(self) -> ModelParts:
        """Its layers, the last norm and the matrix that gives the logits."""
        return ModelParts(self.block, list(self.layers), 0, self.rotary_emb, None, self.norm, self.lm_head)

    def fuse(self, features: torch.Tensor, product: nn.Module | None = None) -> torch.Tensor:
        """States ``[..., H]`` of the target's ``features [..., count * target_hidden]``. ``product``: in place of ``fc``."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            size, weights = self.config.target_hidden, torch.cat(list(self.fc_norm.parameters()))
            parts = features.unflatten(-1, (-1, size))
            features = weights * nn.functional.rms_norm(parts, (size,), eps=self.block.rms_norm_eps).flatten(-2)
        found: torch.Tensor = (product or self.fc)(features)
        return found

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, masks: Sequence[Any], cache: Any
    ) -> torch.Tensor:
        """Run slots.

        Args:
            embeds: ``[rows, q, H]``, of the tokens.
            states: ``[rows, q, H]``, of :meth:`fuse`, or outputs of the slots before.
            positions: int64 ``[rows or 1, q]``.
            masks: per layer, as transformers' attention takes them.
            cache: transformers' ``Cache``, into which keys and values go.

        Returns:
            ``[rows, q, H]``, which the next slot reads, and :meth:`logits`.
        """
        rope = self.rotary_emb(states, position_ids=positions)
        shared = {"position_ids": positions, "past_key_values": cache, "position_embeddings": rope}
        first, *others = self.layers
        normed = first.hidden_norm(states)
        attended, _ = first.self_attn(
            hidden_states=torch.cat([first.input_layernorm(embeds), normed], dim=-1), attention_mask=masks[0], **shared
        )
        hidden = (normed if self.config.norm_before_residual else states) + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer, mask in zip(others, masks[1:], strict=True):
            hidden = layer(hidden, attention_mask=mask, use_cache=True, **shared)
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., draft_vocabulary]`` of outputs ``[..., H]``."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


class HeadStage(Stage):
    """The first stage of a chain, if that is a head, see :mod:`pipespec.engine.head`. It runs in turn with the target, in its process.

    Its cache holds a slot for each position that has features, and after them the slots of the tokens that it has drafted in this round. The next
    round begins by lowering the lengths to the former, and reads the features of what the target has committed since. A head that rests reads
    nothing.

    Args:
        model: the head.
        others: see :class:`Stage`.
    """

    model: Any

    form = "draft head"
    may_defer = True
    _decoder: NativeForm | None = None
    _product: nn.Module | None = None
    """The head's ``fc``, with its native form."""
    _packed = False
    _source: Stage
    _attention: str | None = None
    """The attention of its layers in transformers' registry; None: the one that they were made with."""
    _known: list[int]
    """Per row, slots with features of the target."""

    def read_from(self, target: Stage) -> None:
        """Let the target publish the features that the head reads."""
        depth = target.model.config.get_text_config(decoder=True).num_hidden_layers
        target.published = self.model.config.layers_of(depth), self.model.dtype
        self._source = target

    def pack(self) -> None:
        """Choose the form: the native one on a CPU, where it has all that the head has; else torch's operations."""
        if self._packed:
            return
        self._packed = True
        if self._native and self.model.device.type == "cpu":
            try:
                decoder, fc = NativeForm(self.model.parts(), 0), self.model.fc
                self._product = NativeProduct(fc) if type(fc) is nn.Linear else None  # one in blocks has its own
                self._decoder, self.form = decoder, NATIVE
            except NotReadable as error:
                self.form = f"{HeadStage.form}: {error}"

    @property
    def is_deferred(self) -> bool:
        return not self._began

    # ---- the prompt: it is read by the first step

    def _set_attention(self) -> None:
        # Captured and eager stages share a head, and a pipeline may use both in turn.
        self.model.block._attn_implementation = self._attention or self.model.attention

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        self._set_attention()
        rows = len(inputs.prompts)
        self._device, self._chunk, self._began = self.model.device, inputs.chunk, False
        self._fit_vocabulary(inputs.vocabulary)
        cache, held = self._resume(inputs)
        self._known = known = self._in_cache(held)
        self.pack()
        dtype = self.model.dtype if self._decoder is None else torch.float32
        self._states = torch.zeros((rows, self.model.block.hidden_size), dtype=dtype, device=self._device)
        return cache, known

    def _fit_vocabulary(self, target_vocabulary: int) -> None:
        self._clamp, self._ids = None, target_vocabulary

    def _in_cache(self, positions: Sequence[int]) -> list[int]:
        # Slot s has read the tokens up to s + 1. The last slot runs, for its output.
        return [max(0, n - 1 - skipped) for n, skipped in zip(positions, self._skipped, strict=True)]

    def _read_by(self, cache: RowCache) -> list[int]:
        return [n + skipped + 1 if n else 0 for n, skipped in zip(self._known, self._skipped, strict=True)]

    def _new_cache(self, rows: int, capacity: int) -> RowCache:
        return RowCache(self.model.block, rows, capacity, dtype=self.model.dtype, device=self.model.device)

    def _matches(self, cache: RowCache) -> bool:
        return (cache.dtype, cache.device) == (self.model.dtype, self.model.device)

    def _find(self, inputs: StageInputs) -> tuple[Origin | None, list[Source | None]]:
        # No text depends on its bits.
        made, store = Origin(None, (self.model.dtype, self.model.device)), self._store
        store.retain(lambda kept: kept.origin == made)
        return made, [store.find(prompt, store.texts) for prompt in inputs.prompts]

    def _read(self, inputs: StageInputs, cache: RowCache, held: list[int], *, selects: bool) -> tuple[int, int]:
        return 0, 0

    def _read_until(self) -> list[int]:
        return [n + skipped for n, skipped in zip(self._known, self._skipped, strict=True)]

    # ---- a step

    def _plan(self, lookahead: int, max_draft_tokens: int) -> Action:
        action = super()._plan(lookahead, 0)
        if action == Action.STEP and not self._began:
            self._begin_late()
            if any(self.block.length(self.block.target, row) - 1 <= at for row, at in enumerate(self._skipped)):
                return Action.IDLE  # nothing was published yet; the next plan gives the tokens once more
            self._began = True
        return action

    def _begin_late(self) -> None:
        """Begin at each row's first position with features."""
        for row, at in enumerate(self._features().begin):
            if at != self._skipped[row]:
                self._known[row], self._skipped[row] = 0, at

    def _features(self) -> Features:
        cache = self._source.cache
        assert cache is not None
        assert isinstance(cache.features, Features)
        return cache.features

    def _feed(self) -> tuple[RowCache, torch.Tensor]:
        assert self._cache is not None
        return self._cache, self._take_tokens(self.port.columns)

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        return fed  # rows that select nothing wait until they do

    def _score(self, fed: torch.Tensor, cache: RowCache) -> tuple[torch.Tensor, int]:
        """Run the slots of the rows that select up to their newest token, keep the last outputs, and return their logits as :meth:`_choose` takes them."""
        block = self.block
        selects = [int(n) > 0 for n in self._n_select]
        # Slots with features, and all slots.
        known = [block.length(block.target, row) - 1 - skipped for row, skipped in enumerate(self._skipped)]
        ends = [int(a + b) - 1 - s for a, b, s in zip(self._kv, self._query_lens, self._skipped, strict=True)]
        # A slot reads the token after it, which a stage downstream may have replaced.
        valid = [max(0, int(kv) - 1 - s) for kv, s in zip(self._kv, self._skipped, strict=True)]
        keeps = [chosen and self._known[row] >= known[row] for row, chosen in enumerate(selects)]
        kept = [min(n, ends[row]) if keeps[row] else self._known[row] for row, n in enumerate(valid)]
        cache.truncate([min(pair) for pair in zip(cache.lengths, kept, strict=True)])
        self._run_to(cache, known, [end if chosen else 0 for end, chosen in zip(ends, selects, strict=True)])
        return self._logits(), self._first_selecting()

    def _choose(self, logits: torch.Tensor, fed: torch.Tensor, first: int) -> torch.Tensor:
        """As :meth:`Stage._choose`, from ``logits [rows, draft_vocabulary]`` of the only column in which each row selects."""
        if self._select.is_argmax:
            ids = self.model.ids  # a borrowed head may have more rows
            return ids[ops.argmax(logits[:, None, : len(ids)])].int().cpu()
        column = torch.from_numpy(self._n_select - (1 + first)).to(logits.device)
        return super()._choose(self._widened(logits, column, fed.shape[1] - first), fed, first)

    def _widened(self, logits: torch.Tensor, column: torch.Tensor, width: int) -> torch.Tensor:
        """Logits ``[rows, width, vocabulary]``: those of ``logits [rows, draft_vocabulary]`` in one column of each row, -inf elsewhere. ``column < 0`` is the first one."""
        rows, size = len(logits), self._ids
        is_native = self._decoder is not None
        if is_native and width == 1 and logits.shape[1] == size and self.model.drafts_all:
            return logits[:, None]
        at = column.clamp(min=0)[:, None] * size + self.model.ids
        if is_native:
            # torch's fill wakes its threads, which then poll where those of the native forms are to run.
            filled = np.full((rows, width * size), -np.inf, np.float32)
            np.put_along_axis(filled, at.numpy(), float32_copy(logits[None])[0].numpy(), 1)
            return torch.from_numpy(filled).view(rows, width, size)
        wide = logits.new_full((rows, width * size), -torch.inf).scatter_(1, at, logits)
        return wide.view(rows, width, size)

    def _run_to(self, cache: RowCache, known: Sequence[int], ends: Sequence[int]) -> None:
        """Run the slots of each row up to ``ends[r]``, of which ``known[r]`` have features."""
        features = self._features()
        while True:
            begin = cache.lengths
            counts = [
                min(known[row], ends[row]) - n if n < known[row] else min(1, ends[row] - n)
                for row, n in enumerate(begin)
            ]
            if max(counts) <= 0:
                return
            self._grow(cache, max(begin) + 1)
            q = min(self._chunk, max(counts), cache.capacity - max(begin))
            self._run_columns(cache, features, known, [max(0, min(n, q)) for n in counts])

    def _run_columns(self, cache: RowCache, features: Features, known: Sequence[int], counts: Sequence[int]) -> None:
        """One forward of the head over the next ``counts[r]`` slots of each row: all with features, or one without."""
        head, q, begin = self.model, max(counts), cache.lengths
        tokens = np.zeros((cache.rows, q), np.int64)
        spans = [(at + skipped, n) for at, n, skipped in zip(begin, counts, self._skipped, strict=True)]
        for row, (slot, n) in enumerate(spans):
            tokens[row, :n] = self._text[row, slot + 1 : slot + 1 + n]
        states = self._states[:, None]
        if given := [row for row, n in enumerate(counts) if n and begin[row] < known[row]]:
            read = [features.read(row, spans[row][0], sum(spans[row])) for row in given]
            fused = head.fuse(torch.cat(read).to(self._device), self._product).to(states.dtype)
            split = iter(fused.split([counts[row] for row in given]))
            parts = [next(split) if row in given else states[row] for row in range(cache.rows)]
            states = parts[0][None] if cache.rows == 1 else nn.utils.rnn.pad_sequence(parts, batch_first=True)
        embeds = head.embed(torch.from_numpy(tokens).to(self._device))
        if self._decoder is not None:
            outputs = self._decoder.run_layers(states, cache, side=embeds.float())[0]
        else:
            outputs = head(embeds, states, cache.positions(q), cache.masks(q), cache)
        cache.truncate([at + n for at, n in zip(begin, counts, strict=True)])
        self._states = torch.stack([outputs[row, n - 1] if n else self._states[row] for row, n in enumerate(counts)])
        for row in given:
            self._known[row] = begin[row] + counts[row]

    def _logits(self) -> torch.Tensor:
        """The logits ``[rows, draft_vocabulary]`` of the last outputs."""
        if self._decoder is not None:
            return self._decoder.decoder.logits(self._states)
        return self.model.logits(self._states)


@dataclass(frozen=True, eq=False)
class HeadDraft(DraftSpec):
    """A draft head.

    Args:
        folder: Its folder, or its name on the hub.
    """

    label = "a draft head"
    stage_class = HeadStage
    reads_target = True
    verifies = False  # it runs its slots one after the other, so that drafting costs as much
    source = "model"
    beside_blocks: ClassVar[str | None] = "q4_k"
    """:meth:`default_weights` on a CPU, beside a target in blocks."""
    config_class: ClassVar[type[ReaderConfig]] = HeadConfig
    model_class: ClassVar[Any] = DraftHead

    folder: str | Path

    @classmethod
    def recognise(cls, given: Any) -> HeadDraft | None:
        return cls(given) if is_head(given) else None

    def check(self, target: PretrainedConfig) -> None:
        self.config_class.load(self.folder).require(target)

    def load(self, target: PreTrainedModel, dtype: torch.dtype | str) -> Any:
        if tensor_parallel_size(target) > 1:
            raise ValueError(
                f"{self.folder} is {self.label}, and the target is sharded over processes (tp_plan): leave one out"
            )
        return self.model_class.load(self.folder, target, dtype)

    def fit(self, model: Any, target: PreTrainedModel, weights: str | None) -> tuple[Any, str | None]:
        model.borrow(target)
        return model, None if weights is None else model.quantize(weights)

    def default_weights(self, model: Any, target: PreTrainedModel) -> str | None:
        """The format of a head of which ``weights=`` says nothing. A step in floats would read a third of what that of a target in blocks reads."""
        is_light = model.device.type != "cpu" or not has_blocks(target) or has_blocks(model)
        return None if is_light else self.beside_blocks

    def step_bytes(self, model: Any) -> int:
        found: int = model.step_bytes
        return found
