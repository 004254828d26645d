"""Checks that models form a chain. Every error says what is wrong and what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from pipespec.engine.forward import not_exact, not_native
from pipespec.engine.stage import stage_names
from pipespec.models.properties import embedding_size, head_size
from pipespec.models.rope import rope_changes_at, rope_type
from pipespec.preflight.support import check_runnable
from pipespec.preflight.tokenizers import tokenizer_digest
from pipespec.process.warnings import user_stacklevel
from pipespec_kernels.state import MAX_STAGES


def check_chain(models: Sequence[PreTrainedModel], given: Sequence[Any], *, translated: bool = False) -> None:
    """Check that models can form one chain.

    Args:
        models: drafts first, target last.
        given: what the user passed for each: a path, or the model itself.
        translated: whether the first draft may have another tokenizer.

    Raises:
        ValueError: too many models, one model twice, another vocabulary or tokenizer, or a model that no stage can run
            (:func:`pipespec.preflight.support.check_runnable`).
        TypeError: an architecture that is not LLaMA-like.
    """
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
    target = models[-1]
    vocabulary = embedding_size(target)
    digest = tokenizer_digest(given[-1], target)
    for name, model, source in zip(names, models, given, strict=True):
        head = head_size(model)
        if head != embedding_size(model):
            raise ValueError(
                f"{name} has {head} logits per position for {embedding_size(model)} tokens: its head does not fit the vocabulary"
            )
        if model is target:
            break
        if translated and model is models[0]:
            continue
        own = tokenizer_digest(source, model)
        if own is not None and digest is not None and own != digest:
            raise ValueError(
                f"{name} has another tokenizer than the target (other tokens, or the same with other ids): its draft tokens would mean "
                "other words; drafts must use the target's tokenizer here (`pipespec generate` and Pipeline translate the tokens of a first draft)"
            )
        # Variants of one model pad their embedding to different sizes. Only the tokenizer distinguishes that from another vocabulary.
        if embedding_size(model) != vocabulary and (own is None or digest is None):
            unknown = name if own is None else "the target"
            raise ValueError(
                f"{name} has a vocabulary of {embedding_size(model)} tokens, the target {vocabulary}: drafts must use the target's "
                f"tokenizer, and {unknown} has no tokenizer.json to check that with. If it is the same one and only the "
                "padding differs, put tokenizer.json beside the weights of both; if it is another one, pass tokenizer= and draft_tokenizers="
            )
    check_runnable(models)


def check_rope(target: PreTrainedModel, most: int) -> None:
    """Warn (``RuntimeWarning``) if the RoPE of a text can differ from that of ``generate()``.

    Args:
        target: the model that decides the text.
        most: tokens that the text may reach.
    """
    limit = rope_changes_at(target)
    if limit is not None and most > limit:
        warnings.warn(
            f"beyond {limit} tokens the target's RoPE depends on the longest position of each forward ({rope_type(target)}), and forwards "
            "have other lengths here than in generate(): beyond about that length the text may differ from generate()'s",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def check_exact(target: PreTrainedModel, *, captured: bool = False) -> None:
    """Check that the target's bits depend on neither the batch nor the width of its forwards.

    Args:
        target: the model that decides the text.
        captured: whether it runs in captured steps, and so in the exact fused form. Otherwise it runs in the native form.

    Raises:
        ValueError: it has no such form; with the reason.
    """
    reason = not_exact(target) if captured else not_native(target)
    if reason is not None:
        raise ValueError(
            f"exact=True: the target cannot run in a form whose sums are independent of batch and width: {reason}. Without exact=True it "
            "runs, and texts may differ where two tokens are nearly equally likely"
        )


def check_architecture(name: str, model: PreTrainedModel) -> None:
    """Check that a model is a decoder with a language-model head and full attention in every layer.

    Args:
        name: of the stage.
        model: the model.

    Raises:
        TypeError: it is not.
        ValueError: it has no layers.
    """
    config, kind = model.config, type(model).__name__
    missing = [f for f in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(config, f)]
    is_headless = getattr(model, "lm_head", None) is None and model.get_output_embeddings() is None
    decoder = getattr(model, model.base_model_prefix, None)
    is_decoder = hasattr(decoder, "layers") and not config.is_encoder_decoder and not missing
    if is_headless and (is_decoder or hasattr(model, "layers")):
        raise TypeError(f"{name} is a {kind} without a language-model head; load it with AutoModelForCausalLM")
    if not is_decoder:
        raise TypeError(
            f"{name} is a {kind}, not a LLaMA-like decoder (model.layers, attention with a key/value cache)"
        )
    lacking = _NEEDED - _parameters(model)
    if lacking:
        raise TypeError(f"{name} is a {kind}, not LLaMA-like: its forward() takes no {', '.join(sorted(lacking))}")
    if config.num_hidden_layers < 1:
        raise ValueError(
            f"{name} has num_hidden_layers={config.num_hidden_layers} in its configuration; a model has at least one layer"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window and not hasattr(config, "layer_types")):
        raise TypeError(
            f"{name} is a {kind} with other than full attention in its layers ({', '.join(sorted(kinds))}); only full attention can be "
            "rolled back row by row"
        )


_NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"}


def _parameters(model: PreTrainedModel) -> set[str]:
    """Parameters of ``forward()``; where it passes keyword arguments on, those of the class it extends, too."""
    names: set[str] = set()
    for forward in (model.forward, *(c.__dict__["forward"] for c in type(model).__mro__ if "forward" in c.__dict__)):
        parameters = inspect.signature(forward).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names
