"""What of a model lies where, under a budget of GPU memory, and how fast that can be. Arithmetic only: no torch."""

from __future__ import annotations

from kvboost_rag.plan.memory import available_host_memory, parse_bytes
from kvboost_rag.plan.paged import KVBudget, PageSizes, kv_budget, page_sizes
from kvboost_rag.plan.placement import Budget, Plan, make_plan
from kvboost_rag.plan.weights import SHAPES, Weights, find_weights, weights_of_config

__all__ = [
    "SHAPES",
    "Budget",
    "KVBudget",
    "PageSizes",
    "Plan",
    "Weights",
    "available_host_memory",
    "find_weights",
    "kv_budget",
    "make_plan",
    "page_sizes",
    "parse_bytes",
    "weights_of_config",
]
