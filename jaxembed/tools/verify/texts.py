"""Lists the texts to compare, and forms groups of inputs from them for a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxembed.data.spec import ModelSpec

EVERY_NTH = 5  # groups after the first one have every fifth text

_SENTENCE = (
    "the old lighthouse keeper wrote down every ship that passed the cape and what it carried "
    "while his daughter read the weather from clouds gulls and the colour of the water at dawn"
)
_WORDS = _SENTENCE.split()
_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 31, 45, 64, 90, 128, 180)  # words

TEXTS = [
    *(" ".join((_WORDS * 8)[:count]) for count in _LENGTHS),
    "how do vaccines work",
    "What is the capital of China?",
    "The committee, after three days of talks, did not agree to lower interest rates by 0.25%!",
    "Dr. O'Neill of St. Mary's was seen near the river at 6:45 a.m. yesterday.",
    "MiXeD cAsE WoRdS aNd ACRONYMS such as NATO, iOS and eBay",
    "Ünïcödé ÀÉÎÕÜ ß ẞ İstanbul ﬁne ½ Ⅻ naïve café",
    "e\u0301 and é, n\u0303 and ñ",
    "我喜欢在北京吃饺子。",
    "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅ",
    "나는 학교에 갑니다",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם, what is new?",
    "Привет, мир! Как дела?",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🙂",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 👍🏽 thumb",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)  # naïve",
    "SELECT name, count(*) FROM users WHERE age >= 18 GROUP BY name;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\path\\to",
    "1234567890 3.14159 1e-10 0xFF 1,000,000 -42",
    "\"Quoted,\" she said; 'single' — “curly” … and (brackets) [of] {all} <kinds>",
    "  spaces   inside\tand\nlines\r\nand\u00a0more\u3000",
    "zero\u200bwidth\u200djoiner\ufeffand\u00adsoft hyphen",
    "[CLS] [SEP] [MASK] [PAD] [UNK] </s> <s>",
    "...!?!?---***###@@@(((]]]",
    "!",
    "x",
    " ",
    "antidisestablishmentarianism " * 3,
    "x" * 120,
]
QUERIES = ["how do vaccines work", "Hauptstadt von China? 北京"]


@dataclass(frozen=True)
class InputGroup:
    """Texts, or pairs of texts, that are computed with the same prompt."""

    name: str
    inputs: tuple[str, ...] | tuple[tuple[str, str], ...]
    prompt_name: str | None = None  # a prompt of the checkpoint; None: the default prompt


def long_texts(limit: int) -> list[str]:
    """Return texts of about `limit` tokens, and some that are much longer."""
    lines = (f"Line {k}: the keeper counted {k * 37 % 101} ships." for k in range(limit // 8 + 2))
    words = ("word " * max(limit + by, 1) for by in (-4, -2, -1, 1))
    return [" ".join(lines), "我喜欢在北京吃饺子。" * (limit // 3 + 1), *words]


def input_groups(spec: ModelSpec, limit: int, more: Sequence[str]) -> list[InputGroup]:
    """Form the groups of inputs for a model that takes inputs of up to `limit` tokens.

    `more` are the user's texts, which are added to TEXTS. An embedder gets single texts, a reranker
    gets pairs, and a classifier gets single texts and pairs.
    """
    # no long texts with a template: sentence-transformers would truncate the template at its end
    long = long_texts(limit) if spec.template is None else []
    texts = tuple(dict.fromkeys([*TEXTS, *long, *more]))
    fewer = tuple(dict.fromkeys([*TEXTS[::EVERY_NTH], *long[:1]]))
    if spec.task == "embed":
        prompted = [InputGroup(f"prompt {name!r}", fewer, name) for name in sorted(spec.prompts)]
        return [InputGroup("texts", texts), *prompted]
    pairs = [
        InputGroup(f"pairs with {query!r}", tuple((query, text) for text in documents))
        for query, documents in zip(QUERIES, (texts, fewer), strict=True)
    ]
    return [InputGroup("texts", texts), *pairs] if spec.task == "classify" else pairs
