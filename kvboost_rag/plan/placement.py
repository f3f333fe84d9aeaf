"""Which layers stay on the GPU, what goes to the host, and the tokens per second that follow.

At batch 1 every token moves every streamed layer over the bus once, so that

    tokens/s ≤ bandwidth / bytes of the streamed layers

and the plan's one job is to stream as few bytes as the budget allows. A token's embedding is a few KiB: the table
belongs to host memory. The output matrix is read whole for every token: it belongs to the GPU, and only where there is
no room at all it is multiplied on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.errors import CapacityError, UsageError
from kvboost_rag.plan.memory import gib, parse_bytes
from kvboost_rag.plan.weights import Weights

CPU_READ = 20e9  # bytes/s of host memory, assumed for an output matrix that is multiplied on the CPU


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used. Sizes in bytes (``vram`` also as text, ``"8GiB"``).

    ``context`` tokens of KV are planned for; ``reserve`` is taken by the driver, the display and cuBLAS;
    ``workspace`` by activations and scratch; ``held`` by KV that is kept (``prefix_bytes``; ``store_vram`` is
    added to it), and ``held_tokens`` by KV that is always there (the context that chunks are computed after);
    ``kv``: the pages of a ``kv_vram=`` take this much instead of what ``context`` would (None: no pages);
    ``slots`` are the buffers that streamed layers pass through. ``host``: memory of the machine (None: not checked).
    """

    vram: int
    context: int = 4096
    reserve: int = 900_000_000
    workspace: int = 350_000_000
    held: int = 0
    held_tokens: int = 0
    kv: int | None = None
    slots: int = 2
    host: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.slots, int) or self.slots < 2:
            hint = "a whole number, at least 2: one is computed on while the other is filled"
            raise UsageError(f"slots={self.slots}", hint=hint)
        object.__setattr__(self, "vram", parse_bytes(self.vram))  # "8GiB" is understood here too
        sizes = (self.reserve, self.workspace, self.held, self.held_tokens, self.host or 0)
        if self.context <= 0 or min(sizes) < 0:
            raise UsageError(f"{self} makes no sense", hint="a context above zero, and no size below")
        if self.kv is not None and self.kv <= 0:
            raise UsageError(f"kv={self.kv} is no memory at all", hint="bytes of the pages, or None without kv_vram=")


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lies. ``streamed`` are layer indices, spread evenly; bytes are totals."""

    weights: Weights
    budget: Budget
    streamed: tuple[int, ...]
    slots: int
    embed_on_host: bool
    head_on_host: bool

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers that stay on the GPU."""
        gone = set(self.streamed)
        return tuple(i for i in range(len(self.weights.layers)) if i not in gone)

    @property
    def slot_bytes(self) -> int:
        """One slot: the largest streamed layer."""
        return max((self.weights.layers[i] for i in self.streamed), default=0)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross the bus for one forward."""
        return sum(self.weights.layers[i] for i in self.streamed)

    @property
    def resident_bytes(self) -> int:
        """Layers on the GPU, without slots."""
        return sum(self.weights.layers[i] for i in self.resident)

    @property
    def kv_bytes(self) -> int:
        """KV of the planned context, and of what is always held."""
        b, per_token = self.budget, self.weights.kv_per_token
        own = per_token * b.context if b.kv is None else b.kv
        return own + per_token * b.held_tokens

    @property
    def dense_bytes(self) -> int:
        """Embedding, output matrix and final norm, as far as they are on the GPU."""
        w = self.weights
        head = 0 if self.head_on_host else w.head
        embed = 0 if self.embed_on_host or w.tied else w.embed
        return w.rest + head + embed

    @property
    def device_bytes(self) -> int:
        """Everything that the budget has to hold."""
        b = self.budget
        fixed = b.reserve + b.workspace + b.held + self.kv_bytes
        return fixed + self.dense_bytes + self.resident_bytes + self.slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Weights that stay in host memory (pinned where possible)."""
        w = self.weights
        table = w.embed if self.embed_on_host else 0
        head = w.head if self.head_on_host and not w.tied else 0
        return self.streamed_bytes + table + head

    @property
    def mlp_rows(self) -> int | None:
        """Rows that an MLP may take at a time: half of the workspace. None: not bounded (no workspace is planned)."""
        return max(1, self.budget.workspace // 2 // self.weights.mlp_row) if self._bounded else None

    @property
    def forward_rows(self) -> int | None:
        """Rows that one forward may take: the other half."""
        return max(1, self.budget.workspace // 2 // self.weights.row) if self._bounded else None

    @property
    def _bounded(self) -> bool:
        return self.budget.workspace > 0 and self.weights.mlp_row > 0 and self.weights.row > 0

    def seconds_per_token(self, bandwidth: float) -> float:
        """The transfer's share of a decoding step at ``bandwidth`` bytes/s; 0 when nothing is streamed."""
        head = self.weights.head / CPU_READ if self.head_on_host else 0.0
        return self.streamed_bytes / bandwidth + head

    def tokens_per_s(self, bandwidth: float) -> float | None:
        """The most tokens per second at batch 1; None when the bus does not limit."""
        seconds = self.seconds_per_token(bandwidth)
        return 1 / seconds if seconds else None

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "model": self.weights.name,
            "vram_bytes": self.budget.vram,
            "context": self.budget.context,
            "layers": len(self.weights.layers),
            "resident_layers": len(self.resident),
            "streamed_layers": list(self.streamed),
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
            "embedding": "host" if self.embed_on_host else "device",
            "lm_head": "host" if self.head_on_host else "device",
            "weights_bytes": self.weights.total,
            "resident_bytes": self.resident_bytes,
            "dense_bytes": self.dense_bytes,
            "kv_bytes": self.kv_bytes,
            "workspace_bytes": self.budget.workspace,
            "mlp_rows": self.mlp_rows,
            "forward_rows": self.forward_rows,
            "reserve_bytes": self.budget.reserve,
            "held_bytes": self.budget.held,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "streamed_bytes_per_token": self.streamed_bytes,
        }


def make_plan(weights: Weights, budget: Budget) -> Plan:
    """The placement with the fewest streamed bytes that fits.

    Raises:
        CapacityError: the budget is too small (the message names the smallest that works), or host memory is.
    """
    for embed_on_host, head_on_host in _placements(weights):
        plan = _fewest_streamed(weights, budget, embed_on_host, head_on_host)
        if plan is not None:
            return _check_host(plan)
    least = _plan(weights, budget, len(weights.layers), True, True).device_bytes
    kv, less = f"{budget.context} tokens of context", "a shorter context"
    if budget.kv is not None:
        kv, less = f"kv_vram of {gib(budget.kv)}", "less kv_vram"
    raise CapacityError(
        f"{weights.name or 'the model'} needs at least {gib(least)} of GPU memory with every layer streamed and "
        f"{kv}, the budget is {gib(budget.vram)}",
        hint=f"vram={least} or more, or {less}",
    )


def _placements(weights: Weights) -> list[tuple[bool, bool]]:
    """(embedding on host, output matrix on host), the faster ones first."""
    return [(False, False), (True, True)] if weights.tied else [(True, False), (True, True)]


def _fewest_streamed(weights: Weights, budget: Budget, embed_on_host: bool, head_on_host: bool) -> Plan | None:
    if not head_on_host:  # all on the GPU, as if there were no streaming
        whole = _plan(weights, budget, 0, False, False)
        if whole.device_bytes <= budget.vram:
            return whole
    for count in range(len(weights.layers) + 1):
        plan = _plan(weights, budget, count, embed_on_host, head_on_host)
        if plan.device_bytes <= budget.vram:
            return plan
    return None


def _plan(weights: Weights, budget: Budget, count: int, embed_on_host: bool, head_on_host: bool) -> Plan:
    streamed = spread(count, len(weights.layers))
    return Plan(weights, budget, streamed, min(budget.slots, count), embed_on_host, head_on_host)


def spread(count: int, total: int) -> tuple[int, ...]:
    """``count`` of ``total`` indices, evenly: layers computed in between give the copies time."""
    return tuple((2 * j + 1) * total // (2 * count) for j in range(count))


def _check_host(plan: Plan) -> Plan:
    room = plan.budget.host
    if room is not None and plan.host_bytes > room:
        raise CapacityError(
            f"{plan.weights.name or 'the model'} needs {gib(plan.host_bytes)} of host memory for streamed weights, "
            f"{gib(room)} are available",
            hint="free memory, give more vram, or take a smaller model",
        )
    return plan
