# %% [markdown]
# # What is exact, and what is approximate
#
# Reusing a chunk's keys and values behind other text than it was computed after is an approximation. This notebook
# shows how large the error is, token by token, on two prompts, and how it is traded against the time to the first
# token.
#
# The yardstick is always a **full prefill over the same tokens** (`repair=Repair.full()`): the engine gets the answer
# that full prefill gives and tells how probable each of its tokens is when blocks are reused. Two measures:
#
# * **|Δ log p|**: how far the log-probability of an answer's token moves;
# * **KL**: how far the whole distribution over the next token moves, in nats. 0 means equal; at 0.1 one would rarely
#   notice; at 1 another answer is likely.

# %%
import matplotlib.pyplot as plt
from rank_bm25 import BM25Plus

from kvboost_rag import Corpus, KVBoost, Repair, SplitOptions

plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})

SYSTEM = "Answer the question in one sentence, from the context."
chunks = [chunk.text for chunk in Corpus(["../benchmarks/demo_docs"], split=SplitOptions(600, 60))]
bm25 = BM25Plus([text.lower().split() for text in chunks])


def messages(texts, question):
    context = "\n\n".join(texts)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{context}\n\nQuestion: {question}"}]


def retrieve(question, k):
    return bm25.get_top_n(question.lower().split(), chunks, k)


def score(engine, prompt, answer, **how):
    engine.forget()  # nothing may come from an earlier request: only stored blocks count here
    return engine.score(prompt, answer, logits=True, **how)


def kl(reference, other):
    p, q = (s.logits.double().log_softmax(-1) for s in (reference, other))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


engine = KVBoost.from_pretrained("smollm2", store="memory")

# %% [markdown]
# ## The exact part
#
# These ways to get an answer's probabilities must all agree with the plain model, `reuse="off"`, up to rounding:
#
# 1. full repair: chunks are found, and all of their tokens are recomputed;
# 2. a block computed after **your own head** (`warm(..., head=...)`), for a chunk that stands straight after that
#    head;
# 3. an exact prefix: the second turn of a conversation, on top of the first.

# %%
question, answer = "Who is the captain of the Petrel?", "The captain of the Petrel is Maria Lund."
[best] = retrieve(question, 1)
prompt = messages([best], question)
engine.warm([best], head=SYSTEM)

