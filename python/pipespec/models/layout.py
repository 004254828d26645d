"""What the layers of a model keep of a text: sizes of keys and values, sliding windows, and sizes of recurrent states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pipespec.models.compat import caches_latents, per_layer_configs
from pipespec.models.properties import text_config

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers whose keys and values a rollback can drop, as transformers names them."""

RECURRENT = "linear_attention"
"""Type of recurrent layers, as transformers names it. Models of one type differ in what such a layer computes."""

CONVOLUTION = "conv"
"""Type of the layers of LFM2 that have a short convolution, as transformers names it. Its last inputs are its state."""

GATED_DELTA = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
"""``model_type`` of models whose recurrent layers are gated delta nets: :mod:`pipespec.engine.recurrent` keeps their states."""

SHORT_CONVOLUTIONS = frozenset(("lfm2", "lfm2_moe"))
"""``model_type`` of models whose recurrent layers are short convolutions."""

STATES = 16
"""States per row and layer that a new cache of a model with recurrent layers has room for."""


class UnsupportedLayers(ValueError):
    """Layers whose keys and values, or state, cannot be rolled back row by row. The message is a sentence without its full stop."""


class StateLayout(NamedTuple):
    """Sizes of the states of the recurrent layers of a model, equal in all of them.

    A layer keeps the last inputs of its convolution, ``[channels, taps]``, and a recurrent state in float32, ``[heads, key_dim, value_dim]``, of which a
    short convolution has none.

    Attributes:
        layers: Indices of the recurrent layers.
        channels: Channels of the convolution.
        taps: Last inputs that are kept: as many as the convolution's kernel has, as in transformers' caches. A later column reads all but the first.
        heads: Heads of the recurrent state.
        key_dim: Size of a key.
        value_dim: Size of a value.
    """

    layers: tuple[int, ...]
    channels: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int

    def bytes_for(self, rows: int, dtype: torch.dtype, states: int = STATES) -> int:
        """Bytes of ``states`` states of each layer, for ``rows`` sequences of a model of ``dtype``."""
        inputs = self.channels * self.taps * dtype.itemsize
        state = self.heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return len(self.layers) * rows * states * (inputs + state)


class LayerSizes(NamedTuple):
    """Sizes of the keys and values of a layer.

    Attributes:
        heads: Heads of keys and values.
        key_dim: Size of a key.
        value_dim: Size of a value.
    """

    heads: int
    key_dim: int
    value_dim: int


