"""Defines the settings of the engine and the server as frozen dataclasses. Reads no environment."""

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

from jaxembed.data.spec import DType
from jaxembed.memory import MIB


@dataclass(frozen=True)
class EngineConfig:
    """How the engine computes, and how much work it may hold."""

    dtype: DType | None = None  # None: bfloat16 if the device multiplies it natively
    devices: int | None = None  # number of local devices to use; None: all
    parallel: Literal["replicas", "sharded"] = "replicas"
    warmup: Literal["minimal", "full"] | None = None  # None: full on a GPU, minimal elsewhere
    kernels: str = "auto"  # "auto": the fastest correct ones; "xla", "native" or a models.kernels
    max_batch_tokens: int | None = None  # rows * length, padding included; None: by device
    max_batch_requests: int | None = None  # sequences in one batch; None: no limit
    buckets: Path | None = None  # JSON file with the grid; None: the default grid
    max_input_tokens: int | None = None  # None: the checkpoint's limit
    max_concurrent_requests: int = 8192  # inputs that are admitted and not yet answered
    max_queue_tokens: int | None = None  # None: 64 full batches for each device and model
    max_queue_bytes: int = 1024 * MIB  # memory that requests hold until they are answered
    cache_bytes: int = 0  # answers of interactive work that each model keeps; 0: none
    null_model: bool = False  # answer with constants without a device, to measure the host


@dataclass(frozen=True)
class TextConfig:
    """How texts are tokenized if the request does not say."""

    truncate: bool = True
    default_prompt: str | None = None  # the text of a prompt
    default_prompt_name: str | None = None  # the name of a prompt of the checkpoint
    workers: int | None = None  # tokenizer threads; None: by number of cores


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()  # empty: any if there are API keys, else none
    max_client_batch_size: int = 2048  # inputs of a request; 0: unlimited
    payload_limit: int = 32 * MIB  # bytes of a request body
    media_hosts: tuple[str, ...] = ()  # whose URLs of images are fetched; empty: none
    media_networks: tuple[IPv4Network | IPv6Network, ...] = ()  # private ones they may be in
    accept_bare_token_ids: bool = False  # OpenAI's routes take token ids without special tokens
    drain_timeout_s: float = 20.0  # time to answer admitted requests at shutdown
    prometheus_port: int | None = None  # for /metrics; None: the server's own port
    playground: bool | None = None  # the page at /playground; None: if only this machine reaches it
    admin_key: str | None = None  # opens the routes that load models, on the server's own port
    admin_port: int | None = None  # for these routes, on this machine's own address
    notify_socket: str | None = None  # of a supervisor, which is told when the server is ready
    watchdog_s: float | None = None  # the supervisor ends the server after such a silence


@dataclass(frozen=True)
class PoolLimits:
    """How much memory the models of a server may take, and how long."""

    bytes: int | None = None  # of one device, or on a CPU of the host; None: no limit
    load_timeout_s: float = 30.0  # that a request waits for its model
    keep_alive_s: float | None = None  # None: a model stays until room is needed
