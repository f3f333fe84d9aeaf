"""What users of LlamaIndex with local models complain about, each as a regression test.

Numbers are issues and pull requests of run-llama/llama_index unless another project is named.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.kvboost_rag import KVBoostLLM

from kvboost_rag.errors import ContextLengthError, KVBoostError, TokenizerError
from tests.integrations.llama_index.corpus import QUESTION, ListRetriever, make_nodes
from tests.tiny_tokenizers import CHATML, tiny_tokenizer

NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\n' }}" + CHATML
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    + CHATML
)
HELLO = [ChatMessage(content="Hello, which city is this document about?")]


def ask_twice(llm: KVBoostLLM, reports: list[Any], **kwargs: Any) -> tuple[int, int]:
    """Hits and misses of the second question, nodes reversed."""
    for nodes in (make_nodes(), make_nodes()[::-1]):
        RetrieverQueryEngine.from_args(ListRetriever(nodes), llm=llm, **kwargs).query(QUESTION)
    return reports[-1].hits, reports[-1].misses


def with_template(make_llm: Any, template: str | None, **fields: Any) -> KVBoostLLM:
    llm: KVBoostLLM = make_llm({"tokenizer": tiny_tokenizer(chat_template=template)}, **fields)
    Settings.llm = llm
    return llm


# 1: langchain 29033, 22379: tools never reach a local model's prompt → test_tools.py
# 2: langchain 2309, 18782
def test_streaming_does_not_arrive_in_one_lump(llm: KVBoostLLM, reports: list[Any]) -> None:
    stream = llm.stream_chat(HELLO, max_tokens=20)
    next(stream)
    assert reports == [], "the first piece is there before the answer is finished"
    assert len(list(stream)) > 5


# 4: 10719, 21968
def test_async_is_no_disguised_sync_call(llm: KVBoostLLM) -> None:
    assert not isinstance(llm, CustomLLM)
    here = threading.get_ident()
    threads: list[int] = []

    def spy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        threads.append(threading.get_ident())
        return scores

    asyncio.run(llm.achat(HELLO, logits_processors=[spy]))
    assert threads
    assert here not in threads


# 5: langchain 22601, 1717: stop is ignored, or works for single tokens only
def test_stop_strings_are_honoured_per_call_and_per_object(make_llm: Any) -> None:
    llm = make_llm(max_tokens=20)
    whole = llm.complete("x").text
    stop = whole[6:9]
    cut = whole[: whole.index(stop)]
    assert llm.complete("x", stop=[stop]).text == cut
    assert "".join(r.delta for r in llm.stream_complete("x", stop=[stop])) == cut
    llm.stop = [stop]
    assert llm.complete("x").text == cut
    assert llm.complete("x").raw["finish_reason"] == "stop"


# 6: langchain 19770, 19933: no chat template applied, generation never ends
def test_an_unformatted_completion_is_a_chat_turn(llm: KVBoostLLM) -> None:
    assert llm.complete(HELLO[0].content).text == llm.chat(HELLO).message.content


# 7: langchain 29126, 26656: "chat_template is not set"
def test_a_model_without_a_chat_template_answers_and_reuses(make_llm: Any, reports: list[Any]) -> None:
    llm = with_template(make_llm, None)
    assert not llm.metadata.is_chat_model
    assert not llm.metadata.is_function_calling_model
    assert ask_twice(llm, reports) == (4, 0)
    assert llm.chat(HELLO).message.content == llm.complete(f"user: {HELLO[0].content}\nassistant: ").text


# 8: langchain 28532; transformers 28366: "System role not supported"
def test_a_template_without_a_system_role_answers_and_reuses(make_llm: Any, reports: list[Any]) -> None:
    llm = with_template(make_llm, NO_SYSTEM)
    assert ask_twice(llm, reports) == (4, 0)
    assert "trusted" in llm.engine.render([{"role": "user", "content": "trusted"}])


# 9: 11731, 13728, 11770: "Conversation roles must alternate"
def test_roles_that_do_not_alternate_are_joined(make_llm: Any) -> None:
    llm = with_template(make_llm, NO_SYSTEM)
    history = [
        ChatMessage(role="system", content="Be terse."),
        ChatMessage(role="user", content="one"),
        ChatMessage(role="user", content="two"),
        ChatMessage(role="assistant", content="three"),
        ChatMessage(role="system", content="Be kind."),
        ChatMessage(role="user", content="four"),
    ]
    joined = [
        ChatMessage(role="user", content="Be terse.\n\nBe kind.\n\none\n\ntwo"),
        ChatMessage(role="assistant", content="three"),
        ChatMessage(role="user", content="four"),
    ]
    assert llm.chat(history).message.content == llm.chat(joined).message.content


def test_an_assistant_may_speak_first(make_llm: Any) -> None:
    llm = with_template(make_llm, NO_SYSTEM)
    assert llm.chat([ChatMessage(role="assistant", content="I begin"), *HELLO]).message.content


def test_what_cannot_be_mended_is_refused_in_the_templates_words(make_llm: Any) -> None:
    llm = with_template(make_llm, "{{ raise_exception('only on Sundays') }}")
    with pytest.raises(TokenizerError, match="only on Sundays"):
        llm.chat(HELLO)


# 10: langchain 15232: a history that ends with a tool's result is refused
def test_the_last_message_may_be_a_tool_result(llm: KVBoostLLM) -> None:
    result = ChatMessage(role="tool", content="nine o'clock", additional_kwargs={"name": "clock"})
    assert llm.chat([*HELLO, result]).message.content


# 11: langchain 25916, 24929: the answer echoes the prompt
def test_answers_do_not_repeat_the_prompt(llm: KVBoostLLM) -> None:
    for text in (llm.chat(HELLO).message.content, llm.complete(HELLO[0].content).text):
        assert HELLO[0].content not in text


# 12: 9184: end-of-sequence tokens in the text
def test_control_tokens_never_show(llm: KVBoostLLM) -> None:
    end = sorted(llm.engine.engine.eos_ids)

    def forbid_then_end(count: int) -> Any:
        seen: list[int] = []

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return scores if len(seen) < count else torch.full_like(scores, -1e9).index_fill(-1, torch.tensor(end), 0.0)

        return processor

    pieces = list(llm.stream_chat(HELLO, logits_processors=[forbid_then_end(4)]))
    assert pieces[-1].raw["finish_reason"] == "stop"
    assert pieces[-1].raw["usage"]["completion_tokens"] == 4
    assert not any(token in (p.delta or "") for p in pieces for token in ("</s>", "<|im_end|>"))


# 13: 8046, 14066, 17251, 18946: context size errors
def test_a_large_max_tokens_leaves_room_for_the_prompt(make_llm: Any, reports: list[Any]) -> None:
    llm = Settings.llm = make_llm(max_tokens=4090)
    assert llm.metadata.num_output <= llm.metadata.context_window // 4
    for nodes in (make_nodes(),):
        engine = RetrieverQueryEngine.from_args(ListRetriever(nodes), llm=llm)
        prompts: list[Any] = []
        original = llm.engine.stream

        def short(prompt: Any, **options: Any) -> Any:
            prompts.append(options["max_new_tokens"])
            return original(prompt, **({**options, "stop": ["e", "a", "o"]}))

        llm.engine.stream = short
        engine.query(QUESTION)
    assert prompts[0] == 4090
    assert prompts[1] < 4090 - reports[-1].prompt_tokens + 1


def test_an_order_for_too_many_tokens_is_an_error_with_the_way_out(llm: KVBoostLLM) -> None:
    with pytest.raises(ContextLengthError, match="4096"):
        llm.chat(HELLO, max_tokens=4096)
    with pytest.raises(ContextLengthError, match="set_global_tokenizer"):
        llm.chat([ChatMessage(content="city " * 6000)])


def test_memories_are_trimmed_by_this_models_tokens(llm: KVBoostLLM) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=60)
    for index in range(6):
        memory.put(ChatMessage(role="user", content=f"Zwölf Boxkämpfer jagen Viktor {index}"))
    kept = memory.get()
    assert 1 <= len(kept) < 6
    assert sum(llm.count_tokens(m.content) for m in kept) <= 60


# 14: 12214, 9857, 17673, 19740: usage missing, zero or counted twice → test_llm.py, test_modes.py
# 15: 17553: structured output → test_tools.py
# 16: 17553, 14872
def test_the_model_counts_as_function_calling(llm: KVBoostLLM) -> None:
    assert llm.metadata.is_function_calling_model


# 17: 13375; llama-cpp-python 471, 1995: crashes under concurrency
def test_threads_share_one_llm(llm: KVBoostLLM) -> None:
    prompts = [f"What is the name of city {i}?" for i in range(4)]
    alone = [llm.complete(p).text for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: llm.complete(p).text, prompts * 2)) == alone * 2


# 18: langchain 17678; mellea 378: memory is not released
def test_responses_and_a_dropped_llm_hold_no_tensors(tmp_path: Any, tokenizer: Any) -> None:
    from tests.tiny import save_tiny

    llm = KVBoostLLM(model=str(save_tiny(tmp_path / "m", tokenizer=tokenizer)), store="memory", max_tokens=2)
    response = llm.chat(HELLO)
    assert not any(isinstance(o, torch.Tensor) for o in gc.get_referents(response.raw, *response.raw.values()))
    engine, model = weakref.ref(llm.engine), weakref.ref(llm.engine.adapter.model)
    del llm
    gc.collect()
    assert engine() is None
    assert model() is None
    assert response.message.content


# 19: langchain 17005, 26531: options of a call are ignored in streams → test_llm.py
# 20: transformers 22576; llama-cpp-python 1501; 13494: hangs, double start tokens, a system prompt ignored
def test_an_error_in_the_thread_is_raised_not_waited_for(llm: KVBoostLLM) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")

    async def scenario() -> None:
        await asyncio.wait_for(llm.achat(HELLO, logits_processors=[broken]), timeout=60)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
    with pytest.raises(ZeroDivisionError):
        list(llm.stream_chat(HELLO, logits_processors=[broken]))
    assert llm.chat(HELLO).message.content, "and the next request is answered"


def test_one_start_token(llm: KVBoostLLM) -> None:
    text = llm.engine.render([{"role": "user", "content": HELLO[0].content}])
    assert text.startswith("<s>")
    assert llm.count_tokens(HELLO) == len(llm.tokenizer.encode(text, add_special_tokens=False))


def test_errors_have_one_root(llm: KVBoostLLM) -> None:
    with pytest.raises(KVBoostError):
        llm.chat([])
    with pytest.raises(KVBoostError):
        llm.complete("", formatted=True)


# templates that move positions
@pytest.mark.parametrize("template", [DATED, DEFAULT_SYSTEM], ids=["date", "default-system"])
def test_templates_that_put_text_in_front_still_hit(template: str, make_llm: Any, reports: list[Any]) -> None:
    assert ask_twice(with_template(make_llm, template), reports) == (4, 0)


def test_no_public_method_is_untested_by_signature() -> None:
    """The eight methods keep the framework's signatures."""
    for name in ("chat", "stream_chat", "achat", "astream_chat"):
        assert "messages" in inspect.signature(KVBoostLLM.__dict__[name]).parameters
    assert all(name in KVBoostLLM.__dict__ for name in ("complete", "stream_complete", "acomplete", "astream_complete"))
