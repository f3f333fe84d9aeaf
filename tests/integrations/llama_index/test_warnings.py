"""Nodes that do not stand verbatim in the prompt: one warning, with the cause and the fix."""

from __future__ import annotations

import html
import warnings
from typing import Any

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.kvboost_rag import KVBoostLLM, ReuseWarning
from llama_index.llms.kvboost_rag.retrieved import MOST_TEXTS, RetrievedTexts, find_causes

from tests.integrations.llama_index.corpus import PASSAGES, QUESTION, ListRetriever, make_nodes

STRIPPED = [p.strip() for p in PASSAGES]


def seen(prompt: str, texts: list[str] = STRIPPED) -> list[str]:
    watcher = RetrievedTexts()
    watcher.add(texts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            watcher.standing_in(prompt)
    assert all(w.category is ReuseWarning for w in caught)
    return [str(w.message) for w in caught]


def test_verbatim_and_absent_texts_give_no_warning() -> None:
    assert seen("\n\n".join(STRIPPED)) == []
    assert seen("a question that needs no context") == []
    assert seen(STRIPPED[0]) == []


@pytest.mark.parametrize(
    ("prompt", "cause", "fix"),
    [
        (str(["\n".join(STRIPPED)]), "str\\(\\)", "verbatim_context"),
        (str(STRIPPED), "str\\(\\)", "KVBoostSynthesizer"),
        (html.escape("\n\n".join(STRIPPED)), "HTML", "escaping"),
        ("\n\n".join(" ".join(p.split()) for p in STRIPPED), "white space", "leave node texts"),
        (STRIPPED[0] + "\n\n" + STRIPPED[1][:90], "cut", "set_global_tokenizer"),
        (STRIPPED[0][-70:] + "\n\n" + STRIPPED[1], "cut", "set_global_tokenizer"),
    ],
)
def test_the_cause_and_the_fix_are_named_once(prompt: str, cause: str, fix: str) -> None:
    import re

    messages = seen(prompt)
    assert len(messages) == 1
    assert re.search(cause, messages[0])
    assert fix in messages[0]


def test_overlap_with_a_node_that_is_there_is_no_cut() -> None:
    """Neighbouring chunks share their edges; the shared part stands inside the one that is there."""
    first, second = STRIPPED[0] + " " + STRIPPED[1], STRIPPED[1] + " " + STRIPPED[2]
    assert find_causes([second], [first], first) == [None]


def test_the_memory_of_texts_is_bounded_and_short_ones_are_left_out() -> None:
    watcher = RetrievedTexts()
    watcher.add(f"a text that is long enough to be a chunk: {i}" for i in range(MOST_TEXTS + 50))
    watcher.add(["short", "   "])
    assert len(watcher) == MOST_TEXTS


def test_settled_texts_are_forgotten(llm: KVBoostLLM) -> None:
    RetrieverQueryEngine.from_args(ListRetriever(make_nodes()), llm=llm).query(QUESTION)
    assert len(llm._retrieved) == 0


def test_simple_summarize_warns_through_the_framework(llm: KVBoostLLM, reports: list[Any]) -> None:
    engine = RetrieverQueryEngine.from_args(ListRetriever(make_nodes()), llm=llm, response_mode="simple_summarize")
    with pytest.warns(ReuseWarning, match=r"4 of 4 .*verbatim_context"):
        engine.query(QUESTION)


def test_an_overflowing_context_warns_that_nodes_were_cut(make_llm: Any, reports: list[Any]) -> None:
    from llama_index.core import Settings

    llm = Settings.llm = make_llm(max_tokens=2)
    llm.set_global_tokenizer()
    template = RetrieverQueryEngine.from_args(ListRetriever([]), llm=llm).get_prompts()
    frame = template["response_synthesizer:text_qa_template"].format_messages(
        llm=llm, context_str="", query_str=QUESTION
    )
    half = llm.count_tokens("\n\n".join(PASSAGES)) // 2
    llm.context_window = llm.count_tokens(frame) + half + 500  # LlamaIndex keeps 500 back
    engine = RetrieverQueryEngine.from_args(ListRetriever(make_nodes()), llm=llm)
    with pytest.warns(ReuseWarning, match="were cut"):
        engine.query(QUESTION)
    assert len(reports) > 1
