"""Prompt templates that keep node texts verbatim."""

from __future__ import annotations

from typing import Any

from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL


def verbatim_context(template: BasePromptTemplate | None = None, variable: str = "context_str") -> BasePromptTemplate:
    """A copy of ``template`` (default: LlamaIndex's question-answering prompt) that writes a list of texts as text.

    Response mode ``simple_summarize`` hands its template a list; formatting that gives ``['first line\\\\nsecond']``,
    in which no node stands verbatim (llama_index PR 22392)::

        index.as_query_engine(response_mode="simple_summarize", text_qa_template=verbatim_context())
    """
    copy: BasePromptTemplate = _mapped(template or DEFAULT_TEXT_QA_PROMPT_SEL, variable)
    return copy


def _mapped(template: Any, variable: str) -> Any:
    if isinstance(template, SelectorPromptTemplate):
        conditionals = [(condition, _mapped(inner, variable)) for condition, inner in template.conditionals or ()]
        return SelectorPromptTemplate(_mapped(template.default_template, variable), conditionals)

    def as_text(**kwargs: Any) -> Any:
        value = kwargs[variable]
        return "\n".join(map(str, value)) if isinstance(value, list) else value

    copy = template.model_copy()
    copy.function_mappings = {**(template.function_mappings or {}), variable: as_text}
    return copy
