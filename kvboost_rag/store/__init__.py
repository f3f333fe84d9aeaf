"""Where blocks are kept: in memory, in a folder, on a server, in several of these. ``base`` has the contract."""

from __future__ import annotations

from kvboost_rag.store.base import REASONS, BlockStore, Miss, Problem, StoreStats
from kvboost_rag.store.device import DeviceStore
from kvboost_rag.store.device_tier import DeviceTieredStore
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.null import NullStore
from kvboost_rag.store.open import open_store
from kvboost_rag.store.remote import RemoteStore
from kvboost_rag.store.tiered import TieredStore

__all__ = [
    "REASONS",
    "BlockStore",
    "DeviceStore",
    "DeviceTieredStore",
    "DiskStore",
    "MemoryStore",
    "Miss",
    "NullStore",
    "Problem",
    "RemoteStore",
    "StoreStats",
    "TieredStore",
    "open_store",
]
