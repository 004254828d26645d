"""The bundled model family: its text, its prompts, and the files that are in the repository."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from pipespec import demo
from pipespec.demo import corpus

# Measured agreement is in family/README.md. The bound only separates trained drafts from broken files,
# on few prompts and for the library of whatever interpreter runs the tests.
FLOOR = {"medium": 0.6, "small": 0.5}


def test_import_loads_no_framework() -> None:
    code = "import sys, pipespec.demo; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    root = Path(demo.__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_held_out_packages_are_held_out_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "zipfile").mkdir()
    (tmp_path / "zipfile" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "zipfile" / "_path.py").write_text("y = 1\n")
    (tmp_path / "zipimport.py").write_text("z = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [f.name for f in corpus.held_out_files(tmp_path)] == ["zipfile/__init__.py", "zipfile/_path.py"]


def test_heads_are_distinct_and_deterministic() -> None:
    heads = corpus.function_heads()
    assert len(heads) >= 220
    assert len({h.text for h in heads}) == len(heads)
    assert corpus.function_heads() == heads
    assert corpus.function_heads(50) == heads[:50]
    assert corpus.function_heads(50, seed=1) != heads[:50]
    assert demo.prompts(3) == [h.text for h in heads[:3]]
    for head in heads:
        assert head.text == head.text.rstrip()
        assert "def " in head.text
        assert head.name.split(":")[0].split("/")[0].removesuffix(".py") in corpus.HELD_OUT


def test_more_prompts_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="have only"):
        corpus.function_heads(100_000)


def test_head_ends_where_the_body_begins() -> None:
    text = "\n".join(
        [
            "import os",
            "# A line of context, long enough for the head to be worth something as a prompt.",
            "@decorated",
            "def documented(a,",
            "               b):",
            '    """What it does, in one line that is long enough."""',
            "    # A comment of the body.",
            "    return a + b",
            "",
            "def only_documented():",
            '    """Nothing follows."""',
            "",
            "def short(a): return a",
        ]
    )
    (head,) = corpus.heads_of([corpus.Source("m.py", text)])
    assert head.name == "m.py:documented"
    assert head.text.startswith("import os\n# A line")
    assert head.text.endswith('long enough."""')


def test_unknown_member() -> None:
    with pytest.raises(ValueError, match="bundled family"):
        demo.family_path("large")


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {name: demo.family_path(name) for name in demo.FAMILY}


def test_one_tokenizer(folders: dict[str, Path]) -> None:
    digests = {hashlib.sha256((f / "tokenizer.json").read_bytes()).hexdigest() for f in folders.values()}
    assert len(digests) == 1


def test_size(folders: dict[str, Path]) -> None:
    root = folders["target"].parent
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) < 32e6
    assert (root / "README.md").is_file()


def test_tokenizer_round_trip(folders: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(folders["small"])
    text = 'def f(self):\n        """hé"""\n\n    x = 12\r\n\tif a:\n'
    ids = tok(text)["input_ids"]
    assert ids[0] == tok.bos_token_id
    assert tok.decode(ids[1:]) == text
    assert len({tok.bos_token_id, tok.eos_token_id, tok.pad_token_id}) == 3


def test_drafts_agree_with_the_target(folders: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(folders["target"])
    nets = {
        name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }
    same, total = dict.fromkeys(FLOOR, 0), 0
    with torch.inference_mode():
        for prompt in demo.prompts(6):
            ids = tok(prompt, return_tensors="pt")["input_ids"]
            mask = torch.ones_like(ids)
            text = nets["target"].generate(ids, attention_mask=mask, max_new_tokens=48, do_sample=False)
            start = ids.shape[1]
            total += text.shape[1] - start
            for name in FLOOR:
                first = nets[name](text).logits[0, start - 1 : -1].argmax(dim=-1)
                same[name] += int((first == text[0, start:]).sum())
    for name, floor in FLOOR.items():
        assert same[name] / total > floor, f"{name} agrees on {same[name]} of {total} tokens"
