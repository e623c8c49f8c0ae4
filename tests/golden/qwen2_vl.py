"""Saves random models with the files of jina-reranker-m0, and scores pairs by the formulas of its
modeling.py over transformers' Qwen2VLModel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from golden.families import qwen_bytes, randomise, sized
from golden.qwen3_vl import IMAGES, VISION_TOKENS, spelled, states_of
from safetensors.torch import save_file
from sources import write_json

CODE = "modeling.JinaVLForRanking"
PAIR_LIMIT = 128  # tokens
SCORE_ID, LOGIT_BIAS = 100, 2.65

TEXT = sized(16, 3, 2, 24, PAIR_LIMIT, num_key_value_heads=1)
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
VISION = {"depth": 2, "embed_dim": 8, "num_heads": 2, "mlp_ratio": 3, "patch_size": 4}
# As Qwen2-VL's, which also accepts the roles of a query and a document.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)


class Reference(torch.nn.Module):
    """The published model; its tensors have the published names."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, width = config, config.text_config.hidden_size
        self.model = transformers.Qwen2VLModel(config)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )


def pair_text(query: str, document: str) -> str:
    return f"**Document**:\n{document}\n**Query**:\n{query}"


def save(
    folder: Path,
    text: dict[str, Any] = TEXT,
    vision: dict[str, Any] = VISION,
    images: dict[str, Any] = IMAGES,
) -> Callable[[Any, Any], float]:
    """A reranker, and its logit of a pair, whose items are texts or Parts. The document of too long
    a pair is cut."""
    tokenizer = qwen_bytes(folder, more=VISION_TOKENS)
    tokenizer.chat_template, tokenizer.model_max_length = CHAT, text["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    start, end, pad = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    config = transformers.Qwen2VLConfig(
        text_config=text | {"vocab_size": len(tokenizer)},
        vision_config=vision | {"hidden_size": text["hidden_size"]},
        image_token_id=pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    reference = Reference(config).eval()
    randomise(reference)
    # the fields and names of the published files, which transformers 4 wrote
    names = {"architectures": ["JinaVLForRanking"], "auto_map": {"AutoModel": CODE}}
    flat = config.to_dict() | names
    rope = flat.pop("text_config") | {"rope_parameters": None}
    theta, sections = (text["rope_parameters"][key] for key in ("rope_theta", "mrope_section"))
    rope |= {"rope_theta": theta, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    write_json(folder / "config.json", rope | flat)
    tensors = reference.state_dict()
    for new, old in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        tensors = {name.replace(new, old): one for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "preprocessor_config.json", images)

    @torch.no_grad()
    def judge(query: Any, document: Any) -> float:
        pair = [part if isinstance(part, list) else [part] for part in (query, document)]
        (query, _), (document, _) = (spelled(parts, images) for parts in pair)
        _, inputs = spelled([*pair[1], *pair[0]], images)
        ids = ids_of(tokenizer, query, document)
        return float(reference.score(states_of(reference, ids, inputs)[-1]) - LOGIT_BIAS)

    return judge


def ids_of(tokenizer: Any, query: str, document: str) -> list[int]:
    """The ids of a pair, whose document is cut to leave room for the query."""
    ids, room = tokenizer(pair_text(query, document))["input_ids"], tokenizer.model_max_length - 1
    if len(ids) > room:
        end = tokenizer(f"\n**Query**:\n{query}")["input_ids"]
        ids = [*ids[: room - len(end)], *end]
    return [*ids, SCORE_ID]
