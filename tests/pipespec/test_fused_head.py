"""The fused form of a draft head: what it is compared with, and what is found. Captured rounds with it: ``test_heads.py`` and ``test_graph_emulator.py``."""

import pytest
import torch

from pipespec.engine.attention import ATTENTION
from pipespec.engine.fused_head import FusedHead, fused_head
from pipespec.engine.head import DraftHead
from pipespec.models.families import NotReadable
from tests.pipespec import heads

SHAPES = {
    "plain": {},
    "norms": {"norm_before_fc": True, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "qwen3": {"qwen3": True, "own_embedding": True, "features": 1},
}


@pytest.fixture
def head(tmp_path):
    return made(tmp_path, {})


def made(folder, shape, dtype="float32"):
    flags = {name: True for name in heads.FLAGS if shape.get(name)}
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5][: shape.get("features", 3)]}
    path = heads.write_speculators(folder, heads.make_weights(**shape), **ids, **flags)
    found = DraftHead.load(path, heads.make_target(), dtype)
    found.block._attn_implementation = ATTENTION
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_gives_what_the_heads_modules_give(shape, dtype, tmp_path):
    """``fused_head`` compares them, and the parameters become views of merged matrices."""
    own = made(tmp_path, shape, dtype)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    form = fused_head(own)
    first = own.layers[0]
    assert (
        first.self_attn.q_proj.weight.untyped_storage()._cdata == first.self_attn.v_proj.weight.untyped_storage()._cdata
    )
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    assert fused_head(own).number != form.number


def test_another_result_is_found(head, monkeypatch):
    fuse, run, logits = FusedHead.fuse, FusedHead.run, FusedHead.logits
    planted = {
        "fc": ("fuse", lambda form, given, new: fuse(form, given.flip(-1), new)),
        "outputs": ("run", lambda form, embeds, states, cache: run(form, states, embeds, cache)),
        "logits": ("logits", lambda form, hidden, new: logits(form, hidden, new) * 1.01),
    }
    for what, (name, function) in planted.items():
        with monkeypatch.context() as patch:
            patch.setattr(FusedHead, name, function)
            with pytest.raises(NotReadable, match=f"its {what} differ from those of its modules by"):
                fused_head(head)
    fused_head(head)


def test_what_is_not_a_number_agrees_with_nothing(head):
    with torch.no_grad():
        head.norm.weight[0] = torch.nan
    with pytest.raises(NotReadable, match="its logits differ"):
        fused_head(head)
