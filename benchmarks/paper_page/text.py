"""Text of the page docs/tables.md, with fields for the rows of its tables and for texts that depend on the results."""

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from ringformer.estimate.closed_forms.training import CLOSED_FORM

PAGE = """# The paper's tables, compiled

The actual XLA compiler compiled each context for its hardware; nothing was run. The column "paper" has the numbers
printed in the paper (Liu, Zaharia, Abbeel). Seconds are [modelled](estimating.md#time-model).

## Table 3: the longest context that trains (compiled)

### m as in the paper

| hardware | model | n/m | paper | float32: fits | {hours} h per step | bf16: fits | {hours} h per step | bf16 \
+ offload: fits | {hours} h per step |
|---|---|---|---|---|---|---|---|---|---|
{paper_m}

### m = 1

| hardware | model | n/m | paper | float32: fits | {hours} h per step | bf16: fits | {hours} h per step | bf16 \
+ offload: fits | {hours} h per step |
|---|---|---|---|---|---|---|---|---|---|
{single}

The other rows have m = 1 in the paper already.

### Columns of Table 3

- **float32**: float32 arrays, with bf16 matrix products on TPU. With the paper's m, this is the like-for-like
  comparison.
- **bf16**: computation in bfloat16, with float32 weights.
- **bf16 + offload**: the same, with layer inputs in host memory.
- **n/m**: n devices train m sequences at once, each over n/m devices.
- **fits**: the longest context whose train step fits, its ratio to the paper's context, and the modelled seconds of ONE
  step. **⚠** marks steps of more than a day.
- **{hours} h per step**: the longest context whose step takes at most {seconds} s.

| mark | meaning |
|---|---|
| ≥ | the next power of two was not tried yet |
| < | not even this context fits |
| ~ | not compiled, because all contexts that were tried are longer; the seconds follow the closed form |
| empty | not searched yet |

The closed form assumes {counted},
and logits that spill at the memory's rate. Some of
[the executables](#the-executables-of-table-3s-ring) also take their seconds from it. Compiled programs took 0.8 to 1.3
times as long as the closed form. Those of 3B took up to 1.6 times as long, because the TPU's units do not suit its head
size of 100.

## Table 3 with kernels (compiled)

The same search with `kernel=auto` in bf16 uses Pallas on v4 and v5e, and cuDNN on A100. On v3, `auto` selects XLA's
blocks, so the rows of Table 3 apply. [The executables](#the-executables-of-table-3s-ring) show for which rows every
program of the run was compiled to machine code.

With a kernel, the closed form (**~**) assumes the kernel's [share of the peak](estimating.md#time-model). Compiled
programs took as long, but 1.1 to 1.4 times as long on v4, where they were compiled before segment ids were free in
whole pairs.

| hardware | model | n/m | kernel | regime | XLA's blocks | {hours} h per step | the kernel | {hours} h per step |
|---|---|---|---|---|---|---|---|---|
{kernels}

{shorter_kernels}

## Baselines: one sequence per device (compiled)

The table gives the longest context that fits in float32, with the paper's context in brackets.

| hardware | model | vanilla | memory efficient | blockwise |
|---|---|---|---|---|
{baselines}

{shorter_baselines}

## The executables of Table 3's ring

The commands are in `results/max_context.json`.

| column | meaning |
|---|---|
| peak GiB, host GiB | memory of one device, and the host memory that belongs to it |
| exposed in loops, exposed | share of the ring's bytes that no computation hides, inside the loops over hops and in \
the whole step |
| hop | number of links that the longest hop crosses |
| modelled s/step | seconds of one step, from the batch on the devices to the updated state |
| by | source of the seconds: (m) cycles of the program's machine code, (b) its bytes and FLOPs, (c) the closed form |
| judged | the programs that were compiled, and how far |
| compiler | letter in the list below the table |

| cell | tokens | peak GiB | host GiB | head groups | remat group | exposed in loops | exposed | hop | \
modelled s/step | by | judged | compiler |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
{executables}

## Longest context by number of chips

The table gives the longest context of 7B on v5e, for one sequence in bf16 without offload. A dash means that the row
was not searched yet.

| chips | longest | tokens per chip | peak GiB | modelled s/step |
|---|---|---|---|---|
{scaling}

## Table 4: model FLOPs utilisation (compiled; seconds modelled)

The paper's five configurations are trained with its batches (2,097,152 tokens on A100, 4,194,304 on v4). **Blockwise**
runs have a whole sequence on each rank. **Ring** runs have a longer context, and a ring of proportionally many ranks.
Both have the same tokens per device, the same chunks and the same memory settings, which the estimator chooses for the
ring, so only the ring differs. 30B has tp 2 in both, because 512 devices with 16K tokens each exceed the batch.

**MFU** follows PaLM's convention: tokens per second times (6 N + 12 L H d T), over the peak of the dtype. For float32,
this is the peak of TF32 on A100 and of bf16 on TPU. N excludes the input embedding. Recomputation does not count: with
full rematerialisation, it is a quarter of the products with weights and a third of the products of attention. MFU
also counts pairs that the causal mask hides, although they are not computed. **Halved** counts only the pairs that have
to be computed, 6 L H d T.

**Expected** is the MFU that the baseline predicts for the ring. The schedules of the baseline at T, and at T/2 with
twice the sequences, show how well attention and the other operations use the peak. At a longer context, attention has a
larger share of the step. **Paper** is the approximate range of all MFUs that the paper measured.

The mark after each MFU is the source of its seconds, which include the communication that the compiled schedule
exposes:

| mark | source of the seconds |
|---|---|
| (m) | machine code of attention, as far as a layer compiled alone has the same instructions; bytes and FLOPs for the \
rest ([the executables](#the-executables-of-table-4) list the shares) |
| (b) | the program's bytes and FLOPs |
| (c) | a closed form alone |

Pallas' blocks have chunks of 1024; XLA's blocks have the default chunks at the baseline's context. On v4, 65B's ring
has fewer tokens per device than Table 2 requires, so part of the ring is exposed if the blocks are fast.

### float32, as in the paper

| hardware | model | blocks by | context | blockwise | expected | ring | paper | halved: blockwise | expected | ring |
|---|---|---|---|---|---|---|---|---|---|---|
{mfu_float32}

### bf16 over float32 weights

| hardware | model | blocks by | context | blockwise | expected | ring | paper | halved: blockwise | expected | ring |
|---|---|---|---|---|---|---|---|---|---|---|
{mfu_bfloat16}

![MFU of the blockwise baseline, the MFU it predicts for the ring, and the ring's](figures/training_mfu.svg)

### The executables of Table 4

The commands are in `results/table4.json`. The column "exposed" has the share of exposed communication in the seconds.
The column "used" has the shares of the peak that products with weights, and attention (halved), reach in the two
baselines. The column "by" has the share of the computation whose seconds come from HBM bytes or machine code; the other
seconds come from FLOPs. The list below the table explains the letters in the column "compiler".

| cell | run | mesh | tokens | microbatches | peak GiB | head groups | remat group | s/step | exposed | by | used | \
compiler |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
{mfu_executables}

## Table 5: trajectories in a context (compiled)

The paper trains an agent of 350M parameters on contexts of 32 or 128 trajectories (ExoRL, 1,000 steps of four tokens
each), and says which of them fit. These tables have the sizes of that agent: `--model=agentic_350m`, 24 layers of 1,024
features, 310M parameters with the 1,024 tokens that we gave it, as the paper's reads no text. A trajectory has 4,096
tokens. Of eight devices, the ring trains one sequence on all; the others train one sequence on each, with FSDP. The
paper names neither its hardware nor its batch. [In-context reinforcement learning](experience.md) is about the other
half of the table, the returns.

The most trajectories that fit, a power of two:

| hardware | compute dtype | vanilla | memory efficient | blockwise | ring |
|---|---|---|---|---|---|
{trajectories}

The paper's four cells, with the GiB of a device that a train step takes. The column "limit" is all of a TPU's memory,
or 92% of a GPU's.

| hardware | compute dtype | limit | memory efficient, 32 | blockwise, 32 | blockwise, 128 | ring, 128 |
|---|---|---|---|---|---|---|
| the paper | not said | | no | fits | no | fits |
{trajectories_of_paper}

The ring holds 128 trajectories in every setup, as in the paper. The other answers depend on the setup. Memory efficient
attention over 32 trajectories fits in five of six setups, where the paper says that it does not fit. Blockwise over 32
fits in five of six, and blockwise over 128 does not fit in five of six, as in the paper.

## Table 1: activations of one layer of 7B

The table gives the bf16 activations of one layer on a device while the layer is computed. The column "paper" has the
closed form that the paper prints for the forward pass (b sequences, s tokens, c tokens per device, h features, n
heads), and the next column has its value. The last two columns show how the temporaries of the compiled evaluation step
and train step grow with the length on {target} (`results/activations.json`), without the layer inputs that the backward
pass keeps for all layers.

Our numbers are larger because they include arrays that the paper leaves out: q, k, v and o for all heads, float32
accumulators, and in the backward pass the float32 gradients of keys that are computed, sent and received.

| attention | tokens per device | paper | MiB | forward, compiled | backward, compiled |
|---|---|---|---|---|---|
{activations}

## Table 2: the smallest local length that hides the ring (closed form)

The table gives the smallest number of tokens of one sequence on a device at which the ring is hidden. F is the dense
bf16 peak in FLOP/s. B is the bandwidth of one TPU link in one direction, or of NVLink within a node of GPUs. (The paper
counts several TPU links, which a ring does not use.) The column F/B is the paper's formula, for a forward pass without
a mask. The other columns are for a balanced causal ring, whose backward pass also carries float32 gradients: 2 (K/H)
F/B forward and 2.4 (K/H) F/B backward.

| device | F/B | 7B forward | 7B backward | LLaMA-3 8B (K/H = 1/4) forward | backward |
|---|---|---|---|---|---|
{hidden}

## Figures

![Longest contexts by hardware and model, and their multiples of the paper's](figures/longest_contexts.svg)

The figure shows Table 3 with m as in the paper: the paper's context (open dots), and ours in three regimes, each with
its multiple of the paper's. The like-for-like regime is float32. Days are the modelled duration of one step.

![FLOPs of a pass over the same data at a longer context](figures/training_cost.svg)

This is the paper's Figure 5 by a closed form: the FLOPs of one pass over the same data at a longer context, relative to
a context of 4K. The formula is (6 h + s) / (6 h + 4096).

## Method

`python -m benchmarks.paper_page` wrote this page from what `ringformer tables` compiled: `results/max_context.json`,
`results/activations.json`, `results/table4.json` and `results/table5.json`. **Compiled** means that the compiler for
that hardware compiled the train step of `ringformer train` (AdamW, full rematerialisation, one `shard_map`,
`check_vma=True`).

- On TPU, a context fits if the compiler accepts the program's memory.
- The GPU compiler rejects nothing. There, a context fits if arguments, outputs and temporaries take at most 92% of the
  device's memory.
- With offload, a usual host must also have room for the layer inputs.

An attempt ends when the program is scheduled and its buffers are placed, before machine code is generated. Where we
compared both, machine code changed none of the numbers (`tests/estimate/test_programs.py`).
[The executables](#the-executables-of-table-3s-ring) show for which maxima every program of a run was compiled, and
which were compiled to machine code.

Seconds include the communication that the schedule leaves exposed. They are based on one of the following:

{sources}

These compilers were used:

{compilers}

Another compiler version may place a buffer differently. `ringformer tables` reports differences from the installed
compiler.
"""
"""Template of the page. A field takes one line for each row of a table, or a single text."""

