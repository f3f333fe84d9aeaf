# %% [markdown]
# # LangChain: one changed line
#
# `ChatKVBoost` is a LangChain chat model. Put it where your chain or agent has its model now, warm the documents
# once, and retrieved chunks skip prefill. This notebook runs a retrieval chain, looks at what was reused, and then
# lets the same model act: a forced tool call and structured output, which work with small models because the grammar
# of the answer is enforced while it is generated.

# %%
from typing import Literal

import matplotlib.pyplot as plt
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from pydantic import BaseModel
from rank_bm25 import BM25Plus

from kvboost_rag import Corpus, SplitOptions
from langchain_kvboost_rag import ChatKVBoost, warm_documents

llm = ChatKVBoost(model="smollm2", store="memory", temperature=0, max_tokens=32, stop=["\n", ". "])  # the line

# %% [markdown]
# ## Documents, warmed at ingest
#
# Any loader, splitter and vector store will do; what matters is that the texts that are warmed are the texts that the
# retriever will return. `warm_documents` takes the documents after splitting, `warm_vectorstore` reads what a vector
# store holds, and `KVBoostWarmer` is a step for an ingest pipeline.

# %%
corpus = Corpus(["../benchmarks/demo_docs"], split=SplitOptions(600, 60))
documents = [Document(chunk.text, metadata={"source": chunk.source.rsplit("/", 1)[-1]}) for chunk in corpus]
report = warm_documents(llm, documents)
print(f"{report.stored} chunks, {report.tokens} tokens")

# %% [markdown]
# A word-matching retriever keeps this notebook free of an embedding model. With `reverse` it returns the same
# documents the other way round, which is what a reranker might do.


# %%
class Retriever(BaseRetriever):
    docs: list[Document]
    k: int = 4
    reverse: bool = False

    def _get_relevant_documents(self, query, *, run_manager):
        bm25 = BM25Plus([d.page_content.lower().split() for d in self.docs])
        found = bm25.get_top_n(query.lower().split(), self.docs, self.k)
        return found[::-1] if self.reverse else found


# %% [markdown]
# ## A chain
#
# The usual one, in LangChain's own notation. Nothing in it knows of reuse.

# %%
template = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question in one sentence, from the context."),
        ("human", "{context}\n\nQuestion: {question}"),
    ]
)


def join(docs):
    return "\n\n".join(d.page_content for d in docs)


def chain(reverse=False):
    retriever = Retriever(docs=documents, reverse=reverse)
    return {"context": retriever | join, "question": RunnablePassthrough()} | template | llm


question = "Who is the captain of the Petrel?"
first = chain().invoke(question)
second = chain(reverse=True).invoke(question)  # other order, so that no prefix fits
print(first.text.strip(), "|", second.text.strip())

# %% [markdown]
# The answer is an ordinary `AIMessage`. What was reused stands where LangChain's own tools look for it, in the
# usage's `cache_read`, and in full in `response_metadata["kvboost"]`:

# %%
second.usage_metadata

# %%
for chunk in second.response_metadata["kvboost"]["chunks"]:
    print(f"{chunk['outcome']:6} {chunk['reason']:16} {chunk['text'][:70]!r}")

# %%
plain = (template | llm.bind(reuse="off")).invoke(
    {"context": join(Retriever(docs=documents).invoke(question)), "question": question}
)
asked = {"plain prefill": plain, "first question": first, "reversed order": second}


def bars(asked):
    _, axes = plt.subplots(1, 2, figsize=(10, 1.0 + 0.35 * len(asked)), dpi=80, layout="constrained", sharey=True)
    for name, message in asked.items():
        r = message.response_metadata["kvboost"]
        parts = {"reused": r["reused_tokens"], "repaired": r["repaired_tokens"]}
        parts["forwarded"] = r["prompt_tokens"] - sum(parts.values())
        left = 0
        for (part, n), colour in zip(parts.items(), ("#8fd19e", "#fdae6b", "#bdbdbd"), strict=True):
            axes[0].barh(name, n, left=left, color=colour, label=part)
            left += n
        axes[1].barh(name, r["ttft_s"], color="#4c78a8")
    axes[0].set_title("prompt tokens: green reused, orange repaired, grey forwarded", fontsize=9)
    axes[1].set_title("time to first token, s", fontsize=9)
    axes[0].invert_yaxis()
    plt.show()


bars(asked)

# %% [markdown]
# Streaming, `batch` and the async methods are the same engine underneath and give the same text:

# %%
for piece in (chain() | StrOutputParser()).stream("How heavy is the bell of the Aurora?"):
    print(piece, end="")

# %% [markdown]
# ## An agent's step: calling a tool
#
# In an agent, the model calls a tool, the tool returns documents, and the model answers from them. A model of 135M
# parameters does not reliably decide *whether* to call a tool, so that is forced here (`tool_choice`). *What* it
# calls the tool with is its own choice, and a grammar makes sure that it parses and that the page exists.


# %%
@tool(response_format="content_and_artifact")
def read_page(page: Literal["ferry", "lighthouse", "market", "museum"]):
    """Read a page of the town guide."""
    found = [d for d in documents if d.metadata["source"] == f"{page}.md"]
    return join(found), found


agent_llm = llm.model_copy(update={"stop_sequences": None})
history = [("human", "Who is the captain of the ferry?")]
call = agent_llm.bind_tools([read_page], tool_choice="read_page").invoke(history)
call.tool_calls

# %%
result = read_page.invoke(call.tool_calls[0])
answer = llm.invoke([*history, call, result])
print(answer.text.strip(), "\n")
for chunk in answer.response_metadata["kvboost"]["chunks"]:
    print(f"{chunk['outcome']:6} {chunk['text'][:70]!r}")

# %% [markdown]
# The documents that came back through the tool hit as well: they stand verbatim in the tool's message. With a larger
# model, `langchain.agents.create_agent(ChatKVBoost(...), [read_page])` runs this loop by itself.
#
# ## Structured output
#
# `with_structured_output` enforces a schema in the same way. It guarantees the *shape*; whether the content is right
# is up to the model. Such a small one needs a narrow schema.


# %%
class Weight(BaseModel):
    kilograms: int


bell = "How heavy is the bell of the Aurora?"
text = join(Retriever(docs=documents, k=1).invoke(bell))
agent_llm.with_structured_output(Weight).invoke(f"{text}\n\n{bell}")

# %% [markdown]
# ## Where to go on
#
# * No warm-up possible, because documents are not known before? Wrap the retriever (`KVBoostRetriever`), or let
#   `register_retrieved(llm)` watch it: a chunk that is asked for once is stored after the answer and hits from then
#   on.
# * `ChatKVBoost(..., repair="faithful")`, `reuse="prefix"` or `.bind(repair=...)` set how much is approximated;
#   notebooks 03 and 06 measure it.
