# %% [markdown]
# # LlamaIndex: set `Settings.llm`
#
# `KVBoostLLM` is a LlamaIndex LLM. With it, the nodes that a retriever returns skip prefill, in query engines and in
# chat engines. This notebook builds a small index, asks it in several response modes, and holds a conversation.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
from llama_index.core import Document, Settings
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore
from llama_index.llms.kvboost_rag import KVBoostLLM, KVBoostWarmer
from pydantic import BaseModel
from rank_bm25 import BM25Plus

Settings.llm = KVBoostLLM(model="smollm2", store="memory", max_tokens=24, stop=["\n", ". "])  # the line
Settings.llm.set_global_tokenizer()  # LlamaIndex then counts this model's tokens when it splits and packs

# %% [markdown]
# ## Ingest, with the warm-up as its last step
#
# `KVBoostWarmer` is a transformation like any other. Metadata lines (file names, dates) are not part of a block, so
# they may change without a miss.

# %%
files = sorted(Path("../benchmarks/demo_docs").glob("*.md"))
documents = [Document(text=file.read_text(), metadata={"file_name": file.name}) for file in files]
warmer = KVBoostWarmer(llm=Settings.llm)
pipeline = IngestionPipeline(transformations=[SentenceSplitter(chunk_size=130, chunk_overlap=0), warmer])
nodes = pipeline.run(documents=documents)
print(f"{len(nodes)} nodes; {warmer.report.stored} stored, {warmer.report.tokens} tokens")

# %% [markdown]
# ## Query engine
#
# Every answer's `raw` holds the usage and the whole report. Query engines drop `raw` on their way, so we listen to
# the event at the end of each call, as an observability tool would.

# %%
reports = []


class Listen(BaseEventHandler):
    def handle(self, event, **kwargs):
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            reports.append(event.response.raw["report"])


get_dispatcher().add_event_handler(Listen())


class WordRetriever(BaseRetriever):
    """Word matching (BM25), so that this notebook needs no embedding model. Any retriever will do."""

    def __init__(self, k):
        super().__init__()
        self.k = k
        self.bm25 = BM25Plus([node.get_content().lower().split() for node in nodes])

    def _retrieve(self, query_bundle):
        scores = self.bm25.get_scores(query_bundle.query_str.lower().split())
        best = sorted(range(len(nodes)), key=lambda i: -scores[i])[: self.k]
        return [NodeWithScore(node=nodes[i], score=float(scores[i])) for i in best]


retriever = WordRetriever(k=4)


def ask(question, mode):
    reports.clear()
    answer = RetrieverQueryEngine.from_args(retriever, response_mode=mode).query(question)
    return str(answer).strip(), list(reports)


text, [report] = ask("When did the coal harbour close?", "compact")
print(text)
for chunk in report["chunks"]:
    print(f"{chunk['outcome']:6} {chunk['reason']:16} {chunk['text'][:60]!r}")

# %% [markdown]
# ## Response modes
#
# A response mode decides how nodes are put into prompts: all in one (`compact`), one call per node and the answer
# refined from call to call (`refine`), a tree of summaries. Reuse works in each of them, as long as the node stands
# in the prompt as it is. The share of the prompt that still has to run depends on how much else a mode writes around
# its nodes.

# %%
modes = {}
for mode in "compact", "tree_summarize", "refine":
    Settings.llm.engine.forget()
    text, calls = ask("Who is the captain of the Petrel?", mode)
    modes[mode] = calls
    hits = sum(r["hits"] for r in calls)
    print(f"{mode:15} {len(calls)} calls, {hits} of {hits + sum(r['misses'] for r in calls)} nodes hit: {text}")


# %%
def bars(named):
    _, ax = plt.subplots(figsize=(10, 0.9 + 0.4 * len(named)), dpi=80, layout="constrained")
    for name, calls in named.items():
        left = 0
        total = {key: sum(r[key] for r in calls) for key in ("prompt_tokens", "reused_tokens", "repaired_tokens")}
        rest = total["prompt_tokens"] - total["reused_tokens"] - total["repaired_tokens"]
        for n, colour in (
            (total["reused_tokens"], "#8fd19e"),
            (total["repaired_tokens"], "#fdae6b"),
            (rest, "#bdbdbd"),
        ):
            ax.barh(name, n, left=left, color=colour)
            left += n
    ax.invert_yaxis()
    ax.set_title("prompt tokens of all calls: green reused, orange repaired, grey forwarded", fontsize=9)
    plt.show()


bars(modes)

# %% [markdown]
# Read the answers of `refine` with care: a model this small rarely refines an answer well, with or without reuse.
#
# ## Chat engine
#
# A chat engine retrieves anew in each turn, so its context changes at the front of the prompt while the conversation
# grows at the end. That defeats a prefix cache; blocks do not mind.

# %%
chat = ContextChatEngine.from_defaults(retriever=WordRetriever(k=3), system_prompt="Answer in one sentence.")
turns = {}
for message in "Who is the captain of the Petrel?", "How many cars can the ferry carry?":
    reports.clear()
    print("you:  ", message)
    print("model:", str(chat.chat(message)).strip())
    turns[message] = list(reports)
bars(turns)

# %% [markdown]
# ## Structured answers
#
# Tool calls and schemas are enforced by a grammar while the answer is generated. That guarantees the shape; whether
# the content is right is up to the model, and such a small one needs a narrow schema.


# %%
class Weight(BaseModel):
    kilograms: int


best = retriever.retrieve("How heavy is the bell of the Aurora?")[0].node.get_content()
prompt = PromptTemplate("{context}\n\nHow heavy is the bell of the Aurora?")
Settings.llm.structured_predict(Weight, prompt, context=best, llm_kwargs={"max_tokens": 48, "stop": []})

# %% [markdown]
# ## Where to go on
#
# * `warm_index(llm, index)` warms an index that exists; `kvboost-rag warmup --llama-index STORAGE_DIR` does it from a
#   shell.
# * `KVBoostSynthesizer` hands nodes over whole where LlamaIndex would repack them; `verbatim_context()` mends the one
#   response mode (`simple_summarize`) that writes the context as a Python list.
# * `KVBoostLLM(repair=..., reuse=...)` set how much is approximated; notebooks 03 and 06 measure it.
