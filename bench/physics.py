"""What a GPU's mechanisms cost: ``python -m bench.physics [--json FILE] [--seconds S] [--dry]``

The figures explain the tables of whole generations: the period of dependent nodes in a graph, with and without programmatic dependent launch;
copy nodes; the launch of a graph; the time from the end of a step over the host to the start of the next; plan and commit; every
matrix product of the 1B and 8B models against a copy; two graphs at once, with priorities and without. Each figure is a median.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.devices import Host, check_captured, device_for, host_us
from bench.figures import Figures, parser
from pipespec.bench.planted import SHAPES, Shape, plant

COLUMNS = (1, 4, 5, 8, 9, 16)
"""M of the products: rows of the activations."""

BLOCK = 128
"""Elements per block of threads of the small kernel."""


class Physics:
    """The sections. ``dry``: on the CPU with small sizes."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, device_for(dry)
        self.nodes = 8 if dry else 400
        self.repeats = 2 if dry else 15
        self.shapes: dict[str, Shape] = {
            "draft": SHAPES["tiny-small" if dry else "1B"],
            "target": SHAPES["tiny-target" if dry else "8B"],
        }
        self.copy = 0.0

    def run(self, figures: Figures) -> int:
        for section in (
            self.copying,
            self.dependent_nodes,
            self.launches,
            self.protocol,
            self.turnaround,
            self.two_graphs,
            self.products,
        ):
            figures.section(section.__name__, section)
        return figures.finish()

    def copying(self, figures: Figures) -> None:
        """Bytes read and written per second by a plain copy."""
        self.copy = self.device.copy_gb_per_s()
        figures.add("copy.gb_per_s", self.copy)

    # ---- nodes

    def dependent_nodes(self, figures: Figures) -> None:
        """Microseconds per node of a graph in which each node needs the one before."""
        where = self.device.name
        for name, blocks in (("small", 1), ("wide", 132)):
            for pdl in (False, True):
                figure = f"node.{name}{'_pdl' if pdl else ''}_us"
                try:
                    figures.add(figure, self._kernels(blocks, pdl))
                except Exception as error:
                    if not pdl:
                        raise
                    figures.leave_out(figure, f"{type(error).__name__}: {error}")
        x = torch.zeros(BLOCK, device=where)
        figures.add("node.torch_us", self._per_node(lambda: x.add_(1)))
        a, b = (torch.zeros(4, dtype=torch.int32, device=where) for _ in range(2))

        def there_and_back() -> None:
            b.copy_(a)
            a.copy_(b)

        figures.add("node.memcpy_us", self._per_node(there_and_back) / 2)

        def kernel_and_memcpy() -> None:
            a.add_(1)
            b.copy_(a)

        figures.add("node.kernel_and_memcpy_us", self._per_node(kernel_and_memcpy))

    def _kernels(self, blocks: int, pdl: bool) -> float:
        x = torch.zeros(blocks * BLOCK, device=self.device.name)
        graph = self._chain(functools.partial(small_kernel(self.dry), x, blocks, pdl))
        per_node = self.device.elapsed_us(graph, self.repeats) / self.nodes
        x.zero_()
        graph()
        # Each node adds 1. If a node overtook the one before, additions are lost.
        if not bool((x == self.nodes).all()):
            raise RuntimeError(f"{self.nodes} nodes have added {x.min().item():g} to {x.max().item():g}")
        return per_node

    def _chain(self, node: Callable[[], object]) -> Callable[[], object]:
        def chain() -> None:
            for _ in range(self.nodes):
                node()

        return self.device.capture(chain)

    def _per_node(self, node: Callable[[], object]) -> float:
        return self.device.elapsed_us(self._chain(node), self.repeats) / self.nodes

    def launches(self, figures: Figures) -> None:
        """The host's time for the launch of a graph, and the time between two graphs."""
        x = torch.zeros(BLOCK, device=self.device.name)
        labels = (1, 100, 700, 1300)
        # A dry run has the names of a real one.
        for label, nodes in zip(labels, (1, 2, 4, 8) if self.dry else labels, strict=True):

            def chain(nodes: int = nodes) -> None:
                for _ in range(nodes):
                    x.add_(1)

            graph = self.device.capture(chain)
            figures.add(f"launch.host_{label}_nodes_us", host_us(graph, 5 * self.repeats, self.device))
            if nodes == 1:

                def together(graph: Callable[[], object] = graph) -> None:
                    for _ in range(100):
                        graph()

                figures.add("launch.back_to_back_us", self.device.elapsed_us(together, self.repeats) / 100)

                def there_and_back(graph: Callable[[], object] = graph) -> None:
                    graph()
                    self.device.synchronize()

                figures.add("launch.round_trip_us", host_us(there_and_back, 5 * self.repeats, self.device))

    # ---- the protocol

    def protocol(self, figures: Figures) -> None:
        """Plan and commit of one step: a round of four draft steps and the target's, all draft tokens accepted, without models."""
        from pipespec_kernels.state import StateBlock

        rounds, lookahead = 2 if self.dry else 20, 4
        host = StateBlock.create(2, 1, 4096)
        host.reset([16], [4000], [5], [])
        initial = torch.from_numpy(host.memory.array)
        block: Any = host if self.dry else initial.cuda()
        start = initial.clone() if self.dry else initial.cuda()
        port = self._ports(block)
        first, draft, target = port(0, 2, lookahead, 0), port(0, 1, lookahead, 0), port(1, 1 + lookahead, 0, lookahead)
        steps = [first, *[draft] * (lookahead - 1), target]

        def body() -> None:
            for _ in range(rounds):
                for step in steps:
                    step()

        graph = self.device.capture(body)

        def again() -> None:
            (initial if self.dry else block).copy_(start)

        copying = self.device.elapsed_us(again, self.repeats)

        def fresh() -> None:
            again()
            graph()

        both = self.device.elapsed_us(fresh, self.repeats) - copying
        if not self.dry:
            initial.copy_(block)
        grown = host.length(1, 0) - 16
        figures.detail("protocol.tokens_per_round", grown / rounds)
        if grown < rounds * lookahead:
            raise RuntimeError(f"{rounds} rounds committed {grown} tokens: draft tokens were not accepted")
        figures.add("protocol.plan_commit_us", both / rounds / len(steps))

    def _ports(self, block: Any) -> Callable[[int, int, int, int], Callable[[], None]]:
        def port(stage: int, width: int, lookahead: int, draft_tokens: int) -> Callable[[], None]:
            if self.dry:
                from pipespec.drivers.graphed.rounds import HostPort

                own: Any = HostPort(block, stage, width, 1)
            else:
                from pipespec_kernels.device_state import DevicePort

                own = DevicePort(block, stage, width)
            own.set_policy(lookahead, draft_tokens)
            selected = torch.zeros((1, width), dtype=torch.int32, device=self.device.name)

            def step() -> None:
                own.plan()
                own.commit(selected)

            return step

        return port

    def turnaround(self, figures: Figures) -> None:
        """From the end of a step over event, host callback, wake and decision to the start of the next one, by the steps' trace."""
        from pipespec import Pipeline

        target = plant(["check-target"], texts=0, device=self.device.name, dtype=self.device.dtype).models[-1]
        ids = torch.arange(2, 18, device=self.device.name)[None]
        new = 16 if self.dry else 200
        with Pipeline(target, schedule="plain", graphs=True, trace=512) as pipe:
            for _ in range(2):
                pipe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
                check_captured(pipe, "plain")
            assert pipe.report is not None
            trace = pipe.report.trace
            assert trace is not None
            steps = trace["target"]
        steps = steps[steps["prefill"] == 0]
        ends, starts = steps["end_ns"][:-1].astype(np.int64), steps["start_ns"][1:].astype(np.int64)
        figures.add("turn.end_to_start_us", float(np.median(starts - ends)) / 1e3)
        figures.add("turn.step_us", float(np.median(steps["end_ns"] - steps["start_ns"])) / 1e3)
        launched = steps["launched_ns"].astype(np.int64)
        if launched.any():  # a CPU's steps are not launched
            figures.add("turn.end_to_launch_us", float(np.median(launched[1:] - ends)) / 1e3)
            figures.add("turn.launch_to_start_us", float(np.median(starts - launched[1:])) / 1e3)

    # ---- matrix products

    def products(self, figures: Figures) -> None:
        """All products of a step, one by one on cold weights: as transformers has them, and with those that can be one product as one."""
        device = self.device
        rate = self.copy or device.copy_gb_per_s()
        found: list[dict[str, Any]] = []
        figures.detail("products", found)
        for model, shape in self.shapes.items():
            kv = shape.hidden_size // shape.num_attention_heads * shape.num_key_value_heads
            hidden, inner = shape.hidden_size, shape.intermediate_size
            sizes = {
                "q": (hidden, hidden),
                "k": (hidden, kv),
                "qkv": (hidden, hidden + 2 * kv),
                "gate": (hidden, inner),
                "gate_up": (hidden, 2 * inner),
                "down": (inner, hidden),
                "head": (hidden, shape.vocab_size),
            }
            layers = shape.num_hidden_layers
            times: dict[int, dict[str, float]] = {m: {} for m in COLUMNS}
            total = 0
            for name, (wide, out) in sizes.items():
                nbytes = wide * out * device.dtype.itemsize
                # The product of the output is as large as that of the queries.
                total += {"qkv": layers, "q": layers, "gate_up": layers, "down": layers, "head": 1}.get(
                    name, 0
                ) * nbytes
                copies = device.copies_for(nbytes)
                weights = torch.empty((copies, out, wide), dtype=device.dtype, device=device.name).normal_()
                for m in COLUMNS:
                    inputs = torch.randn((copies, m, wide), device=device.name).to(device.dtype)

                    def call(i: int, inputs: torch.Tensor = inputs, weights: torch.Tensor = weights) -> object:
                        return F.linear(inputs[i], weights[i])

                    us = times[m][name] = device.time_call(call, copies, max(2, self.repeats // 2))
                    of_copy = nbytes / us / 1e3 / rate
                    found.append(
                        {"model": model, "product": name, "m": m, "us": us, "bytes": nbytes, "of_copy": of_copy}
                    )
                del weights
                if figures.left < 0:
                    figures.leave_out(f"products of {model} behind {name}", "the time was over")
                    return
            figures.add(f"product.{model}.floor_us", total / rate / 1e3)
            for m, t in times.items():
                apart = layers * (2 * t["q"] + 2 * t["k"] + 2 * t["gate"] + t["down"]) + t["head"]
                joined = layers * (t["qkv"] + t["q"] + t["gate_up"] + t["down"]) + t["head"]
                figures.add(f"product.{model}.m{m}.apart_us", apart)
                figures.add(f"product.{model}.m{m}.joined_us", joined)

    # ---- two graphs at once

    def two_graphs(self, figures: Figures) -> None:
        """How a graph of large products and one of small kernels slow each other down, by the priority of the streams that captured them.

        The slow-down is the time beside the other one divided by the time alone. ``launched``: captured without priority, launched on a
        stream with it.
        """
        size = 64 if self.dry else 8192
        weights = torch.randn((2 if self.dry else 4, size, size), device=self.device.name).to(self.device.dtype)
        small = torch.randn((2 if self.dry else 8, size // 4, size // 4), device=self.device.name).to(self.device.dtype)

        def target_like(x: torch.Tensor) -> None:
            for w in weights:
                F.linear(x, w)

        def draft_like(x: torch.Tensor) -> None:
            for w in small:
                F.linear(x, w)
                x.add_(0.0)

        inputs = [
            torch.randn((5, w.shape[-1]), device=self.device.name).to(self.device.dtype) for w in (weights, small)
        ]
        bodies = [functools.partial(target_like, inputs[0]), functools.partial(draft_like, inputs[1])]
        for name, captured, launched in (
            ("equal", (0, 0), (0, 0)),
            ("draft_first", (0, -1), (0, -1)),
            ("target_first", (-1, 0), (-1, 0)),
            ("launched", (0, 0), (0, -1)),
        ):
            graphs = [
                self.device.capture(body, self.device.stream(p)) for body, p in zip(bodies, captured, strict=True)
            ]
            streams = [self.device.stream(p) for p in launched]
            alone = [self._times(graphs, streams, [i])[0] for i in range(2)]
            # As many of each as take about as long together.
            repeats = [max(1, round(20 * max(alone) / own)) for own in alone]
            before = [self._times(graphs, streams, [i], repeats)[0] for i in range(2)]
            beside = self._times(graphs, streams, [0, 1], repeats)
            figures.add(f"pair.{name}.target_slowdown", beside[0] / before[0])
            figures.add(f"pair.{name}.draft_slowdown", beside[1] / before[1])

    def _times(
        self, graphs: list[Callable[[], object]], streams: list[Any], which: list[int], repeats: list[int] | None = None
    ) -> list[float]:
        """Microseconds from the first launch of each graph to its last end; the launches of all alternate."""
        counts = repeats or [3, 3]
        if isinstance(self.device, Host):
            return [self.device.elapsed_us(graphs[i], 1) * counts[i] for i in which]
        samples: list[list[float]] = []
        for _ in range(5):
            torch.cuda.synchronize()
            events = {i: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for i in which}
            # Work that waits in front of both, so that the host is ahead of the device.
            gate = torch.cuda.Event()
            torch.cuda._sleep(2_000_000)
            gate.record()
            left = {i: counts[i] for i in which}
            for i in which:
                streams[i].wait_event(gate)
                with torch.cuda.stream(streams[i]):
                    events[i][0].record()
            while any(left.values()):
                # The graph with the smaller share done is next.
                i = max(left, key=lambda i: left[i] / counts[i])
                with torch.cuda.stream(streams[i]):
                    graphs[i]()
                left[i] -= 1
            for i in which:
                with torch.cuda.stream(streams[i]):
                    events[i][1].record()
            torch.cuda.synchronize()
            samples.append([events[i][0].elapsed_time(events[i][1]) * 1e3 for i in which])
        return [statistics.median(column) for column in zip(*samples, strict=True)]


def small_kernel(dry: bool) -> Callable[[torch.Tensor, int, bool], None]:
    """A launch that adds 1 to each element; with ``pdl`` it may begin before the node in front has ended, and waits for that one's stores."""
    if dry:

        def on_host(x: torch.Tensor, blocks: int, pdl: bool) -> None:
            x.add_(1)

        return on_host
    from bench.physics_kernels import add_one

    def launch(x: torch.Tensor, blocks: int, pdl: bool) -> None:
        options = {"launch_pdl": True} if pdl else {}
        add_one[(blocks,)](x, PDL=pdl, BLOCK=BLOCK, num_warps=4, **options)

    return launch


def main() -> int:
    options = parser("Costs of a GPU's mechanisms.").parse_args()
    figures = Figures(options.json, options.seconds)
    torch.manual_seed(0)
    # Each capture collects garbage, without the imported modules.
    gc.collect()
    gc.freeze()
    begin = time.monotonic()
    with torch.no_grad():
        status = Physics(options.dry).run(figures)
    print(f"{time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