BLOCKWISE = """A closed form reproduces most of the paper's blockwise column: 16 N/n + 8 N_layer + 4 L s h + 12 s V +
40 s h bytes per device. By this formula, the paper's contexts in these rows need more memory than the
devices have."""

FORMULAS = {"vanilla": "2 b n s²", "memory_efficient": "8 b s h", "blockwise": "2 b s h", "ring": "6 b c h"}
"""The paper's bytes of activations by kind of attention (Table 1)."""


def seconds_by(attempt: dict[str, Any]) -> str:
    """Return the mark that says on what an attempt's seconds are based."""
    source = attempt["seconds_source"]
    if CLOSED_FORM in source:
        return "(c)"
    if "machine code" in source:
        return "(m)"
    return "(b)"


def with_compilers(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the rows of attempts, each with a letter for its compiler, and a list that explains the letters."""
    compilers = [f"{attempt['compiled_by']}, {attempt['date']}" for _, attempt in rows]
    letters = dict(zip(sorted(set(compilers)), ascii_uppercase, strict=False))
    lines = []
    for (row, _), compiler in zip(rows, compilers, strict=True):
        lines.append(f"{row} {letters[compiler]} |")
    explained = ""
    for compiler, letter in letters.items():
        explained += f"\n- {letter}: {compiler}"
    return [*lines, explained]
