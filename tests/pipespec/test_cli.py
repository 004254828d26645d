"""The command line, the demo, and the benchmark of stages."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipespec.api.text import TextStream
from pipespec.cli import doctor
from pipespec.cli.main import main
from pipespec.config import WEIGHT_FORMATS
from pipespec.demo import load_family
from pipespec.demo import run as demo_run
from pipespec.registry import SCHEDULES
from pipespec_kernels.formats import QUANTIZERS
from tests.conftest import noisy, random_llama
from tests.support.forks import Fork, ran
from tests.support.texts import own_text
from tests.trials import trials
from tests.waiting import SECONDS, until


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: every text can be encoded, and a token may be a part of a character."""
    vocabulary = {"<pad>": 0, "<begin>": 1} | {
        c: i + 2 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>", pad_token="<pad>")


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """A folder with three tiny models, as ``pipespec demo --family`` takes it."""
    folder = tmp_path_factory.mktemp("family")
    target = random_llama(0)
    for name, model in {"target": target, "medium": noisy(target, 0.05), "small": noisy(target, 0.2)}.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def expected_text(family: Path, prompt: str, new_tokens: int) -> str:
    loaded = load_family(family)
    ids = loaded.encode(prompt)
    output = own_text(loaded.target, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens)
    return shown(loaded.tokenizer, output[0, ids.shape[1] :].tolist())


def shown(tokenizer, tokens: list[int]) -> str:
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, lambda text, drafted: pieces.append(text))
    stream.put(torch.tensor([[1]]))
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    return "".join(pieces)


WITHOUT = (
    "import sys; sys.modules[sys.argv[1]] = None; from pipespec.cli.main import main; sys.exit(main(sys.argv[2:]))"
)
"""The program without a package, which comes before its arguments."""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=SECONDS)


# --- start-up time -------------------------------------------------------------------------------------------------


def test_version_and_help_do_not_import_torch():
    code = (
        "import sys\nfrom pipespec.cli.main import main\n"
        "for flag in ('--version', '--help'):\n"
        "    try: main([flag])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & sys.modules.keys()"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pipespec ")
    assert "doctor" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("frobnicate", "generate"),
        ("generate --temprature 0.5", "--temprature 0.5; did you mean --temperature?"),
        ("generate --model m.gguf -n 3", "--model m.gguf -n 3; did you mean --target?"),
        ("generate model.gguf", "model.gguf; did you mean --target MODEL --prompt TEXT?"),
        ("chat model.gguf", "model.gguf; did you mean --target MODEL?"),
        ("generate --frobnicate=3", "--frobnicate=3 (`pipespec generate --help`"),
        ("", "which command? There are generate,"),
        ("run model.gguf", "there is no command run; did you mean chat?"),
        ("recomend --new-tokens 3", "there is no command recomend; did you mean recommend?"),
        ("generate --weights q4_9", "--weights: 'q4_9' is none; the weight formats are q8_0, "),
        ("generate --device gpu", "--device: 'gpu' is not a device; use cpu, "),
        ("generate --temperature -1", "--temperature: must be at least 0, not -1"),
        ("generate --temperature nan", "not nan"),
        ("generate --top-p 1.5", "--top-p: must be at least 0 and at most 1, not 1.5"),
        ("generate --max-new-tokens 0", "at least 1"),
        ("generate --lookahead 3 0", "at least 1"),
        ("recommend --new-tokens 0", "at least 1"),
        ("serve --port 99999", "at most 65535"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_weight_formats_of_the_command_line_are_those_of_the_kernels():
    assert (*QUANTIZERS, "int8") == WEIGHT_FORMATS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt hi --target /nowhere/m.gguf", "there is no file /nowhere/m.gguf"),
        ("generate --prompt hi --target /nowhere/m", "there is no folder /nowhere/m: a model is"),
        ("chat --target target --draft ngram --draft ./nowhere", "there is no folder ./nowhere"),
        ("chat --target a/name --tokenizer /nowhere/t", "there is no folder /nowhere/t"),
        ("generate --prompt hi --target empty", "empty holds no model: there is no config.json in it"),
        ("generate --prompt hi --target random", "random is no GGUF file: it does not begin with GGUF"),
        ("doctor nowhere.gguf", "there is no file nowhere.gguf"),
        ("recommend --target nowhere.gguf", "there is no file nowhere.gguf"),
        ("recommend --prompts nowhere.txt", "--prompts 'nowhere.txt' is no file: it names a text file"),
        ("generate --prompt hi --target some/model", "there is no folder some/model; as a name of the hub it was not"),
    ],
)
def test_what_leads_nowhere_is_named_before_torch_is_imported(arguments, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "random").write_bytes(bytes(range(100)))
    code = (
        "import os, socket, sys; os.chdir(sys.argv[1]); from pipespec.cli.main import main\n"
        "def getaddrinfo(*args): raise socket.gaierror(-2, 'Name or service not known')\n"
        "socket.getaddrinfo = getaddrinfo; os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "assert main(sys.argv[2:]) == 2; assert 'torch' not in sys.modules"
    )
    done = run_python(code, str(tmp_path), *arguments.split())
    assert (done.returncode, message in done.stderr) == (0, True), done.stderr


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for expected in ("native module", "schedule workers", "default schedule", "bundled family", "torch"):
        assert expected in out
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["usable"] is True
    assert set(facts["schedules"]) == set(SCHEDULES)
    monkeypatch.setattr(doctor, "misfits", lambda env: ["transformers 9 is too new"])
    assert main(["doctor"]) == 1


