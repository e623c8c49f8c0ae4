"""The command line: flags and variables reach the settings, errors are one line, help is quick."""

import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from ipaddress import ip_network

import click
import numpy as np
import pytest
import sources
from click.testing import CliRunner
from commands import run
from conftest import save_tiny
from test_keys import table

from jaxembed.checkpoints import hub
from jaxembed.checkpoints.source import ModelSource
from jaxembed.cli import cli, embed, loading, score, serve
from jaxembed.cli.loading import engine_config
from jaxembed.cli.options import EXIT_REFUSED, EXIT_TEMPORARY, exit_status
from jaxembed.cli.serve import SINGLE_MODEL_FLAGS, model_aliases, models_to_serve, serve_command
from jaxembed.cli.server_options import server_config, spans_url
from jaxembed.config import EngineConfig, ServerConfig
from jaxembed.engine.quota import Limits
from jaxembed.errors import (
    CheckpointError,
    ConfigError,
    DeviceStuck,
    JaxembedError,
    NoRoom,
    StoreUnreachable,
)
from jaxembed.observability.log import JsonFormatter
from jaxembed.platform import extras
from jaxembed.server.auth.keyring import digest_of, parse_keys
from jaxembed.server.run import listen

TEI_COMMAND_LINE = (
    "--model-id some/model --revision main --tokenization-workers 2 --dtype float32 "
    "--served-model-name name --pooling mean --max-concurrent-requests 512 "
    "--max-batch-tokens 16384 --max-batch-requests 8 --max-client-batch-size 32 --auto-truncate "
    "--default-prompt-name query --hf-token t --hostname 0.0.0.0 -p 3000 --uds-path /tmp/x "
    "--huggingface-hub-cache /tmp/hub --payload-limit 2000000 --api-key key --json-output "
    "--disable-spans --otlp-service-name x --prometheus-port 9000 --cors-allow-origin *"
)


@pytest.fixture(name="parsed")
def _parsed(monkeypatch):
    """What `serve` would be called with, for a command line and an environment."""

    def parse(line: str, env: dict[str, str] | None = None) -> dict:
        seen: dict = {}
        monkeypatch.setattr(serve_command, "callback", lambda **flags: seen.update(flags))
        result = CliRunner(env=env).invoke(cli, ["serve", *line.split()])
        assert result.exit_code == 0, result.output
        return seen

    return parse


