"""``pipespec generate``: continue a prompt. ``pipespec trace``: the same, and every step is recorded."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.cli.options import (
    Subparsers,
    add_models,
    check_output,
    chosen_models,
    command_of,
    flag,
    loading_options,
    number,
    one_or_all,
    option,
    positive,
    read_text,
    require_text,
    utf8,
)
from pipespec.config import ACCEPTANCES
from pipespec.process.progress import quiet_transformers, reading_shown, say, working
from pipespec.registry import LOCKSTEP, SCHEDULES

if TYPE_CHECKING:
    from pipespec.api.output import Report


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("generate", help="generate text with any models", description=run.__doc__)
    parser.set_defaults(command=run)
    add_generation(parser)
    flag(parser, "report", "afterwards, print what each stage did; with --json-lines in each line")
    tracer = commands.add_parser("trace", help="record every step of a generation", description=run_trace.__doc__)
    tracer.set_defaults(command=run_trace, report=False)
    add_generation(tracer)
    tracer.add_argument("--out", metavar="FILE", type=Path, required=True, help="trace for https://ui.perfetto.dev")
    return [parser, tracer]


# fmt: off
def add_generation(parser: argparse.ArgumentParser) -> None:
    """Add the options of a generation: models, schedule, prompt, sampling, output."""
    add_models(parser)
    option(parser, "system", None, str, "spd: the target in stages, one token in flight in each; --draft may name a draft module's folder; under torchrun one "
           "stage per rank", choices=SYSTEMS, default="pipespec")
    option(parser, "stages", "N", str, "with --system spd: the number of stages, or the layers of each (4,4,4); default: the draft module's, without "
           "one the number of ranks, without ranks 2")
    option(parser, "timeout", "SECONDS", float, "with --system spd under torchrun: longest time of a rank for its part of a cycle, or of a chunk of the prompt "
           "(default: 6)")
    rows = "; ".join(f"{row.name}: {row.stages.replace('`', '')}" for row in SCHEDULES.values())
    option(parser, "schedule", None, str, f"how the stages run; default: by devices and cores, see `pipespec doctor`. {rows}", choices=SCHEDULES)
    option(parser, "lookahead", "N", positive, "draft tokens ahead of the next stage: one number for all drafts, or one per draft", nargs="+")
    flag(parser, "exact", "refuse a target whose bits depend on batch or drafts, in bfloat16 too")
    prompt = parser.add_mutually_exclusive_group()
    option(prompt, "prompt", "TEXT", utf8, "as it is: \\n is two characters; default: standard input")
    option(prompt, "prompt-file", "FILE", Path, "final line breaks are dropped")
    option(parser, "max-new-tokens", "N", positive, "default: %(default)s", default=128)
    sample = add_sampling(parser)
    option(sample, "acceptance", None, str, "how the target accepts draft tokens; rejection: at least as many in expectation, in lockstep with one draft; the text "
           "depends on the draft, too", choices=ACCEPTANCES, default="coupled")
    option(parser, "stop", "TEXT", utf8, "stop after this text; may be repeated", action="append")
    flag(parser, "beyond-context", "read a prompt that is longer than what the target was made for")
    flag(parser, "chat", "apply the target's chat template to the prompt")
    flag(parser, "no-stream", "print the text when it is complete")
    flag(parser, "json-lines", "each line of the input is a prompt: a JSON object with prompt, a JSON string, or a text; a line of JSON with the text answers each")


def add_sampling(parser: argparse.ArgumentParser) -> Any:
    """Add the options that say how tokens are chosen. Returns their group."""
    sample = parser.add_argument_group(
        "sampling", "--temperature, --top-k, --top-p, --min-p or --seed turns sampling on; without them decoding is greedy"
    )
    option(sample, "temperature", "T", number(float, 0), "divides the logits; 0: greedy")
    option(sample, "top-k", "K", number(int, 0), "keep the K most likely tokens")
    option(sample, "top-p", "P", number(float, 0, 1), "keep the most likely tokens with total probability P")
    option(sample, "min-p", "P", number(float, 0, 1), "keep tokens with P times the highest probability")
    option(sample, "seed", "N", int, "one seed gives one text, whatever the drafts (but for --acceptance)")
    option(sample, "repetition-penalty", "R", float, "above 1: fewer repetitions; greedy, too")
    option(sample, "presence-penalty", "P", float, "subtracted from the scores of tokens that the new text has")
    option(sample, "frequency-penalty", "P", float, "subtracted from the scores of tokens, per occurrence in the new text")
    return sample
# fmt: on


SYSTEMS = ("pipespec", "spd")
_TRACE_STEPS = 1 << 16


def run(args: argparse.Namespace) -> int:
    """Continue a prompt with the target's own text, token for token, with or without drafts. Greedy, or sampled with a seed."""
    report = generate(args)
    if args.report and report is not None and not args.json_lines:
        print(report, file=sys.stderr)
    return 0