@pytest.mark.parametrize("missing", ["torch", "transformers", "pipespec_kernels._native"])
def test_where_something_is_missing(missing):
    done = run_python(WITHOUT, missing, "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "CANNOT work" in done.stdout
    assert "! " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    if missing == "torch":
        done = run_python(WITHOUT, missing, "generate", "--prompt", "x")
        assert done.returncode == 2
        assert "pipespec doctor" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", ["spd train --target x", "train-draft --help", "generate --system spd --prompt x"]
)
def test_a_command_of_a_missing_package_says_what_to_install(arguments):
    package, remedy = ("pipespec_spd", "") if "generate" in arguments else ("pipespec_train", r"'pipespec\[train\]'")
    done = run_python(WITHOUT, package, *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"pipespec: error: {package} cannot be imported .*: pip install {remedy}.*\n", done.stderr)


def test_spd_is_a_name_of_the_package():
    code = "import sys, pipespec; assert 'pipespec_spd' not in sys.modules; print(pipespec.spd.SpeculativePipeline.__module__)"
    assert ran("-c", code).stdout == "pipespec_spd.pipeline\n"


# --- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["lockstep", "streams"])
def test_generate_from_stdin_streams_the_targets_text(family, capsys, monkeypatch, schedule):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    models = f"--target {family / 'target'} --draft {family / 'small'} --draft {family / 'medium'}"
    assert main(f"generate {models} --schedule {schedule} --lookahead 3 4 --max-new-tokens 20 --report".split()) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(family, "def f(x):", 20) + "\n"
    assert f"{schedule}: 20 tokens in" in captured.err


