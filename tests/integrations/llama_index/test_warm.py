"""Warm-up from LlamaIndex: pipeline step, indexes, postprocessor, and a persisted storage context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import ImageNode, NodeWithScore
from llama_index.llms.kvboost_rag import KVBoostLLM, KVBoostPostprocessor, KVBoostWarmer, warm_index, warm_nodes

from kvboost_rag.errors import UsageError
from kvboost_rag.warmup.llama_index import LlamaIndexCorpus
from tests.integrations.llama_index.corpus import PASSAGES, QUESTION, ListRetriever, make_nodes


def ask(llm: KVBoostLLM, nodes: list[Any], **kwargs: Any) -> None:
    RetrieverQueryEngine.from_args(ListRetriever(nodes), llm=llm, **kwargs).query(QUESTION)


def test_warmed_nodes_hit_on_the_first_question(llm: KVBoostLLM, reports: list[Any]) -> None:
    report = warm_nodes(llm, make_nodes())
    assert (report.stored, report.skipped) == (4, 0)
    ask(llm, make_nodes()[::-1])
    assert (reports[-1].hits, reports[-1].misses) == (4, 0)
    assert warm_nodes(llm, make_nodes()).skipped == 4


@pytest.mark.parametrize("is_async", [False, True])
def test_an_ingestion_pipeline_warms_what_it_splits(is_async: bool, llm: KVBoostLLM, reports: list[Any]) -> None:
    warmer = KVBoostWarmer(llm=llm)
    documents = [Document(text=f"  {text}\n", metadata={"file_name": "a.txt"}) for text in PASSAGES]
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(chunk_size=200, chunk_overlap=0), warmer])
    nodes = asyncio.run(pipeline.arun(documents=documents)) if is_async else pipeline.run(documents=documents)
    assert len(nodes) >= 4
    assert warmer.report is not None
    assert warmer.report.stored == len({n.get_content().strip() for n in nodes})
    ask(llm, list(nodes))
    assert reports[-1].misses == 0
    assert reports[-1].hits == len(nodes)
    assert warmer.to_dict()["llm"]["model"] == llm.model, "the pipeline's cache key is stable and plain"


def test_an_index_is_warmed_from_its_docstore_or_its_vector_store(llm: KVBoostLLM) -> None:
    index = VectorStoreIndex(make_nodes())
    assert warm_index(llm, index).stored == 4

    class Elsewhere:
        class docstore:
            docs: dict[str, Any] = {}

        vector_store = None

    with pytest.raises(UsageError, match="KVBoostWarmer"):
        warm_index(llm, Elsewhere())


def test_nodes_without_text_are_left_out(llm: KVBoostLLM) -> None:
    assert warm_nodes(llm, [ImageNode(image_url="x.png"), *make_nodes()]).stored == 4


def test_head_makes_the_first_chunk_exact(llm: KVBoostLLM) -> None:
    report = warm_nodes(llm, make_nodes()[:1], head="You are terse.")
    assert report.tokens > warm_nodes(llm, make_nodes()[1:2]).tokens


def test_the_postprocessor_registers_what_reaches_the_prompt(make_llm: Callable[..., KVBoostLLM], reports: Any) -> None:
    """A postprocessor changes the text; the one behind it tells the LLM what it became."""
    from llama_index.core.postprocessor import MetadataReplacementPostProcessor

    llm = make_llm(watch=False)
    nodes = make_nodes()
    for node, text in zip(nodes, PASSAGES[1:] + PASSAGES[:1], strict=True):
        node.metadata = {"window": f"{text} And more of it."}
        node.excluded_llm_metadata_keys = ["window"]
    steps = [MetadataReplacementPostProcessor(target_metadata_key="window"), KVBoostPostprocessor(llm=llm)]
    for order in (nodes, nodes[::-1]):
        ask(llm, [n.model_copy() for n in order], node_postprocessors=steps)
    assert [(r.misses, r.hits) for r in reports] == [(4, 0), (0, 4)]
    without = KVBoostPostprocessor(llm=llm).postprocess_nodes([NodeWithScore(node=n) for n in nodes])
    assert [n.node for n in without] == nodes


def test_retrievals_are_not_watched_when_switched_off(make_llm: Callable[..., KVBoostLLM], reports: list[Any]) -> None:
    llm = make_llm(watch=False)
    ask(llm, make_nodes())
    assert reports[-1].chunks == []


# -- a persisted storage context, without LlamaIndex --------------------------------------------------------------


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A folder as the framework itself writes it."""
    index = VectorStoreIndex(make_nodes(), storage_context=StorageContext.from_defaults())
    index.docstore.add_documents([Document(text="a whole document, which no retriever returns")])
    index.storage_context.persist(str(tmp_path / "storage"))
    return tmp_path / "storage"


