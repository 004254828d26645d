"""Replicas of a server behind one address, with Ray Serve. ``python examples/ray_serve.py TARGET [DRAFT] [--replicas 2] [--port 8000]``

Each replica is a process with a pipeline of its own. A conversation goes to the replica that has read its beginning.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipespec import Pipeline, load_tokenizer
from pipespec.api.server import make_app
from pipespec.demo import family_path

PARALLEL = 4
"""Requests that a replica runs at the same time. Further ones go to another replica, or wait."""

TOKENS = 64
"""Conversations that begin with the same tokens go to the same replica. A shorter one may change it: it is soon read again."""

BEGINNING = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Fields that make the beginning of a prompt, in all APIs."""

RETRY = "the replica that computed this answer has ended: send the request again"


class ByFirstTokens(RequestRouter):
    """Prefers the replica whose hash with the first tokens is highest. Where one ends, the conversations of the others stay where they are."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        if pending_request is None:
            return [candidate_replicas]
        key = pending_request.args[0]

        def weight(replica):
            return hashlib.sha256(key + replica.replica_id.unique_id.encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=weight, reverse=True)]


@serve.deployment(
    max_ongoing_requests=PARALLEL, request_router_config=RequestRouterConfig(request_router_class=ByFirstTokens)
)
class Replica:
    """A pipeline and its server, without a port."""

    def __init__(self, target, drafts):
        pipe = Pipeline(target, drafts)
        self.app = make_app(pipe, load_tokenizer(target), Path(target).stem, parallel=PARALLEL)
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    async def answer(self, key, scope, body):
        """The messages of ASGI that answer a request."""
        sent, gone = asyncio.Queue(), asyncio.Event()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            if (request := next(requests, None)) is None:
                await gone.wait()
            return request or {"type": "http.disconnect"}

        run = asyncio.create_task(self.app(scope, receive, sent.put))
        run.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", self.name.encode())]
                yield message
        finally:
            gone.set()


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Gateway:
    """Takes requests, and passes them on to the replicas."""

    def __init__(self, replicas, target):
        self.replicas = replicas.options(stream=True)
        self.tokenizer = load_tokenizer(target)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        scope = {name: request.scope[name] for name in ("type", "method", "path", "query_string", "headers")}
        key = await asyncio.to_thread(self.key, body)
        return Passed(self.replicas.answer.remote(key, scope, body))

    def key(self, body):
        """The first tokens of a request, as bytes."""
        try:
            fields = json.loads(body)
            beginning = json.dumps([fields.get(name) for name in BEGINNING])
        except (ValueError, AttributeError, RecursionError):
            return b""  # any replica says what is wrong
        return str(self.tokenizer(beginning[: 64 * TOKENS]).input_ids[:TOKENS]).encode()


class Passed(Response):
    """The answer of a replica."""

    def __init__(self, messages):
        super().__init__()
        self.messages = messages

    async def __call__(self, scope, receive, send):
        has_begun = False
        try:
            async for message in self.messages:
                await send(message)
                has_begun = True
        except ray.exceptions.RayActorError:
            error = {"error": {"message": RETRY, "type": "server_error", "param": None, "code": "replica_ended"}}
            if has_begun:  # a stream
                await send({"type": "http.response.body", "body": f"data: {json.dumps(error)}\n\n".encode()})
            else:
                await JSONResponse(error, 503, {"Retry-After": "1"})(scope, receive, send)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default=str(family_path("target")))
    parser.add_argument("draft", nargs="*", default=[])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    replicas = Replica.options(num_replicas=args.replicas).bind(args.target, args.draft)
    serve.run(Gateway.bind(replicas, args.target))
    print(f"serving on http://127.0.0.1:{args.port}/v1", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
