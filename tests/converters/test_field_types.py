"""Whatever config.json says: a model is described, or refused by name before a tower is made."""

import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sources import change_json, write_bert, write_json, write_sentence_bert
from test_golden import FILES, SCORERS, read, write_source

from converters import CONVERTERS, fields, outline_routes
from converters.fields import CONFIG_FIELDS, check_fields
from jaxembed.errors import CheckpointError, UnsupportedModel

WRONG: tuple[Any, ...] = (None, "x", -1, 0, True, 10**30, math.nan, ["x"], {"x": 1})


def small_files(file: Path) -> dict[str, str]:
    """The files of a golden's source that hold no weights, by their path."""
    arrays = read(file).items()
    return {k.removeprefix("source/"): v.item() for k, v in arrays if k.startswith("source/")}


def config_of(file: Path) -> dict[str, Any]:
    return json.loads(small_files(file)["config.json"])


CONFIGS = {file: config_of(file) for file in FILES if "config.json" in small_files(file)}

# A golden of each model type: one that scores if there is one, because more is read then.
FAMILIES = {
    CONFIGS[file]["model_type"]: file
    for file in sorted(CONFIGS, key=lambda file: (file in SCORERS, len(CONFIGS[file])))
}
# Read whatever they hold: only whether they ask for anything, or as text; and one checked there.
ANY_VALUE = {"pruned_heads", "head_config", "_name_or_path", "max_length"}
# Without a golden: other types have their converter; tests/runtime/test_jina_v4.py tries the last.
ALIKE = {"camembert", "new", "llama_bidirec", "qwen2_5_vl"}


def changes(values: Any) -> list[Any]:
    """Copies of a JSON object, each with a wrong value in one of its fields, however deep."""
    changed = []
    for key, value in values.items():
        inside = changes(value) if isinstance(value, dict) else []
        changed += [values | {key: other} for other in (*WRONG, *inside)]
    return changed


def assert_described_or_refused(
    folder: Path, files: Iterable[str], outline: Callable[[Path], object]
) -> None:
    """Whatever one field of one of these files holds."""
    for file in files:
        given = json.loads((folder / file).read_text())
        for changed in changes(given):
            write_json(folder / file, given | changed)
            with suppress(CheckpointError):
                outline(folder)
        write_json(folder / file, given)
    outline(folder)


def has_wrong_type(hf: dict[str, Any]) -> bool:
    """Whether the config is refused before a family reads it."""
    try:
        check_fields("config.json", hf, CONFIG_FIELDS)
    except CheckpointError:
        return True
    return False


def test_every_family_is_tried():
    assert set(CONVERTERS) - set(FAMILIES) == ALIKE


def test_every_key_that_a_converter_reads_has_a_type():
    code = "".join(file.read_text() for file in Path(fields.__file__).parent.rglob("*.py"))
    keys = set(re.findall(r"""\bhf(?:\.get\(|\[)"(\w+)\"""", code))
    assert len(keys) > 50
    assert keys - set(CONFIG_FIELDS) == ANY_VALUE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_is_described_or_refused_whatever_it_holds(family, tmp_path):
    write_source(read(FAMILIES[family]), tmp_path)
    hf = CONFIGS[FAMILIES[family]]
    outline_routes(tmp_path)
    known = {key: value for key, value in hf.items() if key in CONFIG_FIELDS}
    refused: list[dict[str, Any]] = []
    taken: list[dict[str, Any]] = []
    for changed in changes(known):
        (refused if has_wrong_type(hf | changed) else taken).append(changed)
    for changed in [*taken, *refused[::25]]:
        (tmp_path / "config.json").write_text(json.dumps(hf | changed))
        with suppress(CheckpointError):  # which UnsupportedModel and ConversionError are
            outline_routes(tmp_path)


@pytest.mark.parametrize(
    ("file", "field", "value", "wanted"),
    [
        ("1_Pooling/config.json", "pooling_mode_mean_tokens", "false", "true or false"),
        ("1_Pooling/config.json", "pooling_mode", 1, "a string or a list of strings"),
        ("1_Pooling/config.json", "include_prompt", None, "true or false"),
        ("config_sentence_transformers.json", "prompts", ["x"], "an object of strings by name"),
        ("config_sentence_transformers.json", "default_prompt_name", 1, "a string"),
        ("tokenizer_config.json", "tokenizer_class", ["x"], "a string"),
        ("tokenizer_config.json", "model_input_names", 1, "a list of strings"),
        ("config.json", "hidden_size", True, "is true, wanted a whole number from 1 to 16777216"),
        ("config.json", "num_attention_heads", 0, "is 0, wanted a whole number from 1"),
        ("config.json", "num_hidden_layers", 10**9, "is 1000000000, wanted .* from 1 to 1000"),
        ("config.json", "type_vocab_size", "2", 'is "2", wanted a whole number from 0'),
        ("config.json", "layer_norm_eps", -0.5, "is -0.5, wanted a number from 0 to 1"),
        ("config.json", "layer_norm_eps", math.nan, "is NaN, wanted a number from 0 to 1"),
        ("config.json", "rope_theta", math.inf, "is Infinity, wanted a number over 1"),
        ("config.json", "is_causal", "false", 'is "false", wanted true or false'),
        ("config.json", "architectures", True, "is true, wanted a list of strings"),
        ("config.json", "auto_map", "x", 'is "x", wanted a JSON object'),
        ("config.json", "id2label", {"0": [1]}, "wanted an object of names by id"),
        ("config.json", "sentence_transformers", {"activation_fn": [1]}, "wanted a string"),
        ("config.json", "rope_scaling", {"factor": math.nan}, "is NaN, wanted a number over 0"),
        ("config.json", "rope_parameters", {"full_attention": {"rope_theta": 0}}, "is 0, wanted a"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused_by_its_name(file, field, value, wanted, tmp_path):
    source = write_sentence_bert(tmp_path / "source")
    if not (source / file).is_file():
        write_json(source / file, {})
    change_json(source / file, **{field: value})
    with pytest.raises(CheckpointError, match=rf"{file}: {field}[a-z_.]* .*{wanted}"):
        outline_routes(source)


def test_a_model_type_of_another_type_is_no_known_one(tmp_path):
    source = write_bert(tmp_path / "source")
    for kind in (["bert"], {}, 1, None):
        change_json(source / "config.json", model_type=kind)
        with pytest.raises(UnsupportedModel, match=r"model_type .* not supported; known: albert"):
            outline_routes(source)


def test_a_field_that_no_converter_reads_is_not_looked_at():
    check_fields("config.json", {"something": math.nan}, CONFIG_FIELDS)


def test_json_without_end_is_refused(tmp_path):
    source = write_bert(tmp_path / "source")
    (source / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        outline_routes(source)


def test_what_no_check_foresaw_names_the_model_and_what_was_wrong(tmp_path):
    source = write_sentence_bert(tmp_path / "source")
    write_json(source / "sentence_bert_config.json", {"modality_config": 5})
    with pytest.raises(CheckpointError, match=r"source is damaged, or has an .* form: TypeError: "):
        outline_routes(source)
