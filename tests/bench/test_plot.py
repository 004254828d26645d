"""The figures of the benchmarks: their curves are there, the same input gives the same file, and nothing is drawn of nothing."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import plot, real
from bench.plot import Bar, Panel, Series, bars, chart


def texts(svg: str) -> str:
    return " ".join("".join(e.itertext()) for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))


def test_charts_show_their_series() -> None:
    curves = [Series("line", [0, 1, 2], [1, 2, 4]), Series("dots", [1], [3], 1, marks=True)]
    panel = Panel(curves, "panel", "x axis", "y axis")
    picture = chart("t < u", [panel], "a note")
    for text in ("t < u", "line", "dots", "panel", "x axis", "y axis", "a note"):
        assert text in texts(picture)
    assert chart("t < u", [panel], "a note") == picture
    with pytest.raises(ValueError, match="finite points"):
        chart("t", [Panel([Series("line", [0.0], [float("nan")])])])
    with pytest.raises(ValueError, match="finite points"):
        chart("t", [Panel([])])


def test_bars_without_a_value_have_their_text() -> None:
    shown = texts(bars("speeds", [Bar("ours", 2.0, "2.00x"), Bar("rival", None, "not measured")], reference=1.0))
    assert all(text in shown for text in ("ours", "2.00x", "rival", "not measured"))
    with pytest.raises(ValueError, match="nothing to draw"):
        bars("speeds", [Bar("rival", None, "not measured")])


def test_curves_of_a_training_run(tmp_path: Path) -> None:
    history = [{"step": 10 * i, "tokens": i, "seconds": i, "loss": 3 / i, "agreement": i / 9} for i in range(1, 6)]
    file = tmp_path / "training.json"
    file.write_text(json.dumps({"history": history}))
    assert plot.main([str(file)]) == 0
    shown = texts((tmp_path / "training.svg").read_text())
    assert "loss: 0.6" in shown
    assert "agreement: 0.556" in shown


def test_the_table_of_real_models_as_bars(tmp_path: Path) -> None:
    file = Path(plot.__file__).parent / "results" / "real.json"
    record = json.loads(file.read_text())
    assert plot.main([str(file), "--out", str(tmp_path)]) == 0
    shown = texts((tmp_path / "real.svg").read_text())
    assert shown == texts(file.with_suffix(".svg").read_text()), "draw the committed picture again"
    table = real.best_table(record).splitlines()[2:]
    assert len(table) == len(real.TABLE_ROWS)
    for line in table:
        label, code, of_alone, chat, *_ = (cell.strip().replace("`", "") for cell in line.split("|")[1:-1])
        assert f"code: {label} " in shown
        assert f"chat: {label} " in shown
        assert f"{code}  ({of_alone})" in shown
        assert f"{chat}  (" in shown
    assert record["machine"]["commit"][:10] in shown
    page = Path(plot.__file__).parents[1] / "docs" / "when-which.md"
    assert real.best_table(record) in page.read_text(encoding="utf-8"), "write the page's table again"
