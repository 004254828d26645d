"""Checkpoints with weights in groups, as GPTQ, AWQ, compressed-tensors, ModelOpt and gpt-oss store them, as models whose matrices are in blocks.

Floats of 4 bits (MXFP4, NVFP4) have blocks of their own. An integer weight is ``scale * (number - zero point)``, with a scale per group of a row. Blocks of 32 hold the same values: 4 bits around the middle as
``q4_0``, 4 bits around another zero point as ``q5_0``, and 8 bits as ``q8_0``. A matrix that no block holds, and what is no such matrix, becomes float32.

Floats of 8 bits (E4M3) have tiles on a GPU, and no blocks: for a CPU their products with their scales are rounded to 16 bits once, and so is the model.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from pipespec.errors import user_stacklevel
from pipespec.models.families import FAMILIES
from pipespec.models.quantized import Float8Linear, QuantizedExperts, QuantizedLinear, filled, in_blocks, untie
from pipespec_kernels import block_layouts as layouts
from pipespec_kernels.formats import QuantizedMatrix, from_codes, from_e2m1

Get = Callable[[str], torch.Tensor]
"""A tensor of a module by its last name; ``KeyError`` where the module has none of that name."""

Settings = Mapping[str, Any]
"""``quantization_config`` of a configuration."""


class NotHeld(ValueError):
    """A checkpoint in a form that no block holds. Packages of transformers may multiply with it."""


class Floats8(NamedTuple):
    """A matrix of floats of 8 bits: float8_e4m3fn ``[outputs, inputs]``, and scales ``[outputs, groups]`` in float32, each for 128 inputs, or for 16."""

    weight: torch.Tensor
    scale: torch.Tensor


Unpacked = tuple[torch.Tensor, torch.Tensor] | QuantizedMatrix | Floats8
"""Codes ``[outputs, inputs]`` and scales ``[outputs, groups]``, or the matrix."""

_FLOATS_8 = ("e4m3", "float-quantized", "fp8")
"""Formats with floats of 8 bits."""

_WITH_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of configurations: transformers knows how their checkpoints of such floats are stored."""

_OF_ACTIVATIONS = (
    ".input_scale",
    ".activation_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
)
"""Ends of the names of scales for inputs and for keys and values, which have others here."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps each of eight columns, counted in fours of bits from the lowest."""


def settings_of(config: Any) -> Settings | None:
    """How a checkpoint packs its matrices, by its configuration; None: in no way, or in one that only transformers reads.

    Raises:
        NotHeld: the method is one of these, and a setting is not supported.
    """
    settings = getattr(config, "quantization_config", None)
    family = FAMILIES.get(config.model_type)
    if settings is None or family is None or family.prefix is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    name = str(settings.get("quant_method", "")).lower()
    settings = {**settings, "quant_method": name}
    if (method := _METHODS.get(name)) is None:
        return None
    if has_floats_of_8_bits(settings) and any(getattr(config, key, None) for key in _WITH_EXPERTS):
        return None
    if has_floats_of_8_bits(settings) and not all(form in _FLOATS_8 for _, form in _packings(settings)):
        raise NotHeld(f"a checkpoint of {name} with floats of 8 bits beside other formats is not supported")
    for bits, form in _packings(settings):
        if bits not in method.bits or form not in method.formats:
            raise NotHeld(
                f"a checkpoint of {name} in the format {form!r} with weights of {bits} bits is not supported: the formats are "
                f"{', '.join(method.formats)}, with {' or '.join(map(str, method.bits))} bits"
            )
    if settings.get("transform_config"):
        raise NotHeld(
            f"a checkpoint of {name} whose inputs are rotated while it runs (transform_config) is not supported: get one without rotations"
        )
    return settings


def has_floats_of_8_bits(settings: Settings) -> bool:
    """Whether matrices of such a checkpoint are floats of 8 bits."""
    return any(form in _FLOATS_8 for _, form in _packings(settings))


