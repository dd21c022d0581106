"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from baton.engine.text.answers.formats import CALL_PARSERS, REASONING_PARSERS
from baton.router.routing.policies import POLICIES
from baton.runtime.process import LOG_FORMATS
from baton.runtime.ranges import (
    BYTES,
    BYTES_OR_NONE,
    COUNT,
    COUNT_OR_NONE,
    MILLISECONDS,
    PORT,
    POSITIVE,
    SECONDS,
    SECONDS_OR_NONE,
    Range,
)
from baton.runtime.settings import setting

_POLICY_NAMES = tuple(POLICIES)
_http = partial(setting, group="http")
_access = partial(setting, group="access")
_model = partial(setting, group="model")
_routing = partial(setting, group="routing")
_goals = partial(setting, group="goals")
_requests = partial(setting, group="requests")
_lifetime = partial(setting, group="lifetime")
_logging = partial(setting, group="logging")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The addresses at which clients and nodes reach the router, its policies and its limits."""

    model: str = setting("", "checkpoint folder or hub id; empty: the built-in demo model", positional=True)
    host: str = setting("127.0.0.1", "address of the HTTP endpoint")
    port: int = setting(8000, "port of the HTTP endpoint", allowed=PORT)
    control_host: str = setting("127.0.0.1", "address that nodes dial; beyond loopback a cluster key is needed")
    control_port: int = setting(8001, "port that nodes dial; 0: chosen by the system", allowed=PORT)
    listen_fds: tuple[int, ...] = _http(
        (),
        "inherited descriptors of listening sockets for the HTTP endpoint, in place of its address and port",
        allowed=Range(0, 2**20),
    )
    control_fd: int = _routing(
        -1, "inherited descriptor of a listening socket for nodes; -1: none", allowed=Range(-1, 2**20)
    )
    more_models: tuple[str, ...] = _model(
        (), "further models that clients may name; their nodes are started apart", metavar="NAME=CHECKPOINT"
    )
    served_model_name: str = setting("", "name of the model in requests; empty: the model as given")
    model_impl: str = _model(
        "auto",
        "code that computes the model; auto: Baton's own where it has the architecture, else transformers', slower",
        choices=("auto", "baton", "transformers"),
    )
    generation_config: str = _model(
        "auto",
        "whose sampling defaults count for requests without them: the checkpoint's generation_config.json, none, or "
        "that of another folder",
        metavar="{auto,none,FOLDER}",
    )
    prefill_policy: str = _routing(
        "prefix",
        "how the prefill node of a request is chosen; with prefix for both roles, prompts are pulled or stay as well",
        choices=_POLICY_NAMES,
    )
    decode_policy: str = _routing("prefix", "how the decode node of a request is chosen", choices=_POLICY_NAMES)
    local_prefill_tokens: int = _routing(
        16, "prompts of which a decode node lacks at most this many tokens stay there", allowed=COUNT_OR_NONE
    )
    goal_ttft_ms: float = _goals(
        0.0,
        "milliseconds to the first token: what computes a prompt, and how much of it a step takes; 0: no goal",
        allowed=MILLISECONDS,
    )
    goal_tpot_ms: float = _goals(
        0.0,
        "milliseconds between two tokens: chunks of prompts beside running requests keep to it; 0: no goal",
        allowed=MILLISECONDS,
    )
    min_goal_ttft_ms: float = _goals(
        0.0,
        "the tightest --goal-ttft-ms that a request may ask for itself; 0: none below the router's",
        allowed=MILLISECONDS,
    )
    min_goal_tpot_ms: float = _goals(
        0.0,
        "the tightest --goal-tpot-ms that a request may ask for itself; 0: none below the router's",
        allowed=MILLISECONDS,
    )
    adapt: bool = _goals(True, "with goals, mixed nodes are given other legs as the goals are met")
    refuse_late: bool = _goals(False, "with goals, answer 503 at once to requests that are expected to miss them")
    max_concurrent_requests: int = _requests(1024, "requests in flight; more wait for their turn", allowed=COUNT)
    max_queued_requests: int = _requests(
        1024, "requests that wait for their turn when there is no room; 0: none", allowed=COUNT_OR_NONE
    )
    max_queued_tokens: int = _requests(
        2**22, "tokens, prompt and max_tokens, of all requests that wait for their turn", allowed=COUNT_OR_NONE
    )
    max_queue_s: float = _requests(
        600.0, "seconds that a request may wait for its turn; more are answered with 503", allowed=SECONDS_OR_NONE
    )
    max_attempts: int = _routing(
        3, "for how many failures a request is given up; nodes that come back are none", allowed=COUNT
    )
    node_wait_s: float | None = _routing(
        None,
        "seconds that a request waits for a node when there is none; 0: it does not; none: 4 times what the start of a "
        "node took, from 10 to 60",
        allowed=SECONDS_OR_NONE,
    )
    request_timeout_s: float = _requests(600.0, "seconds a request may take in all", allowed=SECONDS)
    resumable_streams_s: float = _requests(
        0.0,
        "seconds for which a stream that broke off or ended can be resumed with Last-Event-ID; 0: not at all",
        allowed=SECONDS_OR_NONE,
    )
    journal_dir: str = _requests(
        "", "folder in which resumable streams are written down, prompts included; empty: they end with the router"
    )
    responses_store: str = _requests(
        "", "folder in which responses are stored, conversations included; empty: in memory, until the router ends"
    )
    responses_store_bytes: int = _requests(
        64 * 2**20,
        "size of all stored responses of /v1/responses; 0: none are stored, and none can be continued by their id",
        allowed=BYTES_OR_NONE,
    )
    responses_store_days: float = _requests(
        30.0, "days for which a conversation is stored after its last response", allowed=POSITIVE
    )
    max_body_bytes: int = _http(8 * 2**20, "largest request body", allowed=BYTES)
    limit_mm_per_prompt: str = _model(
        "image=4", "images that a request may have, where the model sees; image=0: none, and no tower is loaded"
    )
    strict: bool = _model(False, "refuse request fields that change nothing; default: ignore them with a warning")
    trust_request_chat_template: bool = _model(False, "render chat templates that come with requests")
    tool_call_parser: str = _model("auto", "format of tool calls; auto: by the chat template", choices=CALL_PARSERS)
    reasoning_parser: str = _model("auto", "format of reasoning; auto: by the template", choices=REASONING_PARSERS)
    max_connections: int = _http(8192, "open HTTP connections in all; more are closed at once", allowed=COUNT)
    max_connections_per_address: int = _http(
        1024, "open HTTP connections of one address; more are answered with 429", allowed=COUNT
    )
    cluster_key: str = _access("", "file with the deployment's or this role's key, read again on SIGHUP (`baton key`)")
    api_key_file: str = setting("", "file with the clients' API keys, read again on SIGHUP (`baton keys new NAME`)")
    allow_unauthenticated: bool = _access(False, "without API keys, listen beyond loopback and serve anyone")
    ssl_certfile: str = _access("", "PEM file with a certificate: serve HTTPS; read again on SIGHUP")
    ssl_keyfile: str = _access("", "PEM file with its private key; empty: it is in the same file")
    audit_log: str = _access("", "file to which a JSON line is written for each request; opened again on SIGHUP")
    shutdown_timeout_s: float = _lifetime(
        30.0, "seconds that running requests get to finish after SIGTERM", allowed=SECONDS_OR_NONE
    )
    allowed_origins: tuple[str, ...] = _http((), "origins whose scripts may use the router in a browser; *: all")
    allowed_methods: tuple[str, ...] = _http(("*",), "methods that such scripts may use")
    allowed_headers: tuple[str, ...] = _http(("*",), "headers that such scripts may send")
    allow_credentials: bool = _http(False, "let such scripts send cookies and client certificates")
    metrics_aliases: str = _logging(
        "none", "also show metrics under the names of this server", choices=("none", "vllm")
    )
    otlp_traces_endpoint: str = _logging("", "URL that takes OpenTelemetry traces as OTLP over HTTP; empty: no traces")
    log_level: str = _logging("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _logging("text", "lines for people, or one JSON object per line", choices=LOG_FORMATS)
    enable_log_requests: bool = _logging(False, "log one line per request when it ends, without its text")
    no_page: bool = _http(False, "serve no page at /")
    root_path: str = _http(
        "", "path under which a proxy has this server, as /baton: the proxy takes it off, /openapi.json names it"
    )
    enable_debug_endpoints: bool = _logging(False, "serve /debug/requests: ids, nodes and times of recent requests")

    def beside_others(self) -> RouterSettings:
        """Of one of several routers behind one address: what each stores in its memory, the others would not find."""
        return self if self.responses_store else replace(self, responses_store_bytes=0)

    @property
    def reloads_files(self) -> bool:
        """Whether there is a file of its own that SIGHUP makes the router read or open again."""
        return any((self.api_key_file, self.ssl_certfile, self.audit_log))
