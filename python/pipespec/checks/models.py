"""Checks that models form a chain, and can run: in this process, in a worker process, in captured steps. Every error says what is wrong and what to do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from pipespec.engine.chain import stage_names
from pipespec.engine.forward import exact_unsupported_reason, native_unsupported_reason
from pipespec.errors import NotCapturable, Unsupported
from pipespec.models.compat import counts_columns, weightless
from pipespec.models.families import NATIVE_CLASSES
from pipespec.models.layout import CacheLayout, UnsupportedLayers, mask_windows, takes_mask_per_type
from pipespec.models.properties import (
    LayerDevices,
    compute_dtype,
    each_module,
    embedding_size,
    hooks_of,
    input_device,
    is_dispatched,
    is_dynamic,
    local_kv_heads,
    named_tensors,
    not_whole_reason,
    offloaded_modules,
    quantisation,
    tensor_parallel_size,
    text_config,
)
from pipespec.models.quantized import check_files
from pipespec_kernels.state import MAX_STAGES

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_runnable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each model, drafts first, has its weights, and computes on devices, in a dtype and with layers that stages run. Quantised models do.

    Raises ``TypeError`` for a model whose recurrent layers keep no state per column, else ``ValueError``.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        is_target = model is models[-1]
        _check_weights(name, model, is_target)
        at, dtype = LayerDevices.of(model), compute_dtype(model)
        kinds, places = {device.type for device in at.devices}, [str(device) for device in at.devices]
        if not kinds <= {"cpu", "cuda"}:
            raise ValueError(f"{name} is on {', '.join(places)}; stages run on cpu or cuda")
        if at.is_split and not is_dispatched(model):
            raise ValueError(
                f"{name} is spread over {', '.join(places)}, and no hook moves hidden states between them: load it with device_map= (package "
                f"accelerate), give its path with device={{{name!r}: {places}}}, or move it to one device"
            )
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
        # Such a target is decoded by transformers, see pipespec.engine.known.
        if not is_target and dtype == torch.float16 and "cpu" in kinds:
            raise ValueError(
                f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
            )
        if CacheLayout.of(model.config).states is not None:
            from pipespec.engine.recurrent import recurrent_unsupported_reason

            if (reason := recurrent_unsupported_reason(model)) is not None:
                raise TypeError(f"{name} is a {type(model).__name__}: {reason}")


def check_checkpointing(models: Sequence[PreTrainedModel]) -> None:
    """Raise ``Unsupported`` for a model whose layers drop their cache, as gradient checkpointing does in training mode."""
    for name, model in zip(stage_names(len(models)), models, strict=True):
        if any(getattr(module, "gradient_checkpointing", False) and module.training for module in each_module(model)):
            raise Unsupported(
                "gradient_checkpointing",
                f"generate(): {name} is in training mode with gradient checkpointing, which drops the cache of each layer; call its eval() or "
                "gradient_checkpointing_disable() before",
            )


def _check_weights(name: str, model: PreTrainedModel, is_target: bool) -> None:
    """Raise ``ValueError`` for weights on the meta device that no hook brings, sharded ones that stages do not run, and a hook that moves all of a module."""
    processes = tensor_parallel_size(model)
    if processes > 1 and not is_target:
        raise ValueError(
            f"{name} is sharded over processes (tp_plan): only the target may be; load the draft whole, it runs in rank 0 alone"
        )
    if processes > 1:
        if CacheLayout.of(model.config).own is not None:
            raise ValueError(
                f"{name} is sharded over processes (tp_plan), and its layers differ in the sizes of their heads, which is not supported"
            )
        heads, here = getattr(text_config(model.config), "num_key_value_heads", None), local_kv_heads(model)
        if here is not None and heads is not None and here not in (heads, heads / processes):
            raise ValueError(
                f"{name} has {heads} key/value heads, which {processes} processes cannot share: use a number of processes that divides it"
            )
    moved, away = None, set[int]()
    for module in each_module(model):
        if "_hf_hook" in module.__dict__ and any(type(hook).__name__ == "CpuOffload" for hook in hooks_of(module)):
            moved = moved or module
        if any(p is not None and p.is_meta for p in module._parameters.values()):
            away.add(id(module))
    if moved is not None:
        at = next(at for at, module in model.named_modules() if module is moved) or "all of it"
        raise ValueError(
            f"{name}: accelerate moves {at} to the GPU when it is called (cpu_offload_with_hook), and its cache cannot follow; use device_map= or "
            "accelerate.cpu_offload, which bring the weights of one module at a time"
        )
    if away:
        away -= {id(part) for found in offloaded_modules(model).values() for part in found.modules()}
    if away:
        at = next(at for at, module in model.named_modules() if id(module) in away)
        raise ValueError(f"{name} has weights that are not loaded ({at}, on the meta device); load it whole")


def check_shareable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each draft can run in a worker process, which builds its class around weights in shared memory. The target stays where it is.

    Raises ``ValueError`` for a draft that is quantised, split or offloaded, whose class cannot be imported, or that holds tensors its class does not create.
    """
    for name, model in zip(stage_names(len(models)), models[:-1], strict=False):
        quantised = quantisation(model)
        if (whole := f"it is quantised ({quantised})" if quantised else not_whole_reason(model)) is not None:
            raise ValueError(
                f"{name}: a worker process builds a draft whole on one device, around plain weights in shared memory, and {whole}; use "
                "schedule='lockstep', or another draft (the target may be)"
            )
        kind, task = type(model), None
        named = (*model.named_parameters(), *model.named_buffers())
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            task = f"import its class {kind.__qualname__}: define it in a module"
        elif odd := next(
            (f"{at}, a {type(tensor).__name__}" for at, tensor in named if type(tensor) not in _PLAIN), None
        ):
            task = f"share {odd}: make it plain"
        else:
            from pipespec.models.quantizing import held_modules, skeleton

            rebuilt = skeleton(kind, model.config, held_modules(model))
            own, created = ({at for at, _ in named_tensors(m, merged=False)} for m in (model, rebuilt))
            if added := sorted(own - created):
                task = (
                    f"build {added[0]}, which its class {kind.__qualname__} does not create (an adapter, replaced layers?): merge what was added "
                    "into the weights"
                )
        if task is not None:
            raise ValueError(f"{name}: a worker process cannot {task}, or use schedule='lockstep'")


