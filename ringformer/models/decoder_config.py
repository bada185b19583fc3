"""The configuration of a decoder: its architecture and the options of its computation.

A family (`families/`) derives its own class: the parts that its layers are made of, and what else it needs.

Shape letters: V vocabulary, D model width, F feed-forward, L layers, H query heads, K key heads, d head dim.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float32, Int

from ringformer.models.config_checks import KEEP_HIDDEN, Remat, check_config
from ringformer.models.layer_kinds import LayerKind, Parts, Period, periods_of
from ringformer.models.own_attention import ATTENTION, REGISTERED
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.head_exchange import key_copies
from ringformer.ops.kernels.block_kernels import Kernel
from ringformer.ops.layouts import PARTS, Layout
from ringformer.ops.ring import RingForm
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.tokenwise import rope
from ringformer.ops.tokenwise.rope import RopeScaling


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture and options of the computation. Sizes are in tokens, heads and features."""

    PARTS: ClassVar[Parts] = Parts()

    vocab_size: int
    """Rows of the embedding, at least as many as the tokenizer has tokens."""
    hidden_size: int
    """D, the width of the residual stream."""
    intermediate_size: int
    """F, the width of the feed-forward."""
    num_layers: int
    """L, the number of layers."""
    num_heads: int
    """H, the number of query heads."""
    num_kv_heads: int
    """K, the number of heads of keys and values; fewer than num_heads is grouped-query attention."""
    head_dim: int
    """d, the features of a head, an even number."""
    rope_theta: float = 1e4
    """Base of the rotary frequencies; a larger base supports longer contexts."""
    rope_scaling: RopeScaling = rope.UNSCALED
    """Scaling of the rotary frequencies, or a mapping of its fields, as in a run's config.json."""
    norm_eps: float = 1e-6
    """Epsilon added to the mean square in RMSNorm."""
    window: int = 0
    """Keys that a query sees at most, the last ones, its own included (sliding window attention); 0: all."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""

    attention: str = "ring"
    """Algorithm: vanilla materializes all logits, memory_efficient attends in chunks, blockwise also computes the
    feed-forward in chunks, ring distributes blockwise over sp; or a name of `register_attention`."""
    layout: Layout = "zigzag"
    """Distribution of tokens over the ring: contiguous, or striped or zigzag, which balance causal work."""
    ulysses: int = 1
    """Neighbours on sp that exchange heads around attention and are one rank of a ring of sp/ulysses; divides sp and
    the query heads of a tp rank. It changes the order of tokens."""
    ring: RingForm = "one_way"
    """Way of the keys to the other ranks: one_way: from neighbour to neighbour; both_ways: half of them in each
    direction, which on a torus takes half the time; gathered: all at once, for short shards."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of gathered weights and of activations; sums are float32."""
    remat: Remat = "full"
    """Arrays that a layer keeps for its backward: full: only its input; attention: also the attention's output, and the
    feed-forward's where a norm follows it; feedforward: also the feed-forward's hidden products; dots: also the outputs
    of all other products with weights; none: everything, without rematerialisation."""
    remat_group: int = 1
    """Layers of a group for two-level rematerialisation: only the input of the group's first layer is kept, and the
    group is recomputed before its backward. This costs one more forward, and keeps L/g + g layer inputs instead of L.
    The last L % g layers form no group: each keeps its input."""
    full_remat_layers: int = 0
    """First layers that keep only their input, as with remat=full, although remat=attention and offload: the outputs of
    all may be more than host memory can have."""
    offload: bool = False
    """Offload kept arrays to host memory until the backward: the layers' inputs and, with remat=attention, the
    attention's outputs, but not those that a remat group recomputes. This works on accelerators; a CPU has no other
    memory."""
    fetch_ahead: bool = True
    """Fetch a layer's offloaded arrays during the backward of the layer after it, which takes device memory earlier;
    False: fetch them when the layer's own backward begins, which then waits for them."""
    head_groups: int = 1
    """Groups of heads that attention processes one after the other: q, k, v and their gradients exist for one group at
    a time."""
    q_chunk: int | None = None
    """Queries of a chunk pair; unset: a sixteenth of a rank's tokens, between 128 and 1024."""
    k_chunk: int | None = None
    """Keys of a chunk pair; unset: as for q_chunk."""
    kernel: Literal["auto", Kernel] = "auto"
    """Code that computes a chunk pair: xla: XLA's own code; pallas: flash attention kernels for TPU; cudnn: for GPU;
    auto: the best for the devices of a run or an estimate, and xla in a model used on its own."""
    kernel_check: bool = True
    """Compare the kernel with XLA's blocks on the devices at hand before it is used (takes a second, once per
    shape)."""
    ffn_chunk: int = 1024
    """Tokens that the feed-forward computes at a time."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at a time."""

    ARCHITECTURE: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "tie_embeddings",
    )
    CONTEXT: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling")
    INHERITED: ClassVar[tuple[str, ...]] = (*CONTEXT, "norm_eps", "window")
    EXECUTION: ClassVar[tuple[str, ...]] = (
        "attention",
        "layout",
        "remat",
        "remat_group",
        "full_remat_layers",
        "offload",
        "fetch_ahead",
        "head_groups",
        "q_chunk",
        "k_chunk",
        "kernel",
        "kernel_check",
        "ffn_chunk",
        "loss_chunk",
    )

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        check_config(self)

    @property
    def on_ring(self) -> bool:
        """True if the attention distributes the sequence over sp."""
        return self.attention not in ATTENTION or self.attention == "ring"

    def sequence_parts(self, ring_size: int) -> int:
        """Return the parts that all ranks of a ring have of a sequence; 1 without a ring."""
        return PARTS[self.layout] * ring_size if self.on_ring else 1

    @property
    def attend(self) -> Callable[..., Any]:
        """Function that computes the attention on a ring: `ring_attention`, or a registered one."""
        return REGISTERED[self.attention].attend if self.attention in REGISTERED else ring_attention

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each shape letter of the parameters."""
        return {
            "V": self.vocab_size,
            "D": self.hidden_size,
            "F": self.intermediate_size,
            "L": self.num_layers,
            "H": self.num_heads,
            "K": self.num_kv_heads,
            "d": self.head_dim,
        }

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order."""
        return (LayerKind(self.window, self.rope_theta, self.rope_scaling),) * self.num_layers

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        """The layers as periods of runs of equal layers, each of which is compiled once."""
        return periods_of(self.layer_kinds)

    @cached_property
    def windows(self) -> dict[int, int]:
        """Number of layers by window, 0 for full attention."""
        return dict(Counter(kind.window for kind in self.layer_kinds))

    @cached_property
    def ropes(self) -> tuple[tuple[float, RopeScaling] | None, ...]:
        """Rotary frequencies, theta and scaling, that layers have; None for those without."""
        return tuple(dict.fromkeys(kind.rope for kind in self.layer_kinds))

    @property
    def embedding_scale(self) -> float | None:
        """Factor of embedded tokens; None: 1."""
        return None

    @property
    def logit_scale(self) -> float | None:
        """Factor of attention's logits; None: that of `ring_attention`, d^-1/2."""
        return None

    def query_scale(self, positions: Int[AnyArray, "#B T"]) -> Float32[Array, "#B T"] | None:
        """Return the factor of rotated queries by position; None: 1."""
        return None

    @property
    def num_params(self) -> int:
        """Number of parameters, including the input embedding."""
        D, H, K, d, F = (self.sizes[letter] for letter in "DHKdF")
        parts = self.PARTS
        norms = 4 if parts.norms == "both" else 2
        of_qk_norm = {"": 0, "head": 2 * d, "width": (H + K) * d}[parts.qk_norm]
        layer = D * d * (2 * H + 2 * K) + 3 * D * F + norms * D
        layer += (H + 2 * K) * d * parts.bias + of_qk_norm
        matrices_of_tokens = 1 if self.tie_embeddings else 2
        return self.num_layers * layer + D + self.vocab_size * D * matrices_of_tokens

    def held_key_heads(self, tp: int) -> int:
        """Key heads that a device of `tp` computes at once, with the copies that an exchange of heads makes."""
        heads = max(1, self.num_kv_heads // tp // self.head_groups)
        return heads * key_copies(self.ulysses, heads) // self.ulysses

    def kept_bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes that a layer keeps for its backward on a device with `tokens` tokens of a microbatch: those
        of its input, and those of what else `remat` keeps by name (dots and none keep more)."""
        itemsize = 2 if self.compute_dtype == "bfloat16" else 4
        features = 0
        of_softmax = 0
        if self.remat != "full":
            features += self.num_heads * self.head_dim
            features += self.hidden_size * (self.PARTS.norms != "before")
            of_softmax = 8 * self.num_heads
        if self.remat in KEEP_HIDDEN:
            features += 2 * self.intermediate_size
        return tokens * self.hidden_size * itemsize, tokens * (features * itemsize + of_softmax)

    @property
    def remat_groups(self) -> tuple[int, int]:
        """Number of remat groups, and number of layers in no group. Layers of a group are equal."""
        if self.remat_group == 1:
            return 0, self.num_layers
        runs = [(period.repeats, *divmod(n, self.remat_group)) for period in self.periods for _, n in period.runs]
        return sum(count * groups for count, groups, _ in runs), sum(count * single for count, _, single in runs)

    @property
    def has_equal_layers(self) -> bool:
        """True if all layers are of one kind."""
        return len(set(self.layer_kinds)) == 1

    @property
    def one_scan(self) -> bool:
        """True if one scan runs over all layers, or over all periods of them; False if several do, over parts of
        them."""
        if len(self.periods) > 1:
            return False
        (period,) = self.periods
        if period.repeats > 1:
            return True
        return len(period.runs) == 1 and self.num_layers % self.remat_group == 0 and not self.full_remat_layers

    def kept_bytes_of_layers(self, tokens: int) -> int:
        """Return the bytes that all layers keep until the backward on a device with `tokens` tokens of a microbatch,
        without those that a remat group recomputes."""
        of_input, of_attention = self.kept_bytes(tokens)
        groups, single = self.remat_groups
        return (groups + single) * of_input + (single - self.full_remat_layers) * of_attention

    def offloaded_bytes(self, tokens: int) -> int:
        """Bytes that a device with `tokens` tokens of a microbatch offloads to host memory."""
        return self.kept_bytes_of_layers(tokens) if self.offload else 0

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model cannot be computed on the mesh: tp must divide heads and features."""
        tp = mesh.shape["tp"]
        sp = mesh.shape["sp"]
        K = self.num_kv_heads
        for field in ("num_heads", "intermediate_size"):
            if getattr(self, field) % tp:
                raise ValueError(f"tp={tp} does not divide {field}={getattr(self, field)}")
        if K % tp and tp % K:
            raise ValueError(f"tp={tp} neither divides num_kv_heads={K} nor is a multiple of it")
        if max(1, K // tp) % self.head_groups:
            raise ValueError(
                f"head_groups={self.head_groups} does not divide the {max(1, K // tp)} key heads of a tp rank"
            )
        if sp > 1 and not self.on_ring:
            raise ValueError(f"attention {self.attention!r} needs sp=1; mesh has sp={sp}: use attention='ring'")
        if sp % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} does not divide sp={sp}, whose devices exchange heads")
        if (heads := self.num_heads // tp // self.head_groups) % self.ulysses:
            raise ValueError(
                f"ulysses={self.ulysses} does not divide the {heads} query heads that a device computes at once "
                f"(num_heads={self.num_heads}, tp={tp}, head_groups={self.head_groups})"
            )

    def check_stage(self, written: Collection[str]) -> None:
        """Raise ValueError for a stage that sets a theta for a model with a scaling, set or inherited."""
        kind = self.rope_scaling.kind
        if "rope_theta" in written and kind != "none":
            raise ValueError(
                f"model.rope_theta={self.rope_theta:g} and model.rope_scaling.kind={kind!r} both extend the context: "
                "set the theta or the scaling (model.rope_scaling.kind='none' drops an inherited scaling)"
            )
