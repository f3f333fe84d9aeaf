"""Data sets of the fidelity harness: real ones from jsonl files, synthetic ones made from a seed.

An item is a question, its accepted answers and the passages that a retriever would have brought. Real sets are files of
one JSON object a line (``question``, ``answers``, ``passages``); ``--set NAME`` finds ``NAME_dev.jsonl`` in ``--data``,
``--set some/file.jsonl`` takes any file. ``needle``, ``multineedle`` and ``twohop`` are written here, at any length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SYSTEM = "Answer the question from the passages. If they do not hold the answer, say that you do not know."
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_DATA = ROOT.parent / "shared" / "data"
SPLITS = ("all", "tune", "held")  # halves of the file: what was tuned on, and what is reported


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its passages; ``id`` says where it came from."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DataSet:
    """``over``: which answer the mean KL runs over, ``"gold"`` or ``"greedy"`` (full prefill's own)."""

    name: str
    items: tuple[Item, ...]
    over: str


def messages(item: Item, *, passages: bool = True, style: str = "chat") -> list[dict[str, str]]:
    """The prompt of an item. ``style``: ``"chat"`` (system prompt, passages, question), ``"numbered"`` (no system
    prompt, a title before each passage: another head and other glue)."""
    if style == "numbered":
        body = "\n\n".join(f"Document {i}:\n{p}" for i, p in enumerate(item.passages, 1)) if passages else ""
        return [{"role": "user", "content": f"Use these documents.\n\n{body}\n\n{item.question}\nAnswer briefly."}]
    body = "\n\n".join(item.passages) + "\n\n" if passages else ""
    user = {"role": "user", "content": f"{body}Question: {item.question}"}
    return [{"role": "system", "content": SYSTEM}, user]


def head_messages(before: Sequence[str] = (), *, style: str = "chat") -> list[dict[str, str]]:
    """The prompt of :func:`messages` up to where the passage behind ``before`` begins."""
    if style == "numbered":
        titles = [f"Document {i}:\n" for i in range(1, len(before) + 2)]
        body = "\n\n".join(title + p for title, p in zip(titles, [*before, ""], strict=True))
        return [{"role": "user", "content": f"Use these documents.\n\n{body}"}]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "".join(f"{p}\n\n" for p in before)}]


def cut(tokenizer: Any, text: str, tokens: int, answers: Sequence[str] = ()) -> str:
    """About ``tokens`` tokens of ``text``: from its start, or around the first answer that would be lost."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(spans) <= tokens:
        return text.strip()
    lower = text.lower()
    found = min((at for a in answers if (at := lower.find(a.lower())) >= 0), default=0)
    token = next((i for i, (_, end) in enumerate(spans) if end > found), 0)
    start = 0 if token <= tokens * 3 // 4 else max(0, min(token - tokens // 2, len(spans) - tokens))
    return text[spans[start][0] : spans[start + tokens - 1][1]].strip()


def shorten(item: Item, tokenizer: Any, chunks: int, chunk_tokens: int) -> Item:
    """At most ``chunks`` passages of at most ``chunk_tokens`` tokens, those that hold an answer first in the choice."""

    def holds(passage: str) -> bool:
        return any(a.lower() in passage.lower() for a in item.answers)

    gold = [i for i, p in enumerate(item.passages) if holds(p)]
    rest = [i for i in range(len(item.passages)) if i not in gold]
    kept = sorted((gold + rest)[:chunks])
    passages = [
        cut(tokenizer, item.passages[i], chunk_tokens, item.answers if i in gold else ()) if chunk_tokens else p
        for i in kept
        for p in [item.passages[i]]
    ]
    return replace(item, passages=tuple(dict.fromkeys(passages)))


def read_jsonl(path: Path) -> list[Item]:
    """Every line of a file as an item. Raises ``SystemExit`` with the line where one is not readable."""
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            answers = raw.get("answers") or [raw["answer"]]
            items.append(Item(f"{path.stem}:{number}", raw["question"], tuple(answers), tuple(raw["passages"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}:{number}: not an object with question, answers, passages: {error}") from error
    return items


def half(items: Sequence[Item], split: str) -> list[Item]:
    """The first half of a set (``"tune"``), the second (``"held"``) or everything."""
    middle = len(items) // 2
    return list({"all": items, "tune": items[:middle], "held": items[middle:]}[split])


def spread(items: Sequence[Item], n: int) -> list[Item]:
    """``n`` items, evenly spaced, so that a small sample sees the whole set."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


# --- synthetic sets ----------------------------------------------------------------------------------------------

PLACES = "Velmar Ostrea Quillon Harrow Tessaly Brannock Corvane Delphin Umbria Sarkend Lothmere Peverell".split()
NAMES = "Toma Rell|Ada Finch|Ivo Marsh|Lena Quist|Odd Berg|Mira Sol|Jon Carrow|Pia Thorn|Kai Wren|Una Holt".split("|")
THINGS = "ledger lantern barge orchard bridge kiln garden granary tower mill".split()
VERBS = "keeps paints repairs counts rents guards inspects measures lists sketches".split()
TIMES = "every spring|on market days|before noon|in wet years|after the harvest|twice a month|when asked".split("|")


