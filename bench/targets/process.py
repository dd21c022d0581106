"""One target while it is measured: started if it is ours, ready, halted and continued, ended.

Owns the warden of a started server, the walk over all below it and the signals to them, and the port of a started
Baton. psutil reads the system, and signals nobody who has got another's id. Does not know what is measured. A target
that was given as a URL only has to answer: nothing of it is ours to start, halt or end. Ready is what answers a
request: a proxy listens long before its engines do, and a router before its nodes, so two tokens are asked for, and
whoever makes token 1 and whoever makes the later ones have to be there.
Invariants: when a `RunningTarget` is closed, nothing that it started is left; when `halt_tree` returns nothing of the
tree runs, not even a process that was forked meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

import psutil

from baton.bench.facts import ROOT
from baton.bench.targets.spec import Target
from baton.runtime.child import KILL_S, PIPE, Child
from baton.wire.errors import InvalidSetting, RequestFailed

_REQUEST = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
_MAX_SHOWN = 200
_WARDEN = "baton.bench.targets.warden_process"
_LOOPBACK = "127.0.0.1"
_BATON_IS_READY = "Baton ready at"
_LOOK_AGAIN_S = 0.25
_LOOK_S = 5.0
PATIENCE_S = 20.0
"""What a server gets to leave after SIGTERM."""
_HALT_S = 10.0
_CONTINUE_S = 60.0
_TAIL_LINES = 15
_MAX_OUTPUT_BYTES = 64 * 1024
_STEP_S = 0.01  # nobody is told that a process halted or went
_NUM_CLEAN_LOOKS = 2
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def why_not_ready(url: str, timeout_s: float) -> str:
    """One sentence, or "" when the server answers a request.

    One that refuses it as the client's mistake (a key is needed, only chat is served, there is no list of models) is
    ready too: what it makes of the benchmark's own requests is seen there.
    """
    try:
        status, answer = _ask(f"{url}/v1/models", min(timeout_s, _LOOK_S))
        if status in (401, 403, 404):
            return ""
        if status != 200:
            return f"{url}/v1/models answered {status}"
        model = json.loads(answer)["data"][0]["id"]
        status, answer = _ask(f"{url}/v1/completions", timeout_s, {"model": model, **_REQUEST})
        is_refused = 400 <= status < 500 and status not in (408, 425, 429)
        if status != 200 and not is_refused:
            return f"{url}/v1/completions answered {status}: {answer.decode(errors='replace')[:_MAX_SHOWN]}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {str(error) or type(error).__name__}"
    except (ValueError, LookupError, TypeError):
        return f"{url}/v1/models lists no model"
    return ""


def _ask(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """GET, or POST of `body`; no proxy is in between."""
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class RunningTarget:
    """Starts `target` if it has a command, and waits until it answers. Context manager.

    At its end it has `patience_s` to leave by itself. Raises `InvalidSetting` when it cannot be started and
    `RequestFailed` when it does not answer in `ready_timeout_s`.
    """

    def __init__(
        self, target: Target, ready_timeout_s: float, say: Callable[[str], None], patience_s: float = PATIENCE_S
    ) -> None:
        self.target = target
        self.url = target.url or f"http://{_LOOPBACK}:{_free_port()}"
        self._is_halted = False
        self._was_ready = False
        self._patience_s = patience_s
        self._warden: Child | None = None
        # without a name: nothing is left of it whatever happens
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        try:
            if target.is_started:
                _refuse_taken(target)
                say(f"starting {target.name}")
                self._warden = self._start()
            self._wait_until_ready(ready_timeout_s)
            self._was_ready = True
        except BaseException:  # also Ctrl-C: a server that nobody holds would stay until this process ends
            self.close()
            raise

    def __enter__(self) -> RunningTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pause(self) -> None:
        """Halt all its processes, where it was started here. Raises `RequestFailed`."""
        if self._warden is not None and not self._is_halted:
            self._is_halted = True
            halt_tree(self._warden.pid, _HALT_S)

    def resume(self) -> None:
        """Continue where it is halted, and wait until it answers, at once if all is well. Raises `RequestFailed`."""
        if self._warden is not None and self._is_halted:
            continue_tree(self._warden.pid)
            self._is_halted = False
        self._wait_until_ready(_CONTINUE_S)

    def close(self) -> None:
        """End it: SIGTERM, and SIGKILL when that takes too long."""
        if self._warden is not None:
            self._warden.stdin.close()
            self._warden.wait(self._patience_s + 2 * KILL_S)
            self._warden.end()
        self._output.close()

    def _start(self) -> Child:
        words = list(self.target.command)
        environment = dict(os.environ)
        if self.target.is_baton:
            words = [sys.executable, "-P", "-m", "baton", "serve", *words[2:]]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        if not self.target.url:
            words.append(f"--port={self.url.rpartition(':')[2]}")
        if shutil.which(words[0]) is None:
            raise InvalidSetting(f"target {self.target.name} cannot be started: {words[0]}: No such file")
        output = self._output.fileno()
        spec = (str(self._patience_s), *words)
        return Child(
            _WARDEN, *spec, environment=environment, stdin=PIPE, stdout=output, stderr=output, outlives_parent=True
        )

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while reason := self._why_not_ready(deadline_s - time.monotonic()):
            if self._has_ended():
                raise RequestFailed(f"target {self.target.name} has ended{self._last_words()}")
            if time.monotonic() >= deadline_s:
                raise RequestFailed(
                    f"target {self.target.name} did not answer within {timeout_s:g} s ({reason}){self._last_words()}"
                )

    def _why_not_ready(self, timeout_s: float) -> str:
        # a router answers as soon as it has a decode node: only its launcher knows how many nodes were to come
        if self.target.is_baton and not self._was_ready and _BATON_IS_READY not in self._last_output():
            return "its nodes were not all there"
        return why_not_ready(self.url, max(timeout_s, _LOOK_AGAIN_S))

    def _has_ended(self) -> bool:
        """Waits a little. A leader may leave its servers behind: then the target is there as long as they are."""
        if self._warden is None:
            time.sleep(_LOOK_AGAIN_S)
            return False
        return self._warden.wait(_LOOK_AGAIN_S) is not None

    def _last_words(self) -> str:
        """The end of its output, beginning with a new line."""
        lines = self._last_output().splitlines()[-_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in [": the last it said", *lines]) if lines else ""

    def _last_output(self) -> str:
        """Read beside the file's place, which the server writes at."""
        begin = max(0, os.fstat(self._output.fileno()).st_size - _MAX_OUTPUT_BYTES)
        return os.pread(self._output.fileno(), _MAX_OUTPUT_BYTES, begin).decode(errors="replace")


