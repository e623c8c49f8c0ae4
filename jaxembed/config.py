"""Settings of the engine and the server: frozen, one field one meaning. Reads no environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxembed.memory import MIB
from jaxembed.spec import DType


@dataclass(frozen=True)
class EngineConfig:
    """How the engine computes and what it may hold."""

    dtype: DType | None = None  # None: bfloat16 where the device multiplies it natively
    devices: int | None = None  # use this many of the local devices; None: all
    parallel: Literal["replicas", "sharded"] = "replicas"
    warmup: Literal["minimal", "full"] | None = None  # None: full on a GPU, minimal elsewhere
    kernels: str = "auto"  # the fastest that are right, "xla", "native", or one of models.kernels
    max_batch_tokens: int | None = None  # rows * length, padding counted; None: by device
    max_batch_requests: int | None = None  # sequences in one batch
    buckets: Path | None = None  # JSON file with the grid; None: the default grid
    max_input_tokens: int | None = None  # None: what the checkpoint says
    max_concurrent_requests: int = 8192  # inputs admitted and not yet answered
    max_queue_tokens: int | None = None  # None: 64 batches' worth for each device and model
    max_queue_bytes: int = 1024 * MIB  # of memory, held by requests until they are answered
    null_model: bool = False  # answer with constants, run no device: measures the host


@dataclass(frozen=True)
class TextConfig:
    """How text becomes tokens when the request does not say."""

    truncate: bool = True
    default_prompt: str | None = None  # literal text
    default_prompt_name: str | None = None  # a name in the checkpoint's prompts
    workers: int | None = None  # tokenizer threads; None: by cores


@dataclass(frozen=True)
class ServerConfig:
    """What the HTTP server needs beyond its models."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()  # empty: any if there are API keys, else none
    max_client_batch_size: int = 2048  # 0: unlimited
    payload_limit: int = 32 * MIB
    accept_bare_token_ids: bool = False  # on OpenAI's routes, without special tokens around them
    drain_timeout_s: float = 20.0
    prometheus_port: int | None = None
