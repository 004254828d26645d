"""``pipespec bench report``: the numbers of the page are those of the JSON, and what is missing is said."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipespec.bench.page import Column, Page, Section, Table, shown
from pipespec.bench.report import Run, _quantile, page
from pipespec.bench.results import ResultsFolder
from pipespec.cli.main import main
from pipespec.observe import plot
from pipespec.planning.closed_form import lockstep_rate
from pipespec.spd.law import spd_tokens_per_cycle
from tests.bench.small_run import small_run


class Tables(HTMLParser):
    """Of each table its fields, and its rows of texts and full values."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.fields: dict[str, list[str]] = {}
        self._name, self._cell, self._value = "", False, None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "table":
            self._name = given["id"].removeprefix("table-")
            self.found[self._name], self.fields[self._name] = [], []
        elif tag == "th":
            self.fields[self._name].append(given["data-field"])
        elif tag == "tr" and self.fields.get(self._name):
            self.found[self._name].append([])
        elif tag == "td":
            value = given.get("data-value")
            self._cell, self._value = True, None if value is None else float(value)
            self.found[self._name][-1].append(("", self._value))

    def handle_data(self, data):
        if self._cell:
            self.found[self._name][-1][-1] = (data, self._value)

    def handle_endtag(self, tag):
        if tag == "td":
            self._cell = False


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> ResultsFolder:
    return small_run(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def written(results: ResultsFolder) -> Path:
    assert main(["bench", "report", str(results.path)]) == 0
    return results.path


@pytest.fixture(scope="module")
def tables(written: Path) -> Tables:
    return Tables((written / "report.html").read_text(encoding="utf-8"))


def raw(folder: Path) -> list[dict]:
    """All samples, read without the product."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("samples/*/*/*.json"))]


def test_every_figure_of_the_summary_is_in_the_page(written: Path, tables: Tables) -> None:
    summary = json.loads((written / "summary.json").read_text())
    settings = json.loads((written / "settings.json").read_text())
    labels = {system["key"]: system["label"] for system in settings["systems"]}
    rows = tables.found["summary"]
    assert len(rows) == len(summary["rows"]) >= 7
    compared = 0
    for row, expected in zip(rows, summary["rows"], strict=True):
        assert [cell[0] for cell in row[:2]] == [expected["dataset"], labels[expected["system"]]]
        for name, (text, value) in zip(tables.fields["summary"], row, strict=True):
            if name:
                figure, _, part = name.partition(".")
                known = expected[figure].get(part) if part else expected[figure]
                assert value == known
                assert (text == "-") == (known is None)
                compared += known is not None
    assert compared >= 40
    text, value = rows[1][tables.fields["summary"].index("tokens_per_second")]
    assert text == f"{value:.1f}"


def test_histograms_and_rollbacks_are_those_of_the_samples(written: Path, tables: Tables) -> None:
    key = "lockstep-small-L4"
    systems = json.loads((written / "settings.json").read_text())["systems"]
    label = next(s["label"] for s in systems if s["key"] == key)
    own = [s for s in raw(written) if s["system"] == key]
    expected: Counter[int] = Counter()
    for sample in own:
        expected.update(dict(enumerate(sample["stages"][-1]["histogram"])))
    shown_counts = {
        int(r[3][1]): int(r[4][1]) for r in tables.found["accepted"] if r[1][0] == label and r[2][0] == "target"
    }
    assert shown_counts == {j: c for j, c in expected.items() if j <= max(shown_counts)}
    assert sum(shown_counts.values()) == sum(expected.values()) > 0
    shown_rows = [r for r in tables.found["rollbacks"] if r[3][0] == "small"]
    assert shown_rows
    for row in shown_rows:
        key = next(s["key"] for s in systems if s["label"] == row[1][0])
        (traced,) = [s for s in raw(written) if s["system"] == key and s["sample"] == row[2][0]]
        back = [step["rolled_back"] for step in traced["steps"]["small"] if step["rolled_back"]]
        assert (row[4][1], row[5][1]) == (len(back), sum(back))
        assert back


def test_times_devices_and_spd_are_those_of_the_samples(written: Path, tables: Tables) -> None:
    samples = raw(written)
    hf = [s for s in samples if s["system"] == "hf"]
    times = sorted(
        1e3 * (b[0] - a[0]) / (b[1] - a[1])
        for s in hf for a, b in zip(s["commits"], s["commits"][1:], strict=False) for _ in range(b[1] - a[1])
    )  # fmt: skip
    row = tables.found["times"][0]
    assert [cell[1] for cell in row[2:]] == pytest.approx(
        [len(times), sum(times) / len(times), *(_quantile(times, q) for q in (0.1, 0.5, 0.9, 0.99)), times[-1]]
    )
    energy = {(r[1][0], r[2][0]): r[4][1] for r in tables.found["devices"] if r[4][1] is not None}
    assert set(energy.values()) == {0.25}
    staged = [s for s in samples if s["system"] == "spd-module-n4"]
    cycles = sum(s["cycles"] for s in staged)
    (row,) = [r for r in tables.found["spd"] if r[2][0].startswith("module, anchors 0/")]
    values = dict(zip(tables.fields["spd"], (cell[1] for cell in row), strict=True))
    assert values["cycles"] == cycles
    assert values["phases.draft"] == pytest.approx(1e3 * sum(s["phases"]["draft"] for s in staged) / cycles)
    assert values["equivalent_accepted_length"] == pytest.approx(4 * sum(s["verified"] for s in staged) / cycles)


def test_what_features_behind_the_step_would_need(written: Path, tables: Tables) -> None:
    """Where drafting waits for the step, a cycle takes longer, and the acceptance has to make up for it by the law of tokens per cycle."""
    texts = [s for s in raw(written) if s["system"] == "spd-module-n4"]
    (row,) = tables.found["features"]
    needed = row[-1][1]
    cycles = sum(s["cycles"] for s in texts)
    draft, verify, other = (sum(s["phases"][p] for s in texts) / cycles for p in ("draft", "verify", "other"))
    stage = max(sum(s["stage_seconds"][i] for s in texts) for i in range(4)) / cycles
    a = sum(s["stages"][-1]["accepted"] for s in texts) / sum(s["stages"][-1]["drafted"] for s in texts)
    assert [row[4][1], row[5][1], row[6][1]] == pytest.approx([a, 1e3 * draft, 1e3 * stage])
    beside = spd_tokens_per_cycle(a, 4) / (max(draft, stage) + verify + other)
    behind = None if needed is None else spd_tokens_per_cycle(needed, 4) / (draft + stage + verify + other)
    most = 1.0 / (draft + stage + verify + other)  # with every draft token accepted
    assert behind == pytest.approx(beside) if behind is not None else most < beside


def test_predictions_by_hand(written: Path, tables: Tables) -> None:
    """Step times of 1, 4 and 5 ms, and the acceptance of the texts, by the formulas."""
    samples = raw(written)
    own = [s for s in samples if s["system"] == "lockstep-small-L4"]
    accepted, wrong = sum(s["stages"][1]["accepted"] for s in own), sum(s["stages"][0]["rollbacks"] for s in own)
    (row,) = [r for r in tables.found["theory"] if "L4" in r[1][0]]
    a = accepted / (accepted + wrong)
    assert row[2][0] == f"{a:.3f}"
    tokens = round(sum(len(s["tokens"]) for s in own) / 2)
    prompt = round(sum(s["prompt_tokens"] for s in own) / 2)
    rate = lockstep_rate(a, 4, 1e-3, 5e-3)
    assert row[4][1] == pytest.approx(tokens / (prompt * 1e-4 + tokens / rate))
    assert row[6][1] == pytest.approx(row[4][1], rel=0.35)  # the same model, a short text, and both prompts
    measured = sum(len(s["tokens"]) for s in own) / sum(s["seconds"] for s in own)
    assert row[3][1] == pytest.approx(measured)
    assert row[5][1] == pytest.approx(row[4][1] / measured - 1)
    staged = [s for s in samples if s["system"] == "spd-module-n4"]
    (row,) = [r for r in tables.found["theory"] if "module" in r[1][0] and r[4][1] is not None]
    a = sum(s["stages"][-1]["accepted"] for s in staged) / sum(s["stages"][-1]["drafted"] for s in staged)
    prefill = sum(s["phases"]["prefill"] for s in staged)
    cycle = sum(sum(s["phases"].values()) for s in staged) - prefill
    cycle /= sum(s["cycles"] for s in staged)
    tokens = sum(len(s["tokens"]) for s in staged)
    assert row[4][1] == pytest.approx(tokens / (prefill + (tokens - 2) * cycle / spd_tokens_per_cycle(a, 4)))


def test_the_page_is_one_file_and_each_figure_is_a_picture(written: Path) -> None:
    html = (written / "report.html").read_text(encoding="utf-8")
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in html
    files = sorted((written / "figures").glob("*.svg"))
    assert {f.stem.split("-")[0] for f in files} >= {
        "speedup",
        "sweep",
        "accepted",
        "time",
        "times",
        "devices",
        "spd",
        "theory",
    }
    for file in files:
        picture = xml.etree.ElementTree.parse(file).getroot()
        _, _, width, height = map(float, picture.get("viewBox").split())
        for text in picture.iter("{http://www.w3.org/2000/svg}text"):
            x, y = float(text.get("x")), float(text.get("y"))
            if text.get("transform"):
                continue
            long = 5.0 * len(text.text or "") * float(text.get("font-size", 12)) / 12
            begin = x - {"end": long, "middle": long / 2}.get(text.get("text-anchor"), 0.0)
            assert begin >= 0, f"{file.name}: {text.text!r} begins outside"
            assert begin + long <= width, f"{file.name}: {text.text!r} ends outside"
            assert 0 <= y <= height


def test_losses_and_what_was_not_measured_are_drawn(results: ResultsFolder) -> None:
    """A slower system has a bar in the colour of losses, and a system without figures its reason."""
    run = Run.load(results)
    slow = next(row for row in run.summary.rows if row.system == "lockstep-small-L2")
    slow.speedup = 0.5
    next(
        row for row in run.summary.rows if row.system == "lockstep-small-L4"
    ).speedup = 0.001  # the slower one of the sweep has no bar
    found = {section.name: section for section in page(run).sections}
    svg = found["speedup"].figures[0][1]
    assert "0.50x (slower)" in svg
    assert "0.00x" not in svg
    assert svg.count(plot.LOSS) >= 1
    assert "not measured: its draft head" in svg
    reasons = {str(row[1]): row[2] for row in found["speedup"].tables[1].rows}
    assert reasons["spd, 13 stages, ngram"].startswith("ValueError: ")


def test_sections_without_data_name_the_option(results: ResultsFolder, tmp_path: Path, capsys) -> None:
    """A run of plain decoding alone."""
    settings = results.settings()
    keep = {"hf", "plain"}
    settings.systems = [s for s in settings.systems if s.key in keep]
    bare = ResultsFolder(tmp_path / "bare")
    bare.write_settings(settings)
    for sample in results.samples(settings):
        bare.write_sample(replace(sample, energy_joules=None, utilization=None, steps=None))
    assert main(["bench", "report", str(bare.path), "--out", str(tmp_path / "page")]) == 0
    assert "texts, " in capsys.readouterr().out
    html = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    for option in ("--lookahead", "--draft", "--traced", "--systems spd", "--stages", "--no-profile"):
        assert option in html, option
    assert "No device has a meter" in html
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    offered = capsys.readouterr().out
    assert all(
        option.split()[0] in offered
        for option in (
            "--lookahead",
            "--min-draft-tokens",
            "--draft",
            "--traced",
            "--systems",
            "--stages",
            "--no-profile",
        )
    )


def test_bad_folders(results: ResultsFolder, tmp_path: Path, capsys) -> None:
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "settings.json does not exist" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(results.path, damaged, ignore=shutil.ignore_patterns("figures"))
    (damaged / "settings.json").write_text("{")
    assert main(["bench", "report", str(damaged)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_png_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rasteriser the page says what to install; with it each figure has a PNG."""
    svg = plot.bars("a title", [plot.Bar("one", 1.0, "1")])
    small = Page("test", sections=[Section("one", "One", "text", [("a title", svg)])])
    monkeypatch.setitem(__import__("sys").modules, plot.RASTERISER, None)
    files, why = small.write(tmp_path)
    assert [f.name for f in files] == ["report.html", "one.svg"]
    assert why is not None
    assert "pip install 'pipespec[plots]'" in why

    class Rasteriser:
        @staticmethod
        def svg_to_bytes(svg_string: str, zoom: float = 1.0) -> list[int]:
            return list(b"png" if svg_string == svg else svg_string.encode())

    monkeypatch.setitem(__import__("sys").modules, plot.RASTERISER, Rasteriser)
    files, why = small.write(tmp_path)
    assert why is None
    assert files[-1].read_bytes() == b"png"
    # Without a font a text leaves no trace in the picture.
    Rasteriser.svg_to_bytes = staticmethod(lambda svg_string, zoom=1.0: list(b"blank"))
    files, why = small.write(tmp_path)
    assert why is not None
    assert "the system has none" in why
    assert [f.name for f in files] == ["report.html", "one.svg"]


def test_cells() -> None:
    assert shown(None, ".2f") == shown(float("nan"), ".2f") == "-"
    assert (shown(True, ""), shown(0.126, ".0%"), shown("a", ".2f"), shown(12345, ",")) == ("yes", "13%", "a", "12,345")
    table = Table("t", [Column("a<b"), Column("n", ".1f", "f")], [("<i>", 1 / 3), ("x", None)])
    html = Page("p", sections=[Section("s", "S", "t", tables=[table])]).html()
    assert "a&lt;b" in html
    assert "&lt;i&gt;" in html
    found = Tables(html)
    assert found.found["t"][0][1] == ("0.3", 1 / 3)
    assert found.found["t"][1][1] == ("-", None)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_quantiles(share: float, expected: int) -> None:
    assert _quantile([1, 2, 3, 4], share) == expected
