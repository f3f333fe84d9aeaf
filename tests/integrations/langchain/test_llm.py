"""The text model: prompts as they come, batches, tokens to callbacks, usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_kvboost_rag import KVBoostLLM, warm_documents
from tests.integrations.langchain.corpus import documents
from tests.integrations.langchain.scripted import ScriptedKVBoost, scripted_engine


@pytest.fixture
def engine() -> ScriptedKVBoost:
    return scripted_engine(lambda prompt, options: f"You said {str(prompt)[-9:]}")


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.seen.append(token)


def test_all_ways_to_ask_give_one_answer(engine: ScriptedKVBoost) -> None:
    llm = KVBoostLLM(engine=engine)
    answer = llm.invoke("first question")
    assert answer == "You said  question"
    assert asyncio.run(llm.ainvoke("first question")) == answer
    assert "".join(llm.stream("first question")) == answer

    async def streamed() -> str:
        return "".join([c async for c in llm.astream("first question")])

    assert asyncio.run(streamed()) == answer
    assert llm.batch(["first question", "another one"]) == [answer, "You said other one"]
    assert asyncio.run(llm.abatch(["first question", "another one"])) == [answer, "You said other one"]


def test_prompts_reach_the_model_unchanged_unless_asked(engine: ScriptedKVBoost) -> None:
    KVBoostLLM(engine=engine).invoke("plain text")
    KVBoostLLM(engine=engine, apply_chat_template=True).invoke("plain text")
    assert engine.asked == ["plain text", [{"role": "user", "content": "plain text"}]]
    chat = ChatPromptTemplate.from_messages([("system", "be short"), ("human", "{q}")])
    (chat | KVBoostLLM(engine=engine)).invoke({"q": "hi"})
    assert engine.asked[-1] == "System: be short\nHuman: hi"


def test_a_batch_is_reported_as_a_whole_and_one_by_one(engine: ScriptedKVBoost) -> None:
    result = KVBoostLLM(engine=engine).generate(["one", "and two"])
    assert result.llm_output is not None
    details = [g[0].generation_info for g in result.generations]
    assert all(d is not None and d["finish_reason"] == "stop" for d in details)
    usage = [d["usage_metadata"] for d in details if d]
    total = result.llm_output["token_usage"]
    assert total["prompt_tokens"] == sum(u["input_tokens"] for u in usage)
    assert total["completion_tokens"] == sum(u["output_tokens"] for u in usage)
    assert result.llm_output["model_name"] == "scripted"


def test_tokens_reach_callbacks_once(engine: ScriptedKVBoost) -> None:
    for llm, ask in (
        (KVBoostLLM(engine=engine, streaming=True), "invoke"),
        (KVBoostLLM(engine=engine), "stream"),
    ):
        tokens = Tokens()
        answer = "".join(getattr(llm, ask)("a question", {"callbacks": [tokens]}))
        assert "".join(tokens.seen) == answer
        assert len(tokens.seen) > 3
    silent = Tokens()
    KVBoostLLM(engine=engine).invoke("a question", {"callbacks": [silent]})
    assert silent.seen == []


def test_warm_chunks_hit_in_a_text_prompt(engine: ScriptedKVBoost) -> None:
    llm = KVBoostLLM(engine=engine)
    two = documents()[:2]
    warm_documents(llm, two)
    prompt = PromptTemplate.from_template("Context:\n{context}\n\nQuestion: {q}\nHelpful Answer:")
    text = prompt.format(context="\n\n".join(d.page_content for d in two[::-1]), q="What?")
    info = llm.generate([text]).generations[0][0].generation_info
    assert info is not None
    assert info["kvboost"]["hits"] == 2


def test_stop_and_limits(engine: ScriptedKVBoost) -> None:
    assert KVBoostLLM(engine=engine, stop=["said"]).invoke("q") == "You "
    assert KVBoostLLM(engine=engine).invoke("q", stop=["ou"]) == "Y"
    result = KVBoostLLM(engine=engine, max_tokens=2).generate(["q"])
    info = result.generations[0][0].generation_info
    assert info is not None
    assert info["finish_reason"] == "length"
