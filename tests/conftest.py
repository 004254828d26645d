"""Models and prompts that the tests share. Everything is made here: no weights are downloaded."""

import copy
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from pipespec import trust
from pipespec.schedules import base
from pipespec.schedules.asynchronous import local
from pipespec.schedules.graphs import driver
from tests.support import forks
from tests.trials import PROFILE
from tests.waiting import SECONDS, no_more_threads

VOCABULARY = 320

# Nothing of a test stays in the user's cache, and nothing there counts. Processes of a test run share the folder.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"pipespec-tests-{os.getuid()}")
os.environ.setdefault("PIPESPEC_TUNE", "0")  # on a GPU each shape would take six compilations
DEVICE = os.environ.get("PIPESPEC_TEST_DEVICE", "cpu")
"""Where the models and prompts of the tests are that run on any device, see the part ``device`` of ``bench.gpu_check``."""

# The models here are tiny: a second thread gains nothing, and on a busy machine each product waits for it.
torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and children inherit that. The tests of Ctrl-C need its default.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Captured schedules run their steps uncaptured on a CPU, which a user's pipeline refuses.
base._runs_uncaptured = True
# There are hundreds of pipelines, and each would capture the graphs of a dozen widths.
driver.READY = 0


LONGEST = ("test_ranks.py", "test_interpreted.py", "test_compile_gate.py")

PROCESSES = re.compile(
    r"test_(local|remote|channel|forks|faults|signals|damage|robust|cli|command|ranks|asynchronous|tensor_parallel|split|gpu_check|spd_command)\.py"
)
"""Files whose tests start processes. Elsewhere it is those that run a schedule with processes."""


def kind_of(item: pytest.Item) -> str:
    """``triton`` and ``build`` need compilers or an interpreter of their own, ``process`` other processes, ``unit`` nothing."""
    if item.path.parent.name in ("build", "docs"):
        return "build"
    if "triton" in item.path.parts or item.path.name in ("test_interpreted.py", "test_compile_gate.py"):
        return "triton"
    is_process = PROCESSES.fullmatch(item.path.name) or re.search(r"\b(workers|ranks)\b", item.name)
    return "process" if is_process else "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its kind, and run the longest files first: a process that has finished takes over tests from the end of the other's list,
    which are short then.
    """
    for item in items:
        item.add_marker(kind_of(item))
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_report_header() -> str:
    return f"trials: {PROFILE}; torch {torch.__version__}; transformers {transformers.__version__} ({transformers.__path__[0]})"


def random_llama(
    seed: int,
    *,
    layers: int = 2,
    hidden: int = 64,
    kv_heads: int = 2,
    vocabulary: int = VOCABULARY,
    dtype=torch.float32,
) -> LlamaForCausalLM:
    """An untrained LLaMA whose greedy text varies: the weights are large enough for attention and MLP to matter."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(DEVICE, dtype).eval()
    model.generation_config.eos_token_id = None
    return model


class ByPosition(LogitsProcessor):
    """Changes nothing, but is not known to do so: with it, pipespec runs all processors position by position."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


trust(ByPosition)


def always_right(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A draft with the target's own weights: every draft token is accepted."""
    return copy.deepcopy(target)


def always_wrong(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A draft with the target's negated logits: it proposes the target's least likely token."""
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    return draft


def noisy(target: LlamaForCausalLM, scale: float, seed: int = 0) -> LlamaForCausalLM:
    """A draft that agrees with the target more or less often: its weights plus noise of relative size ``scale``."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(noise * parameter.std() * scale)
    return draft


def random_prompts(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 24) -> list[torch.Tensor]:
    """LongTensors ``[P]`` of token ids >= 2 (0 pads, 1 begins)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).to(DEVICE) for n in lengths]


def left_pad(prompts: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask``, both ``[B, S]``."""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids.to(DEVICE), mask.to(DEVICE)


@pytest.fixture
def full() -> Path:
    """A device on which every write finds no room."""
    device = Path("/dev/full")
    if not device.is_char_device():
        pytest.skip("needs the device /dev/full")
    return device


LIMITS = ("_READY_TIMEOUT_S", "_FINISH_TIMEOUT_S", "_EXIT_TIMEOUT_S")
"""Time limits of local drafts."""


@contextmanager
def drafts_of(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # not the test's own one, which it may undo
        for name in LIMITS:
            patch.setattr(local, name, SECONDS)
        is_fresh = node.get_closest_marker("fresh_drafts") is not None
        patch.setattr(local, "_started", forks.FRESH if is_fresh else forks.draft)
        yield


@pytest.fixture(autouse=True, scope="module")
def patience_of_fixtures(request: pytest.FixtureRequest) -> Iterator[None]:
    """As ``patience``, for the pipelines that all tests of a file share."""
    with drafts_of(request.node):
        yield


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest) -> Iterator[None]:
    """Long time limits, so that a worker on a busy machine does not count as hung (tests of a limit set it), and processes that start soon."""
    with drafts_of(request.node):
        yield


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    with no_more_threads():
        yield


@pytest.fixture(scope="session")
def real_family() -> Path:
    """The folder of small real models that ``tools.real_models`` makes. Tests that use it are marked ``real``."""
    folder = Path(os.environ.get("PIPESPEC_REAL_MODELS") or Path(__file__).parents[1] / "build" / "real")
    lacking = [name for name in ("smol-hf", "q05-hf", "q15-hf") if not (folder / name).is_dir()]
    if lacking:
        pytest.skip(f"{folder} lacks {', '.join(lacking)}: run `python -m tools.real_models {folder}`")
    return folder


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    return random_llama(0)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Of all tests of a module, which leave it as it was."""
    return random_llama(3)
