"""Builds tokenizer.json where there is only a SentencePiece model, and compares the two on texts.

It is not left to transformers: what version 5 builds has other ids than training had. It leaves
out DeBERTa's normalization and ALBERT's way with numbers, puts a space after each of ALBERT's
symbols, and none before Mistral's texts.
"""

import random
import unicodedata
from collections.abc import Mapping
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

from converters.field_types import TOKENIZER_FIELDS, check_fields
from converters.heads import read_optional_json
from converters.tokenizers.sentencepiece_families import FAMILIES, Family, class_name
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
class TokenizerFiles:
    """What a folder's files say of its tokenizer."""

    folder: Path
    family: Family
    config: Mapping[str, Any]  # tokenizer_config.json; special_tokens_map.json for what it lacks
    proto: Any  # the ModelProto of sentencepiece_model.proto

    @property
    def path(self) -> Path:
        return self.folder / self.family.file

    @property
    def prefixes_once(self) -> bool:
        """Whether a space is put before a text that has none, and not before each part of it that
        special tokens divide."""
        return self.family.has_legacy and not self.config["legacy"]

    @property
    def lowers(self) -> bool:
        default = self.family.lowercase
        return default is not None and self.config.get("do_lower_case", default)

    @property
    def keeps_accents(self) -> bool:
        return not self.family.is_albert or self.config.get("keep_accents", False)

    @property
    def extra_ids(self) -> list[str]:
        count = self.config.get("extra_ids", self.family.extra_ids) if self.family.extra_ids else 0
        return [f"<extra_id_{number}>" for number in reversed(range(count))]

    def id_of(self, number: int) -> int:
        """The id of the piece that has this number in the SentencePiece model."""
        if number == self.proto.trainer_spec.unk_id and self.family.before:
            return self.family.before.index(self.family.tokens["unk"])
        return len(self.family.before) + number - self.family.dropped

    def token(self, name: str) -> str | dict[str, Any] | None:
        """A special token, perhaps with its flags, by its name."""
        return self.config.get(f"{name}_token", self.family.tokens.get(name))

    @property
    def stated_ids(self) -> dict[str, int]:
        """The ids of added tokens, which files say beside the model."""
        decoder = self.config.get("added_tokens_decoder", {})
        stated = {token["content"]: int(number) for number, token in decoder.items()}
        return self.config["added_tokens"] | stated

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


def build_from_sentencepiece(folder: Path) -> bytes:
    """Build the content of a tokenizer.json from the SentencePiece model in a folder.

    Raises UnsupportedModel for a class without a rule here and for what the result would not
    follow, and CheckpointError if a package is missing, if the model is damaged, if files
    contradict each other, or if the result differs from SentencePiece on any compared text.
    """
    files = _read(folder)
    _refuse(files)
    _adapt(files)
    tokenizer = Tokenizer(_model(files))
    tokenizer.normalizer = _normalizer(files)
    tokenizer.pre_tokenizer = _pre_tokenizer(files)
    tokenizer.decoder = _decoder(files)
    special = _special_tokens(files)
    _add_tokens(files, tokenizer, special)
    _add_template(files, tokenizer)
    _compare(files, tokenizer, {token.content for token in special})
    return tokenizer.to_str().encode()


def _read(folder: Path) -> TokenizerFiles:
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
    return TokenizerFiles(folder, family, config, proto)


def _refuse(files: TokenizerFiles) -> None:
    """Raise UnsupportedModel for what the result would not follow, or would have to guess."""
    config, trainer = files.config, files.proto.trainer_spec
    prefix = files.proto.normalizer_spec.add_dummy_prefix
    for name, wanted in {
        "split_by_punct": False,
        "sp_model_kwargs": {},
        "add_prefix_space": prefix,
    }.items():
        if config.get(name, wanted) != wanted:
            raise UnsupportedModel(
                f"{files.folder}: {name} is {config[name]}, wanted {wanted}; {ADVICE}"
            )
    for name, is_read in (
        ("add_bos_token", files.family.has_ends),
        ("legacy", files.family.has_legacy),
    ):
        if is_read and name not in config:
            raise UnsupportedModel(
                f"{files.folder}: tokenizer_config.json lacks {name}, which is true to "
                f"transformers 4 and false to transformers 5; write there which it is, or {ADVICE}"
            )
    if trainer.model_type not in (UNIGRAM_MODEL, BPE_MODEL) or trainer.treat_whitespace_as_suffix:
        raise UnsupportedModel(
            f"{files.path} is a model of words or characters, or of spaces after words, wanted a "
            f"unigram or BPE model; {ADVICE}"
        )
    if any(piece.type == UNUSED for piece in files.proto.pieces):
        raise UnsupportedModel(f"{files.path} has pieces marked as unused; {ADVICE}")


