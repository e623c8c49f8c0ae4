"""Builds tokenizer.json where there is only a SentencePiece model, and compares the two on texts.

It is not left to transformers: what version 5 builds has other ids than training had. It leaves
out DeBERTa's normalization and ALBERT's way with numbers, puts a space after each of ALBERT's
symbols, and none before Mistral's texts. The rules of each class of tokenizer are those of
transformers 4, with which the models were trained and published.
"""

import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram

from converters.fields import (
    CONFIG_FIELDS,
    TOKENIZER_FIELDS,
    check_fields,
)
from converters.heads import read_optional_json
from jaxembed.errors import CheckpointError, UnsupportedModel

SPACE = "▁"  # what SentencePiece writes for a space

# The numbers of sentencepiece_model.proto.
UNIGRAM_MODEL, BPE_MODEL = 1, 2  # kinds of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of pieces

AVOIDED = 100  # what transformers' AlbertConverter takes from a score

COMPARED = 200  # texts
DRAWN = 10  # pieces on each side of a text's middle one

# The first texts: normalization, spaces, case, accents, numbers, unknown characters, bytes. None
# has a character three times: ".", ".." and "..", "." have one score, and rounding decides.
FIXED_TEXTS = (
    "",
    " ",
    " a  b\tc\n\nd ",
    "  The CAT, the-cat (cat). ",
    "ﬁne ½ Ⅻ ｶﾀｶﾅ e\u0301 n\u0303 \u200b soft\u00adhyphen \u3000 x  y №",
    "\uff21\uff42\uff43\uff11 ǆ ß İ \u00a0 ﷺ ①",
    "é È ñ Å ö",
    "``quoted'' text, 'single'",
    "in 1990, 2,345,678 or 9,",
    "日本語のテキスト 中文\uff0c测试。",
    "한국어 สวัสดี नमस्ते مرحبا Привет",
    "🙂 a🙂b 👨\u200d👩\u200d👧 𠮷",
    "\x00a\x07b\x1f \ufeff",
    "def f(x):\n    return x  # <0x0A>",
)

PLACES = ("$A", "|", "$B")  # of a template, which are no tokens

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

ADVICE = "save one with tokenizer.json"


@dataclass(frozen=True)
class Family:
    """How a class of tokenizers makes ids of the pieces of its SentencePiece model.

    The vocabulary is `before`, then the pieces without the first `dropped`, then `extra_ids` more.
    `template` is a text between special tokens, and after the bar what a second text adds; `:1` is
    a token type. `tokens` are the special tokens where tokenizer_config.json names no others.
    """

    file: str
    template: str
    tokens: Mapping[str, str]
    before: tuple[str, ...] = ()
    dropped: int = 0
    extra_ids: int = 0  # <extra_id_0> and so on, of which the first is last
    lowercase: bool | None = None  # the default of do_lower_case; None: it has no such switch
    is_albert: bool = False  # replaces quotes and accents; no piece ends with a digit and a comma
    has_ends: bool = False  # the switches add_bos_token and add_eos_token
    has_legacy: bool = False  # the switch legacy: a space before each part of a text, or the first


_CLS_SEP = "cls $A sep | $B:1 sep:1"
_BOS_EOS = "bos $A eos | eos $B eos"
_FAIRSEQ = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}

