"""A response synthesizer that never cuts a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.llms.kvboost_rag.base import KVBoostLLM
from llama_index.llms.kvboost_rag.retrieved import node_text
from pydantic import BaseModel

from kvboost_rag.errors import UsageError

SLACK = 32  # tokens between counting piece by piece and the whole prompt
SEPARATOR = "\n\n"


class KVBoostSynthesizer(BaseSynthesizer):
    """One call over all nodes, each whole and in the retriever's order; what does not fit into the window goes into
    further calls that refine the answer. Tokens are counted with the model's own tokenizer.

    ``streaming`` streams the last call. ``output_cls`` gives objects instead of text.
    """

    def __init__(
        self,
        llm: KVBoostLLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(llm=llm, streaming=streaming, output_cls=output_cls, **options)
        if not isinstance(self._llm, KVBoostLLM):
            raise UsageError(f"KVBoostSynthesizer works with KVBoostLLM, not {type(self._llm).__name__}")
        self._kvboost: KVBoostLLM = self._llm
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._refine_template = refine_template or DEFAULT_REFINE_PROMPT_SEL

    def _get_prompts(self) -> dict[str, Any]:
        return {"text_qa_template": self._text_qa_template, "refine_template": self._refine_template}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)
        self._refine_template = prompts.get("refine_template", self._refine_template)

    def synthesize(self, query: Any, nodes: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Answer ``query`` from ``nodes``."""
        self._kvboost.register_retrieved([node_text(n.node) for n in nodes])
        return super().synthesize(query, nodes, *args, **kwargs)

    async def asynthesize(self, query: Any, nodes: list[Any], *args: Any, **kwargs: Any) -> Any:
        """:meth:`synthesize` without blocking the event loop."""
        self._kvboost.register_retrieved([node_text(n.node) for n in nodes])
        return await super().asynthesize(query, nodes, *args, **kwargs)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        """Answer from texts."""
        answer: Any = None
        for context, last in self._contexts(query_str, text_chunks):
            prompt, values = self._prompt(query_str, context, answer)
            if self._output_cls is not None:
                answer = self._kvboost.structured_predict(self._output_cls, prompt, **values, **response_kwargs)
            elif last and self._streaming:
                return self._kvboost.stream(prompt, **values, **response_kwargs)
            else:
                answer = self._kvboost.predict(prompt, **values, **response_kwargs)
        return answer or self._empty_response

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> Any:
        """:meth:`get_response` without blocking the event loop."""
        answer: Any = None
        for context, last in self._contexts(query_str, text_chunks):
            prompt, values = self._prompt(query_str, context, answer)
            if self._output_cls is not None:
                answer = await self._kvboost.astructured_predict(self._output_cls, prompt, **values, **response_kwargs)
            elif last and self._streaming:
                return await self._kvboost.astream(prompt, **values, **response_kwargs)
            else:
                answer = await self._kvboost.apredict(prompt, **values, **response_kwargs)
        return answer or self._empty_response

    def _prompt(self, query: str, context: str, answer: Any) -> tuple[BasePromptTemplate, dict[str, Any]]:
        if answer is None:
            return self._text_qa_template, {"context_str": context, "query_str": query}
        text = answer.model_dump_json() if isinstance(answer, BaseModel) else str(answer)
        return self._refine_template, {"context_msg": context, "query_str": query, "existing_answer": text}

    def _contexts(self, query: str, texts: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Contexts of whole texts, and whether it is the last one."""
        groups = self._groups(query, [t.strip() for t in texts if t.strip()])
        for index, group in enumerate(groups):
            yield SEPARATOR.join(group), index == len(groups) - 1

    def _groups(self, query: str, texts: list[str]) -> list[list[str]]:
        llm, window = self._kvboost, self._kvboost.metadata
        frame = max(
            llm.count_tokens(self._text_qa_template.format_messages(llm=llm, context_str="", query_str=query)),
            llm.count_tokens(
                self._refine_template.format_messages(llm=llm, context_msg="", query_str=query, existing_answer="")
            )
            + (window.num_output if len(texts) > 1 else 0),
        )
        if llm.system_prompt:
            frame += llm.count_tokens(llm.system_prompt)
        room = window.context_window - window.num_output - frame - SLACK
        groups: list[list[str]] = []
        left = -1
        for text in texts:
            size = llm.count_tokens(text) + llm.count_tokens(SEPARATOR)
            if size > left or not groups:
                groups.append([])
                left = room
            groups[-1].append(text)
            left -= size
        return groups
