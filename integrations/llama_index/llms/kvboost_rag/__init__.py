"""LlamaIndex on kvboost_rag: an LLM whose retrieved nodes skip prefill, and what warms it.

::

    from llama_index.core import Settings
    from llama_index.llms.kvboost_rag import KVBoostLLM

    Settings.llm = KVBoostLLM(model="smollm2")
"""

from __future__ import annotations

from llama_index.llms.kvboost_rag.base import KVBoostLLM
from llama_index.llms.kvboost_rag.postprocessor import KVBoostPostprocessor
from llama_index.llms.kvboost_rag.prompts import verbatim_context
from llama_index.llms.kvboost_rag.retrieved import ReuseWarning
from llama_index.llms.kvboost_rag.synthesizer import KVBoostSynthesizer
from llama_index.llms.kvboost_rag.warmer import KVBoostWarmer, warm_index, warm_nodes

__all__ = [
    "KVBoostLLM",
    "KVBoostPostprocessor",
    "KVBoostSynthesizer",
    "KVBoostWarmer",
    "ReuseWarning",
    "verbatim_context",
    "warm_index",
    "warm_nodes",
]