class CacheLayout(NamedTuple):
    """Sizes of the keys and values of a model, and the window of each layer.

    Attributes:
        heads: Heads of keys and values; where the layers differ, the largest number.
        key_dim: Size of a key, likewise.
        value_dim: Size of a value, likewise.
        windows: Per layer, the number of last positions that a column sees, its own included; None: all.
        states: Of the recurrent layers, which have no keys and values; None: there are none.
        is_latent: Keys and values are two parts of one latent, which a storage keeps one behind the other.
        own: Per layer its own sizes, None for a layer that reads the keys and values of another one. None: all layers with attention are alike.
    """

    heads: int
    key_dim: int
    value_dim: int
    windows: tuple[int | None, ...]
    states: StateLayout | None = None
    is_latent: bool = False
    own: tuple[LayerSizes | None, ...] | None = None

    @classmethod
    def of(cls, config: Any, kv_heads: int | None = None) -> CacheLayout:
        """The layout for a configuration.

        Args:
            config: of a model.
            kv_heads: heads of keys and values in this process; None: as the configuration says. A process of a tensor-parallel group holds a
                part of them.

        Raises:
            UnsupportedLayers: A layer is of another type than :data:`FULL` or :data:`SLIDING`, or a recurrent layer of a model outside of
                :data:`GATED_DELTA`.
        """
        config = text_config(config)
        own = _sizes_of_layers(config)
        heads, key_dim, value_dim = _sizes(config) if own is None else map(max, zip(*filter(None, own), strict=True))
        is_latent = _has_latents(config) and caches_latents(config.model_type)
        return cls(kv_heads or heads, key_dim, value_dim, _windows(config), _states(config), is_latent, own)

    @property
    def attention(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values of their own."""
        recurrent = () if self.states is None else self.states.layers
        return tuple(i for i in range(len(self.windows)) if i not in recurrent and (self.own is None or self.own[i]))

    @property
    def readers(self) -> tuple[int, ...]:
        """Indices of the layers that read the keys and values of others."""
        return () if self.own is None else tuple(i for i, own in enumerate(self.own) if own is None)

    def sizes(self, layer: int) -> LayerSizes:
        """The sizes of a layer of :attr:`attention`."""
        own = None if self.own is None else self.own[layer]
        return own or LayerSizes(self.heads, self.key_dim, self.value_dim)

    def bytes_for(self, rows: int, capacity: int, dtype: torch.dtype, layers: int | None = None) -> int:
        """Bytes of the keys and values of ``layers`` layers (None: all), for ``rows`` sequences of ``capacity`` positions.

        With the states of recurrent layers, for which ``layers`` must be all: such a model is whole on one device.
        """
        states = 0 if self.states is None else self.states.bytes_for(rows, dtype)
        sizes = [heads * (key + value) for heads, key, value in map(self.sizes, self.attention)]
        if layers is not None and self.states is None and layers < len(self.windows):
            # Which layers they are is not known.
            sizes = sorted(sizes)[-layers:]
        return sum(sizes) * rows * capacity * dtype.itemsize + states

    def restricts(self, length: int) -> bool:
        """Whether a text of ``length`` tokens is longer than the window of some layer."""
        return any(window is not None and window < length for window in self.windows)


def _has_latents(config: Any) -> bool:
    """Whether a model has multi-head latent attention (DeepSeek-V2, section 2.1)."""
    return bool(getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None))


def _sizes(config: Any) -> tuple[int, int, int]:
    """Heads, and sizes of a key and of a value."""
    if _has_latents(config):
        if caches_latents(config.model_type):
            return 1, config.kv_lora_rank, config.qk_rope_head_dim
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _sizes_of_layers(config: Any) -> tuple[LayerSizes | None, ...] | None:
    """:attr:`CacheLayout.own`, as Gemma 4 has them."""
    try:
        layers = per_layer_configs(config)
    except NotImplementedError as error:
        raise UnsupportedLayers(f"its {error}") from error
    if layers is None:
        return None
    shares = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    return tuple(
        None if share == "reuse" else LayerSizes(*_sizes(of_layer))
        for share, of_layer in zip(shares, layers, strict=True)
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types is None:
        # Where there are types, use_sliding_window has decided about them when the configuration was made.
        is_sliding = window is not None and getattr(config, "use_sliding_window", True)
        types = [SLIDING if is_sliding else FULL] * config.num_hidden_layers
        if getattr(config, "attention_chunk_size", None) is not None:
            types = ["chunked_attention"] * config.num_hidden_layers
    known = {FULL, SLIDING}
    known |= (
        {RECURRENT}
        if config.model_type in GATED_DELTA
        else {CONVOLUTION}
        if config.model_type in SHORT_CONVOLUTIONS
        else set()
    )
    others = sorted(set(types) - known)
    if others:
        raise UnsupportedLayers(
            f"some layers of {config.model_type} models ({', '.join(others)}) cannot be rolled back row by row"
        )
    if SLIDING in types and not window:
        raise UnsupportedLayers(f"its configuration has {SLIDING} layers and no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def _states(config: Any) -> StateLayout | None:
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    layers = tuple(i for i, kind in enumerate(types) if kind in (RECURRENT, CONVOLUTION))
    if not layers:
        return None
    if types[layers[0]] == CONVOLUTION:
        return StateLayout(layers, config.hidden_size, config.conv_L_cache, 0, 0, 0)
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    return StateLayout(layers, channels, config.linear_conv_kernel_dim, heads, key_dim, value_dim)


def takes_mask_per_type(decoder: Any) -> bool:
    """Whether the ``forward()`` of a decoder takes, as ``attention_mask``, a dictionary with a mask per type of layer."""
    return "dict" in names_in_forward(type(decoder))


def names_in_forward(kind: Any) -> frozenset[str]:
    """The globals and attributes that the ``forward()`` of a class names, functions within it included."""
    return _names_in(kind.forward)


@functools.cache
def _names_in_methods(kind: type) -> frozenset[str]:
    """Those of the methods that a class itself has, without its constructor."""
    methods = [value for name, value in vars(kind).items() if inspect.isfunction(value) and name != "__init__"]
    return frozenset().union(*map(_names_in, methods))


@functools.cache
def _names_in(function: Any) -> frozenset[str]:
    found: set[str] = set()
    codes = [code for code in [getattr(inspect.unwrap(function), "__code__", None)] if code is not None]
    while codes:
        code = codes.pop()
        found |= {*code.co_names}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found)


def configuration_read(config: Any, kinds: Iterable[type]) -> list[str]:
    """The entries of a configuration that the calls of some classes may read, with their values."""
    names, space = frozenset().union(*map(_names_in_methods, kinds)), vars(text_config(config))
    return [f"{name}={space[name]!r}" for name in sorted(names & space.keys())]


def mask_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Per layer, the window of the mask that the model's own forward makes with its configuration; None: it hides the future alone.

    A class has no windows at all, or one for all layers, or reads the type of each layer from the configuration (older versions of transformers: from
    the layer).
    """
    decoder = getattr(model, model.base_model_prefix)
    config, names = text_config(decoder.config), names_in_forward(type(decoder))
    window = getattr(config, "sliding_window", None)
    layers = list(decoder.layers)[: config.num_hidden_layers]
    if "create_sliding_window_causal_mask" not in names:
        return (None,) * len(layers)
    if "attention_type" in names:
        types = [getattr(layer, "attention_type", None) or layer.self_attn.attention_type for layer in layers]
    else:
        types = config.layer_types if "layer_types" in names else [SLIDING] * len(layers)
    return tuple(window if kind == SLIDING else None for kind in types)


def layout_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the masks and caches of a model in transformers are not those of its :class:`CacheLayout`, as a phrase; None if they are.

    transformers makes both from the configuration as it is at the call, the masks by the class of the decoder, with its configuration, and the cache by
    the model's alone. So a window that a class does not know shortens the cache and leaves the mask.
    """
    config = text_config(model.config)
    try:
        layout, masks = CacheLayout.of(config), mask_windows(model)
        layers = DynamicCache(config=config).layers
    except UnsupportedLayers as error:
        return str(error)
    own = getattr(model, model.base_model_prefix).config
    if getattr(own, "is_causal", True) is False or getattr(own, "use_bidirectional_attention", None) is True:
        return "its configuration says that it is not causal"
    for i in layout.attention:
        kept = getattr(layers[i], "sliding_window", None)
        if type(layers[i]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"layer {i} has a cache of class {type(layers[i]).__name__}"
        if layout.windows[i] != masks[i] or kept not in (None, masks[i]):
            said = f"sliding_window={getattr(config, 'sliding_window', None)}, layer_types={getattr(config, 'layer_types', None)}"
            return (
                f"with {said} in its configuration, {type(model).__name__} masks layer {i} with a window of {masks[i]} tokens, and its cache "
                f"keeps {kept or 'all'}"
            )
    return None