def test_generate_from_a_file_without_streaming(family, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    arguments = ["generate", "--target", str(family / "target"), "--prompt-file", str(file), "--no-stream"]
    assert main([*arguments, "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected_text(family, "hello", 12) + "\n"


def test_generate_with_the_bundled_family(capsys):
    texts = []
    for options in ("plain", "lockstep", "lockstep --draft ngram --report"):
        command = f"generate --max-new-tokens 24 --schedule {options} --prompt".split()
        assert main([*command, "def f(x):\n    return x\n\ndef f("]) == 0
        captured = capsys.readouterr()
        assert ("bundled demo family" in captured.err) == ("ngram" not in options)
        texts.append(captured.out)
    assert texts[0] == texts[1] == texts[2]
    assert "\nngram " in captured.err


@pytest.mark.parametrize("length", [508, 600])
def test_generate_warns_beyond_the_models_limit(family, capsys, length):
    """A prompt that is longer is refused, unless asked for."""
    arguments = ["generate", "--target", str(family / "target"), "--prompt", "x" * length, "--max-new-tokens", "6"]
    if length >= 512:
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert (
            "the prompt has 600 tokens, and the target was made for texts of 512: shorten it, or pass --beyond"
            in said.err
        )
        assert said.out == ""
        arguments.append("--beyond-context")
    assert main(arguments) == 0
    what = f"beyond {max(0, 512 - length)} new tokens the text passes the 512 tokens that the target was made for"
    assert what in capsys.readouterr().err


def test_a_long_prompt_shows_on_a_terminal_how_much_is_read(family, capsys, monkeypatch):
    """One line, drawn in place, which is gone before the text begins."""
    arguments = ["generate", "--target", str(family / "target"), "--prompt", "x" * 300, "--max-new-tokens", "6"]
    monkeypatch.setattr("pipespec.engine.chain.PREFILL_CHUNK", 100)
    monkeypatch.setattr("pipespec.process.progress._LONG_PROMPT", 200)
    assert main(arguments) == 0
    assert "reading" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().err.split("\r\x1b[K") if line.startswith("pipespec: reading")]
    assert lines == [f"pipespec: reading the prompt: {n} of 299 tokens" for n in (0, 100, 200)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt-file", "/nowhere/prompt"], "/nowhere/prompt"),
        (["--prompt", "caf\udce9"], "not UTF-8 text: --prompt"),  # as Python reads other bytes in the C locale
        (["--prompt", "x", "--draft", "y"], "--target"),
        (["--prompt", "x", "--target", "/nowhere/model"], "/nowhere/model"),
        (["--prompt", "x", "--target", "{family}"], "config.json"),
        (["--prompt", "x", "--target", "{family}/target", "--chat"], "chat template"),
        (["--prompt", "x", "--lookahead", str(2**32)], "lookahead must be 0 to 2147483647, not 4294967296"),
    ],
)
def test_generate_refuses_in_one_line(family, capsys, arguments, message):
    given = [argument.format(family=family) for argument in arguments]
    assert main(["generate", "--schedule", "lockstep", *given]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("pipespec: error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_other_bytes_on_stdin_are_refused(locale):
    command, env = [sys.executable, "-m", "pipespec.cli.main", "generate"], os.environ | {"LC_ALL": locale}
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=env, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == ["pipespec: error: the prompt is not UTF-8 text: standard input"]
    assert done.stdout == b""


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    "settings",
    [{}, ASCII, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, ASCII | {"PYTHONIOENCODING": "utf-16"}],
)
def test_text_in_utf8_under_other_encodings(settings):
    """Of the command line and of standard input. Nothing else of the command line is read so: a path has the bytes of the locale."""
    code = "import sys; from pipespec.cli.options import *; print(ascii([utf8(sys.argv[1]), read_text(None)]))"
    text = "caf\u00e9 \u4f60\u597d \U0001f600"
    command, env = [sys.executable, "-c", code, text.encode()], os.environ | settings
    done = subprocess.run(
        command, input=text.encode() + b"\r\n", capture_output=True, env=env, timeout=SECONDS, check=True
    )
    encoding = "utf-16" if "utf-16" in settings.values() else "ascii"
    assert done.stdout.decode(encoding).strip() == ascii([text, text])


def test_text_that_the_encoding_of_the_output_does_not_have(family):
    """It is escaped there, as on standard error."""
    models = ["--target", family / "target", "--schedule", "plain", "--max-new-tokens", "12"]
    command, text = [sys.executable, "-m", "pipespec.cli.main", "generate", *models], "caf\u00e9"
    env = os.environ | ASCII | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, input=text.encode(), capture_output=True, env=env, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    wanted = expected_text(family, text, 12)
    assert not wanted.isascii()
    assert done.stdout == wanted.encode("ascii", "backslashreplace") + b"\n"


def test_the_exit_code_after_a_closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pipespec.cli.main", "doctor"]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert done.returncode == 141
    assert "Error" not in done.stderr


# --- trace ---------------------------------------------------------------------------------------------------------


def test_trace_writes_what_every_stage_did(family, capsys, tmp_path):
    models = f"--target {family / 'target'} --draft {family / 'small'} --schedule lockstep --lookahead 4"
    arguments = f"trace {models} --out {tmp_path / 'run.json'} --max-new-tokens 20 --prompt".split()
    assert main([*arguments, "def f(x):"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(family, "def f(x):", 20) + "\n"
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["draft 0", "target"]
    assert any(e["name"].startswith("verify") for e in events)
    assert "busy" in captured.err
    assert "mean step in ms by width" in captured.err


def test_trace_refuses_before_it_generates(family, full, capsys, tmp_path, monkeypatch):
    arguments = ["trace", "--target", str(family / "target"), "--prompt", "x", "--max-new-tokens", "4"]
    for out, message in (
        (tmp_path / "run.json", "run.json cannot be written"),
        (tmp_path / "nowhere" / "run.json", f"there is no folder {tmp_path / 'nowhere'}"),
        (tmp_path, f"{tmp_path} is a folder"),
        (full, "No space left on device"),
    ):
        with monkeypatch.context() as patch:
            if "cannot be written" in message:
                patch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
            assert main([*arguments, "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert "Traceback" not in captured.err
        assert captured.out == "" or out == full
    assert full.is_char_device()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_debug_shows_where(capsys):
    assert main(["generate", "--prompt", "", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_the_workers_and_keeps_the_text(family, tmp_path):
    # After its first steps it prints very slowly, so that the text is incomplete when Ctrl-C comes.
    code = """
import itertools, sys, time
from pipespec.cli.main import main
from pipespec.engine.stage import Stage
from tests.support.forks import fork_drafts_here

fork_drafts_here()
step, steps = Stage.step, itertools.count()


def slow(*arguments):
    time.sleep(60 if next(steps) > 20 else 0)
    return step(*arguments)


Stage.step = slow
sys.exit(main())
"""
    arguments = ["generate", "--target", str(family / "target"), "--draft", str(family / "small")]
    arguments += ["--schedule", "workers", "--prompt", "hello", "--max-new-tokens", "400"]
    process = Fork(["-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)  # it is generating
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err.decode()
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err
    assert children

    def lives(child: psutil.Process) -> bool:
        """A zombie does not: in a container there may be no process that reaps it."""
        with suppress(psutil.NoSuchProcess):
            return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        return False

    until(lambda: not any(map(lives, children)), "the workers have ended")


# --- the streamer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "a b  c\n\n\td", "naïve — 日本語 🙂 end", "🙂"])
def test_text_stream_is_the_decoded_text(text):
    tokenizer = byte_tokenizer()
    assert shown(tokenizer, tokenizer(text).input_ids) == text


def test_text_stream_marks_the_targets_own_token():
    pieces: list[tuple[str, bool]] = []
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer.decode, lambda text, drafted: pieces.append((text, drafted)))
    stream.put(torch.tensor([[1]]))
    stream.put(torch.tensor(tokenizer("abc").input_ids))
    stream.end()
    assert pieces == [("a", True), ("b", True), ("c", False)]


# --- demo and benchmark ----------------------------------------------------------------------------------------------

QUICK_DEMO = ["demo", "--quick", "--prompts", "1", "--new-tokens", "6", "--family"]


def test_demo(family, capsys):
    assert main([*QUICK_DEMO, str(family)]) == 0
    out = capsys.readouterr().out
    assert "drafts by an n-gram index and a model" in out
    assert "pipespec, n-gram index + medium" in out
    assert "Every row generated the same text" in out


def test_demo_fails_where_a_text_differs(family, capsys, monkeypatch):
    def wrong(loaded, opened):
        generate = loaded.target.generate
        return {"HF generate()": generate, "wrong": lambda ids, **how: generate(ids, **how | {"max_new_tokens": 3})}

    monkeypatch.setattr(demo_run, "rows_of", wrong)
    monkeypatch.setattr(demo_run, "stream_text", lambda *arguments: None)
    monkeypatch.setattr(demo_run, "pipe_of", lambda generate: None)
    assert main([*QUICK_DEMO, str(family)]) == 1
    assert "NOT every row generated the same text: wrong" in capsys.readouterr().out


def test_demo_where_a_row_does_not_run(family, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(demo_run, "Pipeline", refuse)
    assert main([*QUICK_DEMO, str(family)]) == 2
    assert "error: no more processes" in capsys.readouterr().err


# ---- streams that are closed or full


@pytest.mark.parametrize(
    ("redirected", "status", "text", "message"),
    [
        ("2>&-", 0, True, ""),
        (">&-", 2, False, "standard output is closed"),
        ("--stages 3 2>&-", 2, False, ""),
        ("--stages 3 2>{full}", 2, False, ""),
    ][: trials(ci=3, nightly=4)],
)
def test_streams_that_are_closed_or_full(family, full, redirected, status, text, message):
    command = (
        f"{sys.executable} -m pipespec.cli.main generate --target {family / 'target'} --prompt xy --max-new-tokens 4"
    )
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {redirected.format(full=full)}"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == status, done
    assert bool(done.stdout.strip()) == text
    assert message in done.stderr
    assert "error" not in done.stdout


def test_a_report_that_finds_no_room(family, full):
    given = ["--target", family / "target", "--prompt", "xy", "--max-new-tokens", 4, "--report"]
    with full.open("w") as stderr:
        done = ran("-m", "pipespec.cli.main", "generate", *given, stderr=stderr, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stdout.strip()
    assert "error" not in done.stdout
