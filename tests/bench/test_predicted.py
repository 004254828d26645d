"""Predictions follow from their parameters, and each predicted row is one that the check measures."""

from __future__ import annotations

import pytest

from bench import bench_generate, gpu_check, predicted


def test_predictions_follow_from_their_parameters() -> None:
    found = predicted.load()
    parameters = found["parameters"]
    assert set(found["why"]) == set(parameters)
    for name, entry in found["figures"].items():
        assert entry.get("why") or entry.get("formula"), name
        assert entry["unit"]
        if "formula" in entry:
            assert entry["value"] == pytest.approx(predicted.evaluate(entry["formula"], parameters), rel=1e-3), name


def row(key: str, **fields: object) -> dict[str, object]:
    return {"key": key, "decode_tokens_per_second": 1.0, "seconds_to_first_token": 0.5} | fields


def test_every_predicted_row_is_measured() -> None:
    keys = [c.key for rows in (gpu_check.ROWS, ("static",)) for c in bench_generate.rows_of(rows, ["1B"])]
    parts = {"a": {"rows": [row(key, accepted_length={"target": 3.0}) for key in keys], "figures": {"x.y": 7.0}}}
    found = predicted.measured(parts)
    wanted = {name for name in predicted.load()["figures"] if name.startswith("generate.")}
    assert wanted <= set(found)
    assert found["x.y"] == 7.0
    assert found["generate.plain.first_token_ms"] == 500.0


def test_the_reference_beside_others_counts() -> None:
    many = [row(key, decode_tokens_per_second=10.0) for key in ("plain", "static", "streams-1B")]
    alone = [row(key, decode_tokens_per_second=20.0) for key in ("plain", "static")]
    for parts in (
        {"many": {"rows": many}, "alone": {"rows": alone}},
        {"alone": {"rows": alone}, "many": {"rows": many}},
    ):
        found = predicted.measured(parts)
        assert found["generate.plain.decode_tokens_per_second"] == 10.0
        assert found["generate.compiled.decode_tokens_per_second"] == 20.0


def test_the_comparison() -> None:
    predictions = {"figures": {n: {"value": v, "unit": "us"} for n, v in (("a", 2.0), ("b", 0), ("c", 5.0))}}
    rows = predicted.compare(predictions, {"a": 3.0, "b": 1.0})
    assert [(r.measured, r.ratio) for r in rows] == [(3.0, 1.5), (1.0, None), (None, None)]
    lines = predicted.table(rows).splitlines()
    assert lines[1].split() == ["a", "us", "2", "3", "1.50"]
    assert lines[3].split()[-2:] == ["-", "-"]
