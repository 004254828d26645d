"""Checks that models form a chain. Every error says what is wrong and what to do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from pipespec.checks.support import check_runnable
from pipespec.config import WIDTH
from pipespec.engine.forward import exact_unsupported_reason, native_unsupported_reason
from pipespec.engine.inputs import stage_names
from pipespec.errors import UnsupportedInput
from pipespec.models.compat import counts_columns, weightless
from pipespec.models.families import NATIVE_CLASSES
from pipespec.models.layout import CacheLayout, UnsupportedLayers, mask_windows, takes_mask_per_type
from pipespec.models.properties import embedding_size, rope_changes_at, rope_type, text_config
from pipespec.models.quantized import check_files
from pipespec_kernels.state import MAX_STAGES

_NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"}


def check_chain(models: Sequence[PreTrainedModel], given: Sequence[Any], *, translated: Collection[int] = ()) -> None:
    """Check that models, drafts first, can form one chain. ``given``: what the user passed for each. ``translated``: those that may have another tokenizer.

    Raises:
        ValueError: too many models, one model twice, another vocabulary or tokenizer, or a model that no stage can run
            (:func:`pipespec.checks.support.check_runnable`).
        TypeError: an architecture that is not LLaMA-like.
    """
    check_files(models)
    if len(models) > MAX_STAGES:
        raise ValueError(f"a pipeline has at most {MAX_STAGES} stages, got {len(models)}")
    names = stage_names(len(models))
    for i, model in enumerate(models):
        if any(model is other for other in models[:i]):
            raise ValueError(
                f"{names[i]} is the same object as another stage; every stage needs its own cache and weights"
            )
    for name, model in zip(names, models, strict=True):
        check_architecture(name, model)
    compared = [stage for i, stage in enumerate(zip(names, models, given, strict=True)) if i not in translated]
    if len(compared) > 1:  # reading a tokenizer takes half a second
        check_vocabularies([vocabulary_of(*stage) for stage in compared])
    check_runnable(models)


class Vocabulary(NamedTuple):
    """What must agree between stages: the tokens of the embedding, and the digest of the tokenizer next to the weights (None: there is none)."""

    name: str
    size: int
    digest: str | None


def vocabulary_of(name: str, model: PreTrainedModel, given: Any) -> Vocabulary:
    """The vocabulary of a stage, for which the user passed ``given``. Raises ``ValueError`` for a damaged tokenizer."""
    from pipespec.checks.tokenizers import tokenizer_digest

    return Vocabulary(name, embedding_size(model), tokenizer_digest(given, model))


def check_vocabularies(stages: Sequence[Vocabulary]) -> None:
    """Check that token ids mean the same in all stages. Raises ``ValueError`` for a draft whose ids differ from those of the target, the last one."""
    *drafts, target = stages
    for draft in drafts:
        unknown = draft.name if draft.digest is None else "the target" if target.digest is None else None
        if unknown is None and draft.digest != target.digest:
            raise ValueError(
                f"{draft.name} has another tokenizer than the target (other tokens, or the same with other ids): its draft tokens would mean "
                "other words; drafts must use the target's tokenizer here (`pipespec generate` and Pipeline translate the tokens of a first draft)"
            )
        # Variants of one model pad their embedding to different sizes. Only the tokenizer distinguishes that from another vocabulary.
        if unknown is not None and draft.size != target.size:
            raise ValueError(
                f"{draft.name} has a vocabulary of {draft.size} tokens, the target {target.size}: drafts must use the target's "
                f"tokenizer, and {unknown} has no tokenizer.json to check that with. If it is the same one and only the "
                "padding differs, put tokenizer.json next to the weights of both; if it is another one, pass tokenizer= and draft_tokenizers="
            )


def check_rope(target: PreTrainedModel, positions: int) -> None:
    """Raise ``UnsupportedInput`` where the RoPE of a text, which may use so many positions with its last step's padding, may depend on its length."""
    limit = rope_changes_at(target)
    if limit is not None and positions > limit:
        raise UnsupportedInput(
            "max_new_tokens",
            f"max_new_tokens: a text of up to {positions - WIDTH} tokens, prompt included, is too long: beyond {limit - WIDTH} tokens the "
            f"target's RoPE ({rope_type(target)}) may depend on the length of each forward; ask for fewer tokens, or call transformers' generate()",
        )