def test_the_docstore_gives_the_texts_that_stand_in_prompts(storage: Path) -> None:
    corpus = LlamaIndexCorpus(storage)
    chunks = list(corpus)
    assert [c.text for c in chunks] == [n.get_content().strip() for n in make_nodes()]
    assert chunks[0].id == "node-0"
    assert chunks[0].metadata == {"file_name": "0.txt", "page": 0}
    assert corpus.ignored == {"whole documents": 1}
    assert corpus.problems == []
    assert corpus.fraction_read() == 1.0
    assert [c.text for c in LlamaIndexCorpus(storage / "docstore.json")] == [c.text for c in chunks]
    assert len(list(LlamaIndexCorpus(storage.parent))) == 4, "a folder of storage contexts"


def test_warming_the_storage_makes_its_index_hit(storage: Path, llm: KVBoostLLM, reports: list[Any]) -> None:
    from llama_index.core import load_index_from_storage

    assert llm.engine.warm(LlamaIndexCorpus(storage)).stored == 4
    index = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(storage)))
    index.as_query_engine(similarity_top_k=4, llm=llm).query(QUESTION)
    assert (reports[-1].hits, reports[-1].misses) == (4, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "no docstore"), ("[]", "no docstore"), ('{"docstore/data": 3}', "no docstore"), ("{}", "no nodes")],
)
def test_a_damaged_docstore_is_a_problem_not_a_crash(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "docstore.json").write_text(content)
    corpus = LlamaIndexCorpus(tmp_path)
    assert list(corpus) == []
    assert reason in corpus.problems[0].reason


def test_damaged_nodes_are_named_and_the_rest_is_read(storage: Path) -> None:
    file = storage / "docstore.json"
    content = json.loads(file.read_text())
    data = content["docstore/data"]
    data["node-0"] = {"__data__": "{", "__type__": "1"}
    data["node-1"]["__data__"] = json.dumps(data["node-1"]["__data__"])  # as older versions wrote it
    data["node-2"]["__data__"]["text"] = "\ud800"
    file.write_text(json.dumps(content))
    corpus = LlamaIndexCorpus(storage)
    assert [c.id for c in corpus] == ["node-1", "node-3"]
    assert "node-0" in corpus.problems[0].reason
    assert corpus.ignored["nodes without text"] == 1


def test_no_docstore_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="warm_index"):
        LlamaIndexCorpus(tmp_path)


def test_the_command_line_reads_it(storage: Path, monkeypatch: pytest.MonkeyPatch, llm: KVBoostLLM) -> None:
    from click.testing import CliRunner

    from kvboost_rag.cli import common, main
    from kvboost_rag.cli.warmup import command

    assert main
    monkeypatch.setattr(common, "make_engine", lambda options: llm.engine)
    args = ["--llama-index", str(storage), "--store", str(storage.parent / "kv"), "--json", "--no-progress"]
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["stored"] == 4
    assert CliRunner().invoke(command, [*args, "a.txt"]).exit_code != 0
