"""The list: a piece of the package's text, what it becomes, and the test that must not pass then.

`old` must occur once in its file. Keep it short, so that the list outlives edits around it; a patch that no longer
applies fails the suite, and is then mended together with what moved.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """One wrong ringformer."""

    name: str
    file: str
    """In ringformer/."""
    old: str
    new: str
    test: str
    """A node id in tests/."""


PRECISION = "train/test_precision.py::test_no_error_grows[1,1,1,8]"
ADAMW = "train/test_optimizer.py::test_a_run_is_adamw_on_the_gradients_of_the_oracle[{}]".format
UNTIED, TIED = ADAMW("cosine-7-False"), ADAMW("constant-3-True")
NUMBERS = "train/test_reported_numbers.py::test_every_number_of_a_run_follows_from_what_it_saved"
SKIPPED = "train/test_skipped_steps.py::test_nothing_but_the_number_of_a_bad_step_goes_on"
RING_5 = "ops/test_ring_attention.py::test_plain_causal[zigzag-5]"
RING_BF16 = "ops/test_precision.py::test_attention[zigzag-8]"
PALLAS_BF16 = "ops/kernels/test_flash_attention.py::test_bfloat16_errors_do_not_grow_with_chunks_and_hops"
RING, BLOCK = "ops/ring_attention.py", "ops/blockwise_attention.py"
ROUND = "astype(jnp.bfloat16).astype(jnp.float32)"

MUTATIONS = [
    # Precision: what is summed or computed in float32 is not.
    Mutation(
        "forward accumulator in bfloat16 between hops", RING,
        "return ring.blocks.forward(state, queries, keys, work_list, ring.scale), arriving",
        "state = ring.blocks.forward(state, queries, keys, work_list, ring.scale)\n"
        f"        return state._replace(o=state.o.{ROUND}), arriving",
        PRECISION,
    ),
    Mutation(
        "delta in bfloat16", RING,
        "o, do, preferred_element_type=jnp.float32) - dlse", "o, do) - dlse", PRECISION,
    ),
    Mutation(
        "dk and dv in bfloat16 between hops", RING,
        "jax.tree.map(jnp.add, behind, dkeys)", f"jax.tree.map(lambda a, b: (a + b).{ROUND}, behind, dkeys)",
        RING_BF16,
    ),
    Mutation(
        "dq in bfloat16 between hops", RING,
        "dq, dkeys = ring.blocks.backward(dq, queries, keys, rows, work_list, ring.scale)",
        "dq, dkeys = ring.blocks.backward(dq, queries, keys, rows, work_list, ring.scale)\n"
        f"        dq = dq.{ROUND}",
        RING_BF16,
    ),
    Mutation(
        "attention logits in bfloat16", BLOCK,
        's = _einsum("bkgtd,bksd->bkgts", q.q, k.kv[0]) * scale',
        's = jnp.einsum("bkgtd,bksd->bkgts", q.q, k.kv[0]).astype(jnp.float32) * scale',
        PRECISION,
    ),
    Mutation(
        "gradients reduce-scattered in bfloat16", "ops/gather_weight.py",
        "(lax.psum_scatter(dw, axes, scatter_dimension=dw.ndim + dim, tiled=True),)",
        "(lax.psum_scatter(dw.astype(jnp.bfloat16), axes, scatter_dimension=dw.ndim + dim, tiled=True)"
        ".astype(jnp.float32),)",
        PRECISION,
    ),
    Mutation("RMSNorm in bfloat16", "models/llama.py", "wide = x.astype(jnp.float32)", "wide = x", PRECISION),
    Mutation(
        "RoPE in bfloat16", "ops/rope.py",
        "(r[:, :, None, :] for r in rotation)\n    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)",
        "(r[:, :, None, :].astype(x.dtype) for r in rotation)\n    a, b = jnp.split(x, 2, axis=-1)",
        "ops/test_precision.py::test_rope",
    ),
    Mutation(
        "the loss's logits in bfloat16", "ops/cross_entropy.py",
        'logits = jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)',
        'logits = jnp.einsum("btd,dv->btv", x, head).astype(jnp.float32)',
        PRECISION,
    ),
    Mutation(
        "the head's gradient summed in bfloat16", "ops/cross_entropy.py",
        'dhead += jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)',
        f'dhead = (dhead + jnp.einsum("btd,btv->dv", x, dlogits)).{ROUND}',
        PRECISION,
    ),
    Mutation(
        "the feed-forward's gradient summed in bfloat16", "ops/blockwise_feedforward.py",
        "lambda t, d: t + d.astype(jnp.float32)", f"lambda t, d: (t + d).{ROUND}", PRECISION,
    ),
    Mutation(
        "the embedding's gradient summed in bfloat16", "ops/embedding.py",
        "total.at[tokens].add(dx.astype(jnp.float32))",
        "total.astype(jnp.bfloat16).at[tokens].add(dx).astype(jnp.float32)",
        "ops/test_precision.py::test_embedding",
    ),
    Mutation("l in bfloat16 between hops", RING,
             "return ring.blocks.forward(state, queries, keys, work_list, ring.scale), arriving",
             "state = ring.blocks.forward(state, queries, keys, work_list, ring.scale)\n"
             f"        return state._replace(l=state.l.{ROUND}), arriving",
             RING_BF16),
    Mutation("forward accumulator in bfloat16 between chunks", "ops/online_softmax.py",
             "o=state.o * correction[..., None] + pv,", f"o=(state.o * correction[..., None] + pv).{ROUND},",
             RING_BF16),
    Mutation("the product with the values in bfloat16", "ops/online_softmax.py",
             "p.astype(v.dtype), v, preferred_element_type=jnp.float32)", "p.astype(v.dtype), v)", RING_BF16),
    Mutation("the gradient of the probabilities in bfloat16", BLOCK,
             'dp = _einsum("bkgtd,bksd->bkgts", do, k.kv[1])', 'dp = jnp.einsum("bkgtd,bksd->bkgts", do, k.kv[1])',
             RING_BF16),
    Mutation("m and l saved in bfloat16", RING,
             "o, softmax = checkpoint_name(o, SAVED_OUTPUT)",
             f"softmax = softmax.{ROUND}\n    o, softmax = checkpoint_name(o, SAVED_OUTPUT)", RING_BF16),
    Mutation("the bias's gradient summed in bfloat16", BLOCK,
             "else ds.sum(axis=(1, 2, 3))", "else ds.astype(jnp.bfloat16).sum(axis=(1, 2, 3)).astype(jnp.float32)",
             RING_BF16),
    Mutation("dk's product in bfloat16", BLOCK,
             'dk = _einsum("bkgts,bkgtd->bksd", ds, q.q)',
             'dk = jnp.einsum("bkgts,bkgtd->bksd", ds, q.q).astype(jnp.float32)',
             "ops/test_precision.py::test_products_are_float32_before_they_are_summed[attention]"),
    Mutation("cos and sin in bfloat16", "ops/rope.py",
             "cos, sin = jnp.cos(angle), jnp.sin(angle)",
             f"cos, sin = (f(angle).{ROUND} for f in (jnp.cos, jnp.sin))", "ops/test_precision.py::test_rope"),
    Mutation("the head's gradient, its product in bfloat16", "ops/cross_entropy.py",
             'jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)',
             'jnp.einsum("btd,btv->dv", x, dlogits)', "ops/test_precision.py::test_cross_entropy[32 chunks]"),
    Mutation("the model's logits in bfloat16", "models/llama.py",
             'x, self._head(x.dtype, gather), preferred_element_type=jnp.float32)',
             'x, self._head(x.dtype, gather)).astype(jnp.float32)',
             "models/test_llama.py::test_logits_of_a_bfloat16_model_are_float32"),
    Mutation("the TPU kernel's dq in bfloat16 between visits", "ops/kernels/flash_backward.py",
             "        departure(visit, q_of[p]).start()",
             f'        here["dq"][slot] = here["dq"][slot].{ROUND}\n        departure(visit, q_of[p]).start()',
             PALLAS_BF16),
    Mutation("the TPU kernel's o in bfloat16 between visits", "ops/kernels/flash_forward.py",
             'here["o"][slot, g] = here["o_columns"][g].T', f'here["o"][slot, g] = here["o_columns"][g].T.{ROUND}',
             PALLAS_BF16),
    Mutation("the TPU kernel's l summed from rounded weights", "ops/kernels/flash_forward.py",
             "+ weight.reshape(", f"+ weight.{ROUND}.reshape(", PALLAS_BF16),
    Mutation("1/l rounded with the TPU kernel's do", "ops/kernels/flash_attention.py",
             "(jnp.abs(m) < FEW_DIGITS) & (weight > 0.0)", "weight < 0.0",
             "ops/kernels/test_flash_attention.py::test_bfloat16_gradients_are_as_exact_as_those_of_xla"),
    # The optimizer, and what of its configuration the loop hands on.
    Mutation("norm vectors decay", "train/state.py", "len(letters) > 1, abstract", "len(letters) > 0, abstract",
             UNTIED),
    Mutation("betas ignored", "train/optimizer.py", "b1=config.b1, b2=config.b2, ", "", UNTIED),
    Mutation("b1 ignored", "train/optimizer.py", "b1=config.b1, ", "", TIED),
    Mutation("b2 ignored", "train/optimizer.py", "b2=config.b2, ", "", TIED),
    Mutation("eps ignored", "train/optimizer.py", "eps=config.eps,", "", UNTIED),
    Mutation("decay ignored", "train/optimizer.py", "weight_decay=config.weight_decay, ", "", UNTIED),
    Mutation("no decay mask", "train/optimizer.py", " mask=decayed,", "", TIED),
    Mutation("clip_norm ignored by the loop", "train/loop.py", "clip_norm=config.optimizer.clip_norm, ",
             'clip_norm=float("inf"), ', UNTIED),
    Mutation("clip_norm of 1 whatever the config says", "train/loop.py", "clip_norm=config.optimizer.clip_norm, ",
             "clip_norm=1.0, ", TIED),
    Mutation("accumulate ignored by the loop", "train/loop.py", "optimizer.clip_norm, accumulate=config.accumulate,",
             "optimizer.clip_norm,", UNTIED),
    Mutation("the seed of the parameters ignored", "train/loop.py", "run.mesh, config.seed)", "run.mesh, 0)", UNTIED),
    Mutation("the seed of the data ignored", "train/run.py", "config, mesh, config.seed)", "config, mesh, 0)", UNTIED),
    Mutation(
        "the tied head has no gradient", "models/llama.py",
        'return gather("embed", self.embed[...]).astype(dtype).T',
        'return lax.stop_gradient(gather("embed", self.embed[...]).astype(dtype).T)',
        TIED,
    ),
    Mutation(
        "a learning rate of the step after", "train/optimizer.py",
        "        schedule(config, steps), b1", "        lambda step: schedule(config, steps)(step + 1), b1", UNTIED,
    ),
    Mutation("the cosine ends late by the warm-up", "train/optimizer.py", "steps - warmup", "steps", UNTIED),
    Mutation("the cosine ends at 0", "train/optimizer.py", "alpha=config.final_fraction", "alpha=0.0", UNTIED),
    Mutation("no warm-up", "train/optimizer.py", "[warmup]) if warmup else after", "[warmup]) if 0 else after",
             TIED),
    # What a run reports.
    Mutation(
        "masked tokens counted in evaluation", "train/step.py",
        "counted = batch.mask[..., None] & (", "counted = (", NUMBERS,
    ),
    Mutation(
        "the mean of evaluation batches, whatever their weights", "train/evaluation.py",
        "return _metrics(nats, tokens,",
        "mean = np.mean([n.sum() / t.sum() for n, t in sums])\n"
        "        return _metrics(nats * (mean * tokens.sum() / nats.sum()), tokens,",
        NUMBERS,
    ),
    Mutation("the first evaluation batch alone", "train/evaluation.py", "range(batches)", "range(1)", NUMBERS),
    Mutation(
        "the first evaluation batch alone, again and again", "train/evaluation.py",
        "data.batch(i, sharding)", "data.batch(0, sharding)", NUMBERS,
    ),
    Mutation(
        "bits per byte inverted", "train/evaluation.py",
        "math.log(2) / bytes_per_token", "math.log(2) * bytes_per_token", NUMBERS,
    ),
    Mutation("nats per byte", "train/evaluation.py", "loss / math.log(2) /", "loss /", NUMBERS),
    Mutation(
        "the learning rate of the step after is reported", "train/step_reports.py",
        "updates_before(step)", "updates_before(step) + 1", NUMBERS,
    ),
    Mutation("tokens per second doubled", "train/step_reports.py", "self._tokens / seconds",
             "2 * self._tokens / seconds", NUMBERS),
    Mutation("evaluation in an order of the run's seed", "train/run.py", "mesh, seed=0)", "mesh, seed=config.seed)",
             NUMBERS),
    Mutation(
        "bytes per token over untrained tokens", "data/packing/sequences.py",
        'meta["utf8_bytes"] / self.store.meta["trained_tokens"]', 'meta["utf8_bytes"] / self.store.meta["tokens"]',
        NUMBERS,
    ),
    Mutation("the gradient's norm after clipping", "train/step.py", '"grad_norm": norm',
             '"grad_norm": jnp.minimum(norm, clip_norm)', NUMBERS),
    Mutation("loss per token of the batch, trained or not", "train/step.py", "tokens, masked = (lax.psum(x.sum(), AXIS",
             "tokens, masked = (lax.psum((x | True).sum(), AXIS", NUMBERS),
    Mutation("ends of documents counted as masked", "train/step.py", "~batch.mask & ~batch.ends", "~batch.mask",
             NUMBERS),
    Mutation("position buckets shifted", "train/step.py", "32 - lax.clz(position)", "32 - lax.clz(position + 1)",
             NUMBERS),
    Mutation("evaluation of other parameters than are saved", "train/loop.py", "values := evaluation(state.params,",
             "values := evaluation(jax.tree.map(lambda x: 1.001 * x, state.params),", NUMBERS),
    # What a run is, and whose it is.
    Mutation("a seed may change unsaid", "train/run_identity.py", '"run_dir", "preset", "stages",',
             '"run_dir", "preset", "stages", "seed",',
             "train/test_run_identity.py::test_what_defines_a_run_is_in_its_identity"),
    Mutation("a lock that two can make", "train/run_lock.py", "os.O_CREAT | os.O_EXCL", "os.O_CREAT",
             "train/test_run_lock.py::test_who_is_slower_by_a_moment_is_refused"),
    # Bad numbers.
    Mutation("a loss that is not finite is trained on", "train/step.py", "jnp.isfinite(loss) & ", "", SKIPPED),
    Mutation("a gradient that is not finite is trained on", "train/step.py", " & jnp.isfinite(norm)", "", SKIPPED),
    Mutation("a skipped step moves the moments", "train/step.py", "(state.params, state.opt_state)\n",
             "(state.params, opt_state)\n", SKIPPED),
    # The ring.
    Mutation("own block forgotten", RING, "carry = step(None, (state, keys), send=n > 1)",
             "carry = state, ring.shift(keys)", RING_5),
    Mutation("middle hops forgotten", RING, "lax.fori_loop(1, n - 1, partial(step, send=True), carry)",
             "lax.fori_loop(1, n - 1, lambda t, c: (c[0], ring.shift(c[1])), carry)", RING_5),
    Mutation("last hop forgotten", RING, "carry = step(n - 1, carry, send=False)\n    state = carry[0]",
             "state = carry[0]", RING_5),
    Mutation("dk and dv swapped", RING, "for x in (dkeys.k, dkeys.v))", "for x in (dkeys.v, dkeys.k))",
             RING_5),
    Mutation("delta forgotten", BLOCK, "ds = p * (dp - delta[..., None])", "ds = p * dp", RING_5),
    Mutation(
        "a layer fetched ahead is another one", "models/offloaded_scan.py", "fetch(jnp.maximum(i - 1, 0))", "fetch(i)",
        "models/test_offloaded_scan.py::test_gradients_are_those_of_a_plain_scan[True]",
    ),
    # Integrity: what changed on the disk is read as if it had not.
    Mutation("hashes are not compared", "file_manifest.py", "if found_hashes[name] != hashes[name]",
             "if not hashes[name]", "train/test_damaged_checkpoints.py::test_no_flipped_bit_of_a_hundred_is_silent"),
    Mutation("exports compare no hashes", "convert/block_streams.py", "if faults := tree_faults(folder,",
             "if faults := [] and tree_faults(folder,",
             "convert/test_damaged_models.py::test_no_flipped_bit_is_silent"),
    Mutation("a damaged checkpoint stays where it is", "train/checkpoint_integrity.py",
             "tree_folder(run_dir, step).parent.rename(aside)", "aside.mkdir()",
             "train/test_damaged_checkpoints.py::test_the_newest_whole_one_is_taken_and_the_others_are_kept_aside"),
]  # fmt: skip
