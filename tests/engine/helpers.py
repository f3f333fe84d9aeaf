"""What the law tests share: engines over tiny models, prompts made of documents, a plain transformers reference, and a
spy that counts the rows that the model really ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvboost_rag import KVBoost, Repair
from kvboost_rag.chunk import Prompt
from kvboost_rag.config import resolve_repair
from kvboost_rag.engine.prefill import Prepared
from kvboost_rag.engine.report import Report
from kvboost_rag.engine.request import Request
from tests.tiny import tiny_model, tiny_tokenizer

DOCS = (
    "The river passes under seven bridges before it leaves the old city, and each of them has a name.",
    "In the year 1887 a document was found that told of people who had lived between the two lakes.",
    "Question everything: an answer that was first given by a user is not the answer of the system.",
    "Ünïcödé text, 日本語 and a smile 🙂 belong in every test of this world; so do  double  spaces.",
)
QUESTION = "\n\nQuestion: which river is it?"
SYSTEM = "You answer from documents."
TOLERANCE = 1e-4  # fp32 logits against full prefill

POLICIES = {
    "fast": resolve_repair("fast"),
    "balanced": resolve_repair("balanced"),
    "faithful": resolve_repair("faithful"),
    "none": Repair.none(),
    "boundary": Repair.boundary(4, 3),
    "attention": Repair.attention(0.2),
    "deviation": Repair.deviation(0.2),
    "mixed": Repair.boundary(2) | Repair.attention(0.1) | Repair.deviation(0.1),
    "shifted": (Repair.boundary(4) | Repair.attention(0.1)).with_shift(),
    "full": Repair.full(),
}


def make_engine(family: str = "llama", *, tokenizer: Any = None, model: Any = None, **options: Any) -> KVBoost:
    """An engine over its own copy of a tiny model; ``options`` are the constructor's."""
    tokenizer = tokenizer or tiny_tokenizer()
    model = model or tiny_model(family, vocab_size=len(tokenizer))
    return KVBoost(model, tokenizer, **{"store": "memory", "filler_tokens": 48, **options})


def chat(docs: Sequence[str] = DOCS, question: str = QUESTION, system: str = SYSTEM) -> list[dict[str, str]]:
    """A system message, and a user message of documents and a question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(docs) + question}]


def request_of(engine: KVBoost, prompt: Any, **options: Any) -> Request:
    return Request.build(prompt, reuse=engine.reuse, repair=engine.repair, options=options)


def segmented(engine: KVBoost, prompt: Any, **options: Any) -> Prompt:
    """The prompt as the engine cuts and tokenises it."""
    return engine.engine.segment(request_of(engine, prompt, **options), Report())[0]


def prepared(engine: KVBoost, prompt: Any, **options: Any) -> tuple[Prepared, Report]:
    """The prompt's KV and first logits after compose, repair and forward."""
    report = Report()
    return engine.engine._prepare(request_of(engine, prompt, **options), report, 4)[1], report


def reference(model: Any, token_ids: Sequence[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """transformers' own full prefill: logits ``[n, vocab]`` and per layer (K, V) ``[Hkv, n, D]``."""
    with torch.no_grad():
        out = model(torch.tensor([list(token_ids)]), use_cache=True)
    cache = getattr(out, "cache", None) or out.past_key_values
    return out.logits[0], [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def full_prefill_gap(engine: KVBoost, model: Any, prompt: Any, **options: Any) -> float:
    """Largest difference to ``model``'s own prefill of the same ids: first logits and every K and V."""
    got, _ = prepared(engine, prompt, **options)
    logits, layers = reference(model, got.prompt.token_ids)
    n = got.prompt.num_tokens
    gaps = [(got.logits[0] - logits[-1]).abs().max()]
    for layer, (keys, values) in enumerate(layers):
        gaps.append((got.cache.kv[layer, 0, :, :n] - keys).abs().max())
        gaps.append((got.cache.kv[layer, 1, :, :n] - values).abs().max())
    return float(torch.stack(gaps).max())


def hf_greedy(model: Any, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """New ids of transformers' own greedy ``generate``."""
    ids = torch.tensor([list(token_ids)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, use_cache=True
    )
    return [int(i) for i in out[0, ids.shape[1] :]]


class Rows:
    """Rows run by every decoder layer while :func:`spy` is on."""

    def __init__(self, num_layers: int) -> None:
        self.by_layer = [0] * num_layers
        self.calls: list[int] = []  # rows of each forward, at the first layer

    @property
    def total(self) -> float:
        """Rows, each weighted by the share of layers that it ran."""
        return sum(self.by_layer) / len(self.by_layer)


@contextmanager
def spy(engine: KVBoost) -> Iterator[Rows]:
    """Count rows where the layers are called: independent of what the engine writes down."""
    layers = engine.adapter.model.model.layers
    rows = Rows(len(layers))

    def hook(index: int) -> Any:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rows.by_layer[index] += hidden.shape[0] * hidden.shape[1]
            if index == 0:
                rows.calls.append(hidden.shape[0] * hidden.shape[1])

        return count

    handles = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


class Script:
    """A logits processor that makes the model say given ids, whatever it thinks."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.token_ids[input_ids.shape[1] - self.start]] = 0.0
        return forced


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