def repacked(
    source: str | Path, files: Sequence[Path], config: Any, settings: Settings, rounded: torch.dtype | None = None
) -> PreTrainedModel:
    """A model in eval mode, in float32 but for its blocks.

    Args:
        source: a folder, or a hub name.
        files: its safetensors.
        config: its configuration.
        settings: of :func:`settings_of`.
        rounded: the dtype of the model where floats of 8 bits are to be dequantised; None: they stay.

    Raises:
        NotHeld: weights in a form that is not supported: the message names them.
        ValueError: weights that are damaged, missing or of another shape.
    """
    config = copy.deepcopy(config)
    del config.quantization_config
    rounded = rounded if has_floats_of_8_bits(settings) else None
    config.dtype = dtype = rounded or torch.float32
    method = _METHODS[settings["quant_method"]]
    with ExitStack() as opened:
        opened_files = [opened.enter_context(safe_open(file, "pt")) for file in files]
        tensors = {name: file for file in opened_files for name in list(file.keys())}

        unused, floats = set(tensors), list[str]()

        def fill(name: str, module: nn.Module) -> nn.Module:
            def get(leaf: str) -> torch.Tensor:
                full = f"{name}.{leaf}"
                found = tensors[full].get_tensor(full)
                unused.discard(full)
                return found

            if f"{name}.gate_up_proj_blocks" in tensors:
                return _experts(f"{source}: {name}", module, get)
            if method.unpack is not None and type(module) is nn.Linear and f"{name}.{method.marker}" in tensors:
                module = _with_matrix(f"{source}: {name}", module, partial(method.unpack, get, settings), rounded)
                floats.extend([name] if type(module) is nn.Linear else [])
            _load(f"{source}: {name}", module, {leaf for leaf in _leaves(module) if f"{name}.{leaf}" in tensors}, get)
            return module

        model = filled(source, config, dtype, fill)
        for name in sorted(unused):
            if not _is_spare(name, tensors[name], model):
                raise NotHeld(
                    f"{source}: no module of a {config.model_type} model takes the tensor {name}, which is not supported"
                )
    if floats and rounded is not None:
        size = sum(model.get_submodule(name).weight.nbytes for name in floats)
        warnings.warn(
            f"{source}: no kernel for a CPU multiplies with floats of 8 bits: {size / rounded.itemsize / 1e9:.2f} GB of them become {size / 1e9:.2f} GB in "
            f"{str(rounded).removeprefix('torch.')}",
            stacklevel=user_stacklevel(),
        )
    elif floats:
        warnings.warn(
            f"{source}: no block holds the weights of {len(floats)} of its matrices ({floats[0]}, ...), which are in float32: they take more memory and time",
            stacklevel=user_stacklevel(),
        )
    if rounded is None:
        untie(model)
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _with_matrix(
    name: str, module: nn.Linear, unpack: Callable[[], Unpacked], rounded: torch.dtype | None
) -> nn.Module:
    """The module with its matrix: in blocks, or as floats where no block holds the weights. ``rounded``: as for :func:`repacked`."""
    try:
        unpacked = unpack()
    except KeyError as error:
        raise ValueError(f"{name}: there is no {error.args[0]}") from error
    except NotHeld as error:
        raise NotHeld(f"{name}: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error
    shape = unpacked.shape if isinstance(unpacked, QuantizedMatrix) else unpacked[0].shape
    if tuple(shape) != (module.out_features, module.in_features):
        raise ValueError(f"{name}: it is {list(shape)}, and this model's {list(module.weight.shape)}")
    if isinstance(unpacked, QuantizedMatrix):
        return in_blocks(module, unpacked)
    if isinstance(unpacked, Floats8):
        made = Float8Linear(*unpacked, module.bias)
        if rounded is None:
            return made
        module.weight = nn.Parameter(made.decoded().to(rounded), requires_grad=False)
        return module
    codes, scales = unpacked
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name} is damaged: it has scales that are not finite")
    try:
        return in_blocks(module, from_codes(codes, scales))
    except ValueError:
        weights = codes.float().unflatten(1, (scales.shape[1], -1)) * scales.float()[:, :, None]
        module.weight = nn.Parameter(weights.flatten(1), requires_grad=False)
        return module


