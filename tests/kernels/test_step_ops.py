"""The launches of a captured step keep to a budget."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import step_ops

BUDGET = {"greedy": (5, 7), "sampled": (5, 7), "top-k": (5, 9), "all filters": (5, 9)}
"""Launches per layer and outside of the layers. A change that needs fewer lowers them."""


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("sampling", BUDGET)
@pytest.mark.parametrize("name", step_ops.MODELS)
def test_launches_of_a_step(name, sampling, width):
    """The launches keep to the budget, and a capture refuses nothing: no wait for the device, no copy from the host."""
    counts = step_ops.count(step_ops.MODELS[name], width, sampling)
    assert counts.refused == []
    per_layer, outside = BUDGET[sampling]
    assert counts.layer.total() <= per_layer
    assert counts.outside.total() <= outside
    assert counts.layer == {"qkv_append_kernel": 1, "attention_kernel": 1, "linear_kernel": 3}
    assert counts.outside["linear_kernel"] == 1
    assert counts.outside["verify_kernel"] == 1
    # No step clears memory: the work space stays zero between steps.
    assert not {"zeros", "zero_", "full", "fill_", "arange", "scalar_tensor"} & {*counts.layer, *counts.outside}


@pytest.mark.parametrize(("width", "narrow"), [(16, True), (17, False)])
def test_launches_of_wider_steps(width, narrow):
    """From 17 rows on the products are the library's, with the other operations between them."""
    counts = step_ops.count(step_ops.MODELS["1B"], width)
    assert counts.refused == []
    # The sums of a wide step's attention are combined in a second launch.
    assert counts.layer.pop("combine_kernel", 0) == (not narrow)
    assert (counts.layer.total(), counts.outside.total()) == ((5, 7) if narrow else (9, 8))
    assert counts.layer["mm"] == (0 if narrow else 4)


@pytest.mark.parametrize("width", [1, 5])
def test_launches_of_a_quantised_step(width):
    """Seven products of a library, one launch that joins gate and up, and the five of ours; transformers' modules take many more."""
    wide = step_ops.count(step_ops.MODELS["1B"], 17)
    fused, modules = (step_ops.count(step_ops.MODELS["1B"], width, opaque=True, native=n) for n in (True, False))
    assert fused.refused == []
    assert fused.outside == wide.outside
    assert fused.layer - wide.layer == {"mm": 3, "cat": 1}
    assert wide.layer - fused.layer == {"combine_kernel": 1}
    assert modules.layer.total() > 2 * fused.layer.total()


@pytest.mark.parametrize("width", [1, 5])
def test_launches_of_an_exact_step(width):
    """They are those of the other form."""
    usual, exact = (step_ops.count(step_ops.MODELS["1B"], width, exact=exact) for exact in (False, True))
    assert exact.refused == []
    assert (exact.layer, exact.outside) == (usual.layer, usual.outside)


def test_products_of_a_wide_exact_step():
    """Products of 40 rows take three launches of at most 16 rows, and one that joins the results."""
    counts = step_ops.count(step_ops.MODELS["1B"], 40, exact=True)
    assert {name: counts.layer[name] for name in ("qkv_append_kernel", "linear_kernel", "cat", "mm")} == {
        "qkv_append_kernel": 3,
        "linear_kernel": 9,
        "cat": 3,
        "mm": 0,
    }


@pytest.mark.parametrize("sampling", BUDGET)
def test_launches_behind_the_head(sampling):
    """The selection is one kernel, with filters three."""
    names = step_ops.launches(step_ops.MODELS["1B"], 2, 5, sampling).launches
    tail = names[len(names) - names[::-1].index("linear_kernel") :]
    assert tail[-3:] == ["verify_kernel", "commit", "close"]
    assert tail[:-3] == ([] if BUDGET[sampling][1] == 7 else ["cutoff_scan_kernel", "cutoff_search_kernel"])


def test_every_layer_counts_alike():
    model = step_ops.MODELS["1B"]
    assert len(step_ops.launches(model, 5, 1).launches) == step_ops.count(model, 1).total(5)


@pytest.mark.parametrize("sampling", ["greedy", "all filters"])
def test_no_tensor_of_a_step_stays(sampling):
    """A tensor that stays would keep the memory of a graph, and a replay would overwrite its values."""
    log = step_ops.launches(step_ops.MODELS["1B"], 2, 4, sampling)
    assert log.kept == []
    assert log.on_host == []


@pytest.mark.parametrize(
    ("operation", "refused"),
    [
        (lambda x: x.sum().item(), "waits for the device: _local_scalar_dense"),
        (torch.nonzero, "waits for the device: nonzero"),
        (lambda x: x[x > 0], "waits for the device: index"),
        (lambda x: x.copy_(torch.ones(3)), "reads memory of the host: copy_"),
        (lambda x: torch.ones(3).to(x.device), "reads memory of the host: _to_copy"),
        (lambda x: torch.empty(3).copy_(x), "waits for the device: copy_"),
    ],
    ids=["item", "nonzero", "mask", "copy", "to", "read"],
)
def test_what_a_capture_refuses_is_seen(operation, refused):
    log = step_ops.OperationLog()
    with step_ops.without_gpu(log):
        x = torch.zeros(3, device="meta")
        with log, contextlib.suppress(RuntimeError, NotImplementedError):  # there are no values to read
            operation(x)
    assert refused in log.refused
