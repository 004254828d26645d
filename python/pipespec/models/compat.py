"""Differences between versions of transformers and torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import transformers.cache_utils as cache_utils
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils.generic import maybe_autocast


def query_length(query: int | torch.Tensor) -> int:
    """Columns of a forward, from the argument of ``Cache.get_mask_sizes``: an int, or in 5.0 the 1-D ``cache_position``."""
    return query if isinstance(query, int) else query.shape[0]


def hidden_of(outputs: Any) -> torch.Tensor:
    """Hidden states ``[B, S, H]`` of what a decoder layer returns: in 5.0 some layers return them in a tuple."""
    hidden: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return hidden


@functools.cache
def scales_outside(source: str) -> bool:
    """Whether ``forward()`` of a Gemma scales the outputs of its token embedding. In newer versions the module of the embedding does.

    Args:
        source: name of the module of its classes, which is imported.
    """
    return not any(name.endswith("ScaledWordEmbedding") for name in vars(sys.modules[source]))


def counts_columns(model_type: str) -> bool:
    """Whether queries depend on columns of the batch, padding included, and not on positions in the text.

    Those of Ministral 3 do in 5.0, whose attention takes the factors of queries from ``cache_position``.

    Args:
        model_type: of the configuration.
    """
    if model_type != "ministral3":
        return False
    from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention

    return "cache_position" in inspect.signature(Ministral3Attention.forward).parameters


def has_stacked_experts(model_type: str) -> bool:
    """Whether the experts of a type are two stacked parameters: in 5.0 those of Granite-MoE have modules of their own.

    Args:
        model_type: of the configuration, of a type with experts.
    """
    name = model_type.removesuffix("_text")
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return not any(name.endswith("ParallelExperts") for name in vars(source))


def weightless() -> AbstractContextManager[Any]:
    """Within it, tensors that are made have no memory, and operations compute shapes only.

    They are on the meta device. RoPE of 5.0 asks torch whether autocast is on there, at which torch raises; there they are fake tensors.
    """
    try:
        with maybe_autocast("meta", enabled=False):
            return torch.device("meta")
    except RuntimeError:
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode()


def caches_latents(model_type: str) -> bool:
    """Whether multi-head latent attention of this type keeps the compressed latents, and not the keys and values of all heads.

    Newer versions do: the classes of such models have ``expand_kv()``.

    Args:
        model_type: of the configuration.
    """
    try:
        source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    except ImportError:
        return False
    return any(name.endswith("Attention") and hasattr(kind, "expand_kv") for name, kind in vars(source).items())


recurrent_layer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""The class of a recurrent layer in a ``DynamicCache``; None in versions whose recurrent models have caches of their own."""


empty_layer: Any = getattr(cache_utils, "DummyLayer", None)
"""The class of a layer in a ``DynamicCache`` that keeps nothing, as it reads the keys and values of another one; None in versions without it."""


def per_layer_configs(config: Any) -> Sequence[Any] | None:
    """The configuration of each layer, where a model may have layers of several sizes, or whose keys others read: since transformers 5.15.

    Args:
        config: of a model's text.

    Returns:
        None where all layers are alike.

    Raises:
        NotImplementedError: the layers differ, and this version of transformers says so in another way.
    """
    if not hasattr(type(config), "per_layer_config"):
        if getattr(config, "num_kv_shared_layers", None) or hasattr(config, "global_head_dim"):
            raise NotImplementedError(
                "layers of several sizes, or that read the keys of others, need transformers 5.15 or newer"
            )
        return None
    is_shared = "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    return config.per_layer_config if is_shared or config.is_heterogeneous else None


