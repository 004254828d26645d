"""MTP layers inside GGUF files: the weights that were written, in blocks where the file has them so, and the target's text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from pipespec import Pipeline
from pipespec.engine.mtp import MtpConfig, MtpHead
from pipespec.models.compat import has_stacked_experts
from pipespec.models.loading import load_model
from pipespec.models.quantized import has_blocks
from tests.pipespec.gguf_files import NAMES, SIZES, tiny, write
from tests.pipespec.test_gguf_architectures import CASES

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a draft has failed

TEXT = torch.arange(40)[None] % 17 + 5
OWN = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head_norm", "eh_proj": "eh_proj"}
OF_NETS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
FAMILIES = {"qwen3_5_text": OF_NETS, "qwen3_5_moe_text": OF_NETS, "qwen3_next": OF_NETS, "glm4_moe": {}, "deepseek_v3": {}}  # fmt: skip


def written(family: str, path: Path, types: str) -> dict[str, torch.Tensor]:
    """Write a file whose last layer is an MTP layer. Returns the weights of the layer by their names in :class:`MtpHead`."""
    if family not in CONFIG_MAPPING or ("moe" in family and not has_stacked_experts(family)):
        pytest.skip(f"this version of transformers has no {family} of this form")
    more, metadata = CASES[family]
    whole, name = tiny(family, SIZES | more | FAMILIES[family]), NAMES[family]
    depth, hidden = whole.config.num_hidden_layers - 1, whole.config.hidden_size
    noise = torch.Generator().manual_seed(7)
    own = {at: 0.2 * torch.randn(hidden, generator=noise) for at in ("enorm", "hnorm", "norm")}
    own["eh_proj"] = 0.2 * torch.randn((hidden, 2 * hidden), generator=noise)
    offset = 1.0 if name.startswith("qwen3") else 0.0
    stored = {f"blk.{depth}.nextn.{OWN[at]}.weight": (x + offset * (x.dim() == 1)) for at, x in own.items()}
    # Copies of the model's own, as files of GLM have them.
    stored[f"blk.{depth}.nextn.embed_tokens.weight"] = torch.ones(whole.config.vocab_size, hidden)
    values = {f"{name}.{key}": value for key, value in metadata.items()} | {f"{name}.nextn_predict_layers": 1}
    if f"{name}.attention.recurrent_layers" in values:
        values[f"{name}.attention.recurrent_layers"] = [kind == "linear_attention" for kind in whole.config.layer_types]
    arrays = {at: x.numpy().astype(np.float32) for at, x in stored.items()}
    held = write(whole, path, types, metadata=values, tensors=arrays)
    layer = f"model.layers.{depth}."
    weights = {f"layers.0.{at.removeprefix(layer)}": x for at, x in held.items() if at.startswith(layer)}
    gate = "layers.0.mlp.shared_expert_gate.weight"  # whose one row is no matrix in files
    weights |= {gate: weights[gate][None]} if gate in weights else {}
    return weights | {f"{at}.weight": x for at, x in own.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_the_one_that_was_written(family, tmp_path) -> None:
    weights = written(family, tmp_path / "m.gguf", "f32")
    target = load_model(tmp_path / "m.gguf")
    found = MtpHead.load(tmp_path / "m.gguf", target).state_dict()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_in_blocks_computes_what_its_weights_give(family, tmp_path) -> None:
    weights = written(family, tmp_path / "m.gguf", "q8_0")
    target = load_model(tmp_path / "m.gguf")
    found = MtpHead.load(tmp_path / "m.gguf", target)
    assert has_blocks(found)
    plain = MtpHead(MtpConfig.of(target.config, "here")).eval()
    plain.load_state_dict(weights)
    plain.borrow(target)
    x = torch.randn(1, 3, target.config.hidden_size)
    masks: list[Any] = [torch.zeros(1, 1, 3, 3)]
    for _ in range(2):
        outputs = [each(x, x.flip(1), torch.arange(3)[None], masks, None) for each in (found, plain)]
        assert (outputs[0] - outputs[1]).norm() < 0.05 * outputs[1].norm()
        x = torch.randn(1, 3, target.config.hidden_size)


@pytest.mark.parametrize("types", ["f32", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_target_s(family, types, tmp_path) -> None:
    written(family, tmp_path / "m.gguf", types)
    with (
        Pipeline(tmp_path / "m.gguf", "mtp", lookahead=3) as pipe,
        Pipeline(tmp_path / "m.gguf", schedule="plain") as plain,
    ):
        for how in ({"do_sample": False}, {"do_sample": True, "seed": 5, "temperature": 0.9}):
            text = pipe.generate(TEXT, max_new_tokens=14, **how)
            assert torch.equal(text, plain.generate(TEXT, max_new_tokens=14, **how))
            assert pipe.report.stages[-1].drafted > 0


def test_a_dtype_and_blocks_of_the_file(tmp_path) -> None:
    """A dtype has no effect on blocks, and blocks are not put in blocks again."""
    written("glm4_moe", tmp_path / "m.gguf", "q8_0")
    with pytest.warns(UserWarning, match="dtype='bfloat16' has no effect"):
        pipe = Pipeline(tmp_path / "m.gguf", "mtp", dtype="bfloat16")
    with pipe, Pipeline(tmp_path / "m.gguf", schedule="plain") as plain:
        options = {"max_new_tokens": 14, "do_sample": False}
        assert torch.equal(pipe.generate(TEXT, **options), plain.generate(TEXT, **options))
    with pytest.raises(ValueError, match="is in blocks already: leave weights= of this draft out"):
        Pipeline(tmp_path / "m.gguf", "mtp", weights={"draft 0": "q4_0"})


def test_files_without_the_layer(tmp_path) -> None:
    write(tiny("qwen3"), tmp_path / "m.gguf", "q8_0")
    with pytest.raises(ValueError, match=r"m\.gguf has no MTP layer: it names no qwen3\.nextn_predict_layers"):
        Pipeline(tmp_path / "m.gguf", "mtp")


def test_a_layer_that_lacks_a_tensor(tmp_path) -> None:
    """The names of its own modules are those of the file."""
    more, metadata = CASES["glm4_moe"]
    values = {f"glm4moe.{key}": value for key, value in metadata.items()} | {"glm4moe.nextn_predict_layers": 1}
    write(tiny("glm4_moe", SIZES | more), tmp_path / "m.gguf", "f32", metadata=values)
    with pytest.raises(ValueError, match=r"m\.gguf has no tensor blk\.2\.nextn\.\w+\.weight"):
        Pipeline(tmp_path / "m.gguf", "mtp")
