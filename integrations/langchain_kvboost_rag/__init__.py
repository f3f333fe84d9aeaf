"""LangChain models over kvboost_rag: change one line, and retrieved chunks skip prefill.

::

    from langchain_kvboost_rag import ChatKVBoost, warm_documents

    llm = ChatKVBoost(model="smollm2", temperature=0, max_tokens=64)
    warm_documents(llm, documents)
"""

from __future__ import annotations

try:
    import langchain_core as _langchain_core  # noqa: F401
except ImportError as error:
    from kvboost_rag.errors import MissingExtraError

    raise MissingExtraError(
        "langchain_kvboost_rag needs langchain-core", hint="pip install 'kvboost-rag[langchain]'"
    ) from error

from kvboost_rag import __version__
from langchain_kvboost_rag.callback import RetrievedDocumentsHandler, register_retrieved
from langchain_kvboost_rag.chat_model import ChatKVBoost
from langchain_kvboost_rag.llm import KVBoostLLM
from langchain_kvboost_rag.retriever import KVBoostCompressor, KVBoostRetriever, register_documents
from langchain_kvboost_rag.warm import KVBoostWarmer, warm_documents, warm_vectorstore

__all__ = [
    "ChatKVBoost",
    "KVBoostCompressor",
    "KVBoostLLM",
    "KVBoostRetriever",
    "KVBoostWarmer",
    "RetrievedDocumentsHandler",
    "__version__",
    "register_documents",
    "register_retrieved",
    "warm_documents",
    "warm_vectorstore",
]
