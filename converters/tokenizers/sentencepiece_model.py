"""Builds tokenizer.json from a SentencePiece model, and checks on texts that their ids agree.

transformers 5 is not used, because it builds tokenizers with other ids than the training had. It
leaves out DeBERTa's normalization and ALBERT's treatment of numbers, puts a space after each of
ALBERT's symbols, and none before Mistral's texts. The rules of each tokenizer class are those of
transformers 4.
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

from converters.fields import CONFIG_FIELDS, TOKENIZER_FIELDS, check_fields
from converters.heads import read_optional_json
from jaxembed.errors import CheckpointError, UnsupportedModel

SPACE = "▁"  # what SentencePiece writes for a space

# Enum values of sentencepiece_model.proto.
UNIGRAM_MODEL, BPE_MODEL = 1, 2  # kinds of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of pieces

NUMBER_COMMA_PENALTY = 100  # subtracted from a score, as in transformers' AlbertConverter

NUM_COMPARED_TEXTS = 200
PIECES_PER_SIDE = 10  # pieces on each side of the middle one of a random text

# The first texts: normalization, spaces, case, accents, numbers, unknown characters, bytes. None
# has three dots or the like in a row: ".", ".." and "..", "." score alike, and rounding decides.
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

PLACES = ("$A", "|", "$B")  # parts of a template that are no tokens: first text, bar, second text

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

ADVICE = "save one with tokenizer.json"


@dataclass(frozen=True)
class Family:
    """How a class of tokenizers maps the pieces of its SentencePiece model to ids.

    The vocabulary is `before`, then the pieces without the first `dropped`, then `extra_ids` more.
    `template` has the special tokens around a text, $A, and after the bar what a second text, $B,
    adds; `:1` is a token type. `tokens` are the default special tokens.
    """

    file: str
    template: str
    tokens: Mapping[str, str]
    before: tuple[str, ...] = ()
    dropped: int = 0
    extra_ids: int = 0  # <extra_id_0> and so on, in descending order
    lowercase: bool | None = None  # the default of do_lower_case; None: there is no such switch
    is_albert: bool = False  # quotes and accents are replaced; pieces such as "9," score lower
    has_ends: bool = False  # has the switches add_bos_token and add_eos_token
    # has the switch legacy: true puts a space before each part of a text, false before the first
    has_legacy: bool = False


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

# The default classes of transformers by model_type; for Mistral's, the one that models name.
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
    """What the files in a model's folder say about its tokenizer."""

    folder: Path
    path: Path  # path of the SentencePiece model
    family: Family
    config: Mapping[str, Any]  # tokenizer_config.json, and what only special_tokens_map.json has
    proto: Any  # the ModelProto of sentencepiece_model.proto
    # whether only the first part of a text gets a space before it, where special tokens divide it
    prefixes_once: bool
    lowercases: bool  # whether texts become lower case
    keeps_accents: bool
    extra_ids: Sequence[str]
    stated_ids: Mapping[str, int]  # ids of added tokens, as the JSON files state them

    def id_of(self, number: int) -> int:
        """Return the id of the piece with this number in the SentencePiece model."""
        if number == self.proto.trainer_spec.unk_id and self.family.before:
            return self.family.before.index(self.family.tokens["unk"])
        return len(self.family.before) + number - self.family.dropped

    def token(self, name: str) -> str | dict[str, Any] | None:
        """Return the special token `name` (bos, eos, ...), perhaps with its flags, or None."""
        return self.config.get(f"{name}_token", self.family.tokens.get(name))

    @property
    def template(self) -> list[tuple[str, int]]:
        """The family's template, as a list of entries with their token types. An entry is a special
        token, "$A", "$B" or "|". Entries after "|" are used only for pairs of texts. The tokens bos
        and eos are left out if the files switch them off."""
        template = []
        for part in self.family.template.split():
            name, _, token_type = part.partition(":")
            if name in PLACES:
                template.append((name, int(token_type or 0)))
            elif not self.family.has_ends or self.config.get(f"add_{name}_token"):
                token = self.token(name)
                content = token["content"] if isinstance(token, dict) else token
                template.append((content, int(token_type or 0)))
        return template


def class_name(folder: Path) -> str | None:
    """Return the class of a folder's tokenizer, without "Fast"; None if it is unknown. The class is
    in the field tokenizer_class, or follows from model_type. Raises CheckpointError for invalid
    files."""
    types = {key: CONFIG_FIELDS[key] for key in ("model_type", "tokenizer_class")}
    config = read_optional_json(folder / "config.json", types)
    stated = read_optional_json(folder / "tokenizer_config.json")
    name = stated.get("tokenizer_class") or config.get("tokenizer_class")
    return (
        name.removesuffix("Fast") if name else CLASSES_BY_TYPE.get(config.get("model_type") or "")
    )


