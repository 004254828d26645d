"""The command line: ``pipespec generate``, ``trace``, ``demo``, ``plan``, ``spd train`` and ``doctor``.

Text goes to stdout, everything else to stderr. Exit codes: 0; 1 where the answer is "no" (texts differ, this installation
cannot work); 2 for an error; 130 after Ctrl-C. torch is imported only by what needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.progress import quiet_transformers, say, working
from pipespec_kernels import __version__, collect_env, problems

if TYPE_CHECKING:
    from pipespec.observe import Report

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = "cpu, cuda, cuda:1: for all, or one per stage, drafts first; auto: GPUs by free memory; default: cpu"
_SCHEDULES = ("auto", "plain", "lockstep", "workers", "streams")
_TRACE_STEPS = 1 << 16

# These say in words what was wrong with the input; of any other error the kind is shown, too.
_PLAIN_ERRORS = (ValueError, TypeError, OSError, NotImplementedError, ImportError)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        with _plain_warnings():
            return command(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our text has gone (`| head`). Nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        # One line, but where a table says what does not fit.
        message = str(error).rstrip() if getattr(error, "in_lines", False) else " ".join(str(error).split())
        message = message or type(error).__name__
        if not isinstance(error, _PLAIN_ERRORS):
            message = f"{type(error).__name__}: {message}"
        if isinstance(error, ImportError):
            message += " (`pipespec doctor` says what is wrong with the installation)"
        say(f"error: {message}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pipespec",
        description="A large language model's own answer, faster: a chain of models generates the last one's text.",
    )
    parser.add_argument("--version", action="version", version=f"pipespec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="generate text with any models", description=_generate.__doc__)
    generate.set_defaults(command=_generate)
    _add_generation(generate)
    generate.add_argument("--report", action="store_true", help="afterwards, say what each stage did")

    trace = commands.add_parser("trace", help="record who did what when", description=_trace.__doc__)
    trace.set_defaults(command=_trace)
    _add_generation(trace)
    trace.add_argument("--out", metavar="FILE", type=Path, required=True, help="the trace, for https://ui.perfetto.dev")
    trace.add_argument("--svg", metavar="FILE", type=Path, help="also a picture of it")

    demo = commands.add_parser(
        "demo", help="three bundled models, real prompts, who is how fast", description=_demo.__doc__
    )
    demo.set_defaults(command=_demo)
    demo.add_argument(
        "--system",
        choices=("pipespec", "spd"),
        default="pipespec",
        help="a chain of models (default), or one model in stages with its draft module",
    )
    demo.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    demo.add_argument("--prompt", metavar="FILE", help="show and measure this text instead; - for standard input")
    demo.add_argument("--prompts", metavar="N", type=int, help="how many prompts to measure")
    demo.add_argument("--new-tokens", metavar="N", type=int, help="most tokens per prompt")
    demo.add_argument(
        "--family",
        metavar="FOLDER",
        type=Path,
        help="other models: FOLDER/target, /medium and /small; spd: /target and /module",
    )

    plan = commands.add_parser("plan", help="predict what a chain of models gives", description=_plan.__doc__)
    plan.set_defaults(command=_plan)
    plan.add_argument("--target", metavar="PATH", help="the model whose text it is (default: the bundled family)")
    plan.add_argument(
        "--draft", metavar="PATH", action="append", default=[], help="a smaller model; several: smallest first"
    )
    plan.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=Path,
        help="calibrate on this text instead of one that the target makes up",
    )
    plan.add_argument(
        "--new-tokens", metavar="N", type=int, default=128, help="tokens per call that are planned for (%(default)s)"
    )
    plan.add_argument(
        "--svg", metavar="FILE", type=Path, help="also measure, and draw throughput over depth and window there"
    )
    plan.add_argument("--repeats", metavar="R", type=int, default=3, help="of the measurement (%(default)s)")
    plan.add_argument("--dtype", choices=_DTYPES, help="default: as stored; float32 for the bundled family")
    plan.add_argument("--device", metavar="D", nargs="+", help=_DEVICE)
    plan.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    plan.add_argument(
        "--traces", metavar="FOLDER", type=Path, help="instead: logged runs of the published system, one .json each"
    )
    plan.add_argument("--json", action="store_true", help="the same figures, for programs")

    spd = commands.add_parser("spd", help="speculative pipeline decoding: train a draft module")
    inner = spd.add_subparsers(required=True, metavar="command")
    _add_spd_train(inner.add_parser("train", help="train a draft module for a target", description=_spd_train.__doc__))

    doctor = commands.add_parser("doctor", help="what is installed, what is wrong", description=_doctor.__doc__)
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="everything, for programs")

    for command in (*commands.choices.values(), *inner.choices.values()):
        if command is spd:
            continue
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """What to generate, with what and how."""
    parser.add_argument("--target", metavar="PATH", help="the model whose text it is (default: the bundled family)")
    parser.add_argument(
        "--draft", metavar="PATH", action="append", default=[], help="a smaller model; several: smallest first"
    )
    parser.add_argument(
        "--schedule", choices=_SCHEDULES, help="default: workers where there is more than one core, otherwise lockstep"
    )
    parser.add_argument(
        "--windows", metavar="N", type=int, nargs="+", help="tokens a draft may be ahead: one for all, or one per draft"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="default: standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="line ends at its end are dropped")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="default: %(default)s")
    sample = parser.add_argument_group("sampling", "any of the first five samples; otherwise greedy")
    sample.add_argument("--temperature", metavar="T", type=float, help="below 1: safer, above: livelier; 0: greedy")
    sample.add_argument("--top-k", metavar="K", type=int, help="only the K likeliest tokens")
    sample.add_argument("--top-p", metavar="P", type=float, help="only the likeliest tokens that together have P")
    sample.add_argument(
        "--min-p", metavar="P", type=float, help="only tokens at least P times as likely as the likeliest"
    )
    sample.add_argument("--seed", metavar="N", type=int, help="one seed, one text, whatever the drafts")
    sample.add_argument(
        "--repetition-penalty", metavar="R", type=float, help="above 1: avoid what was said (greedy, too)"
    )
    parser.add_argument("--stop", metavar="TEXT", action="append", help="end behind this text; several allowed")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: as stored; float32 for the bundled family")
    parser.add_argument("--device", metavar="D", nargs="+", help=_DEVICE)
    parser.add_argument("--chat", action="store_true", help="put the prompt into the target's chat template")
    parser.add_argument("--no-stream", action="store_true", help="write the text when it is complete")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")


def _add_spd_train(train: argparse.ArgumentParser) -> None:
    train.set_defaults(command=_spd_train)
    train.add_argument("--target", metavar="PATH", required=True, help="the model that the module drafts for")
    train.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        required=True,
        help="text, .jsonl, .json or .parquet files, or folders of them",
    )
    train.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="module, checkpoint, record and curves"
    )
    train.add_argument(
        "--stages",
        metavar="N",
        type=int,
        nargs="+",
        required=True,
        help="of the target: how many, or the layers of each",
    )
    train.add_argument(
        "--layers", metavar="N", type=int, help="decoder blocks of the module; default: one less than a stage has"
    )
    train.add_argument(
        "--types", metavar="N", type=int, help="at most that many anchors (default: one per stage, plus one)"
    )
    train.add_argument(
        "--vocabulary", metavar="N", type=int, help="draft only the N most frequent tokens (default: all)"
    )
    data = train.add_argument_group("data")
    data.add_argument("--length", metavar="N", type=int, default=512, help="most tokens of an example (%(default)s)")
    data.add_argument("--truncate", action="store_true", help="cut longer conversations instead of leaving them out")
    data.add_argument("--held-out", metavar="PATH", nargs="+", default=[], help="validate on these files")
    data.add_argument(
        "--validation", metavar="P", type=float, default=0.02, help="otherwise on this share of the data (%(default)s)"
    )
    run = train.add_argument_group("the run")
    run.add_argument("--steps", metavar="N", type=int, help="optimizer steps")
    run.add_argument("--minutes", metavar="M", type=float, help="instead: of wall clock")
    run.add_argument("--batch", metavar="N", type=int, default=4, help="examples in a forward (%(default)s)")
    run.add_argument("--accumulate", metavar="N", type=int, default=1, help="forwards in a step (%(default)s)")
    run.add_argument("--rate", metavar="R", type=float, default=1e-4, help="peak learning rate (%(default)s)")
    run.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="default: %(default)s")
    run.add_argument("--decay", metavar="W", type=float, default=0.0, help="weight decay (%(default)s)")
    run.add_argument("--temperature", metavar="T", type=float, default=1.0, help="of both distributions (%(default)s)")
    run.add_argument(
        "--argmax-weight",
        metavar="W",
        type=float,
        default=0.0,
        help="cross entropy with the target's choice, added (%(default)s)",
    )
    run.add_argument("--amp", action="store_true", help="bf16 products; weights and optimizer stay float32")
    run.add_argument("--validate-every", metavar="N", type=int, default=100, help="steps (%(default)s)")
    run.add_argument("--save-every", metavar="N", type=int, default=500, help="steps (%(default)s)")
    run.add_argument("--seed", metavar="N", type=int, default=42, help="default: %(default)s")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    train.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the target (%(default)s)")
    train.add_argument("--device", metavar="D", help="cpu or cuda; default: cpu, with several processes a GPU each")


def _spd_train(args: argparse.Namespace) -> int:
    """Train a draft module for a target cut into stages (speculative pipeline decoding): the target is the teacher and stays as it is. Of
    conversations, what the assistant says is learnt; of text, everything. On several GPUs: torchrun or accelerate launch, `-m pipespec.cli spd train`."""
    if (args.steps is None) == (args.minutes is None):
        raise ValueError("give either --steps or --minutes")
    with working("importing torch and transformers"):
        from pipespec.spd.command import run_train
        from pipespec.spd.training import Settings
    settings = Settings(
        steps=args.steps,
        minutes=args.minutes,
        rate=args.rate,
        accumulate=args.accumulate,
        temperature=args.temperature,
        argmax_weight=args.argmax_weight,
        decay=args.decay,
        optimizer=args.optimizer,
        amp=args.amp,
        seed=args.seed,
        validate_every=args.validate_every,
        save_every=args.save_every,
    )
    return run_train(
        args.target,
        args.data,
        args.out,
        stages=args.stages,
        layers=args.layers,
        settings=settings,
        types=args.types,
        vocabulary=args.vocabulary,
        length=args.length,
        batch=args.batch,
        truncate=args.truncate,
        held_out=args.held_out,
        validation=args.validation,
        resume=args.resume,
        dtype=args.dtype,
        device=args.device,
    )


def _generate(args: argparse.Namespace) -> int:
    """Continue a prompt: the target's own text, token for token, with or without drafts. Greedy, or sampled with a seed."""
    report = _run_generation(args)
    if args.report:
        print(report, file=sys.stderr)
    return 0


