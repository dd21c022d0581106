"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass

from program.settings import setting
from router.policies import POLICIES

_POLICY_NAMES = tuple(POLICIES)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The addresses at which clients and nodes reach the router, its policies and its limits."""

    model: str = setting("", "checkpoint folder or hub id, for its tokenizer; empty: the demo model", positional=True)
    host: str = setting("127.0.0.1", "address of the HTTP endpoint")
    port: int = setting(8000, "port of the HTTP endpoint")
    control_host: str = setting("127.0.0.1", "address that nodes dial; beyond loopback a cluster key is needed")
    control_port: int = setting(8001, "port that nodes dial; 0: chosen by the system")
    served_model_name: str = setting("", "name of the model in requests; empty: the model as given")
    prefill_policy: str = setting("prefix", "how the prefill node of a request is chosen", choices=_POLICY_NAMES)
    decode_policy: str = setting("prefix", "how the decode node of a request is chosen", choices=_POLICY_NAMES)
    local_prefill_tokens: int = setting(16, "prompts of which a decode node lacks at most this many tokens stay there")
    max_concurrent_requests: int = setting(1024, "requests in flight; more wait for their turn")
    max_queued_requests: int = setting(1024, "requests that wait for their turn when there is no room; 0: none")
    max_queued_tokens: int = setting(2**22, "tokens, prompt and max_tokens, of all requests that wait for their turn")
    max_queue_s: float = setting(600.0, "seconds that a request may wait for its turn; more are answered with 503")
    max_attempts: int = setting(3, "how often a request is tried when nodes fail")
    node_wait_s: float = setting(10.0, "seconds that a request waits for a node when there is none; 0: none")
    request_timeout_s: float = setting(600.0, "seconds a request may take in all")
    max_body_bytes: int = setting(8 * 2**20, "largest request body")
    cluster_key: str = setting("", "file with the key that all programs of a deployment share (`baton key FILE`)")
    api_key_file: str = setting("", "file with the clients' API keys, read again on SIGHUP (`baton keys new NAME`)")
    allow_unauthenticated: bool = setting(False, "without API keys, listen beyond loopback and serve anyone")
    ssl_certfile: str = setting("", "PEM file with a certificate: serve HTTPS; read again on SIGHUP")
    ssl_keyfile: str = setting("", "PEM file with its private key; empty: it is in the same file")
    audit_log: str = setting("", "file to which a JSON line is written for each request; opened again on SIGHUP")
    shutdown_timeout_s: float = setting(30.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
