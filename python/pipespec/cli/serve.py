"""``pipespec serve``: OpenAI's and Anthropic's APIs over a pipeline."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipespec.cli.generate import bundled_drafts
from pipespec.cli.options import Subparsers, add_models, chosen_models, flag, loading_options, number, option, positive
from pipespec.process.progress import quiet_transformers, say, working

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_KEY = "PIPESPEC_API_KEY"

_GRACE_S = 5
"""Seconds in which requests end at the end of the server. They do so with their next step."""


# fmt: off
def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("serve", help="serve a model with OpenAI's and Anthropic's APIs", description=run.__doc__)
    parser.set_defaults(command=run)
    add_models(parser)
    option(parser, "host", "ADDRESS", str, "default: %(default)s, this machine only; others need --api-key", default="127.0.0.1")
    option(parser, "port", "N", number(int, 0, 65535), "default: %(default)s; 0: a free one", default=8000)
    option(parser, "served-model-name", "NAME", str, "the model's name in requests; several: answers have the first one (default: that of its file or folder)",
           nargs="+")
    option(parser, "api-key", "KEY", str, f"requests must have it; may be repeated (default: the environment variable {_KEY})", action="append")
    flag(parser, "no-api-key", "serve other machines without a key")
    option(parser, "parallel", "N", positive, "requests that run at the same time, as far as the drafts allow (default: %(default)s)", default=4)
    option(parser, "queue", "N", positive, "requests that may wait; further ones get status 429 (default: %(default)s)", default=64)
    option(parser, "prefix-cache", "BYTES", number(int, 0), "of keys and values of earlier texts that each model keeps, so that a conversation is not read again; "
           "0: none; default: an eighth of the free memory")
    flag(parser, "cors", "let web pages of other origins use the server")
    return [parser]
# fmt: on


def _pack(pipe: Any) -> None:
    """Read and pack the weights in a call of our own: the first client should not wait for it."""
    import torch

    ids = torch.ones((1, 2), dtype=torch.long, device=pipe.target.device)
    try:
        pipe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    except Exception as error:
        say(f"warning: a call before the first request failed ({type(error).__name__}: {error})")


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The API keys. Raises ``ValueError`` where other machines would need none."""
    keys = tuple(args.api_key or filter(None, [os.environ.get(_KEY)]))
    if not all(keys):
        raise ValueError("--api-key is empty")
    if keys or args.no_api_key or _is_loopback(args.host):
        return keys
    raise ValueError(
        f"--host {args.host} lets other machines in: give them a key with --api-key KEY, or say --no-api-key if anybody may use the server"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _slots(pipe: Any, wanted: int) -> int:
    """Requests that run at the same time."""
    most = min(wanted, pipe.most_slots)
    if most < wanted:
        say(
            f"up to {most} requests run at the same time, not {wanted}: that is what these models and drafts have room for"
        )
    return most


def _serve(app: Any, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests then end with an error."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.service.close()
            super().handle_exit(sig, frame)

    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S)
    # uvicorn raises the signal again once it has ended. It has been handled then.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Server(settings).run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> int:
    """Serve a model under /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, with /metrics under vLLM's names. Requests run side by side and take turns; each text is the target's own."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"pipespec serve needs {', '.join(missing)}: pip install 'pipespec[serve]'")
    keys = _keys(args)
    target, drafts, dtype = chosen_models(args, lambda: bundled_drafts(None, "coupled"))
    names = tuple(args.served_model_name or [Path(target).stem if str(target).endswith(".gguf") else Path(target).name])
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.create_server((args.host, args.port), family=family) as listener, quiet_transformers():
        with working("importing torch and transformers"):
            from pipespec.api.pipeline import Pipeline
            from pipespec.api.server import make_app
            from pipespec.models.tokenizers import load_tokenizer

        with working("loading the models"):
            pipe = Pipeline(target, drafts, prefix_cache=args.prefix_cache, **loading_options(args, dtype))
        with pipe:
            tokenizer = load_tokenizer(args.tokenizer or target, trust_remote_code=args.trust_remote_code)
            _pack(pipe)
            parallel = _slots(pipe, args.parallel)
            app = make_app(pipe, tokenizer, names, parallel=parallel, queue=args.queue, cors=args.cors, keys=keys)
            host, port = listener.getsockname()[:2]
            say(f"serving {names[0]} on http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            _serve(app, listener)
    return 0
