"""The scripts of examples/ run, each in a process of its own, with the bundled models."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import Fork, ran
from tests.waiting import SECONDS, until

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: object, given: str = "") -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = ran(
        ROOT / "examples" / script,
        *arguments,
        input=given,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def served(folder: Path, *models: object) -> Iterator[str]:
    """The address of a server."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "pipespec.cli.main", "serve", "--port", "0", *models]
    with (
        (folder / "log").open("w+") as log,
        Fork(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}
        ) as server,
    ):
        try:
            said = lambda: re.search(r"http://[\d.]+:\d+", (folder / "log").read_text())  # noqa: E731
            until(lambda: said() or server.poll() is not None, "it serves")
            found = said()
            assert found, (folder / "log").read_text()
            yield found[0]
        finally:
            server.terminate()


def test_notebook() -> None:
    out = run("notebook.py")
    assert "return" in out
    assert "tokens/s" in out


def test_openai_client(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        out = run("openai_client.py", url)
    assert "return" in out
    assert out.endswith("48 tokens\n")


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="needs the package langchain-openai")
def test_langchain_chat(tmp_path: Path) -> None:
    from tests.pipespec.gguf_files import tiny, write

    write(tiny("qwen2"), tmp_path / "model.gguf")
    with served(tmp_path, "--target", tmp_path / "model.gguf") as url:
        assert len(run("langchain_chat.py", url)) > 1


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the package lm-eval, with the extra hf")
def test_lm_eval_tasks() -> None:
    out = run("lm_eval_tasks.py")
    assert "return" in out
    assert "tokens/s" in out


@pytest.mark.skipif(find_spec("trl") is None, reason="needs the package trl")
def test_trl_grpo() -> None:
    out = run("trl_grpo.py")
    assert "'train_loss'" in out
    assert "lockstep: " in out  # and not transformers


def test_chat() -> None:
    out = run("chat.py", given="def mean(values):\ndef median(values):\n\n")
    assert "return" in out
    assert "tokens/s" in out


def test_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.pipespec.gguf_files import tiny, write

    write(tiny("qwen2"), tmp_path / "model.gguf")
    assert "tokens/s" in run("gguf.py", tmp_path / "model.gguf")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs the package peft")
def test_peft_model() -> None:
    assert "def mean(values):" in run("peft_model.py")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    assert "def mean(values):" in run("two_gpus.py")


def test_own_draft() -> None:
    assert "def mean(values):" in run("own_draft.py")


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray, with the extra serve")
def test_ray_serve(tmp_path: Path) -> None:
    """A replica ends during a stream, then during a whole answer. The error says retry, and another replica gives the right answer to the next request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/completions"
    command = [sys.executable, ROOT / "examples" / "ray_serve.py", "--port", str(port)]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])}
    environment |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def ask(prompt: str = "def mean(values):", **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 450, "temperature": 0, "ignore_eos": True} | fields
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=SECONDS)

    def text(answer: Any) -> str:
        return json.load(answer)["choices"][0]["text"]

    def kill(answer: Any) -> None:
        os.kill(int(answer.headers["x-replica"].rpartition(":")[2]), signal.SIGKILL)

    def interrupted(**fields: Any) -> tuple[int, str]:
        """Status and text of an answer whose replica is killed meanwhile."""
        home = ask(max_tokens=1)
        threading.Timer(0.05, kill, [home]).start()
        try:
            answer = ask(**fields)
            return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment) as server,
    ):
        try:
            until(lambda: "serving on" in (tmp_path / "log").read_text() or server.poll() is not None, "it serves")
            right = text(ask())
            homes = {ask("def total(values):\n" * 20 + end, max_tokens=1).headers["x-replica"] for end in "abcdef"}
            assert len(homes) == 1
            for fields, statuses in (({"stream": True}, (200, 503)), ({}, (503,))):
                while "send the request again" not in (answer := interrupted(**fields))[1]:
                    assert answer[0] == 200  # it was complete before
                assert answer[0] in statuses
                assert text(ask()) == right
        finally:
            server.terminate()
    assert server.returncode == 0


def test_every_script_has_a_test_and_a_row() -> None:
    scripts = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert len(scripts) == 11
    assert all(f"test_{script}" in globals() for script in scripts)
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{script}.py" in page for script in scripts)
