"""Where the weights of experts, of recurrent layers and of latent attention are in transformers' modules, and how routers choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipespec.models.quantized import JoinedLinear, QuantizedExperts
from pipespec_kernels.experts import Experts, Routing
from pipespec_kernels.formats import QuantizedMatrix, dequantize
from pipespec_kernels.latent import Latent
from pipespec_kernels.recurrent import Recurrent
from pipespec_kernels.rows import OrderedRows, in_order

ALPHA = 1.702
"""Factor within the sigmoid of gpt-oss's activation: that of ``quick_gelu``."""


def by_softmax(router: Any) -> Routing:
    """Shares of a softmax; of the chosen ones alone where the router does not say otherwise."""
    return Routing(router.top_k, is_normalised=getattr(router, "norm_topk_prob", True))


def by_sigmoids(router: Any) -> Routing:
    """DeepSeek-V3's: sigmoids, of the groups whose two best experts have the largest sums."""
    number = router.routed_scaling_factor
    return Routing(
        router.top_k, "sigmoid", router.norm_topk_prob, number, router.num_group, router.topk_group, group_best=2
    )


def by_sigmoids_of_all(router: Any) -> Routing:
    """LFM2's: sigmoids, without groups."""
    return Routing(router.top_k, "sigmoid", router.norm_topk_prob, router.routed_scaling_factor)


def by_softmax_of_groups(router: Any) -> Routing:
    """DeepSeek-V2's: shares of a softmax, of the groups whose best experts have the largest ones; as they are, times a factor."""
    groups, chosen = (router.num_group, router.topk_group) if router.topk_method == "group_limited_greedy" else (1, 1)
    return Routing(router.top_k, "softmax", False, router.routed_scaling_factor, groups, chosen)


def by_sparse_mixer(router: Any) -> Routing:
    """PhiMoE's."""
    return Routing(2, "sparse_mixer", jitter=router.router_jitter_noise)


def experts_of(mlp: Any, routing: Callable[[Any], Routing], linear: Callable[[Any], Any]) -> Experts | None:
    """The experts of a feed-forward; None if it has none.

    Args:
        mlp: the module.
        routing: of its router.
        linear: the matrix of a linear module.
    """
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return None
    router = mlp.gate if hasattr(mlp, "gate") else mlp.router
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    gate = getattr(mlp, "shared_expert_gate", None)
    return Experts(
        routing(router),
        linear(router),
        **_stacked(experts, linear),
        router_bias=_detached(router, "bias"),
        choice_bias=_detached(router, "e_score_correction_bias")
        if hasattr(router, "e_score_correction_bias")
        else _detached(mlp, "expert_bias"),
        shared=()
        if shared is None
        else tuple(linear(getattr(shared, f"{name}_proj")) for name in ("gate", "up", "down")),
        shared_router=None if gate is None else linear(gate),
        limit=getattr(experts, "limit", 0.0),
    )


def _stacked(experts: Any, linear: Callable[[Any], Any]) -> Mapping[str, Any]:
    """The matrices of all experts, ``[rows of all, inputs]``. In gpt-oss they are transposed, and gates and ups take turns: these are copied."""
    if isinstance(experts, QuantizedExperts):
        parts = {name: getattr(experts, name) for name in ("gate", "up", "down")}
        return {name: linear(part) for name, part in parts.items()} | {
            f"{name}_bias": _detached(part, "bias") for name, part in parts.items()
        }
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if not _are_transposed(experts):
        return {"gate": gate_up.flatten(0, 1), "up": None, "down": down.flatten(0, 1)}
    rows, bias = gate_up.transpose(1, 2), experts.gate_up_proj_bias.detach()
    return {
        "gate": torch.cat([rows[:, ::2], rows[:, 1::2]], 1).flatten(0, 1),
        "up": None,
        "down": down.transpose(1, 2).flatten(0, 1),
        "gate_bias": torch.cat([bias[:, ::2], bias[:, 1::2]], 1).flatten(),
        "down_bias": experts.down_proj_bias.detach().flatten(),
    }


def _are_transposed(experts: Any) -> bool:
    return not isinstance(experts, QuantizedExperts) and hasattr(experts, "gate_up_proj_bias")


def copied_bytes(module: Any) -> int:
    """Bytes of the matrices of a module that :func:`experts_of` or :func:`latent_of` copies, at most."""
    if is_latent(module):
        return _copied_by_latent(module)
    return module.gate_up_proj.nbytes + module.down_proj.nbytes if _are_transposed(module) else 0


