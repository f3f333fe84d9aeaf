"""What :mod:`tests.pretend` puts in the place of ``torch.cuda``'s streams, events and page-locking."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


class Event:
    """An event that happens when it is recorded: there is one queue, and it is done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)


@dataclass
class Runtime:
    """The part of CUDA's runtime that page-locks memory; ``refuses`` is its error code."""

    refuses: int = 0
    locked: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.pop(address, None)  # an engine of the test before may go only now
        return 0
