"""English sentences, texts that tokenizers trip over, and texts of many scripts."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

DATA = Path(__file__).parents[3] / "shared" / "data"
STSB = DATA / "stsb" / "stsb-en-test.csv"

_WHO = [
    *("A young woman in a red coat", "The committee, after three days of talks,"),
    *("My neighbour's dog", "Nobody at the station", "An unusually large swarm of bees"),
    *("The 2019 annual report", "Dr. O'Neill of St. Mary's", "The old lighthouse keeper"),
    *("Every second customer", "The function that parses dates", "Rain from the north-west"),
    "The world's longest railway tunnel",
]
_WHAT = [
    *("is slicing onions in the kitchen.", "did not agree to lower interest rates by 0.25%!"),
    *("was seen near the river at 6:45 a.m. yesterday", "has been forgotten since the war ended"),
    "will cost about $1,200.50, tax included?",
    "keeps everybody awake until dawn; nevertheless, they stay.",
    "can be found in chapter seven of the handbook (pp. 112-118).",
    *("plays the guitar badly but with enthusiasm", "returned None where a list was expected"),
]
ENGLISH = [f"{who} {what}" for who in _WHO for what in _WHAT]

WEIRD = [
    "🙂",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 👍🏽 thumb",
    "我喜欢在北京吃饺子。",
    "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅ",
    "나는 학교에 갑니다",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם, what is new?",
    "สวัสดีชาวโลก",
    "Ünïcödé ÀÉÎÕÜ ß ẞ İstanbul ﬁne ½ Ⅻ",
    "e\u0301 and é, n\u0303 and ñ",
    "zero\u200bwidth\u200djoiner\ufeffand\u00adsoft hyphen",
    " ",
    "\t\n \r\n",
    "  spaces   inside\tand\nlines\r\nand\u00a0more\u3000",
    "!",
    "...!?!?---***###@@@(((]]]",
    "\"Quoted,\" she said; 'single' — “curly” …",
    "MiXeD cAsE WoRdS aNd ACRONYMS",
    "[CLS] [SEP] [MASK] [PAD] [UNK] </s> <s>",
    "null\x00byte \x07bell \x1b escape",
    "\ufffd\ue000 private",
    "antidisestablishmentarianism " * 3,
    "x" * 99,
    "x" * 101,
    "x" * 5000,
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\path\\to",
    "def f(x): return x**2  # code",
    "1234567890 3.14159 1e-10 0xFF 1,000,000",
    "a" + "\u0301" * 300,
    "word " * 254,  # exactly the limit of all-MiniLM-L6-v2, with the two special tokens
    "word " * 255,
    "The quick brown fox jumps over the lazy dog. " * 200,
    "长" * 3000,
]

VARIED = ENGLISH + WEIRD


BLANKS = ["", " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028"]

# names of special tokens, and marks of pieces, of many tokenizers
_NAMES = "[CLS] [SEP] [MASK] [UNK] [PAD] <s> </s> <unk> <pad> <mask> <bos> <eos> <start_of_turn> "
_NAMES += "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|end_of_text|> <0x0A> "
_NAMES += "▁ ▁the Ġ ## ##ing Yes A: B: {query} {document}"
NAMES = _NAMES.split()

# the first and the last character of scripts, of control characters and of symbols
_BLOCKS = [
    *((0x00, 0x1F), (0x21, 0x7E), (0x7F, 0xA0), (0xA1, 0x24F), (0x300, 0x36F), (0x370, 0x52F)),
    *((0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE5B), (0x1100, 0x11FF)),
    *((0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2100, 0x27BF), (0x3040, 0x30FF), (0x4E00, 0x9FFF)),
    *((0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFDFF), (0xFE00, 0xFE0F), (0xFF00, 0xFFEF)),
    *((0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)),
    *((0x00, 0xD7FF), (0xE000, 0x10FFFF)),
]


def stsb(path: Path = STSB) -> list[str]:
    """Every sentence of an STS-B file, by default of the English test set, once."""
    with path.open(newline="", encoding="utf-8") as file:
        pairs = [row[:2] for row in csv.reader(file)]
    return list(dict.fromkeys(sentence for pair in pairs for sentence in pair))


def in_many_scripts(count: int) -> list[str]:
    """VARIED, texts of 13 languages if their files are here, and drawn mixtures of scripts."""
    texts = VARIED + [text for one in _published() for text in one[:: len(one) // 60]]
    draw = Random(0)
    return texts + [_mixture(draw) for _ in range(count - len(texts))]


def _published() -> Iterator[list[str]]:
    """The texts of each file of STS-B and of XQuAD."""
    yield from map(stsb, sorted(DATA.glob("stsb/*.csv")))
    for path in sorted(DATA.glob("xquad/*.json.gz")):
        articles = json.loads(gzip.decompress(path.read_bytes()))["data"]
        paragraphs = [one for article in articles for one in article["paragraphs"]]
        asked = [one["question"] for paragraph in paragraphs for one in paragraph["qas"]]
        yield [paragraph["context"] for paragraph in paragraphs] + asked


def _mixture(draw: Random) -> str:
    """Words, names of special tokens and characters of a script, mixed; one of nine is long."""
    parts = []
    for _ in range(draw.choice([1, 2, 3, 5, 8, 8, 13, 21, 300])):
        kind, (first, last) = draw.random(), draw.choice(_BLOCKS)
        if kind < 0.25:
            parts.append(draw.choice(draw.choice(ENGLISH).split()))
        elif kind < 0.4:
            parts.append(draw.choice(NAMES))
        else:
            parts.append("".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 9))))
        parts.append(draw.choice(BLANKS))
    return "".join(parts)
