"""The paper's Table 3 and beyond: the longest context of every hardware, model and attention kind, compiled.

Cells are searched breadth first, one length each in turn, and every attempt is written to a file at once: interrupted,
the search goes on where it was, and at any time the file says what is known so far.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from ringformer.estimate.closed_forms import CLOSED_FORM
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.search.longest_context import attempt, longest_start, next_length
from ringformer.estimate.targets import find_target
from ringformer.estimate.time_report import computation_time
from ringformer.estimate.workload import MemorySettings, Workload, estimate_command
from ringformer.hardware import GiB
from ringformer.models.llama_config import ATTENTION, LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.paper.attempts import installed, read, stamp, write_cells

K = 1024


class Row(NamedTuple):
    """One row of the paper's Table 3. Contexts in K tokens, in the order of `ATTENTION`."""

    target: str
    model: str
    devices: int
    sequences: int
    """m: how many the ring trains at once (n/m is the ratio of the table's ring and blockwise columns)."""
    paper: tuple[int, int, int, int] | None = None
    """None: the row is ours."""

    @property
    def name(self) -> str:
        return f"{self.target.lower()}/{self.model.removeprefix('llama_')}"


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
SCALING = tuple(Row(f"v5e-{n}", "llama_7b", n, 1) for n in (32, 64, 128))
"""Rows that are not in the paper: is the longest context linear in devices? The fourth is the last of `ROWS`, m=1."""


class Regime(NamedTuple):
    """What is computed in which dtype and by which kernel, and where layer inputs wait."""

    name: str
    compute_dtype: str
    offload: bool
    kernel: str = "xla"

    def wanted_multiple(self, row: Row) -> int:
        """How many times the paper's ring column is wanted."""
        regime = "offload" if self.offload else self.compute_dtype
        if row.target == "32xA100-80":
            return {"float32": 1, "bfloat16": 1, "offload": 2}[regime]
        return {"float32": 2, "bfloat16": 8 if row.target == "v3-512" else 4, "offload": 8}[regime]


REGIMES = (
    Regime("float32", "float32", False),
    Regime("bfloat16", "bfloat16", False),
    Regime("offload", "bfloat16", True),
)
"""float32: the paper's, float32 arrays (matrix products in bf16 passes on TPU). The baselines are searched in it."""
KERNEL_REGIMES = (
    Regime("bfloat16+kernel", "bfloat16", False, "auto"),
    Regime("offload+kernel", "bfloat16", True, "auto"),
)
"""The same with the kernel that the chips have (`models/kernel_choice.py`), where they have one."""


class Cell(NamedTuple):
    """A cell of the table: whose longest context is searched."""

    row: Row
    attention: str
    regime: Regime
    sequences: int

    @property
    def name(self) -> str:
        return f"{self.row.name}/{self.attention}/{self.regime.name}/m={self.sequences}"

    def workload(self, seq_len: int) -> Workload:
        """What is trained at a length, with the fastest memory settings."""
        n, m = self.row.devices, self.sequences
        ring = self.attention == "ring"
        _, dtype, offload, kernel = self.regime
        options = dict(attention=self.attention, compute_dtype=dtype, offload=offload, kernel=kernel)
        model = LlamaConfig(**preset(self.row.model) | options | {"fetch_ahead": not offload})
        mesh_dim, batch_size = (f"1,{m},1,{n // m}", m) if ring else (f"1,{n},1,1", n)
        target = find_target(self.row.target)
        workload = Workload(model, target, mesh_dim, seq_len, batch_size=batch_size, name=self.row.model)
        return workload.with_kernel()[0]

    @property
    def has_kernel(self) -> bool:
        """Whether its chips have a kernel besides XLA's code."""
        return cast(LlamaConfig, self._replace(regime=KERNEL_REGIMES[0]).workload(1024 * K).model).kernel != "xla"

    @property
    def with_xla(self) -> "Cell":
        """The cell of the same run without a kernel."""
        return self._replace(regime=REGIMES[2 if self.regime.offload else 1]) if self.regime.kernel != "xla" else self

    @property
    def paper(self) -> int:
        """The tokens that the paper prints for this cell; ValueError for a row that is not in it."""
        if self.row.paper is None:
            raise ValueError(f"the paper has no row {self.row.name}")
        return K * self.row.paper[ATTENTION.index(self.attention)]

    @property
    def first_length(self) -> int:
        """The search begins at what is wanted of the paper's ring, else at what the closed form lets fit."""
        if self.attention == "ring" and self.row.paper:
            return self.paper * self.regime.wanted_multiple(self.row)
        return longest_start(self.workload(1024))


