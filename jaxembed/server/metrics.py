"""Prometheus metrics of the process, the API keys and the audit log. `observability.metrics` has
those of models."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from platform import python_version

import jax
from prometheus_client import CollectorRegistry, Info, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jaxembed import __version__
from jaxembed.engine.quota import REFUSAL_REASONS
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.auth.keyring import Keyring

Labels = Mapping[str, str]


@cache
def process_registry() -> CollectorRegistry:
    """Return the metrics of this process under Prometheus's standard names, and
    `jaxembed_build_info`. Metrics whose names begin with `process_` exist only on Linux."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    (device, *_) = jax.local_devices()
    facts = {
        "version": __version__,
        "jax": metadata.version("jax"),
        "python": python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
    }
    Info("jaxembed_build", "Versions and device, as labels", registry=registry).info(facts)
    return registry


def access_registry(keyring: Keyring | None, audit: AuditLog | None) -> CollectorRegistry:
    """Return the metrics of a keyring and of an audit log; None means that there is no keyring or
    no log. The label `key` is the name of a key. When a key leaves the key file, its series
    end."""
    registry = CollectorRegistry()
    registry.register(_AccessMetrics(keyring, audit))
    return registry


class _AccessMetrics(Collector):
    """Reads the counters of the keyring and the audit log at each scrape."""

    def __init__(self, keyring: Keyring | None, audit: AuditLog | None):
        self._keyring, self._audit = keyring, audit

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the keyring and the audit log, if the server has them."""
        keyring = self._keyring
        if keyring is not None:
            quotas = keyring.quotas
            yield _counter(
                "jaxembed_key_requests",
                "Accepted requests of a key",
                [({"key": quota.name}, quota.requests) for quota in quotas],
            )
            yield _counter(
                "jaxembed_key_tokens",
                "Tokens of a key's answered requests",
                [({"key": quota.name}, quota.tokens) for quota in quotas],
            )
            yield _counter(
                "jaxembed_key_refused",
                "Refused requests of a key, by reason",
                [
                    ({"key": quota.name, "reason": reason}, quota.refused[reason])
                    for quota in quotas
                    for reason in REFUSAL_REASONS
                ],
            )
            waiting = GaugeMetricFamily(
                "jaxembed_key_waiting_inputs",
                "Inputs of a key that are admitted and not yet answered",
                labels=["key"],
            )
            for quota in quotas:
                waiting.add_metric([quota.name], quota.waiting)
            yield waiting
            yield _counter(
                "jaxembed_unknown_keys",
                "Requests without a key or with an unknown key",
                [({}, keyring.unknown)],
            )
            yield _counter(
                "jaxembed_key_file_reads",
                "Repeated reads of the key file, by result",
                [({"result": "done"}, keyring.done), ({"result": "failed"}, keyring.failed)],
            )
            yield GaugeMetricFamily(
                "jaxembed_key_file_ok",
                "1 if the last read of the key file succeeded, 0 while earlier keys are in use",
                value=float(keyring.is_current),
            )
            yield GaugeMetricFamily(
                "jaxembed_key_file_read_at",
                "When the keys in use were read, in seconds since 1970",
                value=keyring.read_at,
            )
        if self._audit is not None:
            yield _counter(
                "jaxembed_audit_lines",
                "Lines of the audit log, by result",
                [
                    ({"result": "written"}, self._audit.written),
                    ({"result": "lost"}, self._audit.lost),
                ],
            )


def _counter(name: str, text: str, values: Iterable[tuple[Labels, int | float]]) -> Metric:
    """Return a counter without the usual suffix `_total` in its name, as in TEI. Each of `values`
    is the labels of a series and its count."""
    family = CounterMetricFamily(name, text)
    family.samples += [Sample(name, dict(labels), float(value)) for labels, value in values]
    return family
