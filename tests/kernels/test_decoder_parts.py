"""Experts, recurrent parts and layers of several sizes of the native decoder: what does not fit is named before the native code reads it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipespec_kernels.decoder import DecoderShape, LayerSizes, LayerWeights, NativeDecoder, PerLayerInputs
from pipespec_kernels.experts import Experts, Routing
from pipespec_kernels.recurrent import Recurrent, States

SHAPE = DecoderShape(16, 24, heads=2, kv_heads=1, head_dim=8, vocabulary=50, eps=1e-5, scale=0.3)
HIDDEN, ROWS, COLUMNS = SHAPE.hidden, 2, 5

ATTENTION = {"q": torch.ones(16, HIDDEN), "k": torch.ones(8, HIDDEN), "v": torch.ones(8, HIDDEN), "o": torch.ones(16, 16)}  # fmt: skip
FEED_FORWARD = {"gate": torch.ones(24, HIDDEN), "up": torch.ones(24, HIDDEN), "down": torch.ones(HIDDEN, 24)}
EMPTY = dict.fromkeys(("input_norm", "post_norm", *ATTENTION, *FEED_FORWARD))


def experts(count: int = 4, hidden: int = HIDDEN, size: int = 8, **change: Any) -> Experts:
    given = {
        "routing": Routing(2),
        "router": torch.randn(count, hidden),
        "gate": torch.randn(count * 2 * size, hidden),
        "up": None,
        "down": torch.randn(count * hidden, size),
    }
    return Experts(**given | change)


def routed(**change: Any) -> Experts:
    return experts(routing=dataclasses.replace(Routing(2), **change))


def delta_net(taps: int = 3, **change: Any) -> Recurrent:
    """Two heads of values on one of keys, of 4 elements each."""
    channels = 16
    given = {
        "inputs": torch.randn(channels, HIDDEN),
        "out": torch.randn(HIDDEN, 8),
        "kernel": torch.randn(channels, taps),
        "heads": (1, 2, 4, 4),
        "gates": torch.randn(8, HIDDEN),
        "beta": torch.randn(2, HIDDEN),
        "decay": torch.randn(2, HIDDEN),
        "decay_log": torch.randn(2),
        "decay_bias": torch.randn(2),
        "norm": torch.randn(4),
    }
    return Recurrent(**given | change)


def short_convolution(channels: int, taps: int = 3) -> Recurrent:
    return Recurrent(torch.randn(3 * channels, HIDDEN), torch.randn(HIDDEN, channels), torch.randn(channels, taps))


def states(channels: int = 16, taps: int = 3, heads: int = 2, rows: int = ROWS, places: Any = None) -> States:
    inputs, held = torch.zeros(1, 8, rows, channels, taps), torch.zeros(1, 8, rows, heads, 4, 4)
    return States(inputs, held, places or [list(range(COLUMNS + 1))] * ROWS)


PLAIN = ATTENTION | FEED_FORWARD
READER = PLAIN | {"k": None, "v": None, "keys_of": 1}
RECURRENT = FEED_FORWARD | {"recurrent": delta_net()}
OTHER = LayerSizes(24, 1, 16, 8)
WIDE = PLAIN | {"sizes": OTHER, "q": torch.ones(32, HIDDEN), "k": torch.ones(16, HIDDEN), "v": torch.ones(16, HIDDEN), "o": torch.ones(HIDDEN, 32)}  # fmt: skip
INPUTS = dataclasses.replace(SHAPE, per_layer=4)
OWN = {"per_layer_gate": torch.ones(4, HIDDEN), "per_layer_out": torch.ones(HIDDEN, 4)}


def own_inputs(width: int = 4, rows: int = 4) -> PerLayerInputs:
    return PerLayerInputs(torch.randn(SHAPE.vocabulary, width), torch.randn(rows, HIDDEN), torch.ones(4))


def step(
    *layers: dict[str, Any],
    held: States | None = None,
    shape: DecoderShape = SHAPE,
    per_layer: PerLayerInputs | None = None,
) -> Tensor:
    embedding = torch.randn(shape.vocabulary, HIDDEN)
    decoder = NativeDecoder(
        shape,
        [LayerWeights(**EMPTY | layer) for layer in layers],
        embedding=embedding,
        norm=torch.ones(HIDDEN),
        head=embedding,
        per_layer=per_layer,
    )
    keys = torch.zeros(sum("recurrent" not in layer for layer in layers), ROWS, 1, 16, 8)
    angles, tokens = torch.ones(16, 8), torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    return decoder.step(tokens, keys, keys.clone(), [0] * ROWS, angles, angles, keep=2, states=held)


def with_experts(part: Experts, **change: Any) -> Tensor:
    return step(ATTENTION | {"experts": part} | change)


def with_recurrent(part: Recurrent, held: States | None = None, **change: Any) -> Tensor:
    return step(FEED_FORWARD | {"recurrent": part} | change, held=held or states())


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    (r"experts.router must be \(4, 16\)", lambda: with_experts(experts(hidden=4096))),
    (r"experts.gate must be \(64, 16\)", lambda: with_experts(experts(gate=torch.zeros(32, HIDDEN)))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=4, chosen_groups=2, group_best=2))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=4, chosen_groups=-9))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=4, chosen_groups=9))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=4, chosen_groups=1))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=0))),
    ("4 experts do not allow", lambda: with_experts(routed(groups=3))),
    ("4 experts do not allow", lambda: with_experts(routed(chosen=5))),
    ("0 experts do not allow", lambda: with_experts(experts(count=0))),
    ("sparse_mixer chooses two experts, not 3", lambda: with_experts(routed(chosen=3, scores="sparse_mixer"))),
    ("scores must be one of softmax, ", lambda: with_experts(routed(scores="relu"))),
    ("need an intermediate size", lambda: with_experts(experts(size=0))),
    ("needs a shared expert", lambda: with_experts(experts(shared_router=torch.ones(1, HIDDEN)))),
    ("has experts, and takes none of up, down", lambda: with_experts(experts(), **FEED_FORWARD)),
    ("takes no gate", lambda: with_experts(experts(), gate=FEED_FORWARD["gate"])),
    ("cannot be parallel", lambda: step(ATTENTION | {"experts": experts()}, shape=dataclasses.replace(SHAPE, is_parallel=True))),
    ("has neither up nor experts", lambda: step(ATTENTION)),
    ("has neither down nor experts", lambda: step(ATTENTION | FEED_FORWARD | {"down": None})),
    ("has neither q nor recurrent", lambda: step(FEED_FORWARD)),
    ("has recurrent, and takes none of q, k, v, o", lambda: with_recurrent(delta_net(), **ATTENTION)),
    ("takes none of side_norm, q_gate and sinks", lambda: with_recurrent(delta_net(), sinks=torch.ones(2))),
    ("with heads the weights of a delta net", lambda: with_recurrent(delta_net(norm=None))),
    ("a kernel has channels and taps", lambda: with_recurrent(delta_net(taps=0))),
    ("16 channels do not fit the heads", lambda: with_recurrent(delta_net(heads=(0, 2, 4, 4)))),
    ("16 channels do not fit the heads", lambda: with_recurrent(delta_net(heads=(1, 2, 4, 8)))),
    (r"states must be \(1, 8, 2, 16, 3\)", lambda: with_recurrent(delta_net(), states(channels=1))),
    (r"states must be \(1, 8, 2, 16, 3\)", lambda: with_recurrent(delta_net(), states(taps=2))),
    (r"states must be \(1, 8, 2, 2, 4, 4\)", lambda: with_recurrent(delta_net(), states(heads=1))),
    (r"states must be \(1, 8, 2, 16, 3\)", lambda: with_recurrent(delta_net(), states(rows=1))),
    ("places must be 6 for each of 2 rows", lambda: with_recurrent(delta_net(), states(places=[[0] * 5, [0] * 7]))),
    ("the first one a slot", lambda: with_recurrent(delta_net(), states(places=[[-1] * 6] * 2))),
    ("must be slots of 8", lambda: with_recurrent(delta_net(), states(places=[[0] * 5 + [8]] * 2))),
    ("states of the same sizes", lambda: step(*(FEED_FORWARD | {"recurrent": short_convolution(n)} for n in (16, 32)), held=states())),
    ("reads the keys of layer 0, which must come", lambda: step(READER | {"keys_of": 0})),
    ("reads the keys of layer 1, which must come", lambda: step(PLAIN, READER | {"keys_of": 0}, READER)),
    ("keys of layer 0, .* keys of its size", lambda: step(PLAIN, READER | {"keys_of": 0, "sizes": OTHER})),
    ("keys of layer 0, .* keys of its size", lambda: step(RECURRENT, READER | {"keys_of": 0}, held=states())),
    ("has keys_of, and takes none of k, v", lambda: step(PLAIN, PLAIN | {"keys_of": 0})),
    ("has no o", lambda: step(PLAIN, READER | {"keys_of": 0, "o": None})),
    ("keys and values of 2 sizes, got tensors of 1", lambda: step(PLAIN, WIDE)),
    (r"\[1\] rotates 16 elements", lambda: step(PLAIN, WIDE | {"sizes": OTHER._replace(rotary_dim=16)})),
    ("kv_heads must divide heads", lambda: step(PLAIN | {"sizes": OTHER._replace(kv_heads=3)})),
    ("per_layer_gate and per_layer_out if the shape", lambda: step(PLAIN, shape=INPUTS)),
    ("makes the per-layer inputs that the shape has", lambda: step(PLAIN | OWN, shape=INPUTS)),
    ("50 rows and 4 columns at least", lambda: step(PLAIN | OWN, shape=INPUTS, per_layer=own_inputs(width=3))),
    (r"per_layer.matrix must be \(4, 16\)", lambda: step(PLAIN | OWN, shape=INPUTS, per_layer=own_inputs(rows=5))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_does_not_fit_is_named(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_fits_is_not_refused() -> None:
    for routing in (
        Routing(2),
        Routing(2, "sigmoid", groups=2, chosen_groups=1, group_best=2),
        Routing(2, "sparse_mixer", jitter=0.1),
    ):
        assert with_experts(experts(routing=routing)).isfinite().all()
    assert with_recurrent(delta_net()).isfinite().all()
    assert step(PLAIN | OWN, shape=INPUTS, per_layer=own_inputs(width=9)).isfinite().all()