def cells(rows: tuple[Row, ...] = ROWS + SCALING) -> list[Cell]:
    """Every cell, rings first: with the paper's number of sequences, then with one; the baselines; the scaling; and
    the rings with kernels."""
    scaling = [Cell(row, "ring", REGIMES[1], 1) for row in rows if row.paper is None]
    papers = [row for row in rows if row.paper]
    rings = [Cell(row, "ring", regime, row.sequences) for regime in REGIMES[::-1] for row in papers]
    single = [Cell(row, "ring", regime, 1) for regime in REGIMES[::-1] for row in papers if row.sequences > 1]
    baselines = [Cell(row, kind, REGIMES[0], row.devices) for kind in ATTENTION[2::-1] for row in papers]
    kernels = [
        cell._replace(regime=regime)
        for regime in KERNEL_REGIMES
        for cell in rings + single
        if cell.regime == REGIMES[1] and cell.has_kernel
    ]
    return rings + single + baselines + scaling + kernels


def fill(path: Path, wanted: list[Cell], log: Callable[[str], None], passes: int | None = None) -> None:
    """Search the cells, breadth first, until all maxima are known or for some passes; attempts go to `path`.

    Cells whose compiler is not installed are left out. The search ends if a pass learns nothing, because the compiler
    breaks down on all that is left.
    """
    wanted = _compilable(wanted, log)
    done, learned = 0, True
    while learned and (passes is None or done < passes):
        learned = False
        known = read(path)
        pending = [(c, n) for c in wanted if (n := next_length(known.get(c.name, []), _first_length(c, known)))]
        pending.sort(key=lambda item: len(known.get(item[0].name, [])))  # the least known cells first
        if not pending:
            return
        for i, (cell, seq_len) in enumerate(pending):
            log(f"[{i + 1}/{len(pending)}] {cell.name} at {seq_len:,} tokens")
            workload = cell.workload(seq_len)
            if refused := known_failure(workload):  # which is an answer: nobody can compile it
                log(f"  does not fit: {refused}")
                said = {"seq_len": seq_len, "command": estimate_command(workload)} | vars(workload.settings)
                write(path, cell, said | {"fits": False, "reasons_against": [refused]})
                learned = True
                continue
            try:
                answer = attempt(workload, log)
            except CompilerFailure as error:  # said, and not taken for an answer
                log(f"  the compiler broke down: {error}")
                continue
            host = "" if answer["fits_host"] else f" {answer['host_bytes'] / GiB:.0f} GiB of a usual host,"
            log(
                f"  {'fits' if answer['fits'] else 'does not fit'}:{host} {answer['peak_bytes'] / GiB:.2f} of "
                f"{answer['hbm_bytes'] / GiB:.2f} GiB in {answer['compile_seconds']:.0f} s"
            )
            write(path, cell, answer)
            learned = True
        done += 1


def _first_length(cell: Cell, known: dict[str, list[dict]]) -> int:
    """Where a search begins: with a kernel, at the longest that fits without."""
    found = [a["seq_len"] for a in known.get(cell.with_xla.name, []) if a["fits"]]
    return max(found) if cell.regime.kernel != "xla" and found else cell.first_length


def beside_paper(wanted: list[Cell], *found: tuple[str, dict[str, list[dict]]]) -> list[str]:
    """Lines of a table: the longest context of each cell in tokens, the paper's and those of each title's attempts."""
    columns = {"cell": [cell.name for cell in wanted]}
    columns["paper"] = [f"{cell.paper:,}" if cell.row.paper else "-" for cell in wanted]
    columns |= {title: [_longest(cell, known) for cell in wanted] for title, known in found}
    aligned = [_aligned(title, texts) for title, texts in columns.items()]
    compiled = {a["compiled_by"] for _, known in found for cell in wanted for a in known.get(cell.name, [])}
    about = f"tokens whose train step fits, compiled by {'; '.join(sorted(compiled)) or 'nothing yet'}"
    return [*("  ".join(line) for line in zip(*aligned, strict=True)), about]