def run_trace(args: argparse.Namespace) -> int:
    """Continue a prompt as `generate` does, and record every step of every stage: its time, its tokens, the draft tokens that were accepted, and
    rollbacks. Open the file with https://ui.perfetto.dev; a summary goes to standard error."""
    check_output(args.out)
    report = generate(args, trace=_TRACE_STEPS)
    if report is not None:
        from pipespec.api.trace import summary

        report.save_trace(args.out)
        print(report, summary(report.traced()), sep="\n", file=sys.stderr)
    return 0


def generate(args: argparse.Namespace, trace: int = 0) -> Report | None:
    """Print the continuation on stdout, and return the report of the call. With ranks, all but rank 0 serve instead, and return None.

    ``args``: the options of :func:`add_generation`. ``trace``: steps per stage that the report's trace keeps.
    """
    has_ranks = args.system == "spd" or (args.schedule is not None and SCHEDULES[args.schedule].needs_ranks)
    if has_ranks and int(os.environ.get("RANK", "0")):
        prompt = ""  # rank 0 has it
    elif args.prompt is None:
        prompt = read_text(args.prompt_file)
    else:
        prompt = require_text(args.prompt, "--prompt")
    if args.system == "spd":
        spd = command_of("pipespec_spd")
        spd.check_options(args, trace)
        target, drafts, dtype = chosen_models(args, list)  # its draft module comes later
    elif any(value is not None for value in (args.stages, args.timeout)):
        raise ValueError("--stages and --timeout are options of --system spd")
    else:
        target, drafts, dtype = chosen_models(args, lambda: bundled_drafts(args.schedule, args.acceptance))
    with working("importing torch and transformers"):
        from pipespec.api.text import TextStream
        from pipespec.models.tokenizers import load_tokenizer

    with quiet_transformers():
        with working("loading the models"):
            make = spd.make_pipeline if args.system == "spd" else _chain
            pipe = make(args, target, drafts, dtype, trace)
        with pipe:
            if not pipe.has_target:
                pipe.serve()
                return None
            tokenizer = load_tokenizer(args.tokenizer or target, trust_remote_code=args.trust_remote_code)
            if args.json_lines:
                _write_lines(args, pipe, tokenizer, prompt.splitlines())
                return pipe.report
            inputs = encode(tokenizer, prompt, args.chat)
            _check_room(args, pipe.target, inputs.input_ids.shape[1])
            pieces: list[str] = []

            def write(text: str, drafted: bool) -> None:
                if args.no_stream:
                    pieces.append(text)
                else:
                    print(text, end="", flush=True)

            stream = TextStream(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), write)
            try:
                with reading_shown():
                    output = pipe.generate(
                        **inputs.to(pipe.target.device),
                        max_new_tokens=args.max_new_tokens,
                        streamer=stream,
                        **sampling_options(args, tokenizer),
                    )
            except BaseException as error:
                stream.end()
                if isinstance(error, KeyboardInterrupt):
                    print("".join(pieces), flush=True)
                raise
            print("".join(pieces), flush=True)
            assert pipe.report is not None
            if args.chat and _is_cut(args, pipe, output[0, inputs.input_ids.shape[1] :].tolist()):
                say(f"the answer has {args.max_new_tokens} tokens, the limit: --max-new-tokens N changes it")
            return pipe.report


def _is_cut(args: argparse.Namespace, pipe: Any, new: list[int]) -> bool:
    """Whether the limit ended an answer."""
    from pipespec.models.properties import end_tokens

    return len(new) == args.max_new_tokens and new[-1] not in end_tokens(pipe.target)


