"""Makes the folders beside this file with the code of earlier versions.

    python tests/upgrades/make.py [FOLDER]...

Run it in a clone with its history; each version must run with what is installed now. A folder is
one version's cache directory, without compiled programs, and the grids it wrote.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as for pytest

from test_golden import read, write_source

HERE = Path(__file__).parent
MODIFIED_S = 1_700_000_000  # of every file of a source: its cache entry is named by these times


@dataclass(frozen=True)
class Version:
    """A commit, the golden that it converted, and whether it had `jaxembed tune`."""

    commit: str
    golden: str
    tunes: bool = False


VERSIONS = {
    # embedders alone; an entry of the cache is named by its source
    "format-1": Version("f076ced", "bert_mean"),
    # the first with rerankers; the manifest does not say whether token types are given
    "format-2-without-token-types": Version("41e6b0a", "bert_cross_encoder"),
    # token types, digests, kept costs
    "format-2-digests": Version("8f7be45", "bert_mean", tunes=True),
    # an entry is named by its source and the state of that
    "format-2-states": Version("6242f23", "bert_mean", tunes=True),
    # the last of format 2: parameters of modules are not named by a head
    "format-2-classifier": Version("3610ae5", "bert_classifier"),
    "format-2-dense": Version("3610ae5", "bert_concatenated"),
    # heads with names
    "format-3": Version("712725a", "bert_concatenated", tunes=True),
    # further kinds of heads
    "format-4": Version("4621e74", "bert_concatenated", tunes=True),
}

# Run in each version. Costs are kept by those that tune, of a busy machine too: nobody uses these.
USE = """
import sys, time
from pathlib import Path
from jaxembed import Embedder, EngineConfig
cache, keeps_costs = Path("cache"), sys.argv[2:] == ["keeps-costs"]
if keeps_costs:
    from jaxembed.engine import cost_file, costs
    cost_file.BUSY_SPREAD = costs.MAX_WAITED = float("inf")  # by earlier versions, and by later
config = EngineConfig(dtype="float32", devices=1, max_batch_tokens=64, warmup="full")
with Embedder(sys.argv[1], cache_dir=cache, config=config):
    while keeps_costs and not list(cache.glob("costs/*.json")):
        time.sleep(0.1)
"""
TUNE = "from jaxembed.cli import main; main()"
TEXTS = "the cat sat on the mat\nwhat is a dog?\nthe red sky\n" * 4


def write_dated_source(golden: Path, folder: Path) -> Path:
    """The source of a golden, with the times that fixtures were made from."""
    write_source(read(golden), folder)
    for path in folder.rglob("*"):
        os.utime(path, (MODIFIED_S, MODIFIED_S))
    return folder


def make(name: str) -> None:
    version = VERSIONS[name]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        code = subprocess.run(
            ["git", "-C", str(HERE.parents[1]), "archive", "--prefix=code/", version.commit],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(code)) as archive:
            archive.extractall(work, filter="data")
        golden = HERE.parent / "golden" / f"{version.golden}.npz"
        write_dated_source(golden, work / version.golden)
        (work / "texts.txt").write_text(TEXTS)
        environment = os.environ | {"PYTHONPATH": str(work / "code"), "JAX_PLATFORMS": "cpu"}

        def run(program: str, *arguments: str) -> None:
            command = [sys.executable, "-c", program, *arguments]
            subprocess.run(command, check=True, cwd=work, env=environment)

        source = f"./{version.golden}"
        run(USE, source, *(["keeps-costs"] if version.tunes else []))
        if version.tunes:
            flags = ["-m", source, "--dtype", "float32", "--devices", "1", "--seconds", "1"]
            run(TUNE, "tune", "texts.txt", "-o", "buckets.json", *flags, "--cache-dir", "other")
        replace(HERE / name, work)


def replace(folder: Path, work: Path) -> None:
    """Put what the version left in `work` in place of the folder."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir()
    for found in (work / "cache", work / "buckets.json"):
        if found.exists():
            subprocess.run(["cp", "-r", str(found), str(folder)], check=True)
    for lock in folder.rglob("*.lock"):
        lock.unlink()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or VERSIONS:
        make(chosen)