def _prose(draw: random.Random, words: int) -> list[str]:
    """Sentences that answer no question."""
    out: list[str] = []
    while sum(len(s.split()) for s in out) < words:
        out.append(
            f"{draw.choice(NAMES)} of {draw.choice(PLACES)} {draw.choice(VERBS)} the old {draw.choice(THINGS)} "
            f"near the {draw.choice(THINGS)} {draw.choice(TIMES)}."
        )
    return out


def _hide(draw: random.Random, facts: list[str], chunks: int, words: int) -> tuple[str, ...]:
    """Each fact in a passage of its own (as far as there are enough), at a random sentence."""
    passages = [_prose(draw, words) for _ in range(chunks)]
    for fact, where in zip(facts, draw.sample(range(chunks), min(chunks, len(facts))), strict=False):
        passages[where].insert(draw.randrange(len(passages[where]) + 1), fact)
    return tuple(" ".join(p) for p in passages)


def needle(draw: random.Random, chunks: int, words: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """One fact in one passage; other places have codes too."""
    first, second = draw.sample(PLACES, 2)
    code, other = draw.sample(range(1000, 9999), 2)
    facts = [f"The gate code of {first} is {code}.", f"The gate code of {second} is {other}."]
    return f"What is the gate code of {first}?", (str(code),), _hide(draw, facts, chunks, words)


def multineedle(draw: random.Random, chunks: int, words: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Two facts in two passages, both asked for."""
    places = draw.sample(PLACES, 3)
    codes = [str(c) for c in draw.sample(range(1000, 9999), 3)]
    facts = [f"The gate code of {p} is {c}." for p, c in zip(places, codes, strict=True)]
    question = f"What are the gate codes of {places[0]} and {places[1]}?"
    return question, (f"{codes[0]} and {codes[1]}",), _hide(draw, facts, chunks, words)


def twohop(draw: random.Random, chunks: int, words: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A fact about a person whom another passage names."""
    place, elsewhere = draw.sample(PLACES, 2)
    who, other = draw.sample(NAMES, 2)
    seal, wrong = draw.sample(range(1000, 9999), 2)
    facts = [
        f"The courier of {place} is {who}.",
        f"The seal number of {who} is {seal}.",
        f"The courier of {elsewhere} is {other}.",
        f"The seal number of {other} is {wrong}.",
    ]
    return f"What is the seal number of the courier of {place}?", (str(seal),), _hide(draw, facts, chunks, words)


Synthesis = Callable[[random.Random, int, int], tuple[str, tuple[str, ...], tuple[str, ...]]]
SYNTHETIC: dict[str, Synthesis] = {"needle": needle, "multineedle": multineedle, "twohop": twohop}


def synthetic(name: str, n: int, *, seed: int, chunks: int, chunk_tokens: int) -> list[Item]:
    """``n`` items of a synthetic set; the same seed gives the same items."""

    def make() -> Iterator[Item]:
        for i in range(n):
            draw = random.Random(f"{name}:{seed}:{i}")
            question, answers, passages = SYNTHETIC[name](draw, chunks, max(8, int(chunk_tokens / 1.4)))
            yield Item(f"{name}:{seed}:{i}", question, answers, passages)

    return list(make())


# --- by name -----------------------------------------------------------------------------------------------------

DEFAULT_SHAPE = {"musique": (8, 256)}  # chunks, tokens each; others: as they are


def load_set(
    name: str,
    tokenizer: Any,
    *,
    n: int,
    split: str = "all",
    seed: int = 0,
    chunks: int | None = None,
    chunk_tokens: int | None = None,
    shuffle: bool = False,
    data: Path = DEFAULT_DATA,
) -> DataSet:
    """A set by name or path. ``shuffle`` permutes each item's passages (with ``seed``)."""
    if name in SYNTHETIC:
        items = synthetic(name, n, seed=seed, chunks=chunks or 8, chunk_tokens=chunk_tokens or 128)
    else:
        path = Path(name) if name.endswith(".jsonl") else data / f"{name}_dev.jsonl"
        if not path.is_file():
            raise SystemExit(f"no data set at {path}; known: squad, musique, {', '.join(SYNTHETIC)}, any file.jsonl")
        shape = DEFAULT_SHAPE.get(name, (64, 0))
        items = spread(half(read_jsonl(path), split), n)
        items = [shorten(i, tokenizer, chunks or shape[0], chunk_tokens or shape[1]) for i in items]
    if shuffle:
        items = [_shuffled(i, seed) for i in items]
    return DataSet(name, tuple(items), "greedy" if name == "musique" else "gold")


def _shuffled(item: Item, seed: int) -> Item:
    passages = list(item.passages)
    random.Random(f"{seed}:{item.id}").shuffle(passages)
    return replace(item, passages=tuple(passages))
