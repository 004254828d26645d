"""``pipespec serve``: transformers' server, with a pipeline's generate()."""

from __future__ import annotations

import argparse
import socket
from importlib.util import find_spec
from typing import Any

from pipespec.cli.generate import bundled_drafts
from pipespec.cli.options import Subparsers, add_models, chosen_models, flag, loading_options, number, option, positive
from pipespec.process.progress import quiet_transformers, say, working

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")


# fmt: off
def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("serve", help="serve a model with OpenAI's API", description=run.__doc__)
    parser.set_defaults(command=run)
    add_models(parser)
    option(parser, "host", "ADDRESS", str, "default: %(default)s, this machine only; there are no passwords", default="127.0.0.1")
    option(parser, "port", "N", number(int, 0, 65535), "default: %(default)s; 0: a free one", default=8000)
    option(parser, "queue", "N", positive, "requests that may wait; further ones get status 429 (default: %(default)s)", default=16)
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


def run(args: argparse.Namespace) -> int:
    """Serve a model under /v1/chat/completions and /v1/completions, with /metrics under vLLM's names. Requests run one after the other; the text is the target's own."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"pipespec serve needs {', '.join(missing)}: pip install 'pipespec[serve]'")
    target, drafts, dtype = chosen_models(args, lambda: bundled_drafts(None, "coupled"))
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.create_server((args.host, args.port), family=family) as listener, quiet_transformers():
        with working("importing torch and transformers"):
            import uvicorn

            from pipespec.api.pipeline import Pipeline
            from pipespec.models.tokenizers import load_tokenizer

            try:
                from pipespec.api.server import make_app
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"pipespec serve needs the server of a newer transformers ({error}): pip install -U transformers"
                ) from error

        with working("loading the models"):
            pipe = Pipeline(target, drafts, prefix_cache=args.prefix_cache, **loading_options(args, dtype))
        with pipe:
            tokenizer = load_tokenizer(args.tokenizer or target, trust_remote_code=args.trust_remote_code)
            _pack(pipe)
            app = make_app(pipe, tokenizer, str(target), queue=args.queue, cors=args.cors)
            host, port = listener.getsockname()[:2]
            say(f"serving {target} on http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
            uvicorn.Server(settings).run(sockets=[listener])
    return 0