@pytest.fixture(name="cache_dir", scope="module")
def _cache_dir(tmp_path_factory) -> str:
    """Where this CPU's speed is measured once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(name="refusal")
def _refusal(monkeypatch):
    """What a command line is refused with, before a model is loaded. It runs in this process,
    whose signals and JAX stay as they are."""

    def refusal(*arguments: str, **environment: str) -> str:
        result = CliRunner(env=environment).invoke(cli, arguments)
        if isinstance(result.exception, JaxembedError):
            return str(result.exception)
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    for module in (serve, loading):
        monkeypatch.setattr(module, "configure_jax", lambda *_: None)
    monkeypatch.setattr(serve, "load_model", lambda *_, **__: pytest.fail("it was not refused"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return refusal


def test_a_tei_command_line_is_understood(parsed):
    flags = parsed(TEI_COMMAND_LINE)
    assert server_config(flags) == ServerConfig(
        host="0.0.0.0",
        port=3000,
        api_keys=("key",),
        cors_allow_origins=("*",),
        max_client_batch_size=32,
        payload_limit=2_000_000,
        prometheus_port=9000,
    )
    engine = engine_config(flags)
    assert (engine.max_batch_tokens, engine.max_batch_requests) == (16384, 8)
    assert flags["model_id"] == ("some/model",)
    assert flags["served_model_name"] == ("name",)
    assert flags["auto_truncate"] is True


def test_networks_of_media_are_named_by_flag_or_variable(parsed):
    line = "--allow-media-urls minio.internal:9000 --allow-media-network 10.0.0.0/8"
    for flags in (
        parsed(line + " --allow-media-network fd12::/32"),
        parsed("--allow-media-urls a", {"ALLOW_MEDIA_NETWORK": "10.0.0.0/8 fd12::/32"}),
    ):
        wanted = ip_network("10.0.0.0/8"), ip_network("fd12::/32")
        assert server_config(flags).media_networks == wanted


def test_every_flag_of_tei_has_its_environment_variable_which_the_flag_beats(parsed):
    env = {"MODEL_ID": "some/model", "PORT": "3000", "MAX_BATCH_TOKENS": "4096", "POOLING": "cls"}
    env |= {"AUTO_TRUNCATE": "false", "API_KEY": "one two", "DTYPE": "float16"}
    flags = parsed("--accept-bare-token-ids", env)
    assert server_config(flags).accept_bare_token_ids
    assert engine_config(flags).max_batch_tokens == 4096
    wanted = {"model_id": ("some/model",), "port": 3000, "auto_truncate": False}
    wanted |= {"api_key": ("one", "two"), "dtype": "float16", "pooling": "cls"}
    assert flags == flags | wanted
    assert parsed("--port 1", {"PORT": "2"})["port"] == 1


def test_hostname_counts_only_as_an_ip_address_and_defaults_are_those_of_the_settings(parsed):
    assert parsed("", {"HOSTNAME": "10.1.2.3"})["host"] == "10.1.2.3"
    for hostname in ("3f2a91", ""):
        flags = parsed("", {"HOSTNAME": hostname})
        assert server_config(flags) == ServerConfig()
        assert engine_config(flags) == EngineConfig()


@pytest.mark.parametrize(
    ("line", "variable", "models"),
    [
        ("", "", ()),
        ("a b", "", ("a", "b")),
        ("--model-id a --model-id b", "", ("a", "b")),
        ("a --model-id b", "", ("a", "b")),
        ("a --model-id a", "", ("a",)),
        ("", "a b", ("a", "b")),
        ("a", "b", ("a",)),
        ("--model-id a", "b", ("a",)),
    ],
)
def test_models_come_from_the_line_or_else_from_the_variable(monkeypatch, line, variable, models):
    def callback(model, model_id, **_):
        assert models_to_serve(model, model_id) == models

    monkeypatch.setattr(serve_command, "callback", callback)
    result = CliRunner(env={"MODEL_ID": variable}).invoke(cli, ["serve", *line.split()])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("names", "models", "aliases"),
    [
        ([], ["a"], {}),
        (["x", "y"], ["a"], {"a": ["x", "y"]}),
        (["x=a"], ["a"], {"a": ["x"]}),
        (["x=b", "y=b"], ["a", "b"], {"b": ["x", "y"]}),
        (["x=./a=b"], ["./a=b", "c"], {"./a=b": ["x"]}),
    ],
)
def test_served_names_belong_to_the_model_they_name_or_to_the_only_one(names, models, aliases):
    assert model_aliases(names, models) == aliases


def test_a_served_name_of_no_one_model_is_refused():
    for name in ("x", "x=c", "=a", "x=", ""):
        wanted = f"--served-model-name {name}: expected NAME=MODEL"
        with pytest.raises(click.UsageError, match=wanted):
            model_aliases([name], ["a", "b"])


GRPC = ("--otlp-endpoint", "http://a:4317")
BLANK_KEY = "--api-key is blank"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--drain-timeout", "nan"), {}, "'--drain-timeout'"),
        (("--drain-timeout", "inf"), {}, "'--drain-timeout'"),
        (("--drain-timeout", "-1"), {}, "'--drain-timeout'"),
        (("--port", "99999"), {}, "'--port'"),
        (("--adapter", "x"), {}, "expected NAME=DIR"),
        (("--adapter", "x="), {}, "adapter x has the folder ''; expected a path"),
        (("--adapter", "a:b=folder"), {}, "an adapter has the name 'a:b'; expected letters"),
        (("b", "--served-model-name", "b=./a"), {}, "./a and b cannot both be served as b"),
        (("--otlp-endpoint", "x"), {}, "--otlp-endpoint x: wanted a URL such as"),
        (("--otlp-endpoint", "localhost:4317"), {}, "localhost:4317: wanted a URL such as"),
        (("--otlp-endpoint", "http://"), {}, "--otlp-endpoint http://: wanted a URL"),
        (("--otlp-endpoint", "http://a:b"), {}, "--otlp-endpoint http://a:b: wanted a URL"),
        (GRPC, {"OTEL_EXPORTER_OTLP_PROTOCOL": "x"}, "PROTOCOL is 'x'; expected one of grpc, http"),
        (GRPC, {"OTEL_TRACES_SAMPLER": "x"}, "TRACES_SAMPLER is 'x'; expected one of always_on, "),
        (
            GRPC,
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG is '2'; expected a number from 0 to 1",
        ),
        ((), {"API_KEY": ""}, "API_KEY is set but blank (''); "),
        ((), {"API_KEY": " "}, "API_KEY is set but blank (' '); "),
        (("--api-key", ""), {}, f"{BLANK_KEY} (''); "),
        (("--api-key", "a", "--api-key", " "), {}, f"{BLANK_KEY} (' '); "),
        (("--api-key", ""), {"API_KEY": "a"}, f"{BLANK_KEY} (''); "),
        (("--admin-key", " "), {}, "--admin-key (ADMIN_KEY) is blank (' ')"),
        (("--admin-port", "0"), {"ADMIN_KEY": ""}, "--admin-key (ADMIN_KEY) is blank ('')"),
        (("--admin-key", "a", "--api-key", "a"), {}, "--admin-key is also an --api-key"),
        ((), {"API_KEY_FILE": ""}, "API_KEY_FILE is set but blank ('')"),
        ((), {"AUDIT_LOG": ""}, "AUDIT_LOG is set but blank ('')"),
        (("--api-key-file", "./nowhere"), {}, "cannot read nowhere: No such file"),
        (("--api-key-file", "BROKEN"), {}, "keys.toml: [[key]] number 1 (one): `models` is 'a'"),
        (("--api-key-file", "KEYS", "--api-key", "one"), {}, "same as that of --api-key"),
        (("--api-key-file", "KEYS", "--admin-key", "one"), {}, "same as that of --admin-key"),
        (("--audit-log", "/nowhere/file"), {}, "/nowhere/file cannot be opened: No such"),
        (("--model-repository", "./nowhere"), {}, "--model-repository nowhere is not a directory"),
        (("--model-repository", "s3://a/b"), {}, "an object store use --loadable"),
        (("--allow-media-network", "10.0.0.1/8"), {}, "has host bits set"),
        (("--allow-media-network", "10.0.0.0/8"), {}, "has no effect without --allow-media-urls"),
        ((), {"ALLOW_MEDIA_NETWORK": "10.0.0.0/8 0.0.0.0/0"}, "0.0.0.0/0 is not within one of"),
        (("--loadable", "./b", "--revision", "x"), {}, "single model, and this server may load"),
    ],
)
def test_what_serve_cannot_do_is_refused(arguments, environment, message, refusal, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(table("one", "one", **({"models": "a"} if "BROKEN" in arguments else {})))
    given = [str(keys) if one in ("KEYS", "BROKEN") else one for one in arguments]
    assert message in refusal("serve", "./a", *given, **environment)


@pytest.mark.parametrize("flag", SINGLE_MODEL_FLAGS)
def test_a_flag_of_one_model_is_refused_with_several(flag, refusal):
    option = "--" + flag.replace("_", "-")
    value = {"pooling": "cls", "adapter": "one=folder"}.get(flag, "1")
    told = refusal("serve", "a", "b", option, value)
    assert f"{option} is for a single model, and this server has 2: a, b; " in told


def refused(*arguments: str, status: int = EXIT_REFUSED, **environment: str) -> str:
    """The last line of a command in a process of its own, which ends with this status."""
    done = run(*arguments, **environment)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("jaxembed: ")
    return last


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("serve", "--otlp-endpoint", "http://localhost:4317"), "opentelemetry.sdk", "otel"),
        (("serve", "./a", "s3://bucket/model"), "s3fs", "s3"),
        (("embed", "a.txt", "-o", "out"), "pyarrow", "parquet"),
        (("embed", "a.parquet", "-o", "out.npy"), "pyarrow", "parquet"),
        (("embed", "a.txt", "-o", "s3://bucket/out"), "s3fs", "s3"),
        (("embed", "s3://bucket/in", "-o", "out.npy"), "s3fs", "s3"),
        (("embed", "a.png", "-o", "out"), "PIL", "images"),
        (("embed", "a.pdf", "-o", "out"), "pypdfium2", "pdf"),
        (("embed", "a.jsonl", "--image-column", "image", "-o", "out"), "PIL", "images"),
        (("rerank", "a.jsonl", "-o", "out"), "pyarrow", "parquet"),
        (("classify", "a.jsonl", "-o", "gs://bucket/out"), "gcsfs", "gs"),
    ],
)
def test_a_missing_extra_is_named_before_a_model_is_loaded(
    arguments, module, extra, refusal, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for suffix in ("txt", "jsonl", "parquet", "png", "pdf"):
        (tmp_path / f"a.{suffix}").touch()
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == module else "there")
    for one, name in ((embed, "load_for_outputs"), (score, "load_for_task")):
        monkeypatch.setattr(one, name, lambda *_, **__: pytest.fail("not refused"))
    told = refusal(*arguments)
    assert f"the extra `{extra}` is needed, and {module} is not installed" in told
    assert f"pip install 'jaxembed[{extra}]'" in told


def test_the_extras_are_those_of_the_package():
    declared = metadata("jaxembed").get_all("Provides-Extra")
    assert extras.MODULES.keys() <= set(declared or ())


def test_an_endpoint_without_a_path_gets_the_usual_one_over_http():
    assert spans_url("http://a:4317", "grpc") == "http://a:4317"
    assert spans_url("http://a:4318", "http/protobuf") == "http://a:4318/v1/traces"
    assert spans_url("https://a/", "http/protobuf") == "https://a/v1/traces"
    assert spans_url("http://a/x/v1/traces", "http/protobuf") == "http://a/x/v1/traces"


def test_a_new_key_is_shown_once_and_its_table_opens_for_it():
    line = "key new batch --models a --models b:fr --routes /v1/* --expires 2027-01-31 "
    line += "--requests-per-minute 5 --tokens-per-minute 6 --max-inputs-waiting 7"
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("the key of batch, which is shown only once: jx-")
    key = line.split()[-1]
    assert len(key) == len("jx-") + 43  # 256 bits
    assert key not in done.stdout
    (made,) = parse_keys(done.stdout, "keys.toml", {}).values()
    assert made.digest == digest_of(key.encode())
    assert (made.name, made.models, made.routes) == ("batch", {"a", "b:fr"}, ("/v1/*",))
    assert made.limits == Limits(5, 6, 7)
    assert str(made.expires) == "2027-01-31"
    assert CliRunner().invoke(cli, ["key", "new", "batch"]).stderr.split()[-1] != key


def test_a_key_that_no_server_would_take_is_not_made():
    done = CliRunner().invoke(cli, ["key", "new", "two words", "--tokens-per-minute", "0"])
    assert isinstance(done.exception, JaxembedError)
    assert "`name` is 'two words'; wanted 1 to 64 letters" in str(done.exception)
    assert "`tokens_per_minute` is 0; wanted an integer" in str(done.exception)
    assert done.stdout == ""


def test_models_of_the_command_line_that_take_more_than_all_may_are_refused(tmp_path, cache_dir):
    flags = ("--loadable", "./b", "--model-memory", "1048576", "--port", "0")
    said = refused("serve", str(save_tiny(tmp_path / "tiny")), *flags, "--cache-dir", cache_dir)
    assert "--model-memory 1048576: the models on the command line take" in said


def test_the_log_says_whether_a_key_is_required(tmp_path):
    for keys, in_file, line in (
        ((), 0, "no API key is required; set --api-key (API_KEY) or --api-key-file"),
        (("a",), 0, "need the API key"),
        ((), 2, "need one of 2 API keys (2 in --api-key-file)"),
        (("a",), 2, "need one of 3 API keys (2 in --api-key-file)"),
    ):
        assert line in serve._access_line(keys, in_file)
    done = run("serve", "./nowhere", "--port", "0", "--cache-dir", str(tmp_path), API_KEY="a b")
    assert "requests need one of 2 API keys" in done.stderr.splitlines()[0]


def test_a_cache_directory_that_cannot_be_is_refused_by_its_flag(tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "x")
    assert "--cache-dir" in refused("serve", "--port", "0", "--cache-dir", folder)


@pytest.mark.skipif(os.name == "nt", reason="no modes on Windows")
@pytest.mark.parametrize(("command", "inside"), [("serve", ""), ("embed", "programs")])
def test_a_cache_directory_that_others_can_write_is_refused_in_one_line(tmp_path, command, inside):
    folder = tmp_path / "cache"
    (folder / inside).mkdir(parents=True)
    (folder / inside).chmod(0o777)
    (tmp_path / "in.txt").write_text("the cat\n")
    arguments = {"serve": ["--port", "0"], "embed": [str(tmp_path / "in.txt"), "-o", "out.npy"]}
    said = refused(command, *arguments[command], "--cache-dir", str(folder))
    assert said.startswith(f"jaxembed: the cache directory {folder / inside} belongs to user ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nowhere",), "./nowhere does not exist"),
        (("CHECKPOINT", "./nowhere"), "./nowhere cannot be served: "),  # and ends the other
        (("CHECKPOINT", "--max-input-length", "65"), "65 exceeds the 64 positions"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, message, tiny_checkpoint, cache_dir):
    given = [str(tiny_checkpoint) if a == "CHECKPOINT" else a for a in arguments]
    assert message in refused("serve", *given, "--port", "0", "--cache-dir", cache_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch-tokens", "32", "--max-input-length", "64"), "--max-batch-"),
        (("--default-prompt-name", "no"), "has no prompt 'no'; it has passage, query"),
        (("--default-prompt", "a", "--default-prompt-name", "b"), "not both"),
        (("--buckets", "nowhere.json"), "--buckets nowhere.json"),
    ],
)
def test_flags_that_do_not_fit_a_model_are_refused(
    arguments, message, tiny_checkpoint, cache_dir, refusal, tmp_path
):
    (tmp_path / "in.txt").write_text("the cat\n")
    files = (str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.npy"))
    model = ("--model", str(tiny_checkpoint), "--cache-dir", cache_dir)
    assert message in refusal("embed", *files, *model, *arguments)


@pytest.fixture(name="ask_info")
def _ask_info(monkeypatch):
    """`jaxembed info`, run in this process, which has its device."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return lambda *arguments: CliRunner().invoke(cli, ["info", *map(str, arguments)])