def _aligned(title: str, texts: list[str]) -> list[str]:
    width = max(map(len, [title, *texts]))
    return [text.ljust(width) if title == "cell" else text.rjust(width) for text in [title, *texts]]


def _longest(cell: Cell, known: dict[str, list[dict]]) -> str:
    """The longest that fits, in words that say whether the search is at its end."""
    attempts = known.get(cell.name, [])
    fits = max((a["seq_len"] for a in attempts if a["fits"]), default=None)
    if next_length(attempts, _first_length(cell, known)) is None:
        return "none" if fits is None else f"{fits:,}"
    return "not known" if fits is None else f"at least {fits:,}"


def judge_maxima(path: Path, wanted: list[Cell], log: Callable[[str], None], generate_code: bool) -> None:
    """Compile every program of the runs at the longest contexts that fit so far, to machine code or to their schedules.

    What was judged so before stays. A run of which a program fails does not fit: `fill` goes on from there.
    """
    pending = [(c, a) for c in _compilable(wanted, log) if (a := _unjudged(read(path).get(c.name, []), generate_code))]
    for i, (cell, before) in enumerate(pending):
        log(f"[{i + 1}/{len(pending)}] {cell.name} at {before['seq_len']:,} tokens: every program of the run")
        try:
            answer = attempt(cell.workload(before["seq_len"]), log, whole_run=True, generate_code=generate_code)
        except CompilerFailure as error:  # of a run that was scheduled before: it does not compile
            log(f"  {error}")
            answer = before | {"fits": False, "reasons_against": [str(error)]}
        log("  fits" if answer["fits"] else f"  does not fit: {'; '.join(answer['reasons_against'])}")
        write(path, cell, answer)


def renew_counted(path: Path) -> int:
    """Give every attempt whose seconds are the closed form's those of today's; how many of them changed."""
    known, changed = read(path), 0
    for cell in cells():
        for a in known.get(cell.name, []):
            if (a.get("seconds_source") or "").startswith(CLOSED_FORM):
                settings = MemorySettings(a["head_groups"], a["remat_group"], a.get("q_chunk"), a.get("k_chunk"))
                time = computation_time(cell.workload(a["seq_len"]).with_settings(settings))
                renewed = {
                    "step_seconds_model": time.step,
                    "tokens_per_second_model": time.tokens_per_second,
                    "seconds_source": time.source,
                }
                changed += a | renewed != a
                a |= renewed
    if changed:
        _write(path, known)
    return changed


def _unjudged(attempts: list[dict], generate_code: bool) -> dict | None:
    """The attempt at the longest context that fits, if its run was not judged as wanted."""
    best = max((a for a in attempts if a["fits"]), key=lambda a: a["seq_len"], default=None)
    judged = best and len(best.get("programs", ())) > 1 and (best["generated_code"] or not generate_code)
    return None if judged else best


def _compilable(wanted: list[Cell], log: Callable[[str], None]) -> list[Cell]:
    """The cells whose compiler is installed."""
    there = installed((cell.row.target for cell in wanted), log)
    return [cell for cell in wanted if cell.row.target in there]


def compilers(known: dict[str, list[dict]], wanted: list[Cell]) -> dict[str, set[str]]:
    """By target, what compiled the attempts at these cells."""
    found: dict[str, set[str]] = {}
    for cell in wanted:
        found.setdefault(cell.row.target, set()).update(a["compiled_by"] for a in known.get(cell.name, []))
    return found


def write(path: Path, cell: Cell, answer: dict) -> None:
    """Add today's attempt at a cell to the file, instead of an older one at its length; the file is read anew, so that
    two searches can share it."""
    known = read(path)
    known[cell.name] = [a for a in known.get(cell.name, []) if a["seq_len"] != answer["seq_len"]]
    known[cell.name].append(answer | stamp(find_target(cell.row.target)))
    _write(path, known)


def _write(path: Path, known: dict[str, list[dict]]) -> None:
    about = "compiled: whole train steps of `ringformer train`, one attempt per length; bytes of one device"
    write_cells(path, about, "ringformer tables", known)
