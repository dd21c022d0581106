"""The programs that the checks of the page run against, each ended by its process id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

_PATIENCE_S = 60.0


@contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A program; the first lines of its output can be read."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def is_ready(url: str) -> bool:
    """Whether the router would take a request."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def child_of(supervisor: psutil.Process, module: str) -> psutil.Process:
    """The process of the deployment that runs this program."""
    return next(child for child in supervisor.children(recursive=True) if module in child.cmdline())


@contextmanager
def busy(url: str, model: str, key: str) -> Iterator[None]:
    """A few other clients, one answer after the other: the demo model answers a question faster than an eye can see."""
    is_over = threading.Event()

    def post(data: bytes) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            answer.read()

    def ask(number: int) -> None:
        while not is_over.is_set():
            prompt = f"{number} {time.monotonic()} " + "The river goes to the sea. " * (20 + 40 * number)
            body = {"model": model, "prompt": prompt, "max_tokens": 40 + 30 * number, "ignore_eos": True}
            post(json.dumps(body).encode())

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


@contextmanager
def slowed(process: psutil.Process, stopped_s: float = 0.05) -> Iterator[None]:
    """Let a process run for a small part of the time, as if its model were large."""
    is_over = threading.Event()

    def pace() -> None:
        while not is_over.wait(0.004):
            process.suspend()
            is_over.wait(stopped_s)
            process.resume()

    pacer = threading.Thread(target=pace)
    pacer.start()
    try:
        yield
    finally:
        is_over.set()
        pacer.join()