def recurrent_states(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a recurrent layer of a ``DynamicCache`` holds: the last inputs of its convolution, and its state; None of one that holds nothing.

    Newer versions have several of each per layer, by number.
    """

    def first(value: Any) -> Any:
        return value.get(0) if isinstance(value, dict) else value

    if recurrent_layer is None or not isinstance(layer, recurrent_layer) or not first(layer.has_previous_state):
        return None
    return first(layer.conv_states), first(layer.recurrent_states)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The empty cache that ``generate()`` makes for a model."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def positions_of_call(positions: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """Positions ``[B, S]`` of a call: those that transformers has prepared, or what older versions derive from the mask step by step."""
    if positions is None:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return positions.expand(len(mask), -1)


def mask_columns(kwargs: dict[str, Any]) -> tuple[int, int | None]:
    """Columns of a forward and its offset, from the arguments of a mask function.

    5.0 passes both as ``cache_position``, a tensor that may be on a device.

    Args:
        kwargs: of the mask function.

    Returns:
        The number of columns, and how many tokens are before them: None if that is on a device.
    """
    if "q_length" not in kwargs:
        return query_length(kwargs["cache_position"]), None
    offset = kwargs.get("q_offset", 0)
    return kwargs["q_length"], offset if isinstance(offset, int) else None


def mask_columns_of_call(config: GenerationConfig, position_ids: torch.Tensor | None, width: int) -> int:
    """Columns of the ``attention_mask`` of a call of ``generate()`` that transformers dropped because it holds ones only.

    They are more than those of ``input_ids`` in a call with the new tokens only and a cache of the others.

    Args:
        config: of the call, as transformers has prepared it.
        position_ids: as transformers has prepared it.
        width: columns of ``input_ids``.
    """
    # Versions that drop a mask make position_ids of it first. The caller's own may have the columns of input_ids.
    known = getattr(config, "_mask_length", None) or (width if position_ids is None else position_ids.shape[1])
    return max(width, int(known))


def callers_cache(cache: Cache | None) -> Cache | None:
    """The ``past_key_values`` that transformers passes to a ``custom_generate`` where it is the caller's; None where transformers has made it.

    Since 5.15 transformers marks the caller's. Before, an empty one looks like its own, and is not filled.
    """
    is_callers = cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0)
    return cache if is_callers else None


def tensor_parallel_group(model: Any) -> Any:
    """The ``torch.distributed`` group of the processes over which ``tp_plan`` has sharded a model.

    Newer versions hold the shards in DTensors, which have the mesh of their group. Older ones have plain tensors and one mesh per model.
    """
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            break
    else:
        mesh = model._device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def graph_handle(graph: torch.cuda.CUDAGraph) -> int:
    """The ``cudaGraphExec_t`` of a captured graph, to launch it without torch."""
    return int(graph.raw_cuda_graph_exec())


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Around a capture, outside of ``torch.cuda.graph()``: its matrix products get workspaces of its own.

    torch keeps one cuBLAS workspace per handle and stream, and a capture bakes the address in. Clearing torch's map, as every capture by inductor
    does, frees a workspace that was allocated before the capture. With an empty map, the workspace is allocated within the capture, from the
    capture's memory pool, and stays there as long as a graph of the pool lives. After the capture the map must not hold the workspace, because it
    would keep the pool's memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


_unended: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures that torch's allocator of pinned memory still refers to."""


def discard_capture(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """Undo what a failed capture leaves behind in torch, so that memory is freed and random numbers are drawn as before.

    In torch 2.11, ``capture_end()`` raises before it tells the allocators and the generator that the capture has ended. Newer versions tell
    them first (pytorch#180395), but keep the pool's memory until pytorch#190308. No later capture may use the pool.

    Args:
        graph: of the capture; it must not be used any more.
        device: index of the GPU, which must be the current one.
        pool: memory pool of the capture.
    """
    graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        # "not currently recording": torch has ended it.
        return
    torch._C._cuda_releasePool(device, pool)
    # Nothing in Python ends the recording of the allocator of pinned memory, which calls the graph.
    _unended.append(graph)
    # The generator leaves its capture mode with the next capture that ends, and refuses to draw until then.
    with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # the state outside of a capture
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device), capture_error_mode="thread_local"
        ):
            pass


def chunked_delta_rule(module: Any) -> Any:
    """The function with which a gated delta net computes many columns at once: a kernel where the module found one, else torch.

    Up to 5.0 it is an attribute of the module, later a function of its source that chooses by itself.
    """
    own = getattr(module, "chunk_gated_delta_rule", None)
    return own or sys.modules[type(module).__module__].torch_chunk_gated_delta_rule


def library_columns(dtype: torch.dtype) -> int | None:
    """From how many columns on torch's matrix products are faster than those of the native form on this processor; None: never.

    The native form computes in float32. oneDNN multiplies bfloat16 with AMX or AVX-512-BF16, at several times the rate; without either, torch's
    products in bfloat16 are many times slower. In float32 both reach the same rate.
    """
    has = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return 24 if dtype == torch.bfloat16 and any(is_there is not None and is_there() for is_there in has) else None
