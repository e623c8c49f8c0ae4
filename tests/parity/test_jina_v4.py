"""jina-embeddings-v4 against transformers' Qwen2.5-VL with each task's adapter merged, and the
formulas of the model's code: one vector, and vectors of tokens, of texts and images."""

import copy
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import torch
from colqwen_sources import IMAGE_ID, qwen_words, vlm_config
from dual_sources import png
from PIL import Image
from safetensors.torch import load_file, save_file
from sources import change_json, write_json
from torch.nn.functional import normalize
from transformers import ColQwen2Processor, PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from parity.reference import answers, assert_within, with_odd_norms
from parity.test_colqwen import BUCKETS, pictures, wide_config

TASKS = ("retrieval", "text-matching", "code")
PREFIXES = {"query": "Query: ", "passage": "Passage: "}
PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
)
START_ID, END_ID = IMAGE_ID - 2, IMAGE_ID - 1
RANK, ALPHA, VECTOR_WIDTH = 4, 6, 16
TEXTS = ["who wrote it?", "Größe", "the total of 2024, and of the years before it", "a"]


class Reference:
    """The model with a task's adapter merged into the language model and the projector."""

    def __init__(self, model: Qwen2_5_VLModel, projector: torch.nn.Linear, processor):
        self.model, self.projector, self._processor = model.eval(), projector, processor

    @torch.no_grad()
    def _outputs(self, inputs) -> tuple[np.ndarray, np.ndarray]:
        ids = inputs["input_ids"]
        hidden = self.model(**inputs, mm_token_type_ids=(ids == IMAGE_ID).int())
        self.model.rope_deltas = None  # which it would add to the next input
        states, pooled = hidden.last_hidden_state[0], slice(None)
        if START_ID in ids:
            (first,), (last,) = (
                torch.where(ids[0] == one)[0].tolist() for one in (START_ID, END_ID)
            )
            pooled = slice(first, last + 1)
        vectors = normalize(self.projector(states), dim=-1)
        return normalize(states[pooled].mean(dim=0), dim=0).numpy(), vectors.numpy()

    def of_text(self, text: str):
        return self._outputs(dict(self._processor.tokenizer(text, return_tensors="pt")))

    def of_image(self, colours: np.ndarray):
        images = self._processor.image_processor(Image.fromarray(colours), return_tensors="pt")
        count = int(images["image_grid_thw"].prod()) // 4
        text = PAGE.replace("<|image_pad|>", count * "<|image_pad|>")
        return self._outputs({**self._processor.tokenizer(text, return_tensors="pt"), **images})


@pytest.fixture(
    name="jina",
    scope="module",
    params=["tiny", pytest.param("wide", marks=pytest.mark.slow)],
)
def _jina(request, tmp_path_factory) -> tuple[dict[str, Reference], Path]:
    """The references by task, and the folder of the model as its authors publish it."""
    folder = tmp_path_factory.mktemp("jina") / "model"
    torch.manual_seed(0)
    stated = wide_config("qwen2_5_vl") if request.param == "wide" else vlm_config("qwen2_5_vl")
    stated |= {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    config = Qwen2_5_VLConfig(**stated)
    model = with_odd_norms(Qwen2_5_VLModel(config).float())
    projector = torch.nn.Linear(config.text_config.hidden_size, VECTOR_WIDTH)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen_words(), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    sides = {"shortest_edge": 784, "longest_edge": 40 * 784}
    processor = ColQwen2Processor(Qwen2VLImageProcessorPil(size=sides), tokenizer)
    model.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # the names of old checkpoints: model.layers and visual
    renamed = {k.replace("language_model.", "model."): x for k, x in tensors.items()}
    own = {f"multi_vector_projector.{k}": x.detach() for k, x in projector.state_dict().items()}
    save_file(renamed | own, folder / "model.safetensors")
    adapters, references = {}, {}
    for task in TASKS:
        changed = copy.deepcopy(torch.nn.ModuleDict({"vlm": model, "projector": projector}))
        for name, module in changed.named_modules():
            if not isinstance(module, torch.nn.Linear) or ".visual." in name:
                continue
            down = torch.randn(RANK, module.in_features) / module.in_features**0.5
            up = torch.randn(module.out_features, RANK) / (2 * RANK)
            module.weight.data += ALPHA / RANK * up @ down
            published = name.replace("vlm.", "model.").replace(
                "projector", "multi_vector_projector"
            )
            for part, factor in (("A", down), ("B", up)):
                adapters[f"base_model.model.{published}.lora_{part}.{task}.weight"] = factor
        references[task] = Reference(changed["vlm"], changed["projector"], processor)
    lora = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapters").mkdir()
    write_json(folder / "adapters" / "adapter_config.json", lora)
    save_file(adapters, folder / "adapters" / "adapter_model.safetensors")
    change_json(
        folder / "config.json",
        architectures=["JinaEmbeddingsV4Model"],
        auto_map={"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"},
        task_names=list(TASKS),
        single_vector_pool_strategy="mean",
        multi_vector_projector_dim=VECTOR_WIDTH,
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    return references, folder


def worst(got, wanted) -> float:
    assert [one.shape for one in got] == [one.shape for one in wanted]
    return max(float(np.abs(one - other).max()) for one, other in zip(got, wanted, strict=True))


def test_vectors_of_texts_and_images_are_those_of_its_formulas(jina, make_embedder, note):
    references, folder = jina
    ours = make_embedder(folder, BUCKETS)
    apart = 0.0
    for task in (None, *TASKS):
        reference = references[task or "retrieval"]
        options = {} if task is None else {"adapter": task}
        single, several = zip(*map(reference.of_image, pictures()), strict=True)
        apart = max(apart, worst(ours.encode(images=pictures(), **options), single))
        apart = max(apart, worst(ours.encode_multi(images=pictures(), **options), several))
        for name, prefix in {None: "Query: ", **PREFIXES}.items():
            texts = [reference.of_text(prefix + text) for text in TEXTS]
            single, several = zip(*texts, strict=True)
            apart = max(apart, worst(ours.encode(TEXTS, prompt_name=name, **options), single))
            vectors = ours.encode_multi(TEXTS, prompt_name=name, **options)
            apart = max(apart, worst(vectors, several))
    of_tasks = [references[task].of_text("Query: a") for task in TASKS]
    assert np.abs(of_tasks[0][0] - of_tasks[1][0]).max() > 0.01
    assert np.abs(of_tasks[0][1] - of_tasks[2][1]).max() > 0.01
    assert_within(apart, note, "components")


def test_answers_over_http_are_those_of_its_formulas(jina, make_embedder, note):
    """In Jina's form, with a task for texts and images together."""
    references, folder = jina
    ours = make_embedder(folder, BUCKETS)
    reference, image = references["code"], pictures()[1]
    inputs = [{"text": "a"}, {"image": b64encode(png(image)).decode()}, {"text": "Größe"}]
    of_texts = [reference.of_text(f"Passage: {one}") for one in ("a", "Größe")]
    wanted = [of_texts[0], reference.of_image(image), of_texts[1]]
    body = {"input": inputs, "task": "code.passage"}
    plain, several = answers(ours, "/v1/embeddings", [body, body | {"return_multivector": True}])
    apart = worst([np.array(one["embedding"]) for one in plain["data"]], [one for one, _ in wanted])
    vectors = [np.array(one["embeddings"]) for one in several["data"]]
    apart = max(apart, worst(vectors, [one for _, one in wanted]))
    assert_within(apart, note, "components")