def test_info_says_it_for_people_as_well(tiny_checkpoint, tmp_path, ask_info):
    first, *rows = ask_info(tiny_checkpoint, "--cache-dir", tmp_path).stdout.splitlines()
    facts = json.loads(ask_info(tiny_checkpoint, "--json", "--cache-dir", tmp_path).stdout)
    assert first == facts["source"]
    assert (facts["architecture"], facts["dimensions"], facts["converted"]) == ("bert", 32, True)
    assert facts["parameter_bytes"]["float32"] == 4 * facts["parameters"]
    said = dict(re.split(r" {2,}", row.strip(), maxsplit=1) for row in rows)
    assert said["task"] == "embed (turns texts into vectors)"
    assert said["input limit"] == "64 tokens"
    assert "(32 dimensions)" in said["outputs"]
    assert "passage: 'the '" in said["prompt"]
    assert said["converted"].startswith("yes, content hash ")


def test_info_lists_the_labels_of_a_classifier(tmp_path, ask_info):
    said = ask_info(write_classifier(tmp_path / "source"), "--cache-dir", tmp_path).stdout
    assert re.search(r"^  labels +bad, good$", said, re.MULTILINE)
    assert re.search(r"^  converted +no: ", said, re.MULTILINE)


def test_info_verifies_the_files_of_a_converted_model(tmp_path, ask_info):
    source = sources.write_sentence_bert(tmp_path / "source")
    ask = (source, "--verify", "--json", "--cache-dir", tmp_path / "cache")
    assert "is not converted yet" in str(ask_info(*ask).exception)
    entry = hub.resolve(ModelSource(str(source), cache_dir=tmp_path / "cache"))
    done = ask_info(*ask)
    assert done.exit_code == 0
    assert re.fullmatch(r"\d+ files verified\n", done.stderr)
    assert json.loads(done.stdout)["converted"] is True
    text = (entry / "manifest.json").read_bytes()
    (entry / "manifest.json").write_bytes(b"[" + text[1:])
    done = ask_info(*ask)
    assert done.stdout == ""
    assert "manifest.json: its SHA-256 is " in str(done.exception)


