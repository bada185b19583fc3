"""What the page of tables says around its tables."""

from ringformer.estimate.closed_forms import CLOSED_FORM

HEAD = """# The paper's tables, compiled

Written by `ringformer tables` from `results/max_context.json`; nothing here was run on an accelerator. **compiled**:
the train step of `ringformer train` (AdamW, full rematerialisation, one `shard_map`, `check_vma=True`) was compiled by
the real compiler for that hardware. On TPU the compiler itself accepted its memory; on GPU, whose compiler refuses
nothing, arguments, outputs and temporaries are at most 92% of the device. With offload a usual host has room for the
rest. An attempt ends when the compiler has scheduled the program and placed its buffers, without machine code, which
changes none of these numbers where both were compared (`tests/estimate/test_programs.py`). Of which maxima every
program of a run was compiled, and to machine code, is said [below](#the-executables-of-table-3s-ring).
"paper": the number printed in Liu, Zaharia, Abbeel.
"""

TABLE_3 = """## Table 3: the longest context that trains (compiled)

**Like for like is float32 with the paper's m**, the first columns. The other regimes are ours: bf16 computes in
bfloat16 over float32 weights, offload keeps layer inputs in host memory as well (float32: float32 arrays, bf16 matmul
passes on TPU). m sequences are trained at once, each over n/m devices (n/m is the ratio of the paper's columns).

Each regime has both ends of the search. **fits**: the longest context whose train step fits, how many times the paper's
ring it is, and the modelled seconds of ONE step; **⚠**: more than a day a step. **{hours:g} h a step**: the longest
whose step takes at most {seconds:,.0f} s. There "~" was not compiled: it is shorter than all that was tried.
Its seconds, and those of the attempts that [the executables](#the-executables-of-table-3s-ring) name so, are those of
the closed form: {counted}, and
logits that spill at the memory's rate. Compiled programs took 0.8 to 1.3 times as long; those of 3B, whose head size of
100 fits the TPU's units badly, up to 1.6 times.
≥: the next power of two was not tried yet; <: not even this fits so far; empty: not searched yet.
"""

KERNELS = """## Table 3 with kernels (compiled)

The same search with `kernel=auto`: Pallas on v4 and v5e, cuDNN on A100, in bf16. On v3 auto names XLA's blocks, so its
rows are those above. Length and modelled seconds of a step as above; which of them are whole runs to machine code
stands [below](#the-executables-of-table-3s-ring).
"""

BASELINES = """## Baselines: one sequence per device (compiled)

float32, the longest that fits; in brackets the paper's.
"""

BLOCKWISE = """By the closed form that reproduces most of the paper's blockwise column, with
16 N/n + 8 N_layer + 4 L s h + 12 s V + 40 s h bytes a device, what is printed there needs more than these devices
hold."""

DAY = 86400

EXECUTABLES = """## The executables of Table 3's ring

Peak and host bytes of one device; exposed: ring bytes that no computation hides, inside the loops over hops and in the
whole step; hop: the longest, in links; s/step: modelled seconds of one step, from the batch on the devices to the
updated state, by the cycles of the program's machine code, by its bytes and FLOPs, or by the closed form. The commands
are in `results/max_context.json`.
"""

SCALED = """## Linear in devices

The longest context of 7B on v5e, bf16, one sequence, no offload. A dash: not searched yet.

| chips | longest | tokens a chip | peak GiB | modelled s/step |
|---|---|---|---|---|"""

TABLE_1 = """## Table 1: activations of one layer of 7B

Bytes of bf16 activations that the layer at work holds on a device. "paper": the printed closed form, for the forward
pass (b sequences, s tokens, c tokens a device, h features, n heads). "forward" and "backward": how the temporaries of
the compiled evaluation step and train step grow with the length on {target} (`results/activations.json`); the backward
without the layer inputs that it keeps for all layers. Ours counts what the paper's leaves out: q, k, v and o for all
heads, float32 accumulators, and in the backward the float32 gradients of keys computed, leaving and arriving.

| attention | tokens a device | paper | MiB | forward, compiled | backward, compiled |
|---|---|---|---|---|---|"""