FAMILIES = {
    "AlbertTokenizer": Family(
        "spiece.model",
        _CLS_SEP,
        {"cls": "[CLS]", "sep": "[SEP]", "unk": "<unk>", "pad": "<pad>", "mask": "[MASK]"},
        lowercase=True,
        is_albert=True,
    ),
    "CamembertTokenizer": Family(
        "sentencepiece.bpe.model",
        _BOS_EOS,
        _FAIRSEQ,
        before=("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"),
        dropped=1,
    ),
    "DebertaV2Tokenizer": Family(
        "spm.model",
        _CLS_SEP,
        {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"},
        lowercase=False,
    ),
    "GemmaTokenizer": Family(
        "tokenizer.model",
        "bos $A eos | bos:1 $B:1 eos:1",
        {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"},
        has_ends=True,
    ),
    "LlamaTokenizer": Family(
        "tokenizer.model",
        "bos $A eos | bos:1 $B:1 eos:1",
        {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
        has_ends=True,
        has_legacy=True,
    ),
    "T5Tokenizer": Family(
        "spiece.model",
        "$A eos | $B eos",
        {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        extra_ids=100,
    ),
    "XLMRobertaTokenizer": Family(
        "sentencepiece.bpe.model",
        _BOS_EOS,
        _FAIRSEQ,
        before=("<s>", "<pad>", "</s>", "<unk>"),
        dropped=3,
    ),
}

# The classes that transformers takes if none is named; for Mistral's, the one that models name.
CLASSES_BY_TYPE = {
    "albert": "AlbertTokenizer",
    "camembert": "CamembertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gte": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "llama": "LlamaTokenizer",
    "llama_bidirec": "LlamaTokenizer",
    "ministral3": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "new": "XLMRobertaTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}


@dataclass(frozen=True)
class TokenizerFiles:
    """What a folder's files say of its tokenizer."""

    folder: Path
    path: Path  # of the SentencePiece model
    family: Family
    config: Mapping[str, Any]  # tokenizer_config.json; special_tokens_map.json for what it lacks
    proto: Any  # the ModelProto of sentencepiece_model.proto
    # whether a space is put before a text that has none, and not before each part of it that
    # special tokens divide
    prefixes_once: bool
    lowers: bool
    keeps_accents: bool
    extra_ids: Sequence[str]
    stated_ids: Mapping[str, int]  # of added tokens, which files say beside the model

    def id_of(self, number: int) -> int:
        """The id of the piece that has this number in the SentencePiece model."""
        if number == self.proto.trainer_spec.unk_id and self.family.before:
            return self.family.before.index(self.family.tokens["unk"])
        return len(self.family.before) + number - self.family.dropped

    def token(self, name: str) -> str | dict[str, Any] | None:
        """A special token, perhaps with its flags, by its name."""
        return self.config.get(f"{name}_token", self.family.tokens.get(name))

    @property
    def template(self) -> list[tuple[str, int]]:
        """The family's template as tokens and texts with their token types, and a bar."""
        filled = []
        for word in self.family.template.split():
            name, _, kind = word.partition(":")
            if name in PLACES:
                filled.append((name, int(kind or 0)))
            elif not self.family.has_ends or self.config.get(f"add_{name}_token"):
                token = self.token(name)
                content = token["content"] if isinstance(token, dict) else token
                filled.append((content, int(kind or 0)))
        return filled


def class_name(folder: Path) -> str | None:
    """The class of the tokenizer in a folder, without "Fast": the one that its files name, or the
    one of its model type where they name none."""
    types = {key: CONFIG_FIELDS[key] for key in ("model_type", "tokenizer_class")}
    config = read_optional_json(folder / "config.json", types)
    named = read_optional_json(folder / "tokenizer_config.json").get("tokenizer_class")
    name = named or config.get("tokenizer_class")
    return (
        name.removesuffix("Fast") if name else CLASSES_BY_TYPE.get(config.get("model_type") or "")
    )


def build_from_sentencepiece(folder: Path) -> bytes:
    """Build the content of a tokenizer.json from the SentencePiece model in a folder.

    Raises UnsupportedModel for a class without a rule here and for what the result would not
    follow, and CheckpointError if a package is missing, if the model is damaged, if files
    contradict each other, or if the result differs from SentencePiece on any compared text.
    """
    files = _read(folder)
    spec, pieces = files.proto.normalizer_spec, files.proto.pieces
    if files.family.is_albert:
        # its authors cut these pieces again; transformers' AlbertConverter lowers their scores
        for piece in pieces:
            if piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit():
                piece.score -= AVOIDED
    if files.prefixes_once:
        spec.add_dummy_prefix = False
    tokenizer = Tokenizer(_model(files))
    tokenizer.normalizer = _normalizer(files)
    # what cuts a text into words, whose pieces are found sooner; nothing if pieces span words
    if files.prefixes_once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="first", split=False
        )
    elif not any(SPACE in piece.piece[1:] for piece in pieces):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or files.prefixes_once:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    special = _special_tokens(files)
    # what is found in a text before the rest is cut into pieces
    tokenizer.add_special_tokens(special)
    for content, number in files.stated_ids.items():
        if (wanted := tokenizer.token_to_id(content)) != number:
            raise CheckpointError(
                f"{files.folder}: the added token {content!r} has id {number}, wanted "
                f"{'a special token' if wanted is None else wanted}; {ADVICE}"
            )
    known = {token.content for token in special}
    if files.proto.trainer_spec.model_type == BPE_MODEL:  # others find these as their best pieces
        symbols = [one.piece for one in pieces if one.type == USER_DEFINED]
        tokenizer.add_tokens(
            [AddedToken(one, normalized=True) for one in symbols if one not in known]
        )
    # special tokens around each text and pair
    template = files.template
    ids = {token: tokenizer.token_to_id(token) for token, _ in template if token not in PLACES}
    for token in ids:
        if tokenizer.model.token_to_id(token) is None and token not in files.stated_ids:
            raise CheckpointError(f"{files.path} has no piece {token!r}; {ADVICE}")
    parts = [f"{token}:{kind}" for token, kind in template]
    bar = parts.index("|:0")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts[:bar], pair=parts[:bar] + parts[bar + 1 :], special_tokens=list(ids.items())
    )
    _compare(files, tokenizer, known)
    return tokenizer.to_str().encode()


def _read(folder: Path) -> TokenizerFiles:
    """Read the files of a tokenizer. Raises UnsupportedModel for what the result would not follow,
    or would have to guess."""
    name = class_name(folder)
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"{folder} has only a SentencePiece model, and its tokenizer_class is {name}; wanted "
            f"one of {', '.join(FAMILIES)}, or {ADVICE}"
        )
    family = FAMILIES[name]
    config: dict[str, Any] = {"added_tokens": read_optional_json(folder / "added_tokens.json")}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        stated = read_optional_json(folder / name)
        config |= {key: value for key, value in stated.items() if value is not None}
    check_fields(f"the tokenizer in {folder}", config, TOKENIZER_FIELDS)
    path = folder / family.file
    try:
        # no dependencies of ours, because only models without tokenizer.json need them
        pieces = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
        proto = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has a SentencePiece model and no tokenizer.json, and {error}: pip install "
            f"sentencepiece protobuf for the conversion, or {ADVICE}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"no tokenizer can be built from {path}: {error}; {ADVICE}"
        ) from error
    proto.ParseFromString(pieces.serialized_model_proto())
    trainer, prefix = proto.trainer_spec, proto.normalizer_spec.add_dummy_prefix
    for name, wanted in {
        "split_by_punct": False,
        "sp_model_kwargs": {},
        "add_prefix_space": prefix,
    }.items():
        if config.get(name, wanted) != wanted:
            raise UnsupportedModel(f"{folder}: {name} is {config[name]}, wanted {wanted}; {ADVICE}")
    for name, is_read in (("add_bos_token", family.has_ends), ("legacy", family.has_legacy)):
        if is_read and name not in config:
            raise UnsupportedModel(
                f"{folder}: tokenizer_config.json lacks {name}, which is true to transformers 4 "
                f"and false to transformers 5; write there which it is, or {ADVICE}"
            )
    if trainer.model_type not in (UNIGRAM_MODEL, BPE_MODEL) or trainer.treat_whitespace_as_suffix:
        raise UnsupportedModel(
            f"{path} is a model of words or characters, or of spaces after words, wanted a "
            f"unigram or BPE model; {ADVICE}"
        )
    if any(piece.type == UNUSED for piece in proto.pieces):
        raise UnsupportedModel(f"{path} has pieces marked as unused; {ADVICE}")
    extra = config.get("extra_ids", family.extra_ids) if family.extra_ids else 0
    decoder = config.get("added_tokens_decoder", {})
    stated = {token["content"]: int(number) for number, token in decoder.items()}
    return TokenizerFiles(
        folder,
        path,
        family,
        config,
        proto,
        prefixes_once=family.has_legacy and not config["legacy"],
        lowers=family.lowercase is not None and config.get("do_lower_case", family.lowercase),
        keeps_accents=not family.is_albert or config.get("keep_accents", False),
        extra_ids=[f"<extra_id_{number}>" for number in reversed(range(extra))],
        stated_ids=config["added_tokens"] | stated,
    )


def _model(files: TokenizerFiles) -> Unigram | BPE:
    family, trainer = files.family, files.proto.trainer_spec
    vocabulary = [
        *((name, 0.0) for name in family.before),
        *((piece.piece, piece.score) for piece in files.proto.pieces[family.dropped :]),
        *((name, 0.0) for name in files.extra_ids),
    ]
    unknown = files.id_of(trainer.unk_id)
    if trainer.model_type == UNIGRAM_MODEL:
        return Unigram(vocabulary, unk_id=unknown, byte_fallback=trainer.byte_fallback)
    # the pairs of pieces that SentencePiece joins, in its order: by the score of the result
    normal = [one for one in files.proto.pieces if one.type == NORMAL]
    pieces = [one.piece for one in sorted(normal, key=lambda one: -one.score)]
    names = set(pieces)
    cuts = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    return BPE(
        {name: number for number, (name, _) in enumerate(vocabulary)},
        [(left, right) for left, right in cuts if left in names and right in names],
        unk_token=vocabulary[unknown][0],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _normalizer(files: TokenizerFiles) -> normalizers.Normalizer:
    """The steps from a text to what is cut into pieces, which has SPACE for each space."""
    spec = files.proto.normalizer_spec
    steps = []
    if files.family.is_albert:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not files.keeps_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if files.lowers:
        steps.append(normalizers.Lowercase())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _special_tokens(files: TokenizerFiles) -> list[AddedToken]:
    """The special tokens of the model and of the files, in the order of the ids that files say."""
    config = files.config
    more = config.get("additional_special_tokens", config.get("extra_special_tokens", []))
    pieces = files.proto.pieces[files.family.dropped :]
    tokens = [
        *(piece.piece for piece in pieces if piece.type in (UNKNOWN, CONTROL)),
        *files.extra_ids,
        *(token for name in SPECIAL_TOKENS if (token := files.token(name)) is not None),
        *(more.values() if isinstance(more, dict) else more),
        *(one for one in config.get("added_tokens_decoder", {}).values() if one.get("special")),
    ]
    found: dict[str, AddedToken] = {}
    for token in tokens:
        fields = {"content": token} if isinstance(token, str) else token
        content = fields["content"]
        if isinstance(token, dict) or content not in found:
            flags = {name: fields.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            found[content] = AddedToken(content, special=True, normalized=False, **flags)
    ids = files.stated_ids
    last = max(ids.values(), default=0)
    return sorted(found.values(), key=lambda one: ids.get(one.content, last + 1))


def _compare(files: TokenizerFiles, tokenizer: Tokenizer, special: set[str]) -> None:
    """Raise CheckpointError if a text has other ids than SentencePiece and the family give it."""
    tokens = [token for token, _ in files.template]
    text_at, bar = tokens.index("$A"), tokens.index("|")
    first = [tokenizer.token_to_id(token) for token in tokens[:text_at]]
    last = [tokenizer.token_to_id(token) for token in tokens[text_at + 1 : bar]]
    library = import_module("sentencepiece")
    pieces = library.SentencePieceProcessor(model_proto=files.proto.SerializeToString())
    for text in _texts(files, special):
        given = text  # as the family hands it to SentencePiece
        if files.family.is_albert:
            given = given.replace("``", '"').replace("''", '"')
        if not files.keeps_accents:
            # marks as StripAccents knows them, not those with a combining class as at the authors':
            # so are the published tokenizer.json, and the difference is none in Latin script
            given = unicodedata.normalize("NFKD", given)
            given = "".join(one for one in given if unicodedata.category(one)[0] != "M")
        if files.lowers:
            given = "".join(one.lower() for one in given)
        if files.prefixes_once and given and given[0] not in (" ", SPACE):
            given = SPACE + given
        ids = [files.id_of(number) for number in pieces.encode(given)]
        if tokenizer.encode(text).ids != [*first, *ids, *last]:
            raise CheckpointError(
                f"{files.path}: the tokenizer made of it differs from SentencePiece on {text!r}; "
                f"{ADVICE}"
            )


def _texts(files: TokenizerFiles, special: set[str]) -> list[str]:
    """Texts to compare, without special tokens: fixed ones, and drawn ones of the model's pieces.

    No drawn piece begins with an accent, which would stand on the piece before, perhaps as its
    second one: there the tokenizers library normalizes otherwise than SentencePiece.
    """
    draw = random.Random(0)
    pieces = [one for one in files.proto.pieces if unicodedata.category(one.piece[0])[0] != "M"]
    names = [one.piece for one in pieces if one.type == NORMAL]
    symbols = [one.piece for one in pieces if one.type == USER_DEFINED] or names
    drawn = [
        "".join(
            (*draw.choices(names, k=DRAWN), draw.choice(symbols), *draw.choices(names, k=DRAWN))
        )
        for _ in range(COMPARED - len(FIXED_TEXTS))
    ]
    texts = [*FIXED_TEXTS, *(text.replace(SPACE, " ") for text in drawn)]
    return [text for text in texts if not any(token in text for token in special)]
