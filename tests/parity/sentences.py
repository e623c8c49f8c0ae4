"""English sentences, and texts that tokenizers trip over."""

import csv
from pathlib import Path

STSB = Path(__file__).parents[3] / "shared" / "data" / "stsb" / "stsb-en-test.csv"

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


def stsb() -> list[str]:
    """Every sentence of the English STS-B test set, once."""
    with STSB.open(newline="", encoding="utf-8") as file:
        pairs = [row[:2] for row in csv.reader(file)]
    return list(dict.fromkeys(sentence for pair in pairs for sentence in pair))
