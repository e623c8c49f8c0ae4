"""Which suites a change needs beside `make check`, `make docs` and `make test`, which always run.

`python .ci/suites.py` prints the targets of make that files differing from the base need, one a
line; the base is the commit in .ci/base, at which every suite has passed. `--all` prints all of
them, and `--check` fails for a file of the product that no line of the table covers.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BASE = ROOT / ".ci" / "base"
PRODUCT = ("jaxembed/**", "converters/**", "deploy/**", "examples/**")
TARGETS = (
    "numerics",
    "slow",
    "wheel",
    "parity",
    "eval",
    "estimates",
    "deploy",
    "stores",
    "ray",
    "page",
)
# what a file of tests has if some of its tests are of a suite
MARKS = {"numerics": r"mark\.numerics|import each", "slow": r"mark\.slow"}
# one model of each backbone, for what all of them share
BACKBONES = "minilm distilbert modernbert deberta qwen3 t5 clip static"

# Paths, in which ** also stands for slashes, and the targets that they need. For parity the names
# of families or files in tests/parity follow. An empty list: `make test` covers it.
TABLE: dict[str, list[str]] = {
    # versions, and how the suites run
    "pyproject.toml": list(TARGETS),
    "constraints/tested.txt": list(TARGETS),
    ".ci/**": list(TARGETS),
    ".ci/base": [],
    ".ci/withdrawn.txt": [],
    "Makefile": list(TARGETS),
    "hatch_build.py": ["wheel"],
    "Dockerfile*": ["deploy"],
    "deploy/**": ["deploy"],
    "tests/conftest.py": ["numerics", "slow"],
    "tests/quick.py": ["numerics", "slow", "page"],
    "tests/live_server.py": ["slow", "page"],
    "tests/native/**": ["numerics", "slow"],
    "tests/page/**": ["page"],
    "tests/chaos/**": ["slow"],
    "benchmarks/**": ["slow"],
    "benchmarks/compile_for.py": ["slow", "estimates"],
    "benchmarks/subject.py": ["slow", "estimates"],
    # numerics
    "jaxembed/engine/**": ["slow", "parity minilm"],  # which batch runs when, and what is kept
    "jaxembed/engine/autotune/**": ["numerics", "slow", "parity minilm"],
    **{
        f"jaxembed/engine/{name}.py": ["numerics", "eval", "estimates", f"parity {BACKBONES}"]
        for name in ("batch", "bucket", "build", "compiles", "placement", "replica", "transfer")
    },
    "jaxembed/models/**": ["numerics", "eval", "estimates", f"parity {BACKBONES}"],
    "jaxembed/models/kernels/**": ["numerics", "estimates"],
    "jaxembed/models/native/**": ["numerics", "slow", "wheel", "eval"],
    "jaxembed/models/clip.py": ["numerics", "parity dual jina_clip"],
    "jaxembed/models/deberta.py": ["numerics", "parity deberta"],
    "jaxembed/models/experts.py": ["numerics", "parity nomic_moe"],
    "jaxembed/models/modernbert.py": ["numerics", "estimates", "parity modernbert"],
    "jaxembed/models/pages.py": ["numerics", "parity pages colqwen biqwen"],
    "jaxembed/models/qwen_vision.py": ["numerics", "parity colqwen biqwen"],
    "jaxembed/models/rope.py": ["numerics", "estimates", "parity rope rotary_encoders jina_v3"],
    "jaxembed/models/t5.py": ["numerics", "parity t5"],
    "jaxembed/models/static.py": ["parity static router"],
    "jaxembed/models/adapters.py": ["numerics", "parity adapters jina_v3"],
    "jaxembed/preprocessing/images/**": ["parity dual colqwen biqwen pages"],
    "jaxembed/preprocessing/**": [f"parity {BACKBONES} late cross_encoders colbert"],
    "jaxembed/preprocessing/images/processor.py": ["parity dual colqwen biqwen pages"],
    "jaxembed/runtime/postprocess.py": [
        "parity minilm quantise",
        "parity colbert",
        "parity splade m3",
    ],
    "jaxembed/runtime/requests.py": ["parity minilm quantise"],
    "jaxembed/quantise.py": ["parity quantise"],
    "jaxembed/runtime/similarity.py": ["parity colbert m3"],
    "jaxembed/tools/verify/**": ["slow", "parity verify"],
    # converters
    "converters/**": ["numerics", f"parity {BACKBONES}"],
    **{
        f"converters/*/{name}.py": ["numerics", f"parity {name}"]
        for name in (
            *(
                "adapters",
                "albert",
                "bert",
                "deberta",
                "distilbert",
                "electra",
                "eurobert",
                "gemma2",
            ),
            *("gemma3", "gte", "jina_bert", "llama", "m3", "ministral3", "mistral", "modernbert"),
            *("mpnet", "qwen2", "qwen3", "rope"),
        )
    },
    "converters/*/dse.py": ["numerics", "parity dse"],
    "converters/*/gme.py": ["numerics", "parity gme"],
    "converters/*/jina_v4.py": ["numerics", "parity jina_v4"],
    "converters/families/nomic_bert.py": ["numerics", "parity nomic_bert nomic_moe"],
    "converters/vision/colpali.py": ["numerics", "parity pages"],
    "converters/vision/colqwen.py": ["numerics", "parity colqwen biqwen"],
    "converters/families/decoders.py": [
        "numerics",
        "parity qwen2 qwen3 llama mistral ministral3 gemma2 gemma3",
    ],
    "converters/families/t5.py": ["numerics", "parity mpnet t5"],
    "converters/vision/dual.py": ["numerics", "parity dual jina_clip"],
    "converters/vision/jina_clip.py": ["numerics", "parity jina_clip"],
    "converters/vision/open_clip.py": ["parity dual jina_clip"],
    "converters/vision/image_rules.py": ["numerics", "parity dual pages colqwen"],
    "converters/families/jina.py": ["numerics", "parity jina_v3 jina_clip"],
    "converters/features/late_interaction.py": ["numerics", "parity colbert"],
    "converters/vision/pages.py": ["numerics", "parity pages colqwen biqwen"],
    "converters/families/roberta.py": ["numerics", "parity roberta xlm_roberta camembert"],
    "converters/features/scores.py": ["numerics", "parity qwen3 cross_encoders"],
    "converters/router.py": ["numerics", "parity router"],
    "converters/tokenizers/sentencepiece_*": ["numerics", "parity sentencepiece xlm_roberta"],
    "converters/features/static.py": ["numerics", "parity splade static"],
    "converters/features/terms.py": ["numerics", "parity splade"],
    "tests/golden/**": ["parity goldens"],
    "tests/parity/requirements.txt": ["parity"],
    # the rest of the library
    "jaxembed/*.py": [],
    "jaxembed/data/**": [],
    "jaxembed/platform/**": [],
    "jaxembed/observability/**": [],
    "jaxembed/checkpoints/**": [],
    "jaxembed/runtime/**": [],
    "jaxembed/tools/**": [],
    "jaxembed/py.typed": ["wheel"],
    "jaxembed/tools/known_models.json": ["wheel"],
    "jaxembed/checkpoints/hub.py": ["wheel"],
    "jaxembed/platform/object_store.py": ["deploy"],
    "jaxembed/checkpoints/stored_checkpoint.py": ["deploy"],
    "jaxembed/observability/metrics.py": ["deploy"],
    "jaxembed/memory.py": ["slow"],
    **{f"jaxembed/runtime/{name}.py": ["slow"] for name in ("model", "routes", "runner")},
    "jaxembed/bulk/**": ["slow", "stores", "ray"],
    "jaxembed/cli/**": ["slow", "deploy"],
    "jaxembed/tools/doctor/**": ["slow"],
    "jaxembed/tools/tune/**": ["slow"],
    "jaxembed/integrations/**": ["ray"],
    "examples/**": [],
    "examples/fill_*": ["stores"],
    "examples/hybrid_search.py": ["stores"],
    "examples/ray_*": ["ray"],
    # the server
    "jaxembed/server/**": [],
    "jaxembed/server/http/connection.py": ["slow"],
    "jaxembed/server/metrics.py": ["deploy"],
    "jaxembed/server/run.py": ["slow"],
    "jaxembed/server/routes/playground.*": ["page"],
    "jaxembed/server/routes/openai.py": ["page"],
    "jaxembed/server/routes/openapi.py": ["page"],
}


def needed(files: Iterable[str]) -> list[str]:
    """The targets that changes of these files need. Of paths in the table that fit a file the
    longest counts."""
    found: dict[str, set[str]] = {}
    for file in files:
        for target in _targets_of(file) or []:
            name, *which = target.split()
            found.setdefault(name, set()).update(which or {""})
    return [
        target if "" in found[target] else f"{target} {' '.join(sorted(found[target]))}"
        for target in TARGETS
        if target in found
    ]


def uncovered(files: Iterable[str]) -> list[str]:
    """The files of the product that no path in the table fits."""
    of_product = (file for file in files if any(_fits(file, one) for one in PRODUCT))
    return [file for file in of_product if _targets_of(file) is None]


def changed() -> list[str] | None:
    """The files that differ from the base, committed or not; None without a base that is known."""
    try:
        base = BASE.read_text().strip()
        _git("merge-base", "--is-ancestor", base, "HEAD")
        return [
            *_git("diff", "--name-only", base),
            *_git("ls-files", "--others", "--exclude-standard"),
        ]
    except (OSError, subprocess.CalledProcessError):
        return None


def _targets_of(file: str) -> list[str] | None:
    if file.startswith("tests/parity/test_"):
        return [f"parity {Path(file).stem.removeprefix('test_')}"]
    fitting = [one for one in TABLE if _fits(file, one)]
    if fitting:
        return TABLE[max(fitting, key=len)]
    if re.fullmatch(r"tests/.*test_\w+\.py", file) and (ROOT / file).is_file():
        text = (ROOT / file).read_text()
        return [suite for suite, mark in MARKS.items() if re.search(mark, text)]
    return None


def _fits(file: str, path: str) -> bool:
    pattern = re.escape(path).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(pattern, file) is not None


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> None:
    if "--check" in sys.argv:
        if missing := uncovered(_git("ls-files")):
            sys.exit(f"no line of the table in .ci/suites.py covers {', '.join(missing)}")
        return
    files = None if "--all" in sys.argv else changed()
    for target in TARGETS if files is None else needed(files):
        print(target)


if __name__ == "__main__":
    main()
