"""What of a model lies where, under a budget of GPU memory, and how fast that can be. Arithmetic only: no torch."""

from __future__ import annotations

from kvboost_rag.plan.memory import available_host_memory, parse_bytes
from kvboost_rag.plan.placement import Budget, Plan, make_plan
from kvboost_rag.plan.weights import SHAPES, Weights, find_weights, weights_of_config

__all__ = [
    "SHAPES",
    "Budget",
    "Plan",
    "Weights",
    "available_host_memory",
    "find_weights",
    "make_plan",
    "parse_bytes",
    "weights_of_config",
]