def _trace(args: argparse.Namespace) -> int:
    """Continue a prompt as `generate` does, and write down every step of every stage: when it ran, what it was fed, which drafts held, what was
    taken back. Open the file with https://ui.perfetto.dev; a summary goes to standard error."""
    for file in filter(None, (args.out, args.svg)):
        if not file.absolute().parent.is_dir():  # better now than when the text is complete
            raise FileNotFoundError(f"there is no folder {file.absolute().parent}")
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder: name a file in it")
    report = _run_generation(args, trace=_TRACE_STEPS)
    from pipespec.observe.timeline import timeline
    from pipespec.observe.trace import summary

    report.save_trace(args.out)
    if args.svg is not None:
        args.svg.write_text(timeline(report.traced(), f"pipespec {report.schedule}"), encoding="utf-8")
    print(report, summary(report.traced()), sep="\n", file=sys.stderr)
    return 0


def _run_generation(args: argparse.Namespace, trace: int = 0) -> Report:
    """Continue the prompt, the text on standard output; what the call did."""
    prompt = _prompt(args)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, not {args.max_new_tokens}")
    if args.target is None and args.draft:
        raise ValueError("--draft needs a --target: the bundled family has its own drafts")
    target, drafts, dtype = args.target, list(args.draft), args.dtype or "auto"
    if target is None:
        target, drafts = _bundled(args.schedule)
        dtype = args.dtype or "float32"
    schedule = args.schedule or _default_schedule()
    with working("importing torch and transformers"):
        from transformers import AutoTokenizer

        from pipespec.observe.text import TextStream
        from pipespec.pipeline import Pipeline

    with quiet_transformers():
        with working("loading the models" + (", starting workers" if drafts and schedule == "workers" else "")):
            pipe = Pipeline(
                target,
                drafts,
                schedule=schedule,
                windows=_one_or_all(args.windows),
                trace=trace,
                dtype=dtype,
                device=_one_or_all(args.device),
                trust_remote_code=args.trust_remote_code,
            )
        with pipe:
            try:
                tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=args.trust_remote_code)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(f"{target} holds no tokenizer that can be loaded: {error}") from error
            inputs = _encode(tokenizer, prompt, args.chat)
            length, limit = inputs.input_ids.shape[1], getattr(pipe.target.config, "max_position_embeddings", None)
            if limit is not None and length <= limit < length + args.max_new_tokens:
                say(f"warning: beyond {limit - length} new tokens the text passes the target's limit of {limit} tokens")
            pieces: list[str] = []

            def write(text: str, drafted: bool) -> None:
                if args.no_stream:
                    pieces.append(text)
                else:
                    print(text, end="", flush=True)

            stream = TextStream(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), write)
            try:
                pipe.generate(
                    **inputs.to(pipe.target.device),
                    max_new_tokens=args.max_new_tokens,
                    streamer=stream,
                    **_choice(args, tokenizer),
                )
            except KeyboardInterrupt:
                stream.end()
                print("".join(pieces), flush=True)
                raise
            print("".join(pieces), flush=True)
            assert pipe.report is not None
            return pipe.report