def _adapt(files: TokenizerFiles) -> None:
    """Change the model where the family does not use it as it is."""
    if files.family.is_albert:
        # its authors cut these pieces again; transformers' AlbertConverter lowers their scores
        for piece in files.proto.pieces:
            if piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit():
                piece.score -= AVOIDED
    if files.prefixes_once:
        files.proto.normalizer_spec.add_dummy_prefix = False


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
    return BPE(
        {name: number for number, (name, _) in enumerate(vocabulary)},
        _merges(files.proto),
        unk_token=vocabulary[unknown][0],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """The pairs of pieces that SentencePiece joins, in its order: by the score of the result."""
    pieces = sorted((one for one in proto.pieces if one.type == NORMAL), key=lambda one: -one.score)
    names = {one.piece for one in pieces}
    cuts = ((one.piece[:at], one.piece[at:]) for one in pieces for at in range(1, len(one.piece)))
    return [(left, right) for left, right in cuts if left in names and right in names]


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


def _pre_tokenizer(files: TokenizerFiles) -> pre_tokenizers.PreTokenizer | None:
    """What cuts a text into words, whose pieces are found sooner; None if pieces span words."""
    if files.prefixes_once:
        return pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    if any(SPACE in piece.piece[1:] for piece in files.proto.pieces):
        return None
    return pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")


def _decoder(files: TokenizerFiles) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if files.proto.normalizer_spec.add_dummy_prefix or files.prefixes_once:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


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


def _add_tokens(files: TokenizerFiles, tokenizer: Tokenizer, special: list[AddedToken]) -> None:
    """Add what is found in a text before the rest is cut into pieces."""
    tokenizer.add_special_tokens(special)
    for content, number in files.stated_ids.items():
        if (wanted := tokenizer.token_to_id(content)) != number:
            raise CheckpointError(
                f"{files.folder}: the added token {content!r} has id {number}, wanted "
                f"{'a special token' if wanted is None else wanted}; {ADVICE}"
            )
    if files.proto.trainer_spec.model_type == BPE_MODEL:  # others find these as their best pieces
        known = {token.content for token in special}
        symbols = [one.piece for one in files.proto.pieces if one.type == USER_DEFINED]
        tokenizer.add_tokens(
            [AddedToken(one, normalized=True) for one in symbols if one not in known]
        )


def _add_template(files: TokenizerFiles, tokenizer: Tokenizer) -> None:
    """Have special tokens put around each text and pair."""
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


def _compare(files: TokenizerFiles, tokenizer: Tokenizer, special: set[str]) -> None:
    """Raise CheckpointError if a text has other ids than SentencePiece and the family give it."""
    tokens = [token for token, _ in files.template]
    text_at, bar = tokens.index("$A"), tokens.index("|")
    first = [tokenizer.token_to_id(token) for token in tokens[:text_at]]
    last = [tokenizer.token_to_id(token) for token in tokens[text_at + 1 : bar]]
    library = import_module("sentencepiece")
    pieces = library.SentencePieceProcessor(model_proto=files.proto.SerializeToString())
    for text in _texts(files, special):
        ids = [files.id_of(number) for number in pieces.encode(_prepared(files, text))]
        if tokenizer.encode(text).ids != [*first, *ids, *last]:
            raise CheckpointError(
                f"{files.path}: the tokenizer made of it differs from SentencePiece on {text!r}; "
                f"{ADVICE}"
            )


def _prepared(files: TokenizerFiles, text: str) -> str:
    """A text as the family hands it to SentencePiece."""
    if files.family.is_albert:
        text = text.replace("``", '"').replace("''", '"')
    if not files.keeps_accents:
        # marks as StripAccents knows them, not those with a combining class as at the authors':
        # so are the published tokenizer.json, and the difference is none in Latin script
        text = unicodedata.normalize("NFKD", text)
        text = "".join(one for one in text if unicodedata.category(one)[0] != "M")
    if files.lowers:
        text = "".join(one.lower() for one in text)
    if files.prefixes_once and text and text[0] not in (" ", SPACE):
        text = SPACE + text
    return text


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