def test_info_converts_nothing_and_reads_no_weights(tmp_path, ask_info):
    source = sources.write_sentence_bert(tmp_path / "source")
    (source / "model.safetensors").unlink()
    cache = tmp_path / "cache"
    facts = json.loads(ask_info(source, "--json", "--cache-dir", cache).stdout)
    assert (facts["converted"], facts["content_hash"]) == (False, None)
    assert (facts["source"], facts["pooling"]) == (str(source), ["mean"])
    assert not cache.exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("embedder", "embed, 8 dimensions, 16"), ("scorer", "classify, labels bad, good, 24")],
)
def test_convert_says_what_came_of_it(kind, said, tmp_path):
    out = tmp_path / "out"
    write = sources.write_sentence_bert if kind == "embedder" else write_classifier
    done = run("convert", str(write(tmp_path / "source")), str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: bert, {said} tokens\n"


def write_classifier(folder):
    head = sources.head_tensors({"pooler.dense": (8, 8), "classifier": (8, 2)})
    return sources.write_bert(
        folder,
        tensors=sources.bert_tensors() | head,
        architectures=["BertForSequenceClassification"],
        id2label={"0": "bad", "1": "good"},
    )


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the space cannot be asked for")
def test_what_cannot_be_written_ends_a_conversion_in_one_line(tmp_path):
    """The system's own error: files may have 10 kB here."""
    source = sources.write_sentence_bert(tmp_path / "source")
    folder = tmp_path / "full"
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "from jaxembed.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(folder / "out")],
        capture_output=True,
        text=True,
        # compiled modules would be cut to that length as well, and stay so
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert done.returncode == EXIT_TEMPORARY, done.stderr
    (line,) = done.stderr.splitlines()
    wanted = f"jaxembed: cannot write the converted checkpoint in {folder}: File too large; "
    assert line.startswith(wanted)
    assert not [path for path in folder.rglob("*") if "out" in path.name or "partial" in path.name]


def test_embed_writes_vectors_and_bytes_by_ranges(embedder, grid_file, tmp_path, cache_dir):
    texts = tmp_path / "in.txt"
    texts.write_text("the cat sat\na dog runs\nblue sky\n")
    path = save_tiny(tmp_path / "model")
    flags = ["--buckets", str(grid_file), "--max-batch-tokens", "128", "--dtype", "float32"]
    flags += ["--devices", "1", "--cache-dir", cache_dir]
    done = run("calibrate", str(path), str(texts), str(texts), "--dimensions", "8", *flags)
    assert done.returncode == 0, done.stderr
    file = path / "ranges.json"
    assert done.stdout == f"{file}: ranges of 6 texts, for vectors of 32, 8 dimensions\n"
    assert "the ranges of 6 texts are narrow" in done.stderr
    flags += ["--model", str(path), "-o", str(tmp_path / "out.npy")]
    done = run("embed", str(texts), *flags)
    assert done.returncode == 0, done.stderr
    assert "truncated" not in done.stderr
    floats = embedder.encode(texts.read_text().splitlines())
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), floats, atol=1e-5)
    texts.write_text(texts.read_text() + "the " * 100 + "\n")
    done = run("embed", str(texts), "--dimensions", "8", "--output-dtype", "uint8", *flags)
    assert done.returncode == 0, done.stderr
    assert "truncated 1 text that had more tokens than allowed (the limit of the model is 64)" in (
        done.stderr
    )
    vectors = np.load(tmp_path / "out.npy")
    assert (vectors.dtype, vectors.shape) == (np.uint8, (4, 8))
    assert (vectors.min(axis=0) == 0).all()
    assert (vectors.max(axis=0) >= 254).all()


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("embed in.txt -o out.npy --model MODEL", "dense"),
        ("embed in.txt -o a.jsonl --outputs multi_vector --model MODEL", "multi_vector"),
        ("calibrate MODEL in.txt", "dense"),
        ("embed in.txt -o out.npy --model MODEL", ""),
    ],
)
def test_an_output_that_a_model_lacks_is_refused(tmp_path, line, output, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (sources.write_splade if output else write_classifier)(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (tmp_path / "in.txt").write_text("the cat\n")
    given = [str(source) if one == "MODEL" else one for one in line.split()]
    told = refusal(*given, "--cache-dir", str(tmp_path / "cache"))
    lacking = f"{source} has no {output} output; `jaxembed embed` can write --outputs sparse"
    assert (lacking if output else "is a classifier, which computes no vectors") in told
    assert not (tmp_path / "out.npy").exists()
    assert not (tmp_path / "cache" / "models").exists()


def test_log_lines_can_be_json():
    record = logging.LogRecord("jaxembed", logging.INFO, "", 0, "%d of %d", (1, 2), None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"]) == ("INFO", "1 of 2")


def test_every_option_says_what_it_is_for():
    for command in cli.commands.values():
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert [p.name for p in options if not p.help] == []


def test_a_port_in_use_may_pass(cache_dir):
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        flags = ("--port", str(port), "--cache-dir", cache_dir)
        said = refused("serve", *flags, status=EXIT_TEMPORARY)
    assert f"cannot listen on 127.0.0.1 port {port}" in said


def test_what_may_pass_has_a_status_of_its_own():
    for error in (ConfigError("a"), CheckpointError("a"), NoRoom("a")):
        assert exit_status(error) == EXIT_REFUSED
    for error in (StoreUnreachable("a"), DeviceStuck()):
        assert exit_status(error) == EXIT_TEMPORARY


def test_a_device_that_cannot_be_started_is_one_line(tmp_path, cache_dir):
    texts = tmp_path / "texts.txt"
    texts.write_text("a cat\n")
    line = ("embed", str(texts), "-o", str(tmp_path / "out.npy"), "--cache-dir", cache_dir)
    said = refused(*line, JAX_PLATFORMS="no_such_platform")
    assert "JAX cannot start a device (JAX_PLATFORMS is no_such_platform): " in said