def cost_of_width(model: PreTrainedModel) -> str | None:
    """What steps of several tokens move where bitsandbytes turns whole matrices into the compute dtype for them, as a phrase; None: it does not."""
    kinds = ((type(module).__module__, type(module).__name__, module) for module in model.modules())
    packed: list[Any] = [m for place, kind, m in kinds if kind == "Linear4bit" and place.startswith("bitsandbytes.")]
    if not packed:
        return None
    weights, size = sum(m.in_features * m.out_features for m in packed), compute_dtype(model).itemsize
    return (
        f"bitsandbytes' 4-bit products of several tokens write each matrix in {8 * size} bits and read it again: a step with draft tokens moves "
        f"{weights * (0.5 + 2 * size) / 1e9:.1f} GB of weights, a plain one {weights / 2e9:.1f}. Use schedule='plain', or another quantisation"
    )


def check_streams(models: Sequence[PreTrainedModel]) -> None:
    """Check that models can run with ``schedule="streams"`` or ``graphs=True``. On the CPU the same steps run uncaptured.

    Raises:
        ValueError: for some stages on GPUs and others on the CPU.
        NotCapturable: for the first model whose step cannot. Some causes show only in the capture itself.
    """
    named = zip(stage_names(len(models)), models, strict=True)
    on_cpu = [name for name, model in named if input_device(model).type == "cpu"]
    if on_cpu and len(on_cpu) < len(models):
        raise ValueError(
            f"schedule='streams' and graphs=True need all stages on GPUs, and {', '.join(on_cpu)} "
            f"{'is' if len(on_cpu) == 1 else 'are'} on the CPU: move it there (device=...), or use schedule='workers'"
        )
    for name, model in zip(stage_names(len(models)), models, strict=True):
        for part, cause in _not_static(model):
            raise NotCapturable(name, part, cause)
        if not on_cpu and compute_dtype(model) == torch.float64:
            cause = "it computes in float64, for which there are no GPU kernels here; use float32"
            raise NotCapturable(name, "its dtype", cause)


def _not_static(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Parts that cannot work with a static cache and padding columns, captured or not, and why."""
    if (reason := not_whole_reason(model)) is not None:
        yield "its weights", reason
    config, layout = text_config(model.config), CacheLayout.of(model.config)
    first = next((at for at, module in model.named_modules() if "Attention" in type(module).__name__), "its attention")
    if not model._can_set_attn_implementation():
        yield (
            first,
            f"{type(model).__name__} calls its attention directly, not through transformers' AttentionInterface",
        )
    if getattr(config, "attn_logit_softcapping", None):
        yield first, "it caps its scores (attn_logit_softcapping), which attention by lengths does not"
    if layout.states is not None:
        reason = "it is recurrent, and the host chooses the state that a step begins with, which a static cache does not have"
        yield f"layer {layout.states.layers[0]}", reason
    if layout.own is not None:
        yield (
            first,
            "its layers keep keys and values of several sizes, or read those of others, which a static cache does not hold",
        )
    if layout.key_dim != layout.value_dim:
        yield first, "it keeps keys and values of different sizes (latents), which attention by lengths does not read"
    for at, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            yield at, "it has attention sinks, which attention by lengths does not support"
        types = getattr(module, "rope_type", None)
        for kind in filter(is_dynamic, types.values() if isinstance(types, dict) else [types]):
            yield at, f"RoPE of type {kind!r} depends on the longest position of each forward, padding included"


_NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"}


def check_chain(models: Sequence[PreTrainedModel], given: Sequence[Any], *, translated: Collection[int] = ()) -> None:
    """Check that models, drafts first, can form one chain. ``given``: what the user passed for each. ``translated``: those that may have another tokenizer.

    Raises:
        ValueError: too many models, one model twice, another vocabulary or tokenizer, or a model that no stage can run
            (:func:`pipespec.checks.models.check_runnable`).
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