FORMULAS = {"vanilla": "2 b n s²", "memory_efficient": "8 b s h", "blockwise": "2 b s h", "ring": "6 b c h"}

TABLE_2 = """## Table 2: the smallest local length that hides the ring (closed form)

Tokens of one sequence on a device. The first column is the paper's F/B (no mask, forward); the others are for a
causal, balanced ring, whose backward also carries float32 gradients: 2 (K/H) F/B and 2.4 (K/H) F/B. F is the dense bf16
peak, B one link of a TPU in one direction (the paper counts several links, which a ring does not use), NVLink within a
node of GPUs.
"""

TABLE_4 = """## Table 4: model FLOPs utilisation (compiled; seconds modelled)

The paper's five configurations and its batches (2,097,152 tokens on A100, 4,194,304 on v4), trained twice:
**blockwise**, a whole sequence on each rank, and **ring**, over as many ranks as its context is longer. Both have the
same tokens on a device, the same chunks, and the same memory settings, which the estimator chooses for the ring: the
ring is all that differs. 30B has tp 2 in both, since 512 devices with 16K tokens each are more than the batch.

MFU is tokens a second times (6 N + 12 L H d T) over the peak of the dtype (of float32, TF32's on A100 and bf16's on
TPU), N without the input embedding: PaLM's convention. What is computed again, with full rematerialisation a quarter of
the products with weights and a third of attention's, does not count. The pairs that a causal mask hides do, though
nobody computes them; **halved** counts 6 L H d T, what has to be computed. **Expected** is what the baseline lets
expect of the ring: at T, and at T/2 with twice the sequences, its schedule says how well attention and all the rest use
the peak, and the longer context has more of the one. "paper": about the range of all of its own, measured.

The source of the seconds: (m) machine code of attention as far as a layer's alone has the same, bytes and FLOPs of the
rest, [the executables](#the-executables-of-table-4) say of how much; (b) the program's bytes and FLOPs; both with the
communication that the compiled schedule leaves exposed. A closed form alone would be (c).

Blocks by Pallas have chunks of 1024, XLA's the default at the baseline's context. 65B's ring has fewer tokens on a
device than Table 2 wants of v4: fast blocks leave a part of it exposed."""

SOURCES = {"machine code": "(m)", "the program's bytes and FLOPs": "(b)", CLOSED_FORM: "(c)"}
"""How Table 4 marks what `seconds_by` says."""

_MFU_COLUMNS = """
| hardware | model | blocks by | context | blockwise | expected | ring | paper | halved: blockwise | expected | ring |
|---|---|---|---|---|---|---|---|---|---|---|"""

PRECISIONS = {
    "float32": f"\n### float32, as in the paper\n{_MFU_COLUMNS}",
    "bfloat16": f"\n### bf16 over float32 weights\n{_MFU_COLUMNS}",
}

TABLE_4_EXECUTABLES = """
![MFU of the blockwise baseline, what it lets expect of the ring, and the ring's](figures/training_mfu.svg)

### The executables of Table 4

Exposed: the share of the seconds that are communication which nothing hides. Used: the shares of the peak that products
with weights and attention (halved) reach in the two baselines. The commands are in `results/table4.json`.

| cell | run | mesh | tokens | microbatches | peak GiB | head groups | remat group | s/step | exposed | by | used | \
compiled by |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

FIGURES = """
## Figures

![Longest contexts by hardware and model, and how many times the paper's they are](figures/longest_contexts.svg)

Table 3 drawn, m as in the paper: the paper's context (open), and ours in its three regimes, each with its multiple of
the paper's. Like for like is float32. Days: of one modelled step.

![FLOPs of a pass over the same data at a longer context](figures/training_cost.svg)

Figure 5 (closed form): FLOPs of one pass over the same data at a longer context, relative to a context of 4K,
(6 h + s) / (6 h + 4096).
"""


def seconds_by(attempt: dict) -> str:
    """What an attempt's seconds are of."""
    source = attempt["seconds_source"]
    kinds = (CLOSED_FORM, "machine code")
    return next((kind for kind in kinds if kind in source), "the program's bytes and FLOPs")