def _experts(name: str, own: Any, get: Get) -> QuantizedExperts:
    """The experts of gpt-oss, whose gates and ups take turns."""
    count, hidden, inner = own.num_experts, own.hidden_size, own.intermediate_size

    def matrix(part: str, rows: int, columns: int) -> tuple[QuantizedMatrix, torch.Tensor]:
        shapes = {"blocks": (rows, columns // 32, 16), "scales": (rows, columns // 32), "bias": (rows,)}
        found = {}
        for leaf, shape in shapes.items():
            try:
                found[leaf] = get(f"{part}_{leaf}")
            except KeyError as error:
                raise ValueError(f"{name}: there is no {part}_{leaf}") from error
            if tuple(found[leaf].shape) != (count, *shape):
                raise ValueError(
                    f"{name}.{part}_{leaf} is {list(found[leaf].shape)}, and this model's {[count, *shape]}"
                )
        if int(found["scales"].max()) > layouts.LARGEST_POWER:
            raise ValueError(f"{name}.{part}_scales is damaged: its weights are not finite")
        numbers = layouts.fields(found["blocks"].reshape(count * rows, -1), 4)
        return from_e2m1(numbers, found["scales"].reshape(count * rows, -1)), found["bias"].float().flatten()

    both, bias = matrix("gate_up_proj", 2 * inner, hidden)
    turns = [torch.arange(first, 2 * inner * count, 2) for first in (0, 1)]
    gate, up = (QuantizedLinear(both.rows(rows), bias[rows]) for rows in turns)
    return QuantizedExperts(own, gate, up, QuantizedLinear(*matrix("down_proj", hidden, inner)))


def _is_spare(name: str, file: Any, model: PreTrainedModel) -> bool:
    """Whether a tensor that no module takes changes nothing: a bias of zeros, a head that is the embedding, what is computed from the configuration, scales of activations that are not rounded here, layers that the class passes over."""
    if name.endswith(("rotary_emb.inv_freq", "pos_emb.inv_freq")) or (
        name == "lm_head.weight" and model.config.tie_word_embeddings
    ):
        return True
    ignored = (getattr(part, "_keys_to_ignore_on_load_unexpected", None) or () for part in (model, model.base_model))
    if any(re.search(pattern, name) for pattern in itertools.chain(*ignored)):
        return True
    if name.endswith(_OF_ACTIVATIONS):
        return True
    return name.endswith(".bias") and not bool(file.get_tensor(name).any())


def _leaves(module: nn.Module) -> set[str]:
    """The names of what a module has on the meta device: parameters, and buffers that are stored."""
    held = {**module._buffers, **module._parameters}
    return {leaf for leaf, tensor in held.items() if tensor is not None and tensor.is_meta}


def _load(name: str, module: nn.Module, leaves: set[str], get: Callable[[str], torch.Tensor]) -> None:
    held: dict[str, Any]
    for held in (module._parameters, module._buffers):
        for leaf in leaves & held.keys():
            like: Any = held[leaf]
            held[leaf] = _loaded(f"{name}.{leaf}", get(leaf), like)


def _loaded(name: str, stored: torch.Tensor, like: torch.Tensor) -> Any:
    """A parameter, or a buffer where ``like`` is none."""
    if stored.shape != like.shape:
        raise ValueError(f"{name} is {list(stored.shape)}, and this model's {list(like.shape)}")
    stored = stored.to(like.dtype)
    return nn.Parameter(stored, requires_grad=False) if isinstance(like, nn.Parameter) else stored


def _numbers(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The numbers of ``bits`` bits in 32-bit words, lowest first along ``dim``: uint8."""
    count = 32 // bits
    shifts = torch.arange(count, dtype=torch.int32) * bits
    dim = dim % packed.dim()
    shape = list(packed.shape)
    shape[dim] *= count
    words = packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))
    return (words & ((1 << bits) - 1)).to(torch.uint8).reshape(shape)


def _around(numbers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Numbers ``[outputs, inputs]`` less the zero points ``[outputs, groups]`` of their groups."""
    if numbers.shape[0] != zeros.shape[0] or numbers.shape[1] % zeros.shape[1]:
        raise ValueError(f"its numbers {list(numbers.shape)} and zero points {list(zeros.shape)} do not fit")
    groups = numbers.view(*zeros.shape, -1).to(torch.int16)
    return (groups - zeros.to(torch.int16)[:, :, None]).view(numbers.shape)


def _check_neighbours(get: Get, name: str, inputs: int, groups: int) -> bool:
    """Whether a checkpoint has the order of a matrix. Raises ``ValueError`` where its groups are not runs of neighbours."""
    try:
        order = get(name)
    except KeyError:
        return False
    if not torch.equal(order.long(), torch.arange(inputs) // (inputs // groups)):
        raise NotHeld(
            "the weights of a group are not neighbours, and those of a block are: get a checkpoint that was made without activation order (desc_act)"
        )
    return True


def _e2m1(get: Get, name: str, scales: torch.Tensor) -> QuantizedMatrix:
    """Floats of 4 bits, two neighbours in a byte."""
    packed = get(name)
    if packed.dtype is not torch.uint8:
        raise ValueError(f"{name} is {packed.dtype}, not uint8")
    return from_e2m1(layouts.fields(packed, 4), scales)


def _unpack_gptq(get: Get, settings: Settings) -> Unpacked:
    bits = int(settings["bits"])
    scales, numbers = get("scales").T.contiguous(), _numbers(get("qweight"), bits, 0).T.contiguous()
    if (
        not _check_neighbours(get, "g_idx", numbers.shape[1], scales.shape[1])
        and settings.get("desc_act")
        and scales.shape[1] > 1
    ):
        raise NotHeld("it was made with activation order (desc_act), and there is no g_idx, which holds the order")
    zeros, middle = _numbers(get("qzeros"), bits, 1).T, 1 << bits - 1
    # The first version of the format stores zero points less one. Some programs write the second under the name of the first: where all zero
    # points are to be the middle (sym), that shows.
    is_first = _format_of(settings) == "gptq"
    if settings.get("sym") is not False:
        is_first = bool((zeros == middle - 1).all()) or (is_first and not bool((zeros == middle).all()))
    return _around(numbers, zeros + int(is_first) & (1 << bits) - 1), scales


def _unpack_awq(get: Get, settings: Settings) -> Unpacked:
    def numbers(name: str) -> torch.Tensor:
        return _numbers(get(name), 4, 1).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1).T.contiguous()

    scales = get("scales").T.contiguous()
    zeros = torch.full(scales.shape, 8) if settings.get("zero_point") is False else numbers("qzeros")
    return _around(numbers("qweight"), zeros), scales


def _floats8(weight: torch.Tensor, scales: torch.Tensor, *sizes: Sequence[int] | None) -> Floats8:
    """A matrix whose scales belong to it, to each row, to 128, 64, 32 or 16 inputs of a row, or to blocks of one of ``sizes``, so many rows and inputs.

    Raises:
        ValueError: weights that are not finite, or scales of other parts.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"its weights are {weight.dtype}, not float8_e4m3fn")
    (rows, inputs), scales = weight.shape, scales.float()
    if not bool(scales.isfinite().all()) or bool((weight.view(torch.uint8) & 127 == 127).any()):
        raise ValueError("it is damaged: it has numbers that are not finite")
    groups = -(-inputs // 128)
    if scales.numel() == 1:
        return Floats8(weight, scales.reshape(1, 1).expand(rows, groups).contiguous())
    blocks = [(size[0], size[1]) for size in sizes if size] + [(1, n) for n in (128, 64, 32, 16)]
    fit = (size for size in blocks if tuple(scales.shape) == (-(-rows // size[0]), -(-inputs // size[1])))
    of_rows, of_inputs = next(fit, (0, 0))
    if not of_rows and tuple(scales.shape) in ((rows,), (rows, 1)):
        return Floats8(weight, scales.reshape(rows, 1).expand(rows, groups).contiguous())
    if not of_rows or of_inputs % 16:
        raise NotHeld(
            f"scales {list(scales.shape)} of {list(weight.shape)} floats of 8 bits are not supported: those of the matrix, of its rows, or of blocks whose inputs "
            "are a multiple of 16 are"
        )
    group = 16 if of_inputs % 128 else 128
    of_groups = scales.repeat_interleave(of_inputs // group, 1)[:, : -(-inputs // group)]
    return Floats8(weight, of_groups.repeat_interleave(of_rows, 0)[:rows].contiguous())


def _unpack_fp8(get: Get, settings: Settings) -> Unpacked:
    name = (
        "weight_scale_inv" if settings["quant_method"] == "fp8" else "weight_scale"
    )  # multiplied, in spite of the name
    return _floats8(get("weight"), get(name), settings.get("weight_block_size"))


def _unpack_modelopt(get: Get, settings: Settings) -> Unpacked:
    if has_floats_of_8_bits(settings):
        return _floats8(get("weight"), get("weight_scale"), None)
    return _e2m1(get, "weight", get("weight_scale").float() * get("weight_scale_2").float())


def _unpack_compressed(get: Get, settings: Settings) -> Unpacked:
    scales = get("weight_scale")
    if scales.dtype is torch.uint8:
        return _e2m1(get, "weight_packed", scales)
    if scales.dtype is torch.float8_e4m3fn:
        return _e2m1(get, "weight_packed", scales.float() / get("weight_global_scale").float())
    try:
        (rows, columns), packed = get("weight_shape").tolist(), get("weight_packed")
    except KeyError:
        numbers, middle = get("weight"), 0
        if numbers.dtype is torch.float8_e4m3fn:
            groups = (settings.get("config_groups") or {}).values()
            blocks = [size for group in groups if (size := (group.get("weights") or {}).get("block_structure"))]
            return _floats8(numbers, scales, *blocks)
        (rows, columns), packed = numbers.shape, None
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    _check_neighbours(get, "weight_g_idx", columns, scales.shape[1])
    if packed is not None:
        bits = 32 * packed.shape[1] // columns
        numbers, middle = _numbers(packed, bits, 1)[:, :columns].contiguous(), 1 << bits - 1
    try:
        zeros = get("weight_zero_point")
        zeros = zeros.expand(scales.shape) if packed is None else _numbers(zeros, bits, 0)[:rows]
    except KeyError:
        zeros = torch.full(scales.shape, middle)
    return _around(numbers, zeros), scales


def _packings(settings: Settings) -> Iterator[tuple[Any, Any]]:
    """The bits of a weight, and the format, of all matrices or of each group of them."""
    if settings["quant_method"] in ("gptq", "awq"):
        bits = str(settings.get("bits", settings.get("w_bit", 4)))
        yield int(bits) if bits.isdecimal() else bits, _format_of(settings)
    elif settings["quant_method"] == "mxfp4":
        yield 4, "mxfp4"
    elif settings["quant_method"] == "modelopt":
        yield 4 if "4" in str(settings.get("quant_algo")) else 8, str(settings.get("quant_algo")).lower()
    elif settings["quant_method"] in ("fp8", "fbgemm_fp8"):
        yield 8, str(settings.get("fmt", "e4m3")).lower()
    else:
        for group in (settings.get("config_groups") or {}).values():
            yield (group.get("weights") or {}).get("num_bits"), group.get("format") or settings.get("format")


def _format_of(settings: Settings) -> str:
    """The format of GPTQ or AWQ. ``format`` is the present name of the key."""
    keys, default = (
        (("format", "checkpoint_format"), "gptq")
        if settings["quant_method"] == "gptq"
        else (("format", "version"), "gemm")
    )
    given = {str(settings[key]).lower() for key in keys if settings.get(key)}
    if len(given) > 1:
        raise ValueError(
            f"a checkpoint of {settings['quant_method']} names two formats ({' and '.join(sorted(given))}): correct its configuration"
        )
    return given.pop() if given else default


class _Method(NamedTuple):
    """One way to pack matrices: the tensor by which a packed one is known, how to unpack it (None: only experts are packed), and the supported bits and formats."""

    marker: str
    unpack: Callable[[Get, Settings], Unpacked] | None
    bits: tuple[int, ...]
    formats: tuple[str, ...]


_METHODS = {
    "gptq": _Method("qweight", _unpack_gptq, (4, 8), ("gptq", "gptq_v2")),
    "awq": _Method("qweight", _unpack_awq, (4,), ("gemm",)),
    "compressed-tensors": _Method(
        "weight_scale",
        _unpack_compressed,
        (4, 8),
        ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    ),
    "mxfp4": _Method("", None, (4,), ("mxfp4",)),
    "modelopt": _Method("weight_scale", _unpack_modelopt, (4, 8), ("nvfp4", "fp8")),
    "fp8": _Method("weight_scale_inv", _unpack_fp8, (8,), ("e4m3",)),
    "fbgemm_fp8": _Method("weight_scale", _unpack_fp8, (8,), ("e4m3",)),
}
