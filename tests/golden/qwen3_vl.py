"""Saves random models with the files of Qwen3-VL-Embedding and Qwen3-VL-Reranker, and gives what
transformers' model computes from the ids that the authors' code makes."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden.families import qwen_bytes, randomise, sized
from PIL import Image
from sources import NORMALIZE, POOLING, TRANSFORMER, write_json, write_modules
from torch.nn.functional import normalize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

Answer = Callable[[Any, dict[str, Any]], dict[str, np.ndarray]]
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}"
    "<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
DEFAULT = "default"
PROMPTS = {DEFAULT: "Represent the user's input.", "query": "Where is the dog"}
EMPTY = "NULL"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
TASK = "Given a search query, retrieve relevant candidates that answer the query."
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
LIMIT = 112  # tokens of a text; an image has up to 102
PAIR_LIMIT = 330

TEXT = sized(20, 3, 4, 24, 1024, num_key_value_heads=2, head_dim=12)
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 2, 2]}}
VISION = {"depth": 3, "hidden_size": 8, "num_heads": 2, "intermediate_size": 20}
VISION |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}

IMAGES: dict[str, Any] = {  # one token to twelve, of 8 by 8 pixels
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64, "longest_edge": 12 * 64},
    "patch_size": 4,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def save_model(
    folder: Path,
    text: dict[str, Any],
    vision: dict[str, Any],
    images: dict[str, Any] = IMAGES,
) -> tuple[Any, Any]:
    """A model and its tokenizer, as transformers saves them."""
    tokenizer = qwen_bytes(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    start, end, pad = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    config = transformers.Qwen3VLConfig(
        text_config=text | {"vocab_size": len(tokenizer)},
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=pad,
        tie_word_embeddings=True,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    randomise(model)
    model.eval().save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", images)
    return model, tokenizer


def completed(instruction: str) -> str:
    """An instruction as the authors' code changes it."""
    instruction = instruction.strip()
    ends = unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends else f"{instruction}."


def ids_of(tokenizer: Any, prompt: str, text: str) -> list[int]:
    """The ids of a text, which is cut so that the end of the template stays."""
    messages = [{"role": "system", "content": prompt}]
    messages.append({"role": "user", "content": text or EMPTY})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    tail = tokenizer(TAIL)["input_ids"]
    limit = tokenizer.model_max_length - len(tail)
    return [*ids[: -len(tail)][:limit], *tail]


def write_embedder(folder: Path, width: int, prompts: dict[str, str], limit: int) -> None:
    """The files of sentence-transformers, in the spelling of its version 6."""
    write_modules(folder, (TRANSFORMER, ""), (POOLING, "1_Pooling"), (NORMALIZE, "2_Normalize"))
    pooling = {"embedding_dimension": width, "pooling_mode": "lasttoken", "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    said = {"prompts": prompts, "default_prompt_name": DEFAULT}
    write_json(folder / "config_sentence_transformers.json", said)
    said = {
        "transformer_task": "feature-extraction",
        "max_seq_length": limit,
        "modality_config": {"message": {"method": "forward", "format": "structured"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(folder / "sentence_bert_config.json", said)


Parts = list[str | np.ndarray]  # texts, and images as uint8 `[height, width, 3]`


def spelled(parts: Parts, images: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text that stands for the parts of an input, and the pixels of its images."""
    processor, texts = Qwen2VLImageProcessorPil(**images), []
    pictures = [Image.fromarray(part) for part in parts if not isinstance(part, str)]
    inputs = dict(processor(pictures, return_tensors="pt")) if pictures else {}
    grids = iter(inputs.get("image_grid_thw", ()))
    start, end, pad = VISION_TOKENS
    for part in parts:
        texts.append(part if isinstance(part, str) else start + int(next(grids).prod()) // 4 * pad)
        texts.append("" if isinstance(part, str) else end)
    return "".join(texts), inputs


def states_of(model: Any, ids: list[int], inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden states of a sequence, `[tokens, width]`."""
    rows = torch.tensor([ids])
    is_image = (rows == model.config.image_token_id).int()
    model.model.rope_deltas = None  # of the last image
    return model.model(input_ids=rows, mm_token_type_ids=is_image, **inputs).last_hidden_state[0]


def answer_of(model: Any, tokenizer: Any, limit: int, images: dict[str, Any]) -> Answer:
    """What gives the vector of a text, of an image, or of a list of these."""

    @torch.no_grad()
    def answer(item: Any, options: dict[str, Any]) -> dict[str, np.ndarray]:
        asked = PROMPTS[options.get("prompt_name", DEFAULT)]
        if "instruction" in options:
            asked = completed(options["instruction"])
        text, inputs = spelled(item if isinstance(item, list) else [item], images)
        tokenizer.model_max_length = limit
        if inputs:
            tokenizer.model_max_length = model.config.text_config.max_position_embeddings
        states = states_of(model, ids_of(tokenizer, asked, text), inputs)
        return {"dense": normalize(states[-1], dim=0).numpy()}

    return answer


def save_embedder(folder: Path) -> Answer:
    """An embedder, and its vector of a text or an image."""
    model, tokenizer = save_model(folder, TEXT, VISION)
    write_embedder(folder, TEXT["hidden_size"], PROMPTS, LIMIT)
    return answer_of(model, tokenizer, LIMIT, IMAGES)


def pair_ids(tokenizer: Any, query: str, document: str) -> list[int]:
    """The ids of a pair, of which the last before the end of the template are cut."""
    text = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: {TASK}<Query>:"
    text += f"{query or EMPTY}\n<Document>:{document or EMPTY}{TAIL}"
    ids = tokenizer(text)["input_ids"]
    tail = tokenizer(TAIL)["input_ids"]
    return [*ids[: -len(tail)][: tokenizer.model_max_length - len(tail)], *tail]


def save_reranker(
    folder: Path,
    text: dict[str, Any] = TEXT,
    vision: dict[str, Any] = VISION,
    images: dict[str, Any] = IMAGES,
) -> Callable[[Any, Any], float]:
    """A reranker with the module LogitScore, and its logit of a pair, whose items are texts or
    Parts."""
    model, tokenizer = save_model(folder, text, vision, images)
    (folder / "README.md").write_text(JUDGE)
    tokenizer.model_max_length = PAIR_LIMIT
    yes, no = 70, 90
    ids = {"true_token_id": yes, "false_token_id": no}
    write_modules(folder, (TRANSFORMER, ""), (LOGIT_SCORE, "1_LogitScore"))
    write_json(folder / "1_LogitScore" / "config.json", ids)
    said = {"transformer_task": "any-to-any", "max_seq_length": PAIR_LIMIT}
    write_json(folder / "sentence_bert_config.json", said)

    @torch.no_grad()
    def judge(query: Any, document: Any) -> float:
        pair = [part if isinstance(part, list) else [part] for part in (query, document)]
        (query, _), (document, _) = (spelled(parts, images) for parts in pair)
        _, inputs = spelled([*pair[0], *pair[1]], images)
        state = states_of(model, pair_ids(tokenizer, query, document), inputs)[-1]
        logits = model.lm_head(state)
        return float(logits[yes] - logits[no])

    return judge
