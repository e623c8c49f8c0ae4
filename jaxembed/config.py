"""Defines the settings of the engine and the server as frozen dataclasses."""

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
    kernels: str = "auto"  # the fastest correct ones; "xla", "native" or a name of models.kernels
    max_batch_tokens: int | None = None  # rows * length, padding included; None: by device
    max_batch_requests: int | None = None  # sequences in one batch; None: no limit
    buckets: Path | None = None  # JSON file with the grid of buckets; None: the default grid
    max_input_tokens: int | None = None  # None: the checkpoint's limit
    max_concurrent_requests: int = 8192  # inputs that are admitted and not yet answered
    max_queue_tokens: int | None = None  # None: 64 full batches for each device and model
    max_queue_bytes: int = 1024 * MIB  # memory that requests hold until they are answered
    cache_bytes: int = 0  # of answers to interactive requests that each model keeps; 0: none
    null_model: bool = False  # answer with constants without a device, to measure the host


@dataclass(frozen=True)
class TextConfig:
    """How texts are tokenized, unless the request says otherwise."""

    truncate: bool = True
    default_prompt: str | None = None  # the text of a prompt
    default_prompt_name: str | None = None  # the name of a prompt of the checkpoint
    workers: int | None = None  # tokenizer threads; None: by the number of cores


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()  # empty: any if there are API keys, else none
    max_client_batch_size: int = 2048  # inputs of a request; 0: unlimited
    payload_limit: int = 32 * MIB  # bytes of a request body
    media_hosts: tuple[str, ...] = ()  # hosts that images are fetched from; empty: none
    media_networks: tuple[IPv4Network | IPv6Network, ...] = ()  # private networks of these hosts
    accept_bare_token_ids: bool = False  # take token ids without the tokenizer's special tokens
    drain_timeout_s: float = 20.0  # time to answer admitted requests at shutdown
    prometheus_port: int | None = None  # for /metrics; None: the server's own port
    playground: bool | None = None  # the page at /playground; None: if only this machine reaches it
    admin_key: str | None = None  # API key for the routes that load models, on the server's port
    admin_port: int | None = None  # port for these routes on the loopback address, without a key
    notify_socket: str | None = None  # where the server tells a supervisor that it is ready
    watchdog_s: float | None = None  # after this silence the supervisor ends the server


@dataclass(frozen=True)
class PoolLimits:
    """How much memory the loaded models of a server may take, and for how long."""

    bytes: int | None = None  # of memory of one device, or of the host on a CPU; None: no limit
    load_timeout_s: float = 30.0  # how long a request waits until its model is loaded
    keep_alive_s: float | None = None  # evict a model unused this long; None: if memory is needed
