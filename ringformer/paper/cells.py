"""Cells of the paper's Table 3 and of more rows: each is a setup whose longest context is searched for."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from ringformer.estimate.search.longest_context import longest_start
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.own_attention import ATTENTION

K = 1024


@dataclass(frozen=True)
class TableRow:
    """Row of one of the paper's tables: a model on its hardware."""

    target: str
    model: str

    @property
    def size(self) -> str:
        """Size of the model as printed, e.g. 7B."""
        return self.model.rpartition("_")[2].upper()

    @property
    def name(self) -> str:
        """First part of the names of its cells."""
        return f"{self.target}/{self.size}".lower()


@dataclass(frozen=True)
class Row(TableRow):
    """One row of the paper's Table 3. Contexts are in K tokens, in the order of `ATTENTION`."""

    devices: int
    sequences: int
    """m, the number of sequences that the ring trains at once; n/m is the ratio of the table's ring and blockwise
    columns."""
    paper: tuple[int, ...] = ()
    """Contexts that the paper prints; empty for a row that the paper does not have."""
    command: ClassVar[str] = "ringformer tables"
    """Command that fills the file of the row's attempts."""

    def required_lengths(self, attention: str) -> tuple[int, ...]:
        """Return contexts to compile in any case, before a search."""
        return ()


ROWS = (
    Row("8xA100-80", "llama_3b", 8, 1, (4, 32, 64, 512)),
    Row("8xA100-80", "llama_7b", 8, 1, (2, 16, 32, 256)),
    Row("8xA100-80", "llama_13b", 8, 1, (2, 4, 16, 128)),
    Row("32xA100-80", "llama_7b", 32, 1, (4, 64, 128, 4096)),
    Row("32xA100-80", "llama_13b", 32, 1, (4, 32, 64, 2048)),
    Row("v3-512", "llama_7b", 512, 2, (1, 4, 8, 2048)),
    Row("v3-512", "llama_13b", 512, 4, (1, 2, 8, 1024)),
    Row("v4-1024", "llama_3b", 512, 1, (8, 16, 32, 16384)),
    Row("v4-1024", "llama_7b", 512, 1, (4, 8, 16, 8192)),
    Row("v4-1024", "llama_13b", 512, 2, (4, 8, 16, 4096)),
    Row("v4-1024", "llama_30b", 512, 2, (2, 4, 8, 2048)),
    Row("v5e-256", "llama_3b", 256, 2, (4, 8, 32, 4096)),
    Row("v5e-256", "llama_7b", 256, 2, (2, 8, 16, 2048)),
)
SCALING = (
    Row("v5e-32", "llama_7b", 32, 1),
    Row("v5e-64", "llama_7b", 64, 1),
    Row("v5e-128", "llama_7b", 128, 1),
)
"""Rows that are not in the paper. They test whether the longest context grows linearly with the number of devices. The
fourth point of this series is the last row of `ROWS` with m=1."""


class Regime(NamedTuple):
    """Dtype of the computation, and the memory that holds layer inputs."""

    compute_dtype: str
    offload: bool = False

    @property
    def name(self) -> str:
        return "offload" if self.offload else self.compute_dtype

    def wanted_multiple(self, row: Row) -> int:
        """Return the multiple of the paper's ring column that this regime should reach."""
        if row.target == "32xA100-80":
            return 2 if self.offload else 1
        if row.target == "v3-512" and self.name == "bfloat16":
            return 8
        return {"float32": 2, "bfloat16": 4, "offload": 8}[self.name]


REGIMES = (Regime("float32"), Regime("bfloat16"), Regime("bfloat16", offload=True))
"""Regimes of the cells. "float32" is the paper's regime: float32 arrays, whose matrix products are bf16 passes on TPU.
The baselines are searched in this regime."""


class Cell(NamedTuple):
    """A cell of the table: one setup whose longest context is searched for."""

    row: Row
    attention: str
    regime: Regime
    sequences: int
    kernel: str = "xla"
    """Code that computes attention's blocks: xla, or auto for the chip's kernel (`models/kernel_choice.py`)."""

    @property
    def name(self) -> str:
        kernel = "" if self.kernel == "xla" else "+kernel"
        return f"{self.row.name}/{self.attention}/{self.regime.name}{kernel}/m={self.sequences}"

    @property
    def target(self) -> str:
        return self.row.target

    def workload(self, seq_len: int) -> Workload:
        """Return the workload of a sequence length, with the fastest memory settings."""
        n = self.row.devices
        m = self.sequences
        options = self.regime._asdict() | dict(fetch_ahead=not self.regime.offload, kernel=self.kernel)
        model = LlamaConfig(**preset(self.row.model) | options | {"attention": self.attention})
        mesh_dim = f"1,{n},1,1"
        batch_size = n
        if self.attention == "ring":
            mesh_dim = f"1,{m},1,{n // m}"
            batch_size = m
        workload = Workload(model, find_target(self.target), mesh_dim, seq_len, batch_size, name=self.row.model)
        return workload.with_kernel()[0]

    @property
    def with_xla(self) -> "Cell":
        """Return the cell of the same setup with XLA's blocks instead of a kernel."""
        return self._replace(kernel="xla")

    @property
    def paper(self) -> int:
        """Tokens that the paper prints for this cell; its row must be in the paper."""
        return K * self.row.paper[ATTENTION.index(self.attention)]

    @property
    def first_length(self) -> int:
        """First length of the search: the desired multiple of the paper's ring or, without one, the longest that fits
        by the closed form."""
        if self.attention == "ring" and self.row.paper:
            return self.paper * self.regime.wanted_multiple(self.row)
        return longest_start(self.workload(1024))


def cells(rows: tuple[Row, ...] = ROWS + SCALING) -> list[Cell]:
    """Return every cell: rings with the paper's number of sequences, rings with one sequence, the baselines, the
    scaling series, and rings with kernels."""
    papers = []
    scaling = []
    for row in rows:
        if row.paper:
            papers.append(row)
        else:
            scaling.append(Cell(row, "ring", REGIMES[1], 1))
    rings = []
    single = []
    for regime, row in product(REGIMES[::-1], papers):
        rings.append(Cell(row, "ring", regime, row.sequences))
        if row.sequences > 1:
            single.append(Cell(row, "ring", regime, 1))
    baselines = []
    for kind, row in product(ATTENTION[2::-1], papers):
        baselines.append(Cell(row, kind, REGIMES[0], row.devices))
    kernels = []
    for regime in REGIMES[1:]:
        for ring in rings + single:
            cell = ring._replace(regime=regime, kernel="auto")
            if ring.regime == REGIMES[1] and cell.workload(1024 * K).model.kernel != "xla":
                kernels.append(cell)
    return rings + single + baselines + scaling + kernels