def build_from_sentencepiece(folder: Path) -> bytes:
    """Return a tokenizer.json that is built from the SentencePiece model in a folder.

    Raises UnsupportedModel for an unknown class or unsupported settings, and CheckpointError if a
    package is missing, if files are damaged or contradict each other, or if the result differs from
    SentencePiece on a compared text.
    """
    files = _read_files(folder)
    spec, pieces = files.proto.normalizer_spec, files.proto.pieces
    if files.family.is_albert:
        # ALBERT's code splits these pieces again; transformers' AlbertConverter lowers the scores
        for piece in pieces:
            if piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit():
                piece.score -= NUMBER_COMMA_PENALTY
    if files.prefixes_once:
        spec.add_dummy_prefix = False
    tokenizer = Tokenizer(_build_model(files))
    tokenizer.normalizer = _build_normalizer(files)
    # splits a text into words, which is faster; impossible if pieces span words
    if files.prefixes_once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="first", split=False
        )
    elif not any(SPACE in piece.piece[1:] for piece in pieces):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or files.prefixes_once:
        steps.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    special = _special_tokens(files)
    # the tokens that are found in a text before the rest is split into pieces
    tokenizer.add_special_tokens(special)
    for content, stated_id in files.stated_ids.items():
        if (actual_id := tokenizer.token_to_id(content)) != stated_id:
            raise CheckpointError(
                f"{files.folder}: the added token {content!r} has id {stated_id}, wanted "
                f"{'a special token' if actual_id is None else actual_id}; {ADVICE}"
            )
    specials = {token.content for token in special}
    if files.proto.trainer_spec.model_type == BPE_MODEL:  # unigram models find these as pieces
        symbols = [piece.piece for piece in pieces if piece.type == USER_DEFINED]
        tokenizer.add_tokens(
            [AddedToken(name, normalized=True) for name in symbols if name not in specials]
        )
    # special tokens around each text and pair
    template = files.template
    ids = {token: tokenizer.token_to_id(token) for token, _ in template if token not in PLACES}
    for token in ids:
        if tokenizer.model.token_to_id(token) is None and token not in files.stated_ids:
            raise CheckpointError(f"{files.path} has no piece {token!r}; {ADVICE}")
    parts = [f"{token}:{token_type}" for token, token_type in template]
    bar = parts.index("|:0")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts[:bar], pair=parts[:bar] + parts[bar + 1 :], special_tokens=list(ids.items())
    )
    _check_ids(files, tokenizer, specials)
    return tokenizer.to_str().encode()


def _read_files(folder: Path) -> TokenizerFiles:
    """Read and check the files of a tokenizer. Raises UnsupportedModel and CheckpointError."""
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
        # optional packages, because only models without tokenizer.json need them
        processor = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
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
    proto.ParseFromString(processor.serialized_model_proto())
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
                f"{folder}: tokenizer_config.json lacks {name}, whose default is true in "
                f"transformers 4 and false in transformers 5; set it there, or {ADVICE}"
            )
    if trainer.model_type not in (UNIGRAM_MODEL, BPE_MODEL) or trainer.treat_whitespace_as_suffix:
        raise UnsupportedModel(
            f"{path} is a model of words or characters, or of spaces after words, wanted a "
            f"unigram or BPE model; {ADVICE}"
        )
    if any(piece.type == UNUSED for piece in proto.pieces):
        raise UnsupportedModel(f"{path} has pieces marked as unused; {ADVICE}")
    num_extra_ids = config.get("extra_ids", family.extra_ids) if family.extra_ids else 0
    tokens_by_id = config.get("added_tokens_decoder", {})
    stated = {token["content"]: int(number) for number, token in tokens_by_id.items()}
    return TokenizerFiles(
        folder,
        path,
        family,
        config,
        proto,
        prefixes_once=family.has_legacy and not config["legacy"],
        lowercases=family.lowercase is not None and config.get("do_lower_case", family.lowercase),
        keeps_accents=not family.is_albert or config.get("keep_accents", False),
        extra_ids=[f"<extra_id_{number}>" for number in reversed(range(num_extra_ids))],
        stated_ids=config["added_tokens"] | stated,
    )