def _one_or_all(values: list[Any] | None) -> Any:
    """Of an option that takes one value for all stages or one for each: what ``Pipeline`` is given."""
    return values[0] if values is not None and len(values) == 1 else values


def _choice(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """What --temperature and its like mean to ``generate()``."""
    warpers = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given = {name: value for name, value in warpers.items() if value is not None}
    if args.temperature == 0 and (len(given) > 1 or args.seed is not None):
        raise ValueError("--temperature 0 is greedy: --top-k, --top-p, --min-p and --seed would have no effect")
    # 0 is what many programs call greedy; transformers refuses it.
    sample = args.temperature != 0 and (bool(given) or args.seed is not None)
    choice: dict[str, Any] = {"do_sample": sample}
    if sample:
        choice |= {"top_k": 0, "seed": args.seed} | given  # not the 50 that transformers has for a default
    if args.repetition_penalty is not None:
        choice["repetition_penalty"] = args.repetition_penalty
    if args.stop:
        choice |= {"stop_strings": args.stop, "tokenizer": tokenizer}
    return choice


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        text, where = args.prompt, "--prompt"
    elif args.prompt_file is not None:
        text, where = _read(args.prompt_file), str(args.prompt_file)
    else:
        text, where = _read(None), "standard input"
    if not text.strip():
        raise ValueError(f"the prompt is empty ({where})")
    return text


def _read(file: Path | None) -> str:
    """A prompt from a file or standard input, without the line ends that editors and ``echo`` put at its end."""
    try:
        if file is None:
            if sys.stdin is None or sys.stdin.isatty():
                raise ValueError("no prompt: give --prompt TEXT, --prompt-file FILE, or a text on standard input")
            text = sys.stdin.read()
        else:
            text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {file or 'standard input'}") from error
    return text.rstrip("\r\n")


def _encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not tokenizer.chat_template:
        raise ValueError("--chat: the target's tokenizer has no chat template")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _default_schedule() -> str:
    return "workers" if _cores() > 1 else "lockstep"


def _bundled(schedule: str | None) -> tuple[Path, list[Path]]:
    from pipespec.demo import family_path

    # A process per stage needs a core per stage.
    names = ["small", "medium"] if schedule in ("auto", "lockstep") or _cores() > 2 else ["medium"]
    if schedule == "plain":
        names = []
    say(f"no --target: using the bundled demo family, target{''.join(f' + {name}' for name in names)}")
    return family_path("target"), [family_path(name) for name in names]


def _demo(args: argparse.Namespace) -> int:
    """Stream the text of three bundled models working at once, then measure: plain generate(), HuggingFace's assisted
    generation, and ours. With --system spd: the target in stages with one token in flight in each, and its draft module. Exit code 1 if
    any of them generates another text."""
    from dataclasses import replace

    text = None
    if args.prompt is not None:
        text = _read(None if args.prompt == "-" else Path(args.prompt))
        if not text.strip():
            raise ValueError(f"--prompt: {args.prompt} is empty")
    for name in ("prompts", "new_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    with working("importing torch and transformers"):
        from pipespec.demo.run import FULL, QUICK, run_demo
        from pipespec.demo.run_spd import run_spd_demo
    size = QUICK if args.quick else FULL
    size = replace(size, prompts=args.prompts or size.prompts, new_tokens=args.new_tokens or size.new_tokens)
    run = run_spd_demo if args.system == "spd" else run_demo
    return 0 if run(size, text, args.family) else 1


def _plan(args: argparse.Namespace) -> int:
    """Measure a chain of models and predict what every schedule, subset of drafts and window gives, as schedule="auto" does; with --svg also
    measure them. With --traces: re-derive the published table from logged runs, predict the pipelines from the lock steps by simulation,
    and say what our protocol would give at their step times."""
    if args.traces is None:
        return _plan_models(args)
    with working("simulating"):
        from pipespec.planning import traces

        report = traces.report(traces.load(args.traces))
    print(json.dumps(report, indent=1) if args.json else traces.as_text(report))
    return 0


def _plan_models(args: argparse.Namespace) -> int:
    for name in ("new_tokens", "repeats"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.target is None and args.draft:
        raise ValueError("--draft needs a --target: the bundled family has its own drafts")
    text = None if args.prompt_file is None else _read(args.prompt_file)
    if text is not None and not text.strip():
        raise ValueError(f"the prompt is empty ({args.prompt_file})")
    target, drafts, dtype = args.target, list(args.draft), args.dtype or "auto"
    if target is None:
        from pipespec.demo import family_path

        target, dtype = family_path("target"), args.dtype or "float32"
        drafts = [family_path("small"), family_path("medium")]
    with working("importing torch and transformers"):
        from pipespec.planning.command import run_plan
    return run_plan(
        target,
        drafts,
        text=text,
        new_tokens=args.new_tokens,
        svg=args.svg,
        repeats=args.repeats,
        as_json=args.json,
        dtype=dtype,
        device=_one_or_all(args.device),
        trust_remote_code=args.trust_remote_code,
    )


def _doctor(args: argparse.Namespace) -> int:
    """What is installed, what was built, what will be used, what is wrong and what to do. Exit code 1 if pipespec cannot work."""
    with working("looking around (imports torch and transformers)"):
        env = collect_env()
        env["pipeline_error"] = _pipeline_error()
    env["family"] = _family_state()
    env["draft_module"] = _draft_module_state()
    env["schedules"] = _schedules(env)
    env["default_schedule"] = _default_schedule()
    env["problems"] = problems(env)
    usable = env["usable"] = env["pipeline_error"] is None and env["native"]["version"] == env["version"]
    if env["pipeline_error"] and not env["problems"]:
        env["problems"].append(f"pipespec does not import: {env['pipeline_error']}")
    if isinstance(env["family"], str):
        env["problems"].append(f"The demo's models are missing: {env['family']}")
    elif isinstance(env["draft_module"], str):
        env["problems"].append(f"The demo's draft module is missing: {env['draft_module']}")
    if args.json:
        print(json.dumps(env, indent=1))
        return 0 if usable else 1
    rows = list(_doctor_rows(env))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for problem in env["problems"]:
        print(f"! {problem}")
    if not usable:
        print("pipespec CANNOT work here until the above is repaired.")
    elif env["problems"]:
        print("pipespec works here, with the restrictions above.")
    else:
        print("All is well.")
    return 0 if usable else 1


def _pipeline_error() -> str | None:
    """Why the part that needs everything does not import; None if it does."""
    try:
        import pipespec.pipeline  # noqa: F401
    except Exception as error:  # broken packages fail in many ways
        return f"{type(error).__name__}: {error}"
    return None


def _family_state() -> dict[str, float] | str:
    """Megabytes per model, or what is missing."""
    from pipespec.demo import FAMILY, family_path

    try:
        return {name: round((family_path(name) / "model.safetensors").stat().st_size / 1e6, 1) for name in FAMILY}
    except OSError as error:
        return str(error)


def _draft_module_state() -> float | str:
    """Megabytes of the bundled draft module, or what is missing."""
    from pipespec.demo import draft_module_path

    try:
        return round((draft_module_path() / "draft_module.safetensors").stat().st_size / 1e6, 1)
    except OSError as error:
        return str(error)


def _schedules(env: dict[str, Any]) -> dict[str, str]:
    """Per schedule: ``"yes"``, or why not."""
    if env["pipeline_error"]:
        return dict.fromkeys(_SCHEDULES, "no: pipespec does not import")
    available = dict.fromkeys(_SCHEDULES, "yes")
    if env["cpu"]["usable_cores"] < 2:
        available["workers"] = "yes, but with one core the stages only take turns"
    if not env["cuda"]["devices"]:
        available["streams"] = "yes, but it is made for GPUs: on a CPU workers is faster"
    return available


def _doctor_rows(env: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cpu, cuda, native, torch = env["cpu"], env["cuda"], env["native"], env["torch"]
    yield "pipespec", f"{env['version']}, {env['location']}"
    yield "Python", f"{env['python']}, {env['platform']}"
    for name, version in env["packages"].items():
        detail = version or "not installed"
        if name == "torch" and version and torch["error"]:
            detail += ", does not import"
        elif name == "torch" and torch["version"]:
            detail = f"{torch['version']}, {torch['threads']} threads, CUDA {torch['cuda_version'] or 'no'}"
        yield name, detail
    yield "native module", ", ".join(f"{k} {_short(v)}" for k, v in native.items()) if native else "does not import"
    quota = f", {cpu['quota_cores']:g} allowed by the container" if cpu["quota_cores"] else ""
    yield "CPU", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable{quota}"
    yield "row selection", f"native, {cpu['simd']}" if native else "-"
    if env["memory_bytes"]:
        yield (
            "memory",
            f"{env['memory_bytes'] / 2**30:.1f} GiB, {(env['memory_available_bytes'] or 0) / 2**30:.1f} available"
            + (f", {limit / 2**30:.1f} allowed by the container" if (limit := env["memory_limit_bytes"]) else ""),
        )
    yield (
        "CUDA module",
        cuda["file"] if cuda["file"] and not cuda["error"] else "not built" if not cuda["file"] else "broken",
    )
    yield "GPUs", ", ".join(device["name"] for device in cuda["devices"]) or "none"
    for schedule, state in env["schedules"].items():
        default = " (default)" if schedule == env["default_schedule"] and state == "yes" else ""
        yield f"schedule {schedule}", state + default
    family = env["family"]
    sizes = family if isinstance(family, str) else ", ".join(f"{name} {size} MB" for name, size in family.items())
    yield "bundled family", f"incomplete: {sizes}" if isinstance(family, str) else f"complete: {sizes}"
    module = env["draft_module"]
    yield (
        "draft module",
        f"missing: {module}" if isinstance(module, str) else f"there: {module} MB (pipespec demo --system spd)",
    )


def _short(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a user wants them: what, not where."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *args, **kwargs: say(f"warning: {message}")
        yield


if __name__ == "__main__":
    sys.exit(main())