plain = score(engine, prompt, answer, reuse="off")
rows = {
    "full repair": (plain, score(engine, prompt, answer, repair=Repair.full())),
    "block of this very head": (plain, score(engine, prompt, answer, repair="fast")),
}
engine.forget()
first = engine.generate(prompt, reuse="prefix", max_new_tokens=16)
turn = [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And what was her name?"}]
second = prompt + turn
held = engine.score(second, answer, logits=True, reuse="prefix")
rows["second turn of a chat"] = (score(engine, second, answer, reuse="off"), held)

print(f"{'':24} {'forwarded':>9} {'of':>4}  {'largest KL':>10}  report.exact")
for name, (reference, s) in rows.items():
    r = s.report
    print(f"{name:24} {r.forwarded_tokens:9.0f} {r.prompt_tokens:4}  {kl(reference, s).max():10.1e}  {r.exact}")

# %% [markdown]
# What remains is rounding. Note that the report knows: `exact` is true where the answer's keys and values equal those
# of a full prefill. Where only that will do, `reuse="prefix"` never uses anything else.
#
# ## The approximate part
#
# Now the usual case: several chunks, each with the block that serves *every* prompt. We look at the answer that full
# prefill gives, and ask for its probability under three repair policies. The fourth row is the naive way, for
# comparison: chunks that were computed **alone** (`alone=True`). `kvboost_rag` computes blocks after a neutral text
# instead, because a token at the very start of a text is treated by the model in a way that fits nowhere else.

# %%
questions = [
    "Who was the last keeper of the lighthouse and how long did he serve?",
    "How heavy is the bell of the Aurora?",
]
prompts = [messages(retrieve(q, 5), q) for q in questions]
needed = sorted({text for q in questions for text in retrieve(q, 5)})
engine.warm(needed)

full, references = [], []
for p in prompts:
    engine.forget()
    result = engine.generate(p, repair=Repair.full(), max_new_tokens=18, stop=["\n"])
    full.append(result.report)
    # On top of what the answer just left behind, which is exact.
    references.append(engine.score(p, result.token_ids, logits=True, repair=Repair.full()))
    print(result.text.strip())

# %%
naive = KVBoost(engine.model, engine.tokenizer, store="memory", alone=True)
naive.warm(retrieve(questions[0], 5))

p, reference = prompts[0], references[0]
ids = reference.token_ids
scores = {
    "alone, no repair": score(naive, p, ids, repair="fast"),
    "fast": score(engine, p, ids, repair="fast"),
    "balanced": score(engine, p, ids, repair="balanced"),
    "faithful": score(engine, p, ids, repair="faithful"),
}
naive.close()

print(f"{'':18} {'forwarded':>9} {'of':>4} {'TTFT':>7} {'mean KL':>8} {'mean |Δ log p|':>14}")
print(f"{'full prefill':18} {full[0].forwarded_tokens:9.0f} {full[0].prompt_tokens:4} {full[0].ttft_s:6.2f}s")
for name, s in scores.items():
    delta = (s.logprobs - reference.logprobs).abs().mean()
    r = s.report
    print(
        f"{name:18} {r.forwarded_tokens:9.0f} {r.prompt_tokens:4} {r.ttft_s:6.2f}s "
        f"{kl(reference, s).mean():8.3f} {delta:14.3f}"
    )

# %% [markdown]
# Token by token. Read the picture from left to right as the answer's text:

# %%
tokens = [engine.tokenizer.decode([i]).replace("\n", "⏎") for i in ids]
colours = {"alone, no repair": "#bbbbbb", "fast": "#e66a6a", "balanced": "#fdae6b", "faithful": "#8fd19e"}
figure, axes = plt.subplots(2, 1, figsize=(10, 5), sharex=True)
for n, (name, s) in enumerate(scores.items()):
    places = [x + 0.2 * (n - 1.5) for x in range(len(ids))]
    axes[0].bar(places, (s.logprobs - reference.logprobs).abs(), 0.2, label=name, color=colours[name])
    axes[1].bar(places, kl(reference, s), 0.2, color=colours[name])
axes[0].set_ylabel("|Δ log p|")
axes[1].set_ylabel("KL, nats")
axes[1].set_xticks(range(len(ids)), tokens, rotation=60, ha="right")
axes[0].legend(ncols=4, fontsize=8)
figure.suptitle("What reuse changes, at each token of full prefill's answer", fontsize=10)
plt.show()

# %% [markdown]
# The error is not spread evenly. It sits on the few tokens at which the answer is *decided*: a name, a number, where
# a sentence turns. Tokens that merely complete a word or follow the grammar hardly move. That is also why an average
# over tokens can look harmless while the one token that matters has changed, and why it pays to look at answers.
#
# ## The dial
#
# `Repair.attention(share)` recomputes the share of the context that the question attends to most. From 0, where only
# glue and question are forwarded, to 1, where everything is, it is a dial between time and fidelity.

# %%
pairs = list(zip(prompts, references, strict=True))
shares = [0, 0.05, 0.1, 0.2, 0.5, 1.0]
dial = [[score(engine, p, ref.token_ids, repair=Repair.attention(share)) for p, ref in pairs] for share in shares]
forwarded = [sum(s.report.forwarded_tokens for s in row) / sum(s.report.prompt_tokens for s in row) for row in dial]
ttft = [sum(s.report.ttft_s for s in row) / len(row) for row in dial]
divergence = [sum(float(kl(ref, s).mean()) for ref, s in zip(references, row, strict=True)) / len(row) for row in dial]
full_ttft = sum(report.ttft_s for report in full) / len(full)

figure, axes = plt.subplots(1, 3, figsize=(10, 3))
for ax, values, title in zip(
    axes, (ttft, forwarded, divergence), ("time to first token, s", "forwarded share", "mean KL, nats"), strict=True
):
    ax.plot(shares, values, "o-", color="#4c78a8")
    ax.set(title=title, xlabel="share of the context recomputed", ylim=(0, None))
axes[0].axhline(full_ttft, color="#bbbbbb", ls="--", label="full prefill")
axes[0].legend(fontsize=8)
plt.show()

# %%
print(f"{'share':>5} {'forwarded':>9} {'TTFT':>7} {'mean KL':>8}")
for row in zip(shares, forwarded, ttft, divergence, strict=True):
    print("{:5.0%} {:9.0%} {:6.2f}s {:8.4f}".format(*row))

# %% [markdown]
# The first five to ten percent take away more than half of the difference; the rest goes slowly, down to nothing but
# rounding at 100 %. There, choosing has become pure overhead: the forwarded share is above one, since the pass that
# scores the tokens is counted, too. The named policies sit at the useful end: `balanced` adds the first eight tokens
# of each chunk to what the question looks at, 13 % in all; `faithful` goes up to 30 %.
#
# Two prompts and a model of 135M parameters make a picture, not a benchmark. Larger models and other documents behave
# differently; notebook 06 runs the same measurement on yours.

# %%
engine.close()
