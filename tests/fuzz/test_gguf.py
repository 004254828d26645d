"""GGUF files whose headers are damaged at random: each is read, or refused with its name, in seconds and without memory for what is not there."""

import random
import signal
import struct
import warnings
from pathlib import Path

import pytest

from pipespec.models.gguf import GgufFile
from pipespec.models.gguf_tokenizer import gguf_tokenizer
from pipespec.models.loading import load_model
from tests.fuzz.mutations import SECONDS, check_names, in_child
from tests.pipespec.gguf_files import tiny, write
from tests.trials import trials

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

MEMORY = 1 << 30
"""What a child may take beyond what this process has, in bytes: most of it is for torch's and the tokenizers' threads."""

IN_ONE_CHILD = 200
ODD = (0, 1, 2, 3, 7, 8, 9, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def mutated(content: bytes, begin: int, chance: random.Random) -> bytes:
    """One to three changes before ``begin``, where the weights lie: bytes, numbers of 4 and 8 bytes, parts left out, doubled or cut off."""
    made = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(8, begin)
        kind = chance.randrange(6)
        if kind == 0:
            made[at] = chance.randrange(256)
        elif kind in (1, 2):
            made[at : at + 8] = struct.pack("<Q", chance.choice(ODD))
        elif kind == 3:
            made[at : at + 4] = struct.pack("<I", chance.choice(ODD) & 0xFFFFFFFF)
        elif kind == 4:
            length = chance.randint(1, 40)
            made[at : at + length] = made[at : at + length] * chance.choice((0, 2))
        else:
            del made[chance.randrange(8, len(made)) :]
            begin = max(9, min(begin, len(made)))
    return bytes(made)


def test_damaged_headers_are_read_or_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    more = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.attention.sliding_window": 64}
    write(tiny("llama"), file, metadata=more)
    content = file.read_bytes()
    begin = min(tensor.begin for tensor in GgufFile.open(file).tensors.values())

    def run(seed: int) -> None:
        warnings.simplefilter("ignore")
        for trial in range(seed * IN_ONE_CHILD, (seed + 1) * IN_ONE_CHILD):
            file.write_bytes(mutated(content, begin, random.Random(trial)))
            for load in (load_model, gguf_tokenizer):
                signal.alarm(SECONDS)  # of milliseconds: a hang ends the child
                try:
                    load(file)
                except (ValueError, FileNotFoundError) as error:
                    check_names(error, file)
                except BaseException as error:
                    raise AssertionError(f"trial {trial}, {load.__name__}") from error

    for seed in range(trials(1, 100)):
        in_child(lambda seed=seed: run(seed), memory=MEMORY)
