"""Defines the settings of the engine and the server as frozen dataclasses."""

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

from jaxembed.data.spec import DType, Quantize
from jaxembed.memory import MIB


@dataclass(frozen=True)
class EngineConfig:
    """How the engine computes, and how much work it may hold."""

    dtype: DType | None = None  # None: bfloat16 if the device multiplies it fast, else float32
    quantize: Quantize | None = None  # what is computed in int8; None: nothing
    quantize_anyway: bool = False  # even if the vectors change more than they may
    devices: int | None = None  # number of local devices to use; None: all
    parallel: Literal["replicas", "sharded"] = "replicas"
    tensor_parallel: int = 1  # number of devices that hold each replica of a model together
    warmup: Literal["minimal", "full"] | None = None  # None: full on a GPU, minimal elsewhere
    kernels: str = "auto"  # auto: the fastest correct ones; "xla", "native" or a GPU or TPU kernel
    max_batch_tokens: int | None = None  # tokens in a batch with padding; None: chosen by device
    max_batch_requests: int | None = None  # sequences in one batch; None: no limit
    buckets: Path | None = None  # JSON file with the grid of buckets; None: the default grid
    max_input_tokens: int | None = None  # limit of one input; None: the checkpoint's limit
    max_concurrent_requests: int = 8192  # inputs that are admitted and not yet answered
    max_queue_tokens: int | None = None  # None: 64 full batches for each device and model
    max_queue_bytes: int = 1024 * MIB  # memory that requests hold until they are answered
    cache_bytes: int = 0  # in which a model keeps answers to interactive requests; 0: no cache
    null_model: bool = False  # answer with constants without a device, to measure the host


@dataclass(frozen=True)
class TextConfig:
    """How texts are tokenized if a request does not say otherwise."""

    truncate: bool = True
    default_prompt: str | None = None  # text to put in front of every input
    default_prompt_name: str | None = None  # name of the checkpoint's prompt to put there
    max_instruction_tokens: int | None = None  # of an instruction or prompt; None: no limit
    workers: int | None = None  # tokenizer threads; None: by the number of cores


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()  # empty: any origin if requests need a key, else none
    max_client_batch_size: int = 2048  # inputs of a request; 0: unlimited
    payload_limit: int = 32 * MIB  # bytes of a request body
    media_hosts: tuple[str, ...] = ()  # hosts that images are fetched from; empty: none
    media_networks: tuple[IPv4Network | IPv6Network, ...] = ()  # private ones of `media_hosts`
    accept_bare_token_ids: bool = False  # take token ids without the tokenizer's special tokens
    drain_timeout_s: float = 20.0  # time to answer admitted requests at shutdown
    prometheus_port: int | None = None  # for /metrics; None: the server's own port
    playground: bool | None = None  # the page at /playground; None: if only this machine reaches it
    admin_key: str | None = None  # key for the admin routes, which load models
    admin_port: int | None = None  # loopback port of the admin routes; open if `admin_key` is None
    front_ends: int = 0  # processes that read HTTP; 0: the engine's process does
    notify_socket: str | None = None  # socket on which the server tells a supervisor its state
    watchdog_s: float | None = None  # silence after which the supervisor ends the server


@dataclass(frozen=True)
class PoolLimits:
    """How much memory the loaded models of a server may take, and for how long."""

    bytes: int | None = None  # for models in memory of each device (CPU: host); None: no limit
    load_timeout_s: float = 30.0  # how long a request waits for its model to be loaded
    keep_alive_s: float | None = None  # how long an unused model stays; None: until room is needed
