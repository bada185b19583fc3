"""The page docs/tables.md, with fields for the rows of its tables and for texts that depend on the results."""

from ringformer.estimate.closed_forms import CLOSED_FORM

PAGE = """# The paper's tables, compiled

Each context was compiled for its hardware by the actual XLA compiler; none was run. The column "paper" has the numbers
printed in Liu, Zaharia, Abbeel. Seconds are [modelled](estimating.md#where-seconds-come-from).

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

The other rows have m = 1 in the paper, too.

### How to read it

Like for like is **float32 with the paper's m**: float32 arrays, with bf16 matrix products on TPU. bf16 computes in
bfloat16 over float32 weights, and offload also keeps layer inputs in host memory. m sequences are trained at once, each
over n/m devices (n/m is the ratio of the paper's columns).

**fits**: the longest context whose train step fits, its multiple of the paper's ring, and the modelled seconds of ONE
step; **⚠**: a step takes more than a day. **{hours} h per step**: the longest context whose step takes
at most {seconds} s. ≥: the next power of two was not tried yet; <: not even this fits; empty: not searched yet.

"~" was not compiled, because it is shorter than everything that was tried. Its seconds follow the closed form, as do
those of [the executables](#the-executables-of-table-3s-ring) that say so: {counted}, and logits that spill at the
memory's rate. Compiled programs took 0.8 to 1.3 times as long; those of 3B, whose head size of 100 fits the TPU's units
badly, up to 1.6 times.

## Table 3 with kernels (compiled)

This is the same search with `kernel=auto` in bf16: Pallas on v4 and v5e, cuDNN on A100. On v3, auto selects XLA's
blocks, so its rows are those above. [The executables](#the-executables-of-table-3s-ring) list which of these are whole
runs compiled to machine code.

| hardware | model | n/m | kernel | regime | XLA's blocks | the kernel |
|---|---|---|---|---|---|---|
{kernels}

{shorter_kernels}

## Baselines: one sequence per device (compiled)

The longest context that fits, in float32; the paper's in brackets.

| hardware | model | vanilla | memory efficient | blockwise |
|---|---|---|---|---|
{baselines}

{shorter_baselines}

## The executables of Table 3's ring

Peak and host bytes are those of one device. Exposed: share of the ring's bytes that no computation hides, inside the
loops over hops and in the whole step. Hop: the longest, in links. s/step: modelled seconds of one step, from the batch
on the devices to the updated state. By: what the seconds are based on, the cycles of the program's machine code, its
bytes and FLOPs, or the closed form. The commands are in `results/max_context.json`.

| cell | tokens | peak GiB | of | host GiB | head groups | remat group | exposed in loops | exposed | hop | \
modelled s/step | by | judged | compiled by |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
{executables}

## Linear in devices

The longest context of 7B on v5e in bf16, one sequence, no offload. A dash: not searched yet.

| chips | longest | tokens per chip | peak GiB | modelled s/step |
|---|---|---|---|---|
{scaling}

## Table 4: model FLOPs utilisation (compiled; seconds modelled)

The paper's five configurations are trained on its batches (2,097,152 tokens on A100, 4,194,304 on v4) in two ways:
**blockwise**, with a whole sequence on each rank, and **ring**, over as many ranks as its context is longer. Both have
the same tokens per device, the same chunks and the same memory settings, which the estimator chooses for the ring, so
only the ring differs. 30B has tp 2 in both, because 512 devices with 16K tokens each exceed the batch.

MFU is tokens per second times (6 N + 12 L H d T) over the peak of the dtype (for float32: TF32's on A100 and bf16's on
TPU), with N excluding the input embedding. This is PaLM's convention. Recomputation does not count: with full
rematerialisation it is a quarter of the products with weights and a third of attention's. Pairs hidden by the causal
mask count, although they are not computed; **halved** counts only what has to be computed, 6 L H d T. **Expected** is
what the baseline predicts for the ring. Its schedules at T, and at T/2 with twice the sequences, show how well
attention and everything else use the peak, and a longer context has more attention. "paper": approximate range of all
its measured numbers.

Seconds are based on (m) the machine code of attention, as far as a layer compiled alone has the same, and bytes and
FLOPs for the rest ([the executables](#the-executables-of-table-4) list the shares), or (b) the program's bytes and
FLOPs. Both include the communication that the compiled schedule leaves exposed. A closed form alone would be (c).

Blocks by Pallas have chunks of 1024, XLA's have the default at the baseline's context. 65B's ring has fewer tokens per
device than Table 2 requires on v4, so fast blocks leave a part of it exposed.

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

Exposed: the share of exposed communication in the seconds. Used: the shares of the peak that products with weights and
attention (halved) reach in the two baselines. The commands are in `results/table4.json`.

| cell | run | mesh | tokens | microbatches | peak GiB | head groups | remat group | s/step | exposed | by | \
used | compiled by |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
{mfu_executables}

## Table 1: activations of one layer of 7B

Bytes of bf16 activations that the layer at work holds on a device. "paper": the printed closed form for the forward
pass (b sequences, s tokens, c tokens per device, h features, n heads). "forward" and "backward": the growth of the
temporaries of the compiled evaluation step and train step with the length on {target} (`results/activations.json`),
without the layer inputs that the backward pass keeps for all layers. Our numbers include what the paper leaves out: q,
k, v and o for all heads, float32 accumulators, and in the backward pass the float32 gradients of keys that are
computed, sent and received.

| attention | tokens per device | paper | MiB | forward, compiled | backward, compiled |
|---|---|---|---|---|---|
{activations}

## Table 2: the smallest local length that hides the ring (closed form)

Tokens of one sequence on a device. The first column is the paper's F/B (no mask, forward). The others are for a
balanced causal ring, whose backward pass also carries float32 gradients: 2 (K/H) F/B and 2.4 (K/H) F/B. F is the dense
bf16 peak. B is one link of a TPU in one direction (the paper counts several, which a ring does not use), or NVLink
within a node of GPUs.

| device | F/B | 7B forward | 7B backward | LLaMA-3 8B (K/H = 1/4) forward | backward |
|---|---|---|---|---|---|
{hidden}

## Figures

![Longest contexts by hardware and model, and their multiples of the paper's](figures/longest_contexts.svg)

This is Table 3 with m as in the paper: the paper's context (open), and ours in three regimes, each with its multiple of
the paper's. Like for like is float32. Days are those of one modelled step.

![FLOPs of a pass over the same data at a longer context](figures/training_cost.svg)

Figure 5 (closed form): FLOPs of one pass over the same data at a longer context, relative to a context of 4K,
(6 h + s) / (6 h + 4096).

## How these numbers were made

`ringformer tables` wrote this page from `results/max_context.json`, `results/activations.json` and
`results/table4.json`. **Compiled** means that the compiler for that hardware compiled the train step of `ringformer
train` (AdamW, full rematerialisation, one `shard_map`, `check_vma=True`). On TPU the compiler itself accepts its
memory. The GPU compiler rejects nothing; there, arguments, outputs and temporaries take at most 92% of the device. With
offload, a usual host has room for the rest. An attempt ends when the program is scheduled and its buffers are placed,
without machine code; where both were compared, this changes none of the numbers (`tests/estimate/test_programs.py`).
[The executables](#the-executables-of-table-3s-ring) list the maxima for which every program of a run was compiled, and
those compiled to machine code.

Seconds include the communication that the schedule leaves exposed, and are based on:

{sources}

These compilers were used:

{compilers}

Another compiler may place a buffer differently; where it is installed, `ringformer tables` reports that.
"""
"""Template of the page. Fields have one line for each row, except single texts."""

BLOCKWISE = """By the closed form that reproduces most of the paper's blockwise column,
16 N/n + 8 N_layer + 4 L s h + 12 s V + 40 s h bytes per device, the contexts printed there need more memory than these
devices have."""

FORMULAS = {"vanilla": "2 b n s²", "memory_efficient": "8 b s h", "blockwise": "2 b s h", "ring": "6 b c h"}
"""The paper's bytes of activations by kind of attention (Table 1)."""

SOURCES = {"machine code": "(m)", "the program's bytes and FLOPs": "(b)", CLOSED_FORM: "(c)"}
"""Marks of Table 4 for the results of `seconds_by`."""


def seconds_by(attempt: dict) -> str:
    """Return what an attempt's seconds are based on."""
    kinds = (CLOSED_FORM, "machine code")
    return next((kind for kind in kinds if kind in attempt["seconds_source"]), "the program's bytes and FLOPs")
