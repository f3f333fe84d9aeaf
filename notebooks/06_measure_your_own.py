# %% [markdown]
# # Measure it on your own documents
#
# How far can you trust answers with reuse, and how much faster are they? That depends on your model, your documents,
# how you split them and your questions. So measure it: this notebook answers each question twice, with reuse and by
# full prefill over the same tokens, and compares.
#
# **Change the next cell** to your documents, your model and your questions, and run all. As it stands it takes the
# small town guide and a model of 135M parameters. Ten questions or more make the figures worth something; four, as
# here, only show how it is done.

# %%
DOCUMENTS = ["../benchmarks/demo_docs"]  # files and folders: text, Markdown, HTML, PDF, .jsonl with ready chunks
MODEL = "smollm2"  # a hub id, a local folder or a .gguf file
QUESTIONS = [
    "Who was the last keeper of the lighthouse and how long did he serve?",
    "Who is the captain of the Petrel?",
    "How heavy is the bell of the Aurora?",
    "When did the coal harbour close?",
]
SYSTEM = "Answer the question in one sentence, from the context."
CHUNK_SIZE, CHUNKS_PER_QUESTION, ANSWER_TOKENS = 600, 3, 12

# %%
import matplotlib.pyplot as plt
from rank_bm25 import BM25Plus

from kvboost_rag import Corpus, KVBoost, SplitOptions

plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})

engine = KVBoost.from_pretrained(MODEL, store="memory")
chunks = [chunk.text for chunk in Corpus(DOCUMENTS, split=SplitOptions(CHUNK_SIZE, CHUNK_SIZE // 10))]
bm25 = BM25Plus([text.lower().split() for text in chunks])


def item(question):
    texts = bm25.get_top_n(question.lower().split(), chunks, CHUNKS_PER_QUESTION)
    context = "\n\n".join(texts)
    return {
        "question": question,
        "chunks": texts,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{context}\n\nQuestion: {question}"},
        ],
    }


items = [item(question) for question in QUESTIONS]
print(f"{len(chunks)} chunks, {len(items)} questions")

# %% [markdown]
# Put your own retriever and your own prompt into `item`: what is measured should be what you send. The texts in
# `chunks` have to stand in the prompt as they are.
#
# ## One policy
#
# `verify` warms what is missing, then answers each question both ways. *Agreement* is the share of answer tokens for
# which reuse would have chosen the same token; *KL* is how far the distribution over the next token moves, in nats; a
# star marks an answer that reads differently.

# %%
balanced = engine.verify(items, policy="balanced", max_new_tokens=ANSWER_TOKENS)
print(balanced.table())

# %% [markdown]
# The verdict compares two figures with thresholds, `max_kl` and `min_agreement`, that you can set. It says how close
# reuse comes to full prefill, not whether either of them is right: an answer that reads differently is not always a
# worse one, and with a model as small as this one both can be wrong. So read the pairs above.
#
# ## Where the answers differ
#
# Each cell is one token of full prefill's answer, the redder the larger its KL. A frame marks the places where reuse
# would have chosen another token.


# %%
def picture(report):
    width = max(len(i.tokens) for i in report.items)
    _, ax = plt.subplots(figsize=(10, 0.55 * len(report.items) + 0.8))
    for row, check in enumerate(report.items):
        for column, token in enumerate(check.tokens):
            shade = min(1.0, token.kl**0.5)
            edge = "black" if token.other else "white"
            box = plt.Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, fc=(0.86, 0.3, 0.25, shade), ec=edge, lw=1.5)
            ax.add_patch(box)
            shown = token.text.strip() or ("⏎" if "\n" in token.text else "␣")
            ax.text(column + 0.5, row + 0.5, shown, ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, width), ylim=(len(report.items), 0), xticks=[], yticks=[i + 0.5 for i in range(len(report.items))])
    ax.set_yticklabels([i.question[:28] + "…" for i in report.items], fontsize=8)
    ax.set_title(f"repair={report.policy}: full prefill's answers, coloured by KL", fontsize=10)
    ax.grid(False)
    plt.show()


picture(balanced)

# %% [markdown]
# ## Compare policies
#
# The same items without any repair, side by side with the first run:

# %%
fast = engine.verify(items, policy="fast", max_new_tokens=ANSWER_TOKENS)
reports = [fast, balanced]

print(f"{'':9} {'faster':>7} {'forwarded':>9} {'mean KL':>8} {'agreement':>9} {'changed':>8}")
for r in reports:
    faster = r.full_ttft_s / r.reuse_ttft_s
    print(
        f"{r.policy:9} {faster:6.1f}x {r.forwarded_share:9.0%} {r.kl:8.3f} {r.agreement:9.0%} "
        f"{len(r.changed):>4} of {len(r.items)}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3))
names = ["full prefill", *(r.policy for r in reports)]
axes[0].bar(names, [balanced.full_ttft_s, *(r.reuse_ttft_s for r in reports)], color=["#bdbdbd", "#e66a6a", "#fdae6b"])
axes[0].set_title("time to first token (median), s", fontsize=10)
for r, colour in zip(reports, ["#e66a6a", "#fdae6b"], strict=True):
    axes[1].scatter([i.agreement for i in r.items], [i.kl for i in r.items], label=r.policy, color=colour, s=50)
axes[1].set(title="each question", xlabel="agreement", ylabel="KL, nats")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## What to do with the result
#
# * **Close enough**: use `balanced`, or `fast` if that is close enough as well.
# * **Not close enough**: `repair="faithful"`; larger chunks (fewer seams); or `reuse="prefix"`, which is always
#   exact.
# * **Hardly faster**: look at the forwarded share. If it is high, chunks are missed, since they don't stand verbatim
#   in the prompt; `print(engine.generate(items[0]["messages"], max_new_tokens=1).report.table())` says which, and
#   why.
#
# The same from the command line, with a report page that can be passed on, and an exit status for a pipeline:
#
# ```
# kvboost-rag verify --help
# ```

# %%
engine.close()
