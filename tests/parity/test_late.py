"""Late chunking against the chunked pooling of jina-ai/late-chunking, over the hidden states that
sentence-transformers computes: models that pool by the mean, texts that fit and long ones."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from golden import make
from golden.families import FAMILIES
from sentence_transformers import SentenceTransformer

from jaxembed import ChunkedText
from parity.reference import assert_within, minilm, relative

CASES = {
    name: case
    for name, case in make.CASES.items()
    if isinstance(case, make.Case) and case.head is None and case.pooling == "mean"
}
SENTENCES = ["the cat sat on the mat.", "What is a dog?", "The red sky, where it runs: blue!"]


class LateReference:
    """Late chunking with torch. A text is its tokens, and each belongs to the chunk in which its
    first character lies that is not white space."""

    def __init__(self, model: SentenceTransformer, *, include_prompt: bool):
        self.model = model
        self.include_prompt = include_prompt
        self.backbone = model[0]

    def vectors(self, text: str, chunks, prompt: str = "") -> np.ndarray:
        whole = prompt + text
        asked = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        found = self.model.tokenizer(whole, **asked)
        own = [k for k, special in enumerate(found["special_tokens_mask"]) if not special]
        places = [self._place(whole, found["offset_mapping"][k]) - len(prompt) for k in own]
        head = own[0] + sum(place < 0 for place in places)
        ids, tail = found["input_ids"], len(found["input_ids"]) - own[-1] - 1

        def before(end: int) -> int:
            return head + sum(0 <= place < end for place in places)

        ranges = [(before(start), before(end)) for start, end in chunks]
        first = 0 if self.include_prompt or not prompt else self._length_of(prompt)
        return self._finished(self._pooled(ids, head, tail, ranges, first))

    @staticmethod
    def _place(text: str, span) -> int:
        start, end = span
        return next((k for k in range(start, end) if not text[k].isspace()), start)

    def _length_of(self, prompt: str) -> int:
        found = self.model.tokenizer(prompt, return_special_tokens_mask=True)
        return len(found["input_ids"]) - found["special_tokens_mask"][-1]

    def _hidden(self, ids) -> np.ndarray:
        rows = torch.tensor([ids])
        features = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        with torch.no_grad():
            return self.backbone(features)["token_embeddings"][0].numpy().astype(np.float64)

    def _pooled(self, ids, head, tail, ranges, first) -> np.ndarray:
        """The mean of each range. A text that does not fit is run in windows by hand: as many
        chunks as fit, after up to a quarter of a window of context."""
        count = len(ids) - tail
        room = self.model.max_seq_length - head - tail
        if count - head <= room:
            hidden = self._hidden(ids)
            ends = [end + tail * (end == count) for _, end in ranges]
            starts = [first if start == head else start for start, _ in ranges]
            spans = zip(starts, ends, strict=True)
            return np.stack([hidden[start:end].mean(axis=0) for start, end in spans])
        means, at = [], 0
        while at < len(ranges):
            begin = max(ranges[at][0] - (room // 4 if at else 0), head)
            last = min(begin + room, count)
            hidden = self._hidden(ids[:head] + ids[begin:last] + ids[count:])
            while at < len(ranges) and ranges[at][1] <= last:
                start, end = (place - begin + head for place in ranges[at])
                start = first if ranges[at][0] == head else start
                end += tail * (ranges[at][1] == count)
                means.append(hidden[start:end].mean(axis=0))
                at += 1
        return np.stack(means)

    def _finished(self, pooled: np.ndarray) -> np.ndarray:
        """After the modules that follow the pooling."""
        features = {"sentence_embedding": torch.tensor(pooled, dtype=torch.float32)}
        with torch.no_grad():
            for module in list(self.model)[2:]:
                features = module(features)
        return features["sentence_embedding"].numpy()


def chunks_of(sentences: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """The sentences as one text, and where they are in it, the spaces between them left out."""
    text = " ".join(sentences)
    ends = np.cumsum([len(one) + 1 for one in sentences]).tolist()
    return text, [(start, end - 1) for start, end in pairwise([0, *ends])]


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_random_models_agree(name, tmp_path, make_embedder, note):
    case = CASES[name]
    family = FAMILIES[case.family]
    positions = {"max_position_embeddings": 64 + family.spare_positions}
    case = replace(case, max_seq_length=64, config=case.config | positions)
    make.save(case, tmp_path)
    model = make.load(tmp_path)
    make.publish(family, tmp_path)
    embedder = make_embedder(tmp_path, [(2, 64)])
    model.max_seq_length = embedder.max_input_tokens
    reference = LateReference(model, include_prompt=case.include_prompt)
    words = [word for one in SENTENCES for word in one.split()]
    for repeats, run in ((1, "one pass"), (8, "windows")):
        text, chunks = chunks_of(words * repeats)
        apart = 0.0
        for prompt in {"", *(case.prompts or {}).values()}:
            (got,) = embedder.encode_chunks([ChunkedText(text, chunks)], prompt=prompt)
            apart = max(apart, relative(got.vectors, reference.vectors(text, chunks, prompt)))
        assert_within(apart, note, f"chunks in {run}")


@pytest.mark.parametrize("repeats", [1, 30], ids=["one pass", "windows"])
def test_chunks_of_the_real_model_agree(repeats, make_embedder, note):
    embedder = make_embedder(minilm(), [(2, 256)])
    reference = LateReference(make.load(minilm()), include_prompt=True)
    text, chunks = chunks_of(SENTENCES * repeats)
    (got,) = embedder.encode_chunks([ChunkedText(text, chunks)])
    assert_within(relative(got.vectors, reference.vectors(text, chunks)), note, "chunks")
