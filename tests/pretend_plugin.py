"""For ``pytest -p tests.pretend_plugin``: every test has the pretended GPU, those that are marked ``gpu`` run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pretend import pretend_gpu

torch.cuda.is_available = lambda: True  # asked while tests are collected


@pytest.fixture(autouse=True)
def _pretended_gpu() -> Iterator[None]:
    with pretend_gpu():
        yield