def _build_model(files: TokenizerFiles) -> Unigram | BPE:
    """Return the tokenizers library's model of the pieces, with the family's vocabulary."""
    family, trainer = files.family, files.proto.trainer_spec
    vocabulary = [
        *((name, 0.0) for name in family.before),
        *((piece.piece, piece.score) for piece in files.proto.pieces[family.dropped :]),
        *((name, 0.0) for name in files.extra_ids),
    ]
    unknown_id = files.id_of(trainer.unk_id)
    if trainer.model_type == UNIGRAM_MODEL:
        return Unigram(vocabulary, unk_id=unknown_id, byte_fallback=trainer.byte_fallback)
    # the merges of SentencePiece, in its order: by the score of the merged piece
    normal = [piece for piece in files.proto.pieces if piece.type == NORMAL]
    pieces = [piece.piece for piece in sorted(normal, key=lambda piece: -piece.score)]
    known = set(pieces)
    splits = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    return BPE(
        {name: token_id for token_id, (name, _) in enumerate(vocabulary)},
        [(left, right) for left, right in splits if left in known and right in known],
        unk_token=vocabulary[unknown_id][0],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _build_normalizer(files: TokenizerFiles) -> normalizers.Normalizer:
    """Return the normalization before a text is split into pieces; spaces become SPACE."""
    spec = files.proto.normalizer_spec
    steps = []
    if files.family.is_albert:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not files.keeps_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if files.lowercases:
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
    """Return the special tokens of the SentencePiece model and the JSON files, ordered by the ids
    in these files; tokens without an id come last."""
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
    by_content: dict[str, AddedToken] = {}
    for token in tokens:
        fields = {"content": token} if isinstance(token, str) else token
        content = fields["content"]
        if isinstance(token, dict) or content not in by_content:  # the last with flags wins
            flags = {name: fields.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            by_content[content] = AddedToken(content, special=True, normalized=False, **flags)
    ids = files.stated_ids
    largest = max(ids.values(), default=0)
    return sorted(by_content.values(), key=lambda token: ids.get(token.content, largest + 1))


def _check_ids(files: TokenizerFiles, tokenizer: Tokenizer, special: set[str]) -> None:
    """Raise CheckpointError if the tokenizer's ids differ from SentencePiece's on a text without
    tokens of `special`. SentencePiece gets each text as the family prepares it."""
    tokens = [token for token, _ in files.template]
    text_at, bar = tokens.index("$A"), tokens.index("|")
    ids_before = [tokenizer.token_to_id(token) for token in tokens[:text_at]]
    ids_after = [tokenizer.token_to_id(token) for token in tokens[text_at + 1 : bar]]
    library = import_module("sentencepiece")
    processor = library.SentencePieceProcessor(model_proto=files.proto.SerializeToString())
    for text in _sample_texts(files, special):
        prepared = text
        if files.family.is_albert:
            prepared = prepared.replace("``", '"').replace("''", '"')
        if not files.keeps_accents:
            # Remove marks, as the published tokenizer.json does. ALBERT's code removes characters
            # with a combining class, which are the same in Latin script.
            prepared = unicodedata.normalize("NFKD", prepared)
            prepared = "".join(char for char in prepared if unicodedata.category(char)[0] != "M")
        if files.lowercases:
            prepared = "".join(char.lower() for char in prepared)
        if files.prefixes_once and prepared and prepared[0] not in (" ", SPACE):
            prepared = SPACE + prepared
        ids = [files.id_of(piece) for piece in processor.encode(prepared)]
        if tokenizer.encode(text).ids != [*ids_before, *ids, *ids_after]:
            raise CheckpointError(
                f"{files.path}: the tokenizer built from it differs from SentencePiece on "
                f"{text!r}; {ADVICE}"
            )


def _sample_texts(files: TokenizerFiles, special: set[str]) -> list[str]:
    """Return FIXED_TEXTS and random texts of the model's pieces, except texts that have a token of
    `special`. Pieces that begin with an accent are not used, because the tokenizers library
    normalizes a second accent on a letter unlike SentencePiece."""
    rng = random.Random(0)
    pieces = [one for one in files.proto.pieces if unicodedata.category(one.piece[0])[0] != "M"]
    normal = [piece.piece for piece in pieces if piece.type == NORMAL]
    symbols = [piece.piece for piece in pieces if piece.type == USER_DEFINED] or normal
    random_texts = [
        "".join(
            (
                *rng.choices(normal, k=PIECES_PER_SIDE),
                rng.choice(symbols),
                *rng.choices(normal, k=PIECES_PER_SIDE),
            )
        )
        for _ in range(NUM_COMPARED_TEXTS - len(FIXED_TEXTS))
    ]
    texts = [*FIXED_TEXTS, *(text.replace(SPACE, " ") for text in random_texts)]
    return [text for text in texts if not any(token in text for token in special)]
