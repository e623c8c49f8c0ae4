"""The documents, held against the code: flags, routes, metrics, errors, and every path, command
and name that CONTRIBUTING.md mentions. `make docs` checks their links."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_embedder import FakeEmbedder
from prometheus_client import CollectorRegistry
from test_keys import ring
from test_keys import table as key_table

from jaxembed.cli import cli
from jaxembed.config import ServerConfig
from jaxembed.engine.quota import REFUSAL_REASONS
from jaxembed.observability.metrics import FAILURES, PRIORITIES, STAGES, Telemetry
from jaxembed.server.app import create_app
from jaxembed.server.auth.audit import AuditLog
from jaxembed.server.errors import REPLIES, dialect_of
from jaxembed.server.metrics import access_registry, process_registry
from jaxembed.server.registry.models import Models
from jaxembed.server.registry.pool import ModelPool
from jaxembed.server.routes.openapi import document

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "deploy").rglob("README.md")),
]
DIALECTS = {"OpenAI": "openai", "TEI": "tei", "Cohere": "cohere"}
MODEL, ENGINE, TEXTS = "Model", "Engine", "Texts"  # sections of docs/configuration.md
COMMANDS = {  # and the sections with the flags that they share with others
    "serve": ("Server", "Models that come and go", MODEL, ENGINE, TEXTS),
    "convert": (MODEL,),
    "embed": (MODEL, ENGINE, TEXTS),
    "rerank": (MODEL, ENGINE, TEXTS),
    "classify": (MODEL, ENGINE, TEXTS),
    "token-classify": (MODEL, ENGINE, TEXTS),
    "calibrate": (MODEL, ENGINE, TEXTS),
    "info": (MODEL,),
    "models": (),
    "tune": (MODEL, ENGINE, TEXTS),
    "doctor": (MODEL, ENGINE),
    "verify": (MODEL, ENGINE),
    "key new": (),
    "cache pack": (),
    "cache unpack": (),
}
HEADING = re.compile(r"^(\w[\w ]*):$", re.MULTILINE)
OPTION = re.compile(r"^  (-\S.*?)(?:\s{2,}|$)", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|txt|json)")


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of a page, up to the next heading of any level."""
    _, *parts = re.split(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def table(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its head."""
    rows = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    lines = rows[0].splitlines()[2:] if rows else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def codes(text: str) -> list[str]:
    """What is set in code type, outside blocks of code. A line may end within it."""
    return [" ".join(code.split()) for code in CODE.findall(FENCE.sub("", text))]


# Flags


def documented_flags(command: str) -> dict[frozenset[str], tuple[str, str, str | None]]:
    """By the spellings of each flag, its section, "" for one of the command's own, its variable and
    its default, None where that is described in words."""
    shared = sections(DOCS / "configuration.md")
    texts = {name: shared[name] for name in COMMANDS[command]}
    texts[""] = sections(DOCS / "command-line.md")[command]
    flags = {}
    for section, text in texts.items():
        for flag, variable, default, _ in table(text):
            exact = CODE.fullmatch(default)
            found = section, variable.strip("`"), exact[1] if exact else None
            flags[frozenset(codes(flag))] = found
    return flags


def offered_flags(command: str) -> dict[frozenset[str], tuple[str, str, str | None]]:
    """The same, from what `--help` prints."""
    done = CliRunner().invoke(cli, [*command.split(), "--help"], terminal_width=1000)
    _, *texts = HEADING.split(done.stdout)
    flags = {}
    for section, listed in zip(texts[::2], texts[1::2], strict=True):
        _, *parts = OPTION.split(listed)
        for head, text in zip(parts[::2], parts[1::2], strict=True):
            spellings = frozenset(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", head))
            words = " ".join(text.split())
            variable = re.search(r"\[env var: (\w+)", words)
            default = re.search(r"[\[;] ?default: \(?([^;)\]]+)", words)
            flags[spellings] = (
                section if section in COMMANDS[command] else "",
                variable[1] if variable else "",
                default[1] if default else None,
            )
    del flags[frozenset({"-h", "--help"})]
    return flags


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_are_documented_with_variables_and_defaults(command):
    assert documented_flags(command) == offered_flags(command)


def test_the_help_has_an_example_of_each_command_and_whole_summaries():
    help_of = {name: CliRunner().invoke(cli, [*name.split(), "--help"]).stdout for name in COMMANDS}
    for name, text in help_of.items():
        example = re.search(r"^Example:\n  (jaxembed .+)$", text, re.MULTILINE)
        assert example is not None, name
        assert example[1].startswith(f"jaxembed {name} ")
    summaries = CliRunner().invoke(cli, ["--help"]).stdout.split("Commands:\n")[1]
    assert len(re.findall(r"\.$", summaries, re.MULTILINE)) == len(cli.commands)
    assert "..." not in summaries


def test_every_command_is_documented():
    assert set(cli.commands) == {command.split()[0] for command in COMMANDS}


# Routes, errors, metrics


def documented_routes() -> dict[tuple[str, str], str]:
    """The dialect of the errors of each path and method."""
    routes = {}
    for cell, _, dialect in table(sections(DOCS / "http-api.md")["Routes"]):
        method = cell.split()[0].lower()
        routes |= {(path, method): DIALECTS[dialect] for path in codes(cell)}
    return routes


def test_every_route_is_documented_with_the_dialect_of_its_errors():
    models = Models([FakeEmbedder()])
    app = create_app(models, ServerConfig(admin_key="key"), ModelPool(models))
    paths = document(app.url_map.iter_rules())["paths"]
    offered = {(path, method): dialect_of(path) for path in paths for method in paths[path]}
    assert documented_routes() == offered


def test_every_error_is_documented_with_its_statuses():
    documented = {
        name.strip("`"): cells[:5]
        for name, *cells in table(sections(DOCS / "errors.md")["Statuses"])
    }
    assert documented == {
        kind.__name__: [
            str(reply.tei_status),
            f"`{reply.tei_type}`",
            str(reply.openai_status),
            f"`{reply.openai_type}`",
            f"`{reply.code}`" if reply.code else "",
        ]
        for kind, reply in REPLIES.items()
    }


def offered_series(registry: CollectorRegistry) -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each series."""
    series: dict[str, tuple[str, set[str]]] = {}
    for metric in registry.collect():
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        names = {sample.name for sample in metric.samples}
        name = f"{metric.name}_total"  # as prometheus_client calls its own counters
        series[name if name in names else metric.name] = (metric.type, labels)
    return series


def documented_series(*headings: str) -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each series in the tables below these headings."""
    found = sections(DOCS / "metrics.md")
    rows = [row for heading in headings for row in table(found[heading])]
    return {codes(name)[0]: (kind, set(codes(labels))) for name, kind, labels, _ in rows}


def test_every_metric_is_documented_with_its_type_and_labels(tmp_path):
    documented = documented_series("TEI's series", "Series of jaxembed")
    assert documented == offered_series(Telemetry().registry)
    audit = AuditLog(tmp_path / "audit")
    registry = access_registry(ring(tmp_path, key_table()), audit)
    audit.close()
    assert documented_series("Series of keys and of the audit log") == offered_series(registry)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the series of processes")
def test_every_metric_of_the_process_is_documented_with_its_type_and_labels():
    offered = offered_series(process_registry())
    build = offered.pop("jaxembed_build")  # an Info, which is a gauge of that name and `_info`
    offered["jaxembed_build_info"] = ("gauge", build[1])
    assert documented_series("Series of the process") == offered


def test_every_value_of_a_label_is_documented():
    mentioned = set(codes((DOCS / "metrics.md").read_text()))
    assert mentioned >= {*FAILURES, *PRIORITIES, *STAGES, *REFUSAL_REASONS}


# What pages mention


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_make_target_and_file_that_a_page_names_exists():
    folders = "jaxembed|converters|benchmarks|tests|docs|deploy|examples|constraints"
    for page in PAGES:
        text = page.read_text()
        commands = "\n".join([*codes(text), *FENCE.findall(text)])
        named = re.findall(r"(?:^|&& )make ([a-z][a-z-]*)", commands, re.MULTILINE)
        assert set(named) <= targets(), page
        files = [code for code in codes(text) if re.fullmatch(rf"(?:{folders})/[\w./-]+", code)]
        missing = [code for code in files if not (ROOT / code).exists()]
        assert [code for code in missing if not code.startswith("docs/_build")] == [], page


def words_of(files: list[Path]) -> set[str]:
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


def test_every_name_in_contributing_is_in_the_code():
    folders = ("jaxembed", "converters", "tests", "docs", "constraints")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    known = words_of([*files, ROOT / "pyproject.toml"])
    names = {path.name for path in files}
    for code in codes((ROOT / "CONTRIBUTING.md").read_text()):
        if PATH.fullmatch(code) and "/" not in code:
            assert code in names or (ROOT / code).is_file(), f"no file {code}"
        elif re.fullmatch(r"[\w.]+(\([\w, ]*\))?", code):
            assert set(re.findall(r"[A-Za-z_]\w*", code)) <= known, f"nothing is called {code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_example_puts_a_file_into_an_argument(page):
    """Linux refuses an argument over 128 KiB, which an image in base64 exceeds."""
    assert "$(base64" not in page.read_text()