def _detached(module: Any, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.detach()


def recurrent_of(layer: Any, matrix: Callable[[Any], Any]) -> Recurrent | None:
    """What a layer has in place of its attention; None if it has attention. ``matrix``: of a linear module."""
    if hasattr(layer, "conv"):
        return _short_convolution(layer.conv, matrix)
    own = getattr(layer, "linear_attn", None)
    if own is None:
        return None
    key_heads, heads, key_dim, value_dim = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim
    group = heads // key_heads
    if isinstance(getattr(own, "in_proj_qkvz", None), JoinedLinear):
        # Their outputs go head by head in the model, and not in these matrices.
        inputs, gates = map(matrix, own.in_proj_qkvz.parts)
        rest = matrix(own.in_proj_ba)
        beta, decay = (_in_order(rest, order) for order in _by_head(rest, (group, group)))
    elif hasattr(own, "in_proj_qkvz"):
        # Head by head: query, key, the values and gates of its group; the betas and decays of that.
        whole, rest = matrix(own.in_proj_qkvz), matrix(own.in_proj_ba)
        *mixed, z = _by_head(whole, (key_dim, key_dim, group * value_dim, group * value_dim))
        inputs, gates = _in_order(whole, torch.cat(mixed)), _in_order(whole, z)
        beta, decay = (_in_order(rest, order) for order in _by_head(rest, (group, group)))
    else:
        inputs, gates, beta, decay = (matrix(getattr(own, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a"))
    bias, is_tiled = own.conv1d.bias, isinstance(own.out_proj, JoinedLinear)
    return Recurrent(
        inputs,
        matrix(own.out_proj.parts[0] if is_tiled else own.out_proj),
        own.conv1d.weight.detach()[:, 0],
        (key_heads, heads, key_dim, value_dim),
        gates,
        beta,
        decay,
        own.A_log.detach(),
        own.dt_bias.detach(),
        own.norm.weight.detach(),
        kernel_bias=None if bias is None else bias.detach(),
        is_tiled=is_tiled,
    )


def _short_convolution(own: Any, matrix: Callable[[Any], Any]) -> Recurrent:
    inputs, out, kernel = (
        None if part.bias is None else part.bias.detach() for part in (own.in_proj, own.out_proj, own.conv)
    )
    return Recurrent(
        matrix(own.in_proj),
        matrix(own.out_proj),
        own.conv.weight.detach()[:, 0],
        inputs_bias=inputs,
        out_bias=out,
        kernel_bias=kernel,
    )


def halves_of_heads(whole: Matrix, head_dim: int) -> list[Matrix | OrderedRows]:
    """Of the rows of queries and their gates, ``2 * head_dim`` in each head, the ones and the others."""
    return [_in_order(whole, order) for order in _by_head(whole, (head_dim, head_dim))]


def _by_head(whole: Matrix, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The numbers of the rows of each part of a matrix, where ``sizes`` rows of the parts follow one another in each head."""
    return [part.flatten() for part in torch.arange(whole.shape[0], device="cpu").view(-1, sum(sizes)).split(sizes, 1)]


def _in_order(whole: Matrix, order: torch.Tensor) -> Matrix | OrderedRows:
    return in_order(whole, order) if isinstance(whole, torch.Tensor) else whole.rows(order)


Matrix = torch.Tensor | QuantizedMatrix


def is_latent(attention: Any) -> bool:
    """Whether an attention keeps latents of keys and values."""
    return hasattr(attention, "kv_a_proj_with_mqa")


def _of_queries(own: Any) -> Any:
    return own.q_proj if own.q_lora_rank is None else own.q_b_proj


def _is_in_pairs(own: Any) -> bool:
    """Whether the model rotates neighbours, and keeps the halves of what is rotated one after the other."""
    return bool(getattr(own.config, "rope_interleave", False))


def _copied_by_latent(module: Any) -> int:
    """Bytes of the matrices of an attention that :func:`latent_of` copies, at most."""
    both, rows = module.kv_b_proj, [_of_queries(module), module.kv_a_proj_with_mqa] if _is_in_pairs(module) else []
    size = torch.float32.itemsize if getattr(both, "weight", None) is None else both.weight.itemsize
    return both.out_features * both.in_features * size + sum(
        each.weight.nbytes for each in rows if hasattr(each, "weight")
    )


def latent_of(own: Any, matrix: Callable[[Any], Any]) -> Latent:
    """What the native decoder takes of an attention. Where the model rotates neighbours, the rows are brought into the order of halves.

    Args:
        own: the module.
        matrix: of a linear module.
    """
    heads, rank, plain, rotated = own.num_heads, own.kv_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim
    queries, latents, bias = (
        matrix(_of_queries(own)),
        matrix(own.kv_a_proj_with_mqa),
        _detached(own.kv_a_proj_with_mqa, "bias"),
    )
    if _is_in_pairs(own):
        halves = torch.arange(rotated).view(-1, 2).T.reshape(-1)
        head = torch.cat([torch.arange(plain), plain + halves])
        queries = _copied_rows(queries, (torch.arange(heads)[:, None] * (plain + rotated) + head).flatten())
        order = torch.cat([torch.arange(rank), rank + halves])
        latents, bias = _copied_rows(latents, order), None if bias is None else bias[order]
    both = _floats(matrix(own.kv_b_proj)).view(heads, plain + own.v_head_dim, rank)
    more: dict[str, Any] = {}
    if own.q_lora_rank is not None:
        more = {
            "query_latents": matrix(own.q_a_proj),
            "query_norm": own.q_a_layernorm.weight.detach(),
            "query_latents_bias": _detached(own.q_a_proj, "bias"),
        }
    return Latent(
        queries,
        latents,
        both[:, :plain].transpose(1, 2).reshape(heads * rank, plain),
        both[:, plain:].reshape(-1, rank),
        own.kv_a_layernorm.weight.detach(),
        float(own.kv_a_layernorm.variance_epsilon),
        latents_bias=bias,
        **more,
    )


def _floats(matrix: Matrix) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else dequantize(matrix)


def _copied_rows(matrix: Matrix, order: torch.Tensor) -> Matrix:
    return matrix[order] if isinstance(matrix, torch.Tensor) else matrix.rows(order)
