"""transformers' forward of a model with random weights, on token ids: what torch does with lengths.

Runs in torch's environment: bf16, scaled dot product attention, rows sorted by length and padded to
the longest of their batch, mean pooled, as sentence-transformers runs a model, without its
tokenizer. Standard input is a JSON object with `model_type` and `config` of transformers, `mixes`
(lengths by name), `batches` to try and `repeat`; the last line of output is one of rows.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


def main() -> None:
    job = json.load(sys.stdin)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = transformers.AutoConfig.for_model(job["model_type"], **job["config"])
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    rows = []
    for name, lengths in job["mixes"].items():
        found = {batch: seconds(model, lengths, batch, job["repeat"]) for batch in job["batches"]}
        batch = min(found, key=lambda size: found[size])
        rows.append({"mix": name, "batch": batch, "tokens_per_s": sum(lengths) / found[batch]})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"results": rows, "device": str(device), "versions": versions}))


@torch.inference_mode()
def seconds(model: Any, lengths: list[int], batch: int, repeat: int) -> float:
    """The median over runs of embedding every sequence, after one that is not counted."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        embed(model, sorted(lengths, reverse=True), batch)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeat // 2]


def embed(model: Any, lengths: list[int], batch: int) -> torch.Tensor:
    pooled = []
    for start in range(0, len(lengths), batch):
        rows = torch.tensor(lengths[start : start + batch])
        mask = (torch.arange(int(rows.max()))[None] < rows[:, None]).to(model.device)
        ids = mask * torch.randint(5, model.config.vocab_size, mask.shape, device=mask.device)
        hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        weights = mask[:, :, None].float()
        pooled.append((hidden * weights).sum(1) / weights.sum(1))
    return torch.nn.functional.normalize(torch.cat(pooled)).cpu()


if __name__ == "__main__":
    main()
