# %% [markdown]
# # Quickstart: retrieved chunks that skip prefill
#
# A retrieval-augmented application sends the same document chunks to its language model again and again: in another
# order, behind another question. The model reads them from scratch each time. This is called *prefill*, and the user
# waits for all of it before the first word of the answer appears.
#
# `kvboost_rag` lets the model read each chunk **once**. What the model computed (the keys and values of its attention
# layers, the *KV cache*) is stored under the chunk's content and put back wherever the chunk turns up later. Only the
# question and a few tokens that have to be recomputed go through the model.
#
# This notebook shows that on a small town guide with SmolLM2-135M, a model that runs on any laptop's CPU. It takes
# less than a minute.

# %%
import tempfile

from rank_bm25 import BM25Plus

from kvboost_rag import Corpus, KVBoost, SplitOptions

store = tempfile.TemporaryDirectory()  # in real life: a folder that stays
engine = KVBoost.from_pretrained("smollm2", store=store.name)

# %% [markdown]
# ## 1. Warm: read the documents once
#
# `Corpus` reads files and splits them. Chunks that your own splitter or vector store made work as well: `warm` takes
# any list of strings.

# %%
chunks = [chunk.text for chunk in Corpus(["../benchmarks/demo_docs"], split=SplitOptions(600, 60))]
report = engine.warm(chunks)
print(f"{report.stored} chunks, {report.tokens} tokens, {report.bytes / 1e6:.0f} MB stored in {report.seconds:.1f} s")

# %% [markdown]
# ## 2. Ask as always
#
# The prompt stays what it was: chat messages with the retrieved texts pasted in. Nothing has to be marked; the engine
# finds the chunks that it knows in the text. Here, a word-matching retriever (BM25) picks five of the chunks.

# %%
bm25 = BM25Plus([text.lower().split() for text in chunks])


def retrieve(question, k=5):
    return bm25.get_top_n(question.lower().split(), chunks, k)


def messages(texts, question):
    context = "\n\n".join(texts)
    return [
        {"role": "system", "content": "Answer the question in one sentence, from the context."},
        {"role": "user", "content": f"{context}\n\nQuestion: {question}"},
    ]


question = "Who was the last keeper of the lighthouse and how long did he serve?"
prompt = messages(retrieve(question), question)
options = {"max_new_tokens": 40, "stop": ["\n", ". "]}

# %% [markdown]
# First the baseline. `reuse="off"` is the plain model: every token of the prompt is forwarded.

# %%
plain = engine.generate(prompt, reuse="off", **options)
plain

# %% [markdown]
# Now the same prompt with reuse, which is the default. A result draws itself: green came from the store, orange was
# recomputed ("repaired"), grey is what no chunk covers (the template, the instructions, the question).

# %%
reused = engine.generate(prompt, **options)
reused

# %%
for name, r in {"plain prefill": plain.report, "with reuse": reused.report}.items():
    print(f"{name:14} {r.forwarded_tokens:5.0f} tokens forwarded, first token after {r.ttft_s:.2f} s")

# %% [markdown]
# ## 3. Another order, another question
#
# A prefix cache would miss here, as the prompt differs from its first chunk on. Blocks do not care where they stand:
# all chunks hit again. `report.plot()` gives the same picture as a figure, for a paper or a dashboard.

# %%
other = "Who is the captain of the Petrel?"
result = engine.generate(messages(list(reversed(retrieve(other))), other), **options)
print(result.text.strip())
print(f"{result.report.hits} of {len(result.report.chunks)} chunks hit")
result.report.plot()

# %% [markdown]
# ## 4. What it costs: the answer is approximate
#
# A stored block was computed without the chunks that now stand in front of it, so its keys and values are close to
# the true ones, not equal. *Repair* recomputes the tokens where that matters most. How much is your choice:

# %%
results = {"plain prefill": plain}
for repair in "fast", "balanced", "faithful":
    engine.forget()  # let go of finished prompts, so that each row starts from the stored blocks alone
    results[repair] = engine.generate(prompt, repair=repair, **options)

print(f"{'':14} {'forwarded':>9} {'TTFT':>7} {'faster':>7}  answer")
for name, result in results.items():
    r = result.report
    faster = plain.report.ttft_s / r.ttft_s
    print(f"{name:14} {r.forwarded_tokens:9.0f} {r.ttft_s:6.2f}s {faster:6.1f}x  {result.text.strip()}")

# %% [markdown]
# Read the answers and not only the times. Without repair, the little model says something else than it says after a
# full prefill; with repair it is back at the same answer. That is one question and one small model: notebook 03 looks
# at the difference token by token, and notebook 06 measures it on **your** documents with **your** model. Where an
# approximation is out of place, `reuse="prefix"` reuses exact prefixes only, and `result.report.exact` always says
# which of the two you got.
#
# **Next**: 02 keeps the store over a restart · 03 what is exact and what is not · 04 LangChain · 05 LlamaIndex · 06
# measure it yourself.

# %%
engine.close()
store.cleanup()
