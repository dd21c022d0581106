"""A small OpenAI-like server with workers, for tests: `stub_server.py PORT [BEHAVIOUR ...]`.

`detached`: its workers lead sessions of their own. `stubborn`: it ignores SIGTERM. `mute`: it never answers. `leaves`:
it starts its workers, the server among them, and goes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_NUM_WORKERS = 2


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def answer(self, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        return


def work(behaviours: tuple[str, ...]) -> None:
    """What a worker does: it computes, so that its CPU time grows."""
    if "detached" in behaviours:
        os.setsid()
    while True:
        time.sleep(0.001)


def main() -> None:
    port, behaviours = int(sys.argv[1]), tuple(sys.argv[2:])
    if "stubborn" in behaviours:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(_NUM_WORKERS):
        if os.fork() == 0:
            work(behaviours)
    if "leaves" in behaviours:
        leader = os.getpid()
        if os.fork():
            return
        while os.getppid() == leader:  # it answers when its leader has gone: nobody counts one that is just leaving
            time.sleep(0.001)
    if "mute" in behaviours:
        work(behaviours)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
