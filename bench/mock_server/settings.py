"""Settings of `python -m bench.mock_server`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.mock_server.schedule import Fault, FaultKind, Steady
from bench.mock_server.server import MockOptions
from program.settings import setting
from wire.errors import InvalidSetting

NO_FAULT = "none"


@dataclass(frozen=True, slots=True)
class MockServerSettings:
    """Settings of the mock server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8100, "port to listen on; 0: any")
    model: str = setting("mock", "name of the model that it lists")
    owned_by: str = setting("mock", "who owns the model; baton: clients may ask for Baton's timings, which are made up")
    ttft_ms: float = setting(50.0, "from a request to the first chunk of its answer")
    itl_ms: float = setting(10.0, "from token to token after that")
    jitter: float = setting(0.0, "draw each time within this share around its value")
    tokens_per_chunk: int = setting(1, "tokens that come in one event")
    text: str = setting(" word", "text of each token")
    fault: str = setting(NO_FAULT, "what befalls some of the requests", choices=(NO_FAULT, *FaultKind))
    fault_share: float = setting(1.0, "share of the requests that it befalls")
    fault_after_chunks: int = setting(0, "chunks that come before it, where it breaks a stream")
    fault_status: int = setting(503, "status of an HTTP error")
    seed: int = setting(0, "of all that is drawn")


def schedule_of(settings: MockServerSettings) -> Steady:
    """Raises `InvalidSetting`."""
    for name in ("ttft_ms", "itl_ms", "fault_after_chunks"):
        if getattr(settings, name) < 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} {getattr(settings, name)} is below 0")
    for name in ("jitter", "fault_share"):
        if not 0 <= getattr(settings, name) <= 1:
            raise InvalidSetting(f"--{name.replace('_', '-')} {getattr(settings, name)} is no share from 0 to 1")
    if settings.tokens_per_chunk < 1:
        raise InvalidSetting(f"--tokens-per-chunk {settings.tokens_per_chunk} is not at least 1")
    if not 400 <= settings.fault_status <= 599:
        raise InvalidSetting(f"--fault-status {settings.fault_status} is no status of an error")
    fault = None
    if settings.fault != NO_FAULT:
        fault = Fault(FaultKind(settings.fault), settings.fault_after_chunks, settings.fault_status)
    return Steady(
        ttft_s=settings.ttft_ms / 1e3,
        itl_s=settings.itl_ms / 1e3,
        jitter=settings.jitter,
        tokens_per_chunk=settings.tokens_per_chunk,
        text=settings.text,
        fault=fault,
        fault_share=settings.fault_share,
        seed=settings.seed,
    )


def options_of(settings: MockServerSettings) -> MockOptions:
    """Nobody reads the records of a server on the command line, so it keeps none."""
    return MockOptions(settings.host, settings.port, settings.model, settings.owned_by, max_records=0)
