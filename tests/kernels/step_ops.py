"""The operations of a captured step, counted without a GPU: ``python -m tests.kernels.step_ops``.

The step runs on torch's meta tensors, which have shapes and dtypes, and no memory. The log has every operation of torch and every launch of a Triton
kernel in the code that a capture runs. So it shows the content of a graph, and the operations that a capture would refuse: tensors of the host,
copies from it, and waits for the device.

An operation of torch counts as one launch. Some take more (a product may split its sum), so the counts are lower bounds; views and allocations
take none. The kernels over the block count, too. CUDA's own optimisation of a graph is not measured.
"""

import argparse
import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from pipespec import trust
from pipespec.engine.attention import ATTENTION
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampling import SamplingParams
from pipespec.schedules.graphs.capture import RecordedStep
from pipespec.schedules.graphs.scheduling import HostShadow
from pipespec.schedules.graphs.stage import GraphedStage

MODELS = {
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of LLaMA 3.2 1B and LLaMA 3.1 8B."""

SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(seeds=(1,), temperature=0.7),
    "top-k": SamplingParams(seeds=(1,), temperature=0.7, top_k=50),
    "all filters": SamplingParams(seeds=(1,), temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
}

_VOCABULARY = 128256
_TEXT = 2048
_MULTIPROCESSORS = 132
"""Of an H100 or H200. They decide how many blocks of threads share the keys of a row."""

_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")
_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")


class Counts(NamedTuple):
    """Launches of a step, by operation.

    Attributes:
        layer: In each layer.
        outside: Outside of the layers.
        refused: Operations that a capture would refuse, or record with values that no replay updates.
    """

    layer: Counter[str]
    outside: Counter[str]
    refused: list[str]

    def total(self, layers: int) -> int:
        """Launches of a step of a model of so many layers."""
        return layers * self.layer.total() + self.outside.total()


class OperationLog(TorchDispatchMode):
    """Logs the operations that run within it.

    Attributes:
        launches: Names of the operations that launch something, in order.
        refused: See :class:`Counts`.
        on_host: Operations on the host, which happen at the capture and never again.
        kept: Operations whose results something refers to after the step. In a capture they keep the memory of its graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.refused: list[str] = []
        self.on_host: list[str] = []
        self.kept: list[str] = []
        self._made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def end(self) -> None:
        """Record the tensors that remain, while the owner of the step lives."""
        gc.collect()
        self.kept = [name for name, made in self._made if made() is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        by_mask = name.startswith("index") and any(x.dtype is torch.bool for x in given[1:])
        if (name in _WAITS or by_mask) and any(x.is_meta for x in given):
            self.refused.append(f"waits for the device: {name}")
        result = func(*args, **kwargs)
        aliases = [given.alias_info for given in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if not any(alias is not None and alias.is_write for alias in aliases):
            self._made += [(name, weakref.ref(x)) for x in made]
        if not is_view and name not in _ALLOCATIONS and any(x.is_meta for x in (*given, *made)):
            self.launches.append(name)
        self._check_devices(name, given, made)
        return result

    def _check_devices(self, name: str, given: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        # Tensors without dimensions are numbers.
        of, into = ({x.is_meta for x in tensors if x.dim() > 0} for tensors in (given, made))
        if False in of and True in into:
            self.refused.append(f"reads memory of the host: {name}")
        elif False in into and True in of:
            self.refused.append(f"waits for the device: {name}")
        elif False in into:
            self.on_host.append(name)


class _Port:
    """The part of a port that a step uses. It logs the kernels over the block instead of launching them."""

    def __init__(self, log: OperationLog, rows: int, width: int) -> None:
        self.width, self._log = width, log
        self.tokens = torch.zeros((rows, width), dtype=torch.int32, device="meta")
        self.kv, self.query_lens, self.num_draft_tokens, self.n_select = torch.zeros(
            (4, rows), dtype=torch.int32, device="meta"
        ).unbind()

    def plan(self) -> None:
        self._log.launches.append("plan")

    def commit(self, selected: torch.Tensor) -> None:
        assert selected.shape == self.tokens.shape
        self._log.launches.append("commit")


@contextlib.contextmanager
def without_gpu(log: OperationLog) -> Iterator[None]:
    """Make code treat tensors without memory as a GPU's, and log launches of Triton kernels."""
    from triton.runtime.jit import JITFunction

    copy_ = torch.Tensor.copy_

    def copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not source.is_meta or into.is_meta:
            return copy_(into, source, non_blocking)
        # Into pinned memory, for the host to read later. Tensors without memory cannot be copied to it.
        log.launches.append("copy to the host")
        if not non_blocking:
            log.refused.append("waits for the device: copy_")
        return into

    trust(copy)

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        log.launches.append(kernel.__name__)

    with contextlib.ExitStack() as replaced:
        for place, value in {
            "torch.Tensor.is_cuda": property(lambda tensor: tensor.is_meta),
            "torch.Tensor.pin_memory": lambda tensor: tensor,
            "torch.Tensor.is_pinned": lambda tensor: not tensor.is_meta,
            "torch.Tensor.copy_": copy,
            "torch.is_autocast_enabled": lambda kind: False,
            "torch.cuda.is_current_stream_capturing": lambda: False,
            "pipespec_kernels.triton.launch.check_device": lambda device, what: None,
            "pipespec_kernels.triton.launch.multiprocessors": lambda device: _MULTIPROCESSORS,
            # The calls take the same path as on a GPU, and not torch's dispatcher.
            "pipespec_kernels.kv.traced": lambda tensor: False,
            # Without values there is nothing to compare.
            "pipespec.engine.fused._with_stand_ins": lambda model: model,
            "pipespec.engine.fused.check_outputs": lambda *arguments: None,
            "pipespec.engine.fused._check_exact": lambda *arguments: None,
        }.items():
            replaced.enter_context(mock.patch(place, value))
        replaced.enter_context(mock.patch.object(JITFunction, "run", launch))
        yield


class Opaque(torch.nn.Linear):
    """In the place of a linear module whose product is one launch of a library's kernel."""


trust(Opaque)


def launches(
    model: dict[str, Any],
    layers: int,
    width: int,
    sampling: str = "greedy",
    *,
    exact: bool = False,
    opaque: bool = False,
    native: bool = True,
) -> OperationLog:
    """Log the second step of a stage, because work of the first one alone (the warm-up) is not a part of a graph.

    Args:
        model: Sizes, as those in :data:`MODELS`.
        layers: How many the model has here.
        width: Columns of the step.
        sampling: A name in :data:`SAMPLING`.
        exact: Whether the step runs in the exact form.
        opaque: Whether the matrices in the layers are quantised: each is an :class:`Opaque` module.
        native: Whether the fused form may run. False: transformers' modules.
    """
    log = OperationLog()
    config = LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=_TEXT, **model | {"num_hidden_layers": layers})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    for module in llama.model.modules() if opaque else ():
        if type(module) is torch.nn.Linear:
            module.__class__ = Opaque
    llama.set_attn_implementation(ATTENTION)
    with without_gpu(log):
        stage = GraphedStage(llama, HostShadow.create(1, 1, _TEXT), 0, exact=exact, native=native)
        with torch.no_grad():
            stage.prepare(StageInputs([np.zeros(1, dtype=np.int32)], [_TEXT // 2], SAMPLING[sampling], _VOCABULARY))
        step = RecordedStep(stage, _Port(log, 1, width))  # type: ignore[arg-type]
        step(warm_up=True)
        log.launches.clear()
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True), log:
            log.launches.append("open")
            step(warm_up=False)
            log.launches.append("close")
        log.end()
    return log


def count(model: dict[str, Any], width: int, sampling: str = "greedy", **form: bool) -> Counts:
    """Count the launches of a step, from models of two and of three layers. Arguments as for :func:`launches`."""
    two, three = (launches(model, layers, width, sampling, **form) for layers in (2, 3))
    layer = Counter(three.launches)
    layer.subtract(two.launches)
    outside = Counter(two.launches)
    for _ in range(2):
        outside.subtract(layer)
    return Counts(+layer, +outside, two.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--width", type=int, default=1, help="columns of the step")
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy")
    parser.add_argument("--exact", action="store_true", help="the step of exact=True")
    parser.add_argument("--opaque", action="store_true", help="a quantised model, each product of which is one launch")
    parser.add_argument("--modules", action="store_true", help="transformers' modules instead of the fused form")
    given = parser.parse_args()
    model = MODELS[given.model]
    form = {"exact": given.exact, "opaque": given.opaque, "native": not given.modules}
    counts, layers = count(model, given.width, given.sampling, **form), model["num_hidden_layers"]
    print(f"{given.model}, {layers} layers, width {given.width}, {given.sampling}, {form}\n")
    print(f"{'operation':24}{'per layer':>10}{'outside':>10}")
    for name in sorted({*counts.layer, *counts.outside}):
        print(f"{name:24}{counts.layer[name] or '':>10}{counts.outside[name] or '':>10}")
    print(f"{'sum':24}{counts.layer.total():>10}{counts.outside.total():>10}")
    print(f"\n{counts.total(layers)} launches in a step")
    for what in counts.refused:
        print(f"not possible in a graph: {what}")


if __name__ == "__main__":
    main()
