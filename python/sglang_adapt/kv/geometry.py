"""The shapes of a KV pool: one region per GPU that every TP size reads in its own way.

A region is `[layers, 2, blocks, block_elements]` (K is plane 0 of a layer, V is plane 1). A block is the unit
of memory, of constant bytes at every TP size; at TP size t it holds `tokens_per_block(t)` tokens of the
rank's own KV heads, laid out `[tokens, local_heads, head_dim]`. Constant bytes with remapped page tables:
Flying Serving, 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTUM = 16
"""Bytes of the widest access of a GPU thread. Every offset in a copy plan counts these."""

DUMMY_BLOCK = 0
"""Every engine writes the KV of padding tokens here (slot 0 of stock's pool); it is never leased."""


class GeometryError(ValueError):
    """Shapes that no KV pool can have, or a TP size that this pool cannot serve; the text names the value."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Shapes of the KV region that each GPU of a deployment has.

    Attributes:
        layers: layers that have KV.
        kv_heads: KV heads of the whole model.
        head_dim: elements of one head, the same for K and V.
        itemsize: bytes of one stored element (2 for bf16, 1 for fp8).
        finest_tp: the largest TP size; every served TP size divides it.
        block_bytes: bytes of one block in one plane (one layer's K or V).
        blocks: blocks per plane and GPU, the dummy block included.

    Raises:
        GeometryError: a value that is not positive, a head whose bytes are not a multiple of 16, a block that
            is not a whole number of tokens at TP 1, or no block beside the dummy.
    """

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    finest_tp: int
    block_bytes: int
    blocks: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "itemsize", "finest_tp", "block_bytes", "blocks"):
            value = getattr(self, name)
            if value < 1:
                raise GeometryError(f"{name} is {value}; it must be positive")
        if self.head_bytes % QUANTUM:
            raise GeometryError(
                f"head_dim {self.head_dim} x itemsize {self.itemsize} is {self.head_bytes} bytes; "
                f"a head must be a multiple of {QUANTUM} bytes"
            )
        if self.block_bytes % (self.kv_heads * self.head_bytes):
            raise GeometryError(
                f"block_bytes {self.block_bytes} is not a whole number of tokens of "
                f"{self.kv_heads} heads x {self.head_bytes} bytes"
            )
        if self.blocks < 2:
            raise GeometryError(f"blocks is {self.blocks}; a pool needs the dummy block and at least one more")
        self._check_tp(self.finest_tp)

    @classmethod
    def from_pool_bytes(
        cls,
        pool_bytes: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int,
        finest_tp: int,
        page_tokens: int,
    ) -> PoolGeometry:
        """The largest pool within `pool_bytes` of one GPU whose blocks hold `page_tokens` tokens at TP 1.

        Raises:
            GeometryError: as above, or fewer bytes than two blocks need.
        """
        if page_tokens < 1:
            raise GeometryError(f"page_tokens is {page_tokens}; it must be positive")
        block_bytes = page_tokens * kv_heads * head_dim * itemsize
        blocks = pool_bytes // (2 * layers * block_bytes) if layers > 0 and block_bytes > 0 else 0
        if layers > 0 and block_bytes > 0 and blocks < 2:
            raise GeometryError(
                f"{pool_bytes} bytes hold {blocks} blocks of {layers} layers x 2 x {block_bytes} bytes; "
                "a pool needs at least 2: give it more memory or use smaller pages"
            )
        return cls(layers, kv_heads, head_dim, itemsize, finest_tp, block_bytes, blocks)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane."""
        return self.head_dim * self.itemsize

    @property
    def planes(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers

    @property
    def plane_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of one GPU's region."""
        return self.planes * self.plane_bytes

    @property
    def block_elements(self) -> int:
        return self.block_bytes // self.itemsize

    @property
    def region_shape(self) -> tuple[int, int, int, int]:
        """`[layers, 2, blocks, block_elements]`, in elements of the KV dtype."""
        return (self.layers, 2, self.blocks, self.block_elements)

    def tp_sizes(self) -> tuple[int, ...]:
        """Every TP size that this pool can serve, ascending."""
        return tuple(tp for tp in range(1, self.finest_tp + 1) if self._tp_fault(tp) is None)

    def local_heads(self, tp: int) -> int:
        """KV heads that one rank stores at TP size `tp`; one where there are more ranks than heads.

        Raises:
            GeometryError: `tp` is not a size that this pool can serve.
        """
        self._check_tp(tp)
        return max(1, self.kv_heads // tp)

    def replicas(self, tp: int) -> int:
        """How many ranks store each head: 1 up to `kv_heads` ranks, `tp / kv_heads` beyond."""
        self._check_tp(tp)
        return max(1, tp // self.kv_heads)

    def head_range(self, tp: int, rank: int) -> range:
        """The model's KV heads that `rank` stores, as in stock QKVParallelLinear (layers/linear.py):
        neighbouring ranks replicate a head where there are more ranks than heads.

        Raises:
            GeometryError: a TP size or rank that does not exist.
        """
        heads = self.local_heads(tp)
        if not 0 <= rank < tp:
            raise GeometryError(f"rank {rank} does not exist at TP {tp} (0 to {tp - 1})")
        first = rank // self.replicas(tp) * heads
        return range(first, first + heads)

    def token_bytes(self, tp: int) -> int:
        """Bytes of one token in one plane of one rank: the stride between tokens of a block."""
        return self.local_heads(tp) * self.head_bytes

    def tokens_per_block(self, tp: int) -> int:
        """Tokens that one block holds at TP size `tp`: the page size of an engine of that size."""
        return self.block_bytes // self.token_bytes(tp)

    def blocks_for(self, tokens: int, tp: int) -> int:
        """Blocks on each rank that `tokens` tokens need at TP size `tp`, the last one perhaps partial."""
        if tokens < 0:
            raise GeometryError(f"a request has {tokens} tokens; it cannot be negative")
        return -(-tokens // self.tokens_per_block(tp))

    def capacity_tokens(self, tp: int) -> int:
        """Tokens that fit into the whole pool of an engine of TP size `tp` (its `max_total_num_tokens`)."""
        return (self.blocks - 1) * self.tokens_per_block(tp)

    def check_region(self, shape: tuple[int, ...], itemsize: int) -> None:
        """Raise GeometryError if a tensor of this shape and element size is not a region of this pool."""
        if tuple(shape) != self.region_shape:
            raise GeometryError(f"a KV region has shape {tuple(shape)}; this pool's regions have {self.region_shape}")
        if itemsize != self.itemsize:
            raise GeometryError(f"a KV region has elements of {itemsize} bytes; this pool's have {self.itemsize}")

    def _check_tp(self, tp: int) -> None:
        fault = self._tp_fault(tp)
        if fault is not None:
            raise GeometryError(f"TP size {tp} {fault}")

    def _tp_fault(self, tp: int) -> str | None:
        if tp < 1 or self.finest_tp % tp:
            return f"does not divide the finest TP size {self.finest_tp}"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"neither divides the {self.kv_heads} KV heads nor is a multiple of them"
        return None