def _check_room(args: argparse.Namespace, target: Any, length: int) -> None:
    """Refuse a prompt of ``length`` tokens that is longer than what the target was made for, and warn of a text that may become so."""
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit <= length and not args.beyond_context:
        raise ValueError(
            f"the prompt has {length} tokens, and the target was made for texts of {limit}: shorten it, or pass --beyond-context, "
            "which reads it all the same; the text may make no sense"
        )
    if limit is not None and limit < length + args.max_new_tokens:
        what = f"beyond {max(0, limit - length)} new tokens the text"
        say(f"warning: {what} passes the {limit} tokens that the target was made for, and may make no sense")


def _prompt_of(line: str, number: int) -> dict[str, Any]:
    """A line of the input as an object with ``prompt``: a JSON object has it, a JSON string or any other line is it.

    Raises:
        ValueError: An object without a text as its ``prompt``.
    """
    try:
        found = json.loads(line)
    except ValueError:
        found = line
    if not isinstance(found, dict):
        return {"prompt": found if isinstance(found, str) else line}
    if not isinstance(found.get("prompt"), str) or not found["prompt"]:
        raise ValueError(f'line {number}: the object has no text as its "prompt"')
    return found


def _write_lines(args: argparse.Namespace, pipe: Any, tokenizer: Any, lines: list[str]) -> None:
    """Print, for each line that is not empty, its object with ``text``, ``finish_reason``, ``tokens``, ``seconds``, and with ``--report`` the ``report``. All are checked before the first text."""
    given = [_prompt_of(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    options = sampling_options(args, tokenizer)
    encoded = [encode(tokenizer, entry["prompt"], args.chat) for entry in given]
    for each in encoded:
        _check_room(args, pipe.target, each.input_ids.shape[1])
    for entry, each in zip(given, encoded, strict=True):
        output = pipe.generate(**each.to(pipe.target.device), max_new_tokens=args.max_new_tokens, **options)
        new = output[0, each.input_ids.shape[1] :].tolist()
        found = {
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "finish_reason": "length" if _is_cut(args, pipe, new) else "stop",
            "tokens": len(new),
            "seconds": round(pipe.report.seconds, 3),
        }
        if args.report:
            found["report"] = pipe.report.to_dict()
        print(json.dumps(entry | found, ensure_ascii=False), flush=True)


def _chain(args: argparse.Namespace, target: str | Path, drafts: list[str | Path], dtype: str, trace: int) -> Any:
    from pipespec.api.pipeline import Pipeline

    pipe = Pipeline(
        target,
        drafts,
        schedule=args.schedule,
        lookahead=one_or_all(args.lookahead),
        exact=args.exact,
        acceptance=args.acceptance,
        trace=trace,
        **loading_options(args, dtype),
    )
    for name in (name for name, draft in zip(pipe.config.names, pipe.config.drafts, strict=False) if draft.translates):
        say(f"{name} has another tokenizer than the target: its draft tokens are translated")
    return pipe


def sampling_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The options of sampling and stopping as arguments of ``generate()``."""
    warpers = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given = {name: value for name, value in warpers.items() if value is not None}
    if args.temperature == 0 and (len(given) > 1 or args.seed is not None):
        raise ValueError("--temperature 0 is greedy: --top-k, --top-p, --min-p and --seed would have no effect")
    # Many programs take temperature 0 for greedy decoding; transformers refuses it.
    sample = args.temperature != 0 and (bool(given) or args.seed is not None)
    options: dict[str, Any] = {"do_sample": sample}
    if sample:
        # transformers' default would be top_k=50.
        options |= {"top_k": 0, "seed": args.seed} | given
    penalties = {name: getattr(args, name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")}
    options |= {name: value for name, value in penalties.items() if value is not None}
    if getattr(args, "stop", None):
        options |= {"stop_strings": args.stop, "tokenizer": tokenizer}
    return options


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not tokenizer.chat_template:
        raise ValueError("--chat: the target's tokenizer has no chat template")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def bundled_drafts(schedule: str | None, acceptance: str) -> list[str]:
    """Drafts of the bundled family; with few cores, one draft, since a worker process needs a core of its own."""
    row = None if schedule is None else SCHEDULES[schedule]
    if row is not None and row.needs_ranks:  # as many as there are ranks
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return ["small", "medium"][max(0, 3 - world) :][: world - 1]
    names = ["small", "medium"] if row is LOCKSTEP or len(os.sched_getaffinity(0)) > 2 else ["medium"]
    if acceptance != "coupled":
        names = names[-1:]
    if row is not None and not row.has_drafts:
        names = []
    say(f"no --target: using the bundled demo family, target{''.join(f' + {name}' for name in names)}")
    return names
