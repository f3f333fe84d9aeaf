# %% [markdown]
# # Warm a corpus once, restart as often as you like
#
# Reading a large corpus takes a while, so it should happen once: overnight, on a better machine, in a job that may be
# interrupted. This notebook warms a folder of documents, asks from a **new process**, changes one document and warms
# again, and at last damages the store on purpose to see what happens.

# %%
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvboost_rag import Corpus, KVBoost, SplitOptions

work = tempfile.TemporaryDirectory()
docs = Path(work.name) / "docs"
store = Path(work.name) / "store"
_ = shutil.copytree("../benchmarks/demo_docs", docs)  # a copy, as we are going to edit it

# %% [markdown]
# ## Plan, then warm
#
# `plan_warm` is the dry run: what would be computed, how large it would be, and roughly how long it would take.

# %%
engine = KVBoost.from_pretrained("smollm2", store=store)
corpus = Corpus([docs], split=SplitOptions(chunk_size=600, chunk_overlap=60))

plan = engine.plan_warm(corpus)
print(f"{plan.chunks} chunks, {plan.new_chunks} of them new: {plan.tokens} tokens, {plan.bytes / 1e6:.0f} MB")

# %%
report = engine.warm(corpus)
print(f"stored {report.stored}, skipped {report.skipped}, failed {report.failed}: {report.tokens_per_s:.0f} tokens/s")

# %% [markdown]
# The store is keyed by content. Warming again finds everything there and computes nothing. For the same reason an
# interrupted job just goes on when it is started again, and `shard=(1, 4)` … `shard=(4, 4)` split a corpus over four
# machines that share nothing but the store.

# %%
again = engine.warm(corpus)
print(f"stored {again.stored}, skipped {again.skipped}, {again.seconds:.2f} s")

# %% [markdown]
# ## Restart
#
# First, this process notes what it thinks of one answer: the log-probability of each of its tokens, given the prompt
# and the stored blocks.

# %%
chunks = [chunk.text for chunk in corpus]
prompt = [
    {"role": "system", "content": "Answer the question in one sentence, from the context."},
    {"role": "user", "content": "\n\n".join(chunks[:4]) + "\n\nQuestion: Who is the captain of the Petrel?"},
]
answer = "The captain of the Petrel is Maria Lund."
before = engine.score(prompt, answer).logprobs

# %% [markdown]
# And now a new Python process that knows nothing but the store's folder. It loads the model, opens the store and gets
# the very same prompt.

# %%
script = """
import json, sys
from kvboost_rag import KVBoost

store, prompt, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
with KVBoost.from_pretrained("smollm2", store=store) as engine:
    logprobs = engine.score(prompt, answer).logprobs.tolist()
    result = engine.generate(prompt, max_new_tokens=24, stop=["\\n", ". "])
    print(json.dumps({"logprobs": logprobs, "text": result.text, "table": result.report.table()}))
"""


def in_new_process(prompt, answer):
    import json

    command = [sys.executable, "-c", script, str(store), json.dumps(prompt), answer]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


told = in_new_process(prompt, answer)
print(told["text"].strip(), "\n")
print(told["table"])

# %%
after = before.new_tensor(told["logprobs"])
print("largest difference of a log-probability between the two processes:", (after - before).abs().max().item())

# %% [markdown]
# All chunks hit, and the numbers agree between the processes: a block that went to disk and came back is the same
# block.
#
# ## A document changes
#
# The ferry gets a new captain. Only the chunk in which she is named has to be read again; all others keep their hash.

# %%
ferry = docs / "ferry.md"
ferry.write_text(ferry.read_text().replace("Maria Lund", "Henrik Dahl"))

report = engine.warm(corpus)
print(f"stored {report.stored}, skipped {report.skipped}")

chunks = [chunk.text for chunk in corpus]
prompt[1]["content"] = "\n\n".join(chunks[:4]) + "\n\nQuestion: Who is the captain of the Petrel?"
print(engine.generate(prompt, max_new_tokens=24, stop=["\n", ". "]).text.strip())

# %% [markdown]
# The old block stays until it is evicted or pruned, but it can't be used by mistake: its key is the hash of the old
# text, and one changed character makes another key. The same holds for another model, another precision or another
# tokenizer: they never see these blocks.
#
# ## A damaged store
#
# Disks fail and jobs are killed. So each block carries a checksum, and whoever reads a block checks it. Here we flip
# one byte in each of the stored block files, which no application should ever do:

# %%
engine.close()
files = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 500_000]
for path in files:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
print(f"{len(files)} files damaged")

# %%
engine = KVBoost(engine.model, engine.tokenizer, store=store)  # the same model, the store opened anew
result = engine.generate(prompt, max_new_tokens=24, stop=["\n", ". "])
result

# %% [markdown]
# No crash and no wrong answer: the chunks are misses, with the reason, and were simply prefilled. After the answer
# they were stored anew, so the next request hits again:

# %%
engine.forget()
result = engine.generate(prompt, max_new_tokens=24, stop=["\n", ". "])
print(f"{result.report.hits} of {len(result.report.chunks)} chunks hit")

# %% [markdown]
# ## The same from the command line
#
# ```
# kvboost-rag warmup docs/ --model smollm2 --store ./store --dry-run     # the plan
# kvboost-rag warmup docs/ --model smollm2 --store ./store               # the job, with a progress bar
# kvboost-rag warmup docs/ --model smollm2 --store ./store --shard 1/4   # a quarter of it
# kvboost-rag store stats --store ./store
# kvboost-rag store check --store ./store                                # exits non-zero when it finds damage
# ```

# %%
engine.close()
work.cleanup()
