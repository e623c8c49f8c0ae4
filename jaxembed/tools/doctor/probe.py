"""Asks a running server for its facts, and measures the latency of single queries from outside."""

import math
import time
from typing import Any

import msgspec

from jaxembed.errors import ConfigError
from jaxembed.platform.fetch import fetch
from jaxembed.runtime.diagnostics.facts import Examination, Facts

PROBES = 20  # queries that are sent to a model
PROBED_QUERY = "how long does a short query take"
WANTED = (
    "expected the URL of a running jaxembed server, such as http://127.0.0.1:8080; if it needs a "
    "key, give one with --api-key"
)
PROBE_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {  # by task: path and body of a query
    "embed": ("/embed", {"inputs": PROBED_QUERY}),
    "rerank": ("/rerank", {"query": PROBED_QUERY, "texts": [PROBED_QUERY]}),
    "classify": ("/predict", {"inputs": PROBED_QUERY}),
    "token_classify": ("/token_classify", {"inputs": PROBED_QUERY}),
}


class Probe(msgspec.Struct):
    """The latencies of queries that were sent one after the other."""

    milliseconds: list[float]  # the latencies of the queries that were answered
    failed: int
    error: str | None  # message of the last failure

    def quantile(self, share: float) -> float:
        """Return the milliseconds that this share (0 to 1) of the latencies does not exceed.

        Raises IndexError if no query was answered.
        """
        ordered = sorted(self.milliseconds)
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def ask(url: str, key: str | None) -> dict[str, Examination]:
    """Fetch the examination of each model of a server, by served name.

    `key` is the API key, if any. Raises ConfigError if no jaxembed server answers at `url`.
    """
    answer = fetch(url.rstrip("/") + "/info?verbose", WANTED, headers=_headers(key))
    try:
        return msgspec.convert(
            msgspec.json.decode(answer)["jaxembed"]["doctor"], dict[str, Examination]
        )
    except (KeyError, TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{url} does not answer as this version of `jaxembed doctor` expects; {WANTED}"
        ) from error


def probe_model(url: str, key: str | None, facts: Facts) -> Probe:
    """Send PROBES queries to one model, one after the other, and time them.

    `key` is the API key, if any. Queries that fail are counted, and raise nothing.
    """
    path, body = PROBE_REQUESTS[facts.task]
    route_field = {"prompt_name": facts.route} if facts.route else {}
    data = msgspec.json.encode(body | {"model": facts.model} | route_field)
    headers = _headers(key) | {"Content-Type": "application/json"}
    probe = Probe(milliseconds=[], failed=0, error=None)
    for _ in range(PROBES):
        started_at = time.perf_counter()
        try:
            fetch(url.rstrip("/") + path, WANTED, body=data, headers=headers)
        except ConfigError as error:  # one refused query does not stop the probe
            probe.failed, probe.error = probe.failed + 1, str(error)
        else:
            probe.milliseconds.append(1000 * (time.perf_counter() - started_at))
    return probe


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
