"""The dashboard and the alert rules, held against the series of the server."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from test_keys import ring
from test_keys import table as key_table

from jaxembed.observability.metrics import Telemetry
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.metrics import access_registry, process_registry

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
GROUPS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
EXPRESSIONS = [
    *((name, rule["expr"]) for name, rule in ALERTS.items()),
    *((title, one["expr"]) for title, panel in PANELS.items() for one in panel["targets"]),
]
OF_SCRAPES = {"job", "instance", "model"}  # model: with several models
SERIES = re.compile(r"\b((?:te|jaxembed|process)_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)(=~?)"(.*?)"')


@pytest.fixture(name="samples", scope="module")
def _samples(tmp_path_factory) -> dict[str, dict[str, set[str]]]:
    """The labels of each series that a server shows, with their values."""
    if sys.platform != "linux":
        pytest.skip("only Linux has the series of processes")
    folder = tmp_path_factory.mktemp("access")
    audit = AuditLog(folder / "audit")
    access = access_registry(ring(folder, key_table()), audit)
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for registry in (Telemetry().registry, access, process_registry()):
        for metric in registry.collect():
            for sample in metric.samples:
                for label, value in sample.labels.items():
                    found[sample.name][label].add(value)
                found[sample.name]  # one without labels is there, too
    audit.close()
    return found


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS)
def test_an_expression_names_series_labels_and_values_that_are_there(samples, name, expression):
    asked = SERIES.findall(expression)
    assert asked
    for series, matchers in asked:
        assert series in samples, f"{name}: no series {series}"
        for label, operator, value in MATCHER.findall(matchers):
            if label not in OF_SCRAPES:
                assert operator == "="
                assert value in samples[series][label], f"{name}: no {label} {value} of {series}"
    grouped = re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", expression)))
    assert OF_SCRAPES.union(*(samples[series] for series, _ in asked)).issuperset(grouped)


def test_what_asks_for_a_model_asks_only_series_that_have_one():
    of_process = ("jaxembed_key_", "jaxembed_build", "jaxembed_compile_", "process_")
    for name, expression in EXPRESSIONS:
        for series, matchers in SERIES.findall(expression):
            assert not (series.startswith(of_process) and "model=" in matchers), name


def test_legends_and_variables_of_the_dashboard_are_there(samples):
    names = [one["name"] for one in DASHBOARD["templating"]["list"]]
    for title, panel in PANELS.items():
        for one in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", one["expr"])) - {"__rate_interval"}
            assert used <= set(names), title
            shown = set(re.findall(r"\{\{(\w+)\}\}", one["legendFormat"]))
            series = [found for found, _ in SERIES.findall(one["expr"])]
            assert shown <= OF_SCRAPES.union(*(samples[found] for found in series)), title
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_alert_says_how_bad_it_is_and_what_happened():
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["annotations"]["summary"].endswith((".", "}}")), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus parses the expressions")
def test_prometheus_takes_every_expression(tmp_path):
    given = [re.sub(r"\$__rate_interval", "5m", one) for _, one in EXPRESSIONS]
    rules = [{"record": f"r{number}", "expr": one} for number, one in enumerate(given)]
    asked = tmp_path / "rules.yaml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for path in (asked, MONITORING / "alerts.yaml"):
        done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