def _refuse_taken(target: Target) -> None:
    """Raise `InvalidSetting` when something listens where `target` is to: it would be measured in its place."""
    parts = urlsplit(target.url)
    if parts.hostname is None:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, port), _LOOK_S):
        raise InvalidSetting(f"target {target.name}: something else answers at {target.url} already")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        return int(found.getsockname()[1])


def descendants(root: int) -> list[psutil.Process]:
    """The living processes below `root`, parents first."""
    return [process for process in _walk(root) if _status(process) not in _GONE]


def halt_tree(root: int, timeout_s: float) -> None:
    """SIGSTOP to all below `root`, until none runs. Raises `RequestFailed`.

    A walk is not one moment: a process may fork after the folder was listed and halt before it is read. Its child is in
    the next listing, so the tree has to be found at rest twice in a row.
    """
    num_clean = 0

    def at_rest() -> bool:
        nonlocal num_clean
        running = [process for process in descendants(root) if _status(process) != psutil.STATUS_STOPPED]
        _signal(running, signal.SIGSTOP)
        num_clean = 0 if running else num_clean + 1
        return num_clean == _NUM_CLEAN_LOOKS

    if not until(at_rest, timeout_s):
        raise RequestFailed(f"the processes below {root} could not be halted within {timeout_s:g} s")


def continue_tree(root: int) -> None:
    """SIGCONT to all below `root`: what is halted cannot fork, so one walk finds them."""
    _signal(descendants(root), signal.SIGCONT)


def end_tree(root: int, leader: int, patience_s: float, kill_s: float) -> bool:
    """End all below `root`; whether SIGTERM was enough.

    `leader` is asked first and may end the others in its own order; what is left without it is asked next. When
    `patience_s` is over the rest is killed.
    """
    deadline_s = time.monotonic() + patience_s
    continue_tree(root)
    _signal([process for process in descendants(root) if process.pid == leader], signal.SIGTERM)
    until(lambda: all(process.pid != leader for process in descendants(root)), patience_s)
    _signal(descendants(root), signal.SIGTERM)
    if until(lambda: not descendants(root), deadline_s - time.monotonic()):
        return True
    until(lambda: not _signal(descendants(root), signal.SIGKILL), kill_s)
    return False


def until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again; False when the time is over. Looks once at least."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_STEP_S)
    return True


def _walk(root: int) -> list[psutil.Process]:
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _signal(processes: Collection[psutil.Process], number: signal.Signals) -> int:
    """The number of processes that there were to signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return len(processes)
