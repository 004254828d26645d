"""The documentation site builds without a warning: links, anchors, references to code, parameters named in docstrings."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python", "pymdownx")


def _missing() -> list[str]:
    missing = []
    for name in NEEDED:
        try:
            if importlib.util.find_spec(name) is None:
                missing.append(name)
        except ModuleNotFoundError:
            missing.append(name)
    return missing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := _missing():
        pytest.skip(f"the site's tools are not installed ({', '.join(missing)}): pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    for source in (ROOT / "docs").rglob("*.md"):
        page = source.relative_to(ROOT / "docs")
        built = page.with_suffix("") / "index.html" if page.stem != "index" else page.with_suffix(".html")
        assert (site / built).is_file(), page


def test_commands_and_reference_are_generated(site: Path) -> None:
    commands = (site / "reference" / "cli" / "index.html").read_text()
    for name in ("pipespec generate", "pipespec recommend", "pipespec spd train", "pipespec doctor"):
        assert f">{name}<" in commands, name
    assert "--max-new-tokens" in commands
    reference = (site / "reference" / "pipespec" / "index.html").read_text()
    for name in ("pipespec.Pipeline", "pipespec.Pipeline.generate", "pipespec.attach", "pipespec.Report.save_trace"):
        assert f'id="{name}"' in reference, name
    kernels = (site / "reference" / "kernels" / "index.html").read_text()
    assert 'id="pipespec_kernels.ops.verify"' in kernels


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?(https?://[^"\s>]+)', page.read_text())
        assert not loaded, (page, loaded)
