"""Small checks of one GPU: ``python -m bench.variants [--json FILE] [--seconds S] [--dry]``

Operations through ``pipespec_kernels.ops`` and through the function of ``pipespec_kernels.triton`` behind it must give the same bits. The difference
of the host's time is the cost of checks and dispatch. A target in stages on one device (SPD), and a target in NF4 where bitsandbytes is installed,
must give the text of ``generate()``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from bench.devices import device_for, host_us
from bench.figures import Figures, parser
from pipespec import Pipeline
from pipespec.bench.planted import plant
from pipespec.spd import SpeculativePipeline
from pipespec_kernels import ops

NEW_TOKENS = 48


class Variants:
    """The sections. ``dry``: on the CPU, the reference in place of the Triton kernels."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, device_for(dry)

    def run(self, figures: Figures) -> int:
        for section in (self.both_ways, self.stages_on_one_device, self.nf4):
            figures.section(section.__name__, section)
        return figures.finish()

    # ---- kernels through ops and directly

    def both_ways(self, figures: Figures) -> None:
        raw = importlib.import_module("pipespec_kernels.reference" if self.dry else "pipespec_kernels.triton")
        for name, arguments in self._calls().items():
            public, behind = (functools.partial(getattr(module, name), *arguments()) for module in (ops, raw))
            results = [_outputs(call) for call in (public, behind)]
            if not self.dry:  # on a CPU these are two implementations
                for a, b in zip(*results, strict=True):
                    if not torch.equal(a, b):
                        raise AssertionError(f"{name}: ops and the kernel behind it give different results")
            for way, call in (("ops", public), ("raw", behind)):
                figures.add(f"host.{name}_{way}_us", host_us(call, 3 if self.dry else 200, self.device))

    def _calls(self) -> dict[str, Callable[[], tuple[Any, ...]]]:
        """By operation: makes arguments, the same ones each time, as for a target of 8B that verifies four draft tokens."""
        where: dict[str, Any] = {"device": self.device.name}
        vocabulary, storage = (512, 32) if self.dry else (128256, 1024)
        width, heads, kv_heads, dim = 5, 32, 8, 128
        generator = torch.Generator(self.device.name)

        def normal(*shape: int) -> torch.Tensor:
            generator.manual_seed(len(shape))
            return torch.randn(shape, generator=generator, **where).to(self.device.dtype)

        def count(n: int) -> torch.Tensor:
            return torch.tensor([n], dtype=torch.int32, **where)

        def verify() -> tuple[Any, ...]:
            tokens = torch.zeros((1, width), dtype=torch.int32, **where)
            return normal(1, width, vocabulary), tokens, count(width), count(width - 1)

        def verify_attention() -> tuple[Any, ...]:
            keys, values = (normal(1, kv_heads, storage, dim) for _ in range(2))
            return normal(1, width, heads, dim).transpose(1, 2), keys, values, count(storage - width)

        def kv_append() -> tuple[Any, ...]:
            new = [normal(1, width, kv_heads, dim).transpose(1, 2) for _ in range(2)]
            return *new, normal(1, kv_heads, storage, dim), normal(1, kv_heads, storage, dim), count(storage - width)

        def rope_append() -> tuple[Any, ...]:
            parts = normal(1, width, heads + 2 * kv_heads, dim).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
            tables = normal(storage, dim), normal(storage, dim)
            caches = normal(1, kv_heads, storage, dim), normal(1, kv_heads, storage, dim)
            return *parts, *tables, *caches, count(storage - width)

        return {f.__name__: f for f in (verify, verify_attention, kv_append, rope_append)}

    # ---- other targets

    def stages_on_one_device(self, figures: Figures) -> None:
        """SPD with the n-gram drafter in float32, where texts are equal."""
        models = plant(["check-target"], texts=0, device=self.device.name, dtype=torch.float32).models
        self._compare(figures, "spd", models[-1], lambda target: SpeculativePipeline(target, "ngram", stages=2))

    def nf4(self, figures: Figures) -> None:
        """A chain whose target is quantised to four bits."""
        if importlib.util.find_spec("bitsandbytes") is None:
            figures.leave_out("nf4", "bitsandbytes is not installed")
            return
        if self.dry:
            figures.leave_out("nf4", "a dry run has no GPU")
            return
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        draft, target = plant(["check-draft", "check-target"], texts=0, device="cuda", dtype=torch.bfloat16).models
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            target.save_pretrained(folder)
            quantised = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": 0})
        self._compare(figures, "nf4", quantised, lambda model: Pipeline(model, [draft], schedule="lockstep"))

    def _compare(self, figures: Figures, name: str, target: Any, pipeline: Callable[[Any], Any]) -> None:
        ids = torch.arange(5, 21, device=self.device.name)[None]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        wanted = target.generate(ids, **options)
        pipe = pipeline(target)
        got = pipe.generate(ids, **options)
        same = int((got == wanted).sum()) - ids.shape[1] if got.shape == wanted.shape else -1
        figures.add(f"{name}.same_tokens", same)
        if same != NEW_TOKENS:
            raise AssertionError(f"{name}: {same} of {NEW_TOKENS} tokens are those of generate()")


def _outputs(call: functools.partial[Any]) -> list[torch.Tensor]:
    """Copies of the results of a call and of its arguments, some of which it changes."""
    arguments = [a.clone() if isinstance(a, torch.Tensor) else a for a in call.args]
    returned = call.func(*arguments)
    found = [*arguments, *(returned if isinstance(returned, tuple) else (returned,))]
    return [tensor.clone() for tensor in found if isinstance(tensor, torch.Tensor)]


def main() -> int:
    options = parser("Small checks of one GPU.").parse_args()
    figures = Figures(options.json, options.seconds)
    with torch.no_grad():
        return Variants(options.dry).run(figures)


if __name__ == "__main__":
    sys.exit(main())
