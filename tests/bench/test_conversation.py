"""bench.conversation: what it sends and measures, against a server in this process."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from bench.conversation import TURNS, conversations, measure, table

WORDS = [f"w{i}" for i in range(2000)]


@pytest.fixture
def server():
    """It answers with the number of messages, and counts those that it has heard before as cached."""

    class Handler(BaseHTTPRequestHandler):
        heard: ClassVar[list] = []

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.heard.append(body["messages"])
            known = [said["content"] for messages in self.heard[:-1] for said in messages]
            cached = sum(said["content"] in known for said in body["messages"])
            events = [{"choices": [{"delta": {"role": "assistant"}}]}]
            events += [{"choices": [{"delta": {"content": part}}]} for part in ("a", str(len(body["messages"])))]
            usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached}}
            events.append({"choices": [], "usage": usage})
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args):
            pass

    Handler.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}", Handler.heard
        made.shutdown()


def test_a_chat_says_again_what_was_said(server):
    url, heard = server
    rows = measure({"one": (url, "m")}, "chat", WORDS, 4)
    assert [len(messages) for messages in heard] == [2 + 2 * turn for turn in range(TURNS)]
    assert heard[1][:2] == heard[0]
    assert heard[1][2] == {"role": "assistant", "content": "a2"}
    assert [row["cached"] for row in rows] == [0] + [2 * turn for turn in range(1, TURNS)]
    assert all(0 < row["first"] <= row["total"] for row in rows)
    assert len(table(rows).splitlines()) == 3


def test_agents_begin_alike_and_conversations_alternate(server):
    url, heard = server
    measure({"one": (url, "m")}, "agents", WORDS, 4)
    assert {len(messages) for messages in heard} == {2}
    assert len({messages[0]["content"] for messages in heard}) == 1
    assert len({messages[1]["content"] for messages in heard}) == TURNS
    both = list(conversations("alternating", WORDS))
    assert [number for number, *_ in both] == [0, 1] * TURNS
    assert len({system for _, _, system, _ in both}) == 2
