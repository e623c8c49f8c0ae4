"""The tokenizer of plain ASCII gives what the whole tokenizer gives."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxembed.preprocessing import word_cache
from jaxembed.preprocessing.tokenizer import Tokenizer

WORDS = [
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *"abcéz!-.",
    "##a",
    "##b",
    "##z",
    "ab",
    "Ab",
    "##ab",
    "cafe",
    "café",
]
NORMALIZERS = {
    "BERT": normalizers.BertNormalizer(),
    "BERT, cased": normalizers.BertNormalizer(lowercase=False),
    "BERT, accents kept": normalizers.BertNormalizer(strip_accents=False),
    "NFC": normalizers.NFC(),
    "a sequence": normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    ),
    "only Unicode": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "replaces": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("b", "a a")]),
}
OTHER = {"none": None, "lowercase": normalizers.Lowercase()}


def tokenizer_with(normalizer, folder, *added: AddedToken) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    file = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    if normalizer is not None:
        file.normalizer = normalizer
    file.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    file.add_special_tokens(["[CLS]", "[SEP]"])
    file.add_tokens([AddedToken("zz", normalized=True), AddedToken("Cat", lstrip=True)])
    file.add_tokens(list(added))
    file.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = folder / "tokenizer.json"
    file.save(str(path))
    return Tokenizer(path)


@pytest.fixture(name="made", scope="module", params=NORMALIZERS)
def _made(request, tmp_path_factory):
    return tokenizer_with(NORMALIZERS[request.param], tmp_path_factory.mktemp("tokenizer"))


PIECES = st.sampled_from(["[CLS]", "[sep]", "zz", "Zz", " Cat", "cat", "ab", "\u0301", "é", "漢"])
ASCII = st.characters(max_codepoint=127)
TEXTS = st.lists(st.lists(ASCII | st.characters() | PIECES, max_size=12).map("".join), max_size=4)


def fields(encoding) -> tuple:
    return encoding.ids, encoding.type_ids, encoding.special_tokens_mask


@given(texts=TEXTS, special=st.booleans())
def test_every_text_gets_the_tokens_of_the_whole_tokenizer(made, texts, special):
    assert made._of_ascii is not None
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]  # no lone surrogates
    whole = made.file.encode_batch(texts, add_special_tokens=special)
    for fast in (False, True):
        encodings = made.encode(texts, special=special, fast=fast)
        assert list(map(fields, encodings)) == list(map(fields, whole))
        if not fast:
            assert [e.offsets for e in encodings] == [e.offsets for e in whole]
            assert [e.word_ids for e in encodings] == [e.word_ids for e in whole]


@pytest.mark.parametrize("name", OTHER)
def test_a_normalizer_without_unicode_steps_is_left_alone(name, tmp_path):
    assert tokenizer_with(OTHER[name], tmp_path)._of_ascii is None


def test_an_added_token_that_ascii_may_spell_after_the_normalizer_counts(tmp_path):
    made = tokenizer_with(NORMALIZERS["BERT"], tmp_path, AddedToken("ábc", normalized=True))
    assert made._of_ascii is None
    (encoding,) = made.encode(["abc"], special=False)
    assert encoding.ids == [made.file.token_to_id("ábc")]


WITHOUT_WORDS = {"a sequence", "replaces"}  # normalizers that do more to ASCII than lowercase it


@given(texts=TEXTS)
def test_short_texts_get_the_ids_of_the_whole_tokenizer(made, texts):
    for text in [*texts, *texts]:  # the words of the second half are in the cache
        text = text.encode("utf-8", "ignore").decode()
        ids = made.short_ids(text)
        assert ids in (None, made.file.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_ids_of_short_texts_come_from_the_cache_of_words(name, tmp_path, monkeypatch):
    made = tokenizer_with(NORMALIZERS[name], tmp_path)
    wanted = made.file.encode("ab Ab !b", add_special_tokens=False).ids
    first = made.short_ids("ab Ab !b")
    monkeypatch.setattr(made, "encode", None)
    if name in WITHOUT_WORDS:
        assert first is None
        assert made.short_ids("ab") is None
    else:
        assert first == made.short_ids("ab Ab !b") == wanted
    for text in ("a [CLS]", "zz", "Zz", "cat", "\u00e9", "a" * 513):  # may spell an added token
        assert made.short_ids(text) is None


def test_the_cache_of_words_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(word_cache, "MAX_WORDS", 3)
    made = tokenizer_with(NORMALIZERS["BERT"], tmp_path)
    for text in ("a", "b", "ab", "a b ab", "a b ab aa bb", "a" * 40, "ab " + "a" * 40, "a b !"):
        assert made.short_ids(text) == made.file.encode(text, add_special_tokens=False).ids
        assert len(made._words._ids) <= max(3, len(text.split()))
    assert "a" * 40 not in made._words._ids


def test_a_tokenizer_with_an_added_token_that_begins_with_a_space_has_no_cache(tmp_path):
    assert tokenizer_with(NORMALIZERS["BERT"], tmp_path)._words is not None
    assert tokenizer_with(NORMALIZERS["BERT"], tmp_path, AddedToken(" b"))._words is None


def test_a_tokenizer_whose_words_may_have_no_tokens_has_no_cache(tmp_path):
    file = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "1": 1}, []))
    file.normalizer, file.pre_tokenizer = NORMALIZERS["BERT"], pre_tokenizers.BertPreTokenizer()
    file.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json")._words is None