def check_exact(target: PreTrainedModel, *, captured: bool = False) -> None:
    """Raise ``ValueError`` for a target whose bits depend on the batch or the width of its forwards: in the native form, or the exact fused one (``captured``)."""
    reason = exact_unsupported_reason(target) if captured else native_unsupported_reason(target)
    if reason is not None:
        raise ValueError(
            f"exact=True: the target cannot run in a form whose sums are independent of batch and width: {reason}. Without exact=True it "
            "runs, and texts may differ where two tokens are nearly equally likely"
        )


def check_architecture(name: str, model: PreTrainedModel) -> None:
    """Raise ``TypeError`` for a model that is no decoder with a head, or whose layers cannot be rolled back row by row, ``ValueError`` for one without layers."""
    config, kind = model.config, type(model).__name__
    is_headless = getattr(model, "lm_head", None) is None and model.get_output_embeddings() is None
    decoder = getattr(model, model.base_model_prefix, None)
    is_decoder = hasattr(decoder, "layers") and not config.is_encoder_decoder
    is_decoder &= all(hasattr(config, f) for f in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if is_headless and (is_decoder or hasattr(model, "layers")):
        raise TypeError(f"{name} is a {kind} without a language-model head; load it with AutoModelForCausalLM")
    if not is_decoder:
        raise TypeError(
            f"{name} is a {kind}, not a LLaMA-like decoder (model.layers, attention with a key/value cache)"
        )
    if lacking := _NEEDED - _parameters(model):
        raise TypeError(f"{name} is a {kind}, not LLaMA-like: its forward() takes no {', '.join(sorted(lacking))}")
    if config.num_hidden_layers < 1:
        raise ValueError(
            f"{name} has num_hidden_layers={config.num_hidden_layers} in its configuration; a model has at least one layer"
        )
    try:
        layout = CacheLayout.of(text_config(config))
    except UnsupportedLayers as error:
        raise TypeError(f"{name} is a {kind}: {error}") from error
    # A window that the class does not know is no matter of the class, see pipespec.engine.known.
    if len(set(mask_windows(model))) > 1 and not takes_mask_per_type(decoder):
        raise TypeError(
            f"{name} is a {kind} with windows in some of its layers, and its forward() takes one mask for all of them"
        )
    if counts_columns(config.model_type):
        raise TypeError(
            f"{name} is a {kind}, whose queries depend on the columns of the batch in this version of transformers, so that rows of other lengths change "
            "the text: install a newer version"
        )
    # A forward without data may end before a layer that stores twice shows it: fewer layers than the configuration counts do.
    stores_once = len(getattr(decoder, "layers", ())) >= config.num_hidden_layers
    if layout.states is None and kind not in NATIVE_CLASSES and not (stores_once and _stores(model, layout)):
        raise TypeError(
            f"{name} is a {kind} whose layers do not each store the keys and values that its configuration says; no cache here can roll that back"
        )


class _Stored(DynamicCache):
    """A cache that records what each layer stores, as ``(layer, heads, size of a key, size of a value)``; ``()`` for what is not keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append((layer_idx, key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states

    def _note_other(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.sizes.append(())
        return states

    update_conv_state = update_recurrent_state = update_indexer = _note_other


def _stores(model: PreTrainedModel, layout: CacheLayout) -> bool:
    """Whether the layers of a model of an unknown family store what its configuration says.

    A copy without weights runs one token. Where its operations wait for data (experts), the layers before count.
    """
    stored, expected = _Stored(), [(i, *layout.sizes(i)) for i in layout.attention]
    with suppress(Exception), weightless(), torch.inference_mode():
        meta_model = type(model)(copy.deepcopy(model.config)).eval()
        meta_model(
            input_ids=torch.zeros((1, 1), dtype=torch.long),
            attention_mask=torch.zeros((1, 1, 1, 1), dtype=meta_model.dtype),
            position_ids=torch.zeros((1, 1), dtype=torch.long),
            past_key_values=stored,
            use_cache=True,
            logits_to_keep=1,
        )
        return stored.sizes == expected
    return stored.sizes == expected[: len(stored.sizes)]


def _parameters(model: PreTrainedModel) -> set[str]:
    """Parameters of ``forward()``; where it passes keyword arguments on, those of the class it extends, too."""
    names: set[str] = set()
    for forward in (model.forward, *(c.__dict__["forward"] for c in type(model).__mro__ if "forward" in c.__dict__)):
        parameters = inspect.signature(forward).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names
