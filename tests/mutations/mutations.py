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
SKIPPED = "train/test_skipped_steps.py::test_nothing_but_the_number_of_a_bad_step_goes_on[{}]".format
ANY_NORM, UP_TO_A_NORM = SKIPPED("any norm"), SKIPPED("up to a norm")
RING_5 = "ops/test_ring_attention.py::test_plain_causal[zigzag-5]"
RING_BF16 = "ops/test_precision.py::test_attention[zigzag-8]"
PALLAS_BF16 = "ops/kernels/test_flash_attention.py::test_bfloat16_errors_do_not_grow_with_chunks_and_hops"
PALLAS_HALVES = "ops/kernels/test_flash_attention.py::test_gradients_of_one_half_of_the_heads_travel_during_the_other"
CHAT_TEXT = "inference/test_text_generator.py::test_a_chat_has_its_template_and_ends_with_the_turn[{}]"
WITH_CHAT = "evals/test_commands.py::test_prompts_go_through_the_template_with_chat[lines --num_lines=3-True]"
PERPLEXITY = "evals/test_perplexity.py::test_losses_stand_where_the_tokens_do[True]"
TWO_DEVICES = "inference/test_sampling.py::test_rows_on_two_devices_draw_as_on_one"
YARN = "inference/test_generator.py::test_greedy_tokens_are_those_of_transformers[yarn-1,1,1,2]"
READ_IN_PART = "inference/test_session.py::test_a_long_cache_is_read_in_part"
TOKEN = "inference/test_decode_step.py::test_attention_of_a_token[{}]".format
DOCUMENTS = "ops/kernels/test_cudnn_documents.py::test_documents_as_dense[3-4-zigzag]"
CENTRED, OFF_CENTRE = TOKEN("values around 0"), TOKEN("values around 10")
RING, HOPS, BLOCK = "ops/ring_passes.py", "ops/ring_hops.py", "ops/blockwise_attention.py"
EXCHANGED, COPIED = (
    f"ops/test_head_exchange.py::test_packed_documents_bias_lse_and_empty_rows[{case}]"
    for case in ("8-2-striped-gqa", "8-4-zigzag-2 of 24")
)
FORM = "ops/test_ring_forms.py::test_packed_documents_bias_lse_and_empty_rows[{}]".format
WINDOW = "ops/test_windows.py::test_windows_of_every_reach[{}]".format
RINGS = "ops/test_rings.py::test_each_ring_attends_to_its_own_sequence[{}]".format
ROUND = "astype(jnp.bfloat16).astype(jnp.float32)"

MUTATIONS = [
    # Precision: what is summed or computed in float32 is not.
    Mutation(
        "forward accumulator in bfloat16 between hops",
        RING,
        "        # When the next hop begins",
        f"        states = [x._replace(o=x.o.{ROUND}) for x in states]\n        # When the next hop begins",
        PRECISION,
    ),
    Mutation(
        "pairs that a document's boundary cuts in another row are taken for whole",
        BLOCK,
        "((q_min == k_max) & (k_min == q_max)).all(axis=0)",
        "((q_min == k_max) & (k_min == q_max)).any(axis=0)",
        "ops/kernels/test_flash_attention.py::test_long_documents_that_end_elsewhere_in_every_row",
    ),
    Mutation(
        "delta in bfloat16",
        RING,
        "o, do, preferred_element_type=jnp.float32) - dlse",
        "o, do) - dlse",
        PRECISION,
    ),
    Mutation(
        "dk and dv in bfloat16 between hops",
        RING,
        "jax.tree.map(jnp.add, behind, share)",
        f"jax.tree.map(lambda a, b: (a + b).{ROUND}, behind, share)",
        RING_BF16,
    ),
    Mutation(
        "dq in bfloat16 between hops",
        RING,
        "dqs[i], share = ring.backward(dqs[i], *block)",
        f"dqs[i], share = ring.backward(dqs[i], *block)\n                dqs[i] = dqs[i].{ROUND}",
        RING_BF16,
    ),
    Mutation(
        "the gradients of the first half of the heads stay behind",
        RING,
        "dkeys[i] = ring.shift(dkeys[i], stream) if i == 0 and t is not None else dkeys[i]",
        "pass",
        PALLAS_HALVES,
    ),
    Mutation(
        "the second half of the heads computes the first half's",
        "ops/streams.py",
        '"three b (k g) t -> three b k g t", k=K)[:, :, self.heads]',
        '"three b (k g) t -> three b k g t", k=K)[:, :, : self.heads.stop and self.heads.stop - self.heads.start]',
        PALLAS_HALVES,
    ),
    Mutation(
        "gradients that arrived are replaced instead of added to",
        "ops/kernels/flash_backward.py",
        'dkv[...] += here["dkv_before"][...]',
        "pass",
        PALLAS_HALVES,
    ),
    Mutation(
        "attention logits in bfloat16",
        BLOCK,
        's, slope = _einsum("bkgtd,bksd->bkgts", q.q, k.kv[0]) * scale, None',
        's, slope = jnp.einsum("bkgtd,bksd->bkgts", q.q, k.kv[0]).astype(jnp.float32) * scale, None',
        PRECISION,
    ),
    Mutation(
        "gradients reduce-scattered in bfloat16",
        "parallel/gather_weight.py",
        "(lax.psum_scatter(dw, axes, scatter_dimension=dw.ndim + dim, tiled=True),)",
        "(lax.psum_scatter(dw.astype(jnp.bfloat16), axes, scatter_dimension=dw.ndim + dim, tiled=True)"
        ".astype(jnp.float32),)",
        PRECISION,
    ),
    Mutation("RMSNorm in bfloat16", "models/rms_norm.py", "wide = x.astype(jnp.float32)", "wide = x", PRECISION),
    Mutation(
        "RoPE in bfloat16",
        "ops/tokenwise/rope.py",
        "(r[:, :, None, :] for r in rotation)\n    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)",
        "(r[:, :, None, :].astype(x.dtype) for r in rotation)\n    a, b = jnp.split(x, 2, axis=-1)",
        "ops/test_precision.py::test_rope",
    ),
    Mutation(
        "the loss's logits in bfloat16",
        "ops/tokenwise/cross_entropy.py",
        'logits = jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)',
        'logits = jnp.einsum("btd,dv->btv", x, head).astype(jnp.float32)',
        PRECISION,
    ),
    Mutation(
        "the head's gradient summed in bfloat16",
        "ops/tokenwise/cross_entropy.py",
        'dhead += jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)',
        f'dhead = (dhead + jnp.einsum("btd,btv->dv", x, dlogits)).{ROUND}',
        PRECISION,
    ),
    Mutation(
        "the feed-forward's gradient summed in bfloat16",
        "ops/tokenwise/blockwise_feedforward.py",
        "lambda t, d: t + d.astype(jnp.float32)",
        f"lambda t, d: (t + d).{ROUND}",
        PRECISION,
    ),
    Mutation(
        "the embedding's gradient summed in bfloat16",
        "ops/tokenwise/embedding.py",
        "total.at[tokens].add(dx.astype(jnp.float32))",
        "total.astype(jnp.bfloat16).at[tokens].add(dx).astype(jnp.float32)",
        "ops/test_precision.py::test_embedding",
    ),
    Mutation(
        "l in bfloat16 between hops",
        RING,
        "        # When the next hop begins",
        f"        states = [x._replace(l=x.l.{ROUND}) for x in states]\n        # When the next hop begins",
        RING_BF16,
    ),
    Mutation(
        "forward accumulator in bfloat16 between chunks",
        "ops/online_softmax.py",
        "o=state.o * correction[..., None] + pv,",
        f"o=(state.o * correction[..., None] + pv).{ROUND},",
        RING_BF16,
    ),
    Mutation(
        "the product with the values in bfloat16",
        "ops/online_softmax.py",
        "p.astype(v.dtype), v, preferred_element_type=jnp.float32)",
        "p.astype(v.dtype), v)",
        RING_BF16,
    ),
    Mutation(
        "the gradient of the probabilities in bfloat16",
        BLOCK,
        'dp = _einsum("bkgtd,bksd->bkgts", do, k.kv[1])',
        'dp = jnp.einsum("bkgtd,bksd->bkgts", do, k.kv[1])',
        RING_BF16,
    ),
    Mutation(
        "m and l saved in bfloat16",
        RING,
        "o, softmax = checkpoint_name(o, SAVED_OUTPUT)",
        f"softmax = softmax.{ROUND}\n    o, softmax = checkpoint_name(o, SAVED_OUTPUT)",
        RING_BF16,
    ),
    Mutation(
        "the bias's gradient summed in bfloat16",
        BLOCK,
        "else ds.sum(axis=(1, 2, 3))",
        "else ds.astype(jnp.bfloat16).sum(axis=(1, 2, 3)).astype(jnp.float32)",
        RING_BF16,
    ),
    Mutation(
        "dk's product in bfloat16",
        BLOCK,
        'dk = _einsum("bkgts,bkgtd->bksd", ds, q.q)',
        'dk = jnp.einsum("bkgts,bkgtd->bksd", ds, q.q).astype(jnp.float32)',
        "ops/test_precision.py::test_products_are_float32_before_they_are_summed[attention]",
    ),
    Mutation(
        "cos and sin in bfloat16",
        "ops/tokenwise/rope.py",
        "cos, sin = jnp.cos(angle), jnp.sin(angle)",
        f"cos, sin = (f(angle).{ROUND} for f in (jnp.cos, jnp.sin))",
        "ops/test_precision.py::test_rope",
    ),
    Mutation(
        "the head's gradient, its product in bfloat16",
        "ops/tokenwise/cross_entropy.py",
        'jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)',
        'jnp.einsum("btd,btv->dv", x, dlogits)',
        "ops/test_precision.py::test_cross_entropy[32 chunks]",
    ),
    Mutation(
        "the model's logits in bfloat16",
        "models/decoder.py",
        "x, self._head(x.dtype, gather), preferred_element_type=jnp.float32)",
        "x, self._head(x.dtype, gather)).astype(jnp.float32)",
        "models/test_llama.py::test_logits_of_a_bfloat16_model_are_float32",
    ),
    Mutation(
        "the TPU kernel's dq in bfloat16 between visits",
        "ops/kernels/flash_backward.py",
        "        departure(visit, q_of[p]).start()",
        f'        here["dq"][slot] = here["dq"][slot].{ROUND}\n        departure(visit, q_of[p]).start()',
        PALLAS_BF16,
    ),
    Mutation(
        "the TPU kernel's o in bfloat16 between visits",
        "ops/kernels/flash_forward.py",
        'here["o"][slot, g] = here["o_columns"][g].T',
        f'here["o"][slot, g] = here["o_columns"][g].T.{ROUND}',
        PALLAS_BF16,
    ),
    Mutation(
        "the TPU kernel's l summed from rounded weights",
        "ops/kernels/flash_forward.py",
        "+ weight.reshape(",
        f"+ weight.{ROUND}.reshape(",
        PALLAS_BF16,
    ),
    Mutation(
        "1/l rounded with the TPU kernel's do",
        "ops/kernels/flash_attention.py",
        "(jnp.abs(m) < FEW_DIGITS) & (weight > 0.0)",
        "weight < 0.0",
        "ops/kernels/test_flash_attention.py::test_bfloat16_gradients_are_as_exact_as_those_of_xla",
    ),
    # The optimizer, and what of its configuration the loop hands on.
    Mutation(
        "norm vectors decay", "train/optimizer.py", "len(letter) > 1, letters", "len(letter) > 0, letters", UNTIED
    ),
    Mutation("betas ignored", "train/optimizer.py", "        b1=config.b1,\n        b2=config.b2,\n", "", UNTIED),
    Mutation("b1 ignored", "train/optimizer.py", "b1=config.b1,", "", TIED),
    Mutation("b2 ignored", "train/optimizer.py", "b2=config.b2,", "", TIED),
    Mutation("eps ignored", "train/optimizer.py", "eps=config.eps,", "", UNTIED),
    Mutation("decay ignored", "train/optimizer.py", "weight_decay=config.weight_decay,", "", UNTIED),
    Mutation(
        "no decay mask", "train/optimizer.py", "mask=jax.tree.map(lambda letter: len(letter) > 1, letters),", "", TIED
    ),
    Mutation(
        "clip_norm ignored by the loop",
        "train/program.py",
        '"clip_norm": optimizer.clip_norm,',
        '"clip_norm": float("inf"),',
        UNTIED,
    ),
    Mutation(
        "clip_norm of 1 whatever the config says",
        "train/program.py",
        '"clip_norm": optimizer.clip_norm,',
        '"clip_norm": 1.0,',
        TIED,
    ),
    Mutation(
        "accumulate ignored by the loop",
        "train/prepare.py",
        "seq_len=config.seq_len, accumulate=config.accumulate",
        "seq_len=config.seq_len",
        UNTIED,
    ),
    Mutation(
        "the seed of the parameters ignored",
        "train/prepare.py",
        "mesh, self.config.seed, params)",
        "mesh, 0, params)",
        UNTIED,
    ),
    Mutation(
        "the seed of the data ignored",
        "train/prepare.py",
        "load(train_store, seed=config.seed,",
        "load(train_store, seed=0,",
        UNTIED,
    ),
    Mutation(
        "the tied head has no gradient",
        "models/decoder.py",
        'return gather("embed", self.embed[...]).astype(dtype).T',
        'return lax.stop_gradient(gather("embed", self.embed[...]).astype(dtype).T)',
        TIED,
    ),
    Mutation(
        "a learning rate of the step after",
        "train/optimizer.py",
        "        schedule(config, steps),",
        "        lambda step: schedule(config, steps)(step + 1),",
        UNTIED,
    ),
    Mutation("the cosine ends late by the warm-up", "train/optimizer.py", "steps - warmup", "steps", UNTIED),
    Mutation("the cosine ends at 0", "train/optimizer.py", "alpha=config.final_fraction", "alpha=0.0", UNTIED),
    Mutation("no warm-up", "train/optimizer.py", "[warmup]) if warmup else after", "[warmup]) if 0 else after", TIED),
    # What a run reports.
    Mutation(
        "masked tokens counted in evaluation",
        "train/step.py",
        "counted = batch.mask[..., None] & (",
        "counted = (",
        NUMBERS,
    ),
    Mutation(
        "the mean of evaluation batches, whatever their weights",
        "train/evaluation.py",
        "return _metrics(nats, tokens,",
        "mean = np.mean([n.sum() / t.sum() for n, t in sums])\n"
        "    return _metrics(nats * (mean * tokens.sum() / nats.sum()), tokens,",
        NUMBERS,
    ),
    Mutation(
        "the first evaluation batch alone",
        "train/evaluation.py",
        "range(count_batches(eval_batches, data))",
        "range(1)",
        NUMBERS,
    ),
    Mutation(
        "the first evaluation batch alone, again and again",
        "train/evaluation.py",
        "data.batch(i, sharding)",
        "data.batch(0, sharding)",
        NUMBERS,
    ),
    Mutation(
        "bits per byte inverted",
        "train/evaluation.py",
        "math.log(2) / bytes_per_token",
        "math.log(2) * bytes_per_token",
        NUMBERS,
    ),
    Mutation("nats per byte", "train/evaluation.py", "loss / math.log(2) /", "loss /", NUMBERS),
    Mutation(
        "the learning rate of the step after is reported",
        "train/reports.py",
        "updates_before(step)",
        "updates_before(step) + 1",
        NUMBERS,
    ),
    Mutation(
        "tokens per second doubled",
        "train/reports.py",
        "self._tokens / seconds",
        "2 * self._tokens / seconds",
        NUMBERS,
    ),
    Mutation(
        "evaluation in an order of the run's seed",
        "train/prepare.py",
        "load(eval_store, seed=0,",
        "load(eval_store, seed=config.seed,",
        NUMBERS,
    ),
    Mutation(
        "bytes per token over untrained tokens",
        "data/packing/sequences.py",
        'meta["utf8_bytes"] / self.store.meta["trained_tokens"]',
        'meta["utf8_bytes"] / self.store.meta["tokens"]',
        NUMBERS,
    ),
    Mutation(
        "the gradient's norm after clipping",
        "train/step.py",
        '"grad_norm": norm',
        '"grad_norm": jnp.minimum(norm, clip_norm)',
        NUMBERS,
    ),
    Mutation(
        "loss per token of the batch, trained or not",
        "train/step.py",
        "tokens, masked = (lax.psum(x.sum(), AXIS",
        "tokens, masked = (lax.psum((x | True).sum(), AXIS",
        NUMBERS,
    ),
    Mutation(
        "ends of documents counted as masked", "train/step.py", "~batch.mask & ~batch.ends", "~batch.mask", NUMBERS
    ),
    Mutation(
        "position buckets shifted", "train/step.py", "32 - lax.clz(position)", "32 - lax.clz(position + 1)", NUMBERS
    ),
    Mutation(
        "evaluation of other parameters than are saved",
        "train/evaluation.py",
        "                state.params,\n",
        "                jax.tree.map(lambda x: 1.001 * x, state.params),\n",
        NUMBERS,
    ),
    # What a run is, and whose it is.
    Mutation(
        "a seed may change unsaid",
        "runs/identity.py",
        '"stages",',
        '"stages", "seed",',
        "runs/test_identity.py::test_what_defines_a_run_is_in_its_identity",
    ),
    Mutation(
        "a lock that two can make",
        "processes/run_lock.py",
        "os.O_CREAT | os.O_EXCL",
        "os.O_CREAT",
        "processes/test_run_lock.py::test_who_is_slower_by_a_moment_is_refused",
    ),
    # Bad numbers.
    Mutation("a loss that is not finite is trained on", "train/step.py", "jnp.isfinite(loss) & ", "", ANY_NORM),
    Mutation("a gradient that is not finite is trained on", "train/step.py", " & jnp.isfinite(norm)", "", ANY_NORM),
    Mutation(
        "a skipped step moves the moments",
        "train/step.py",
        "(state.params, state.opt_state)\n",
        "(state.params, opt_state)\n",
        ANY_NORM,
    ),
    Mutation("a norm beyond the limit is trained on", "train/step.py", "sound &= norm <= limit", "pass", UP_TO_A_NORM),
    # The ring.
    Mutation(
        "own block forgotten",
        RING,
        "carry = step(None, (states, keys_of), send=ring.hops > 0)",
        "carry = states, [ring.shift(*x) for x in zip(keys_of, streams)]",
        RING_5,
    ),
    Mutation(
        "middle hops forgotten",
        RING,
        "lax.fori_loop(1, n - 1, partial(step, send=True), carry, unroll=ring.blocks.unroll)",
        "lax.fori_loop(1, n - 1, lambda t, c: (c[0], [ring.shift(*x) for x in zip(c[1], streams)]), carry)",
        RING_5,
    ),
    Mutation(
        "last hop forgotten",
        RING,
        "carry = step(n - 1, carry, send=False)\n    states, _ = carry",
        "states, _ = carry",
        RING_5,
    ),
    # Head exchange, and the forms of a ring: a device attends to other keys than those it thinks it has.
    Mutation(
        "a hop leads to another place of the next rank",
        HOPS,
        "(f + b) * u + i)",
        "(f + b) * u + (i + 1) % u)",
        EXCHANGED,
    ),
    Mutation("the rank of a device is its place", HOPS, ") // self.exchange.ulysses", ") % self.size", EXCHANGED),
    Mutation(
        "heads are exchanged among every u-th device",
        "ops/head_exchange.py",
        "list(range(first * u, (first + 1) * u)) for first in range(ranks)",
        "list(range(first, ranks * u, ranks)) for first in range(ranks)",
        EXCHANGED,
    ),
    Mutation(
        "copies of key heads in another order",
        "ops/head_exchange.py",
        "jnp.repeat(x, self.copies, axis=2)",
        "jnp.tile(x, (1, 1, self.copies, 1))",
        COPIED,
    ),
    Mutation(
        "one copy's gradients for all", "ops/head_exchange.py", ".sum(axis=3).astype", "[:, :, :, 0].astype", COPIED
    ),
    Mutation(
        "a device's own ids for those of its rank",
        "ops/head_exchange.py",
        "return lax.all_gather(x, self.axis_name, axis=1, axis_index_groups=self._groups, tiled=True)",
        "return jnp.tile(x, (1, self.ulysses))",
        EXCHANGED,
    ),
    Mutation(
        "keys from the other side counted as from this side",
        HOPS,
        "rank >= t if stream.direction == 1 else rank + t >= self.size",
        "rank >= t",
        FORM("4-1-zigzag-both_ways-mqa"),
    ),
    Mutation(
        "a run of tokens taken for the first",
        "ops/work_list.py",
        "(k.first + k.start - k.origin)",
        "(k.start - k.origin)",
        FORM("4-1-zigzag-both_ways-mqa"),
    ),
    Mutation(
        "gathered shards in another order",
        "ops/work_list.py",
        "(rank - t) % ranks * n",
        "(rank + t) % ranks * n",
        FORM("7-1-zigzag-gathered-mqa"),
    ),
    Mutation(
        "keys gathered from a rank's own devices",
        HOPS,
        "list(range(first + i, first + ring, u))",
        "list(range(first + i * self.size, first + (i + 1) * self.size))",
        FORM("8-4-zigzag-gathered-gqa"),
    ),
    Mutation(
        "half of the heads reads the gathered keys of the other half",
        RING,
        "for x in with_shared_ids(streams, keys_of)]",
        "for x in with_shared_ids(streams, keys_of)[::-1]]",
        FORM("5-1-contiguous-gathered-gqa"),
    ),
    Mutation(
        "gradients of gathered halves swapped",
        RING,
        "for _, of_others in pairs]",
        "for _, of_others in pairs[::-1]]",
        FORM("5-1-contiguous-gathered-gqa"),
    ),
    Mutation("dk and dv swapped", RING, "for x in (dk, dv))", "for x in (dv, dk))", RING_5),
    Mutation("delta forgotten", BLOCK, "ds = p * (dp - delta[..., None])", "ds = p * dp", RING_5),
    Mutation(
        "a layer fetched ahead is another one",
        "models/offloaded_scan.py",
        "fetch(jnp.maximum(i - 1, 0))",
        "fetch(i)",
        "models/test_offloaded_scan.py::test_gradients_are_those_of_a_plain_scan[True]",
    ),
    Mutation(
        "the newest proven checkpoint goes like any other",
        "checkpoints/retention.py",
        "[-self.latest :], self.proven(steps)}",
        "[-self.latest :]}",
        "checkpoints/test_retention.py::test_who_comes_back_keeps_no_more_than_others",
    ),
    Mutation(
        "a diverged level is taken for a good one",
        "checkpoints/retention.py",
        "mean if self._level is None else min(self._level, mean)",
        "mean",
        "checkpoints/test_retention.py::test_one_lucky_batch_proves_nothing",
    ),
    # Integrity: what changed on the disk is read as if it had not.
    Mutation(
        "hashes are not compared",
        "files/manifest.py",
        "same = entry_of(content) == entry",
        "same = True",
        "checkpoints/test_compared_as_read.py::test_no_trial_of_24_is_silent[zarr 3-False]",
    ),
    Mutation(
        "chunks are not compared with the manifest",
        "files/manifest.py",
        "same = chunk_entry_of(content) == entry and",
        "same = len(content) == entry[0] and",
        "checkpoints/test_compared_as_read.py::test_a_chunk_is_compared_with_its_own_crc",
    ),
    Mutation(
        "the file is read again after it was compared",
        "checkpoints/zarr_files.py",
        "content = read_verified(folder, file, hashes, verify_crc=False)",
        "content = (folder / file).read_bytes()",
        "checkpoints/test_compared_as_read.py::test_no_trial_of_24_is_silent[zarr 3-True]",
    ),
    Mutation(
        "exports compare no hashes",
        "convert/block_streams.py",
        "hashes = tree_hashes(Path(infos[0].parent_dir))",
        "hashes = None",
        "checkpoints/test_compared_as_read.py::test_an_export_compares_what_it_reads[zarr 3]",
    ),
    Mutation(
        "a damaged checkpoint stays where it is",
        "checkpoints/verify.py",
        "tree_folder(run_dir, step).parent.rename(aside)",
        "aside.mkdir()",
        "checkpoints/test_damaged_checkpoints.py::test_the_newest_whole_one_is_taken_and_the_others_are_kept_aside",
    ),
    # Evaluations.
    Mutation(
        "--chat is not passed to who answers",
        "evals/evaluate.py",
        "args.batch_size, args.chat)",
        "args.batch_size, False)",
        WITH_CHAT,
    ),
    Mutation(
        "the template's tokens are not counted",
        "evals/runner.py",
        "encode(prompt, chat=self.chat, prefix=prefix)",
        "encode(prompt, prefix=prefix)",
        WITH_CHAT,
    ),
    Mutation(
        "answers without the template",
        "evals/runner.py",
        "new_tokens, chat=self.chat, ",
        "new_tokens, ",
        WITH_CHAT,
    ),
    Mutation(
        "the file does not say whether it was a chat",
        "evals/evaluate.py",
        "settings(chat=args.chat)",
        "settings(chat=False)",
        WITH_CHAT,
    ),
    Mutation(
        "--template is not passed on",
        "evals/evaluation_setup.py",
        'template=getattr(args, "template", None)',
        "template=None",
        WITH_CHAT,
    ),
    Mutation(
        "a batch's prompts are completed without the template",
        "inference/text_generator.py",
        "asked = [self.text.prompt(prompt, chat, prefix)",
        "asked = [self.text.prompt(prompt, False, prefix)",
        CHAT_TEXT.format("complete"),
    ),
    Mutation(
        "a batch's answers end where texts do",
        "inference/text_generator.py",
        "end_tokens=asked[0].ends)",
        "end_tokens=self.text.end_tokens)",
        CHAT_TEXT.format("complete"),
    ),
    Mutation(
        "a stream's prompt goes without the template",
        "inference/text_generator.py",
        "asked = self.text.prompt(prompt, chat)\n",
        "asked = self.text.prompt(prompt, False)\n",
        CHAT_TEXT.format("stream"),
    ),
    Mutation(
        "a stream's answer ends where texts do",
        "inference/text_generator.py",
        "end_tokens=prompt.ends)",
        "end_tokens=self.text.end_tokens)",
        CHAT_TEXT.format("stream"),
    ),
    Mutation(
        "generate --chat is not passed on",
        "inference/commands.py",
        ".ask if args.chat else",
        ".ask if False else",
        "inference/test_commands.py::test_an_answer_by_the_run_s_template",
    ),
    Mutation(
        "perplexity as a mean over documents",
        "evals/perplexity.py",
        '(row["length"], row["last_nats"], row["last_tokens"])',
        '(row["length"], row["last_nats"] / row["last_tokens"], 1)',
        PERPLEXITY,
    ),
    Mutation(
        "untrained tokens count as trained ones of no loss",
        "evals/perplexity.py",
        '"last_tokens": int(counted[-last:].sum())',
        '"last_tokens": last',
        PERPLEXITY,
    ),
    Mutation(
        "losses of untrained tokens count",
        "evals/perplexity.py",
        "np.where(counted, losses.astype(np.float64), 0.0)",
        "losses.astype(np.float64)",
        PERPLEXITY,
    ),
    Mutation(
        "bits per byte over untrained tokens",
        "evals/evaluate.py",
        '/ store.meta["trained_tokens"]',
        '/ store.meta["tokens"]',
        "evals/test_commands.py::test_bits_per_byte_are_of_the_bytes_that_are_trained_on",
    ),
    # Inference: what is drawn, and by which row.
    Mutation(
        "top_p before top_k",
        "inference/decode_step.py",
        "softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)",
        "softmax(ranked, axis=-1)",
        "inference/test_sampling.py::test_frequencies[Sampling(temperature=1.5, top_k=4, top_p=0.85, seed=0)]",
    ),
    Mutation(
        "rows of another device draw with the keys of the first",
        "inference/programs.py",
        "row_keys(seed, first + jnp.arange(B), lengths)",
        "row_keys(seed, jnp.arange(B), lengths)",
        TWO_DEVICES,
    ),
    Mutation(
        "rows of another device end with those of the first",
        "inference/programs.py",
        "(control, 4 + first, B)",
        "(control, 4, B)",
        TWO_DEVICES,
    ),
    Mutation(
        "a row that ended has longer and longer a text",
        "inference/programs.py",
        "State(cache, logits, lengths + alive)",
        "State(cache, logits, lengths + 1)",
        TWO_DEVICES,
    ),
    Mutation(
        "one key for all tokens of a row",
        "inference/decode_step.py",
        "jax.random.fold_in(jax.random.fold_in(key, row), length)",
        "jax.random.fold_in(key, row)",
        "inference/test_sampling.py::test_every_place_has_a_key_of_its_own",
    ),
    # Inference: a token at a time.
    Mutation(
        "positions are not scaled in decode",
        "inference/decode_step.py",
        "placements(c, positions[:, None])",
        "placements(__import__('dataclasses').replace(c, rope_scaling=type(c.rope_scaling)()), positions[:, None])",
        YARN,
    ),
    Mutation(
        "YaRN's attention factor is forgotten",
        "models/decoder_layers.py",
        "rope.frequencies(c.head_dim, theta, scaling), scaling.amplitude)",
        "rope.frequencies(c.head_dim, theta, scaling))",
        YARN,
    ),
    Mutation(
        "a cache that has outgrown what is read of it",
        "inference/program_sizes.py",
        "read // 2 >= max(top, SHORTEST)",
        "read // 2 >= SHORTEST",
        READ_IN_PART,
    ),
    Mutation(
        "the newest slot is not read",
        "inference/program_sizes.py",
        ">= max(top, SHORTEST)",
        ">= max(top - 1, SHORTEST)",
        READ_IN_PART,
    ),
    Mutation(
        "the next turn reads a part of the cache",
        "inference/program_sizes.py",
        "return self.read(top) if cached",
        "return self.read(0) if cached",
        READ_IN_PART,
    ),
    Mutation(
        "the whole cache is read, whatever it holds",
        "inference/session.py",
        "self._sizes.read(self._slots.top)",
        "self._sizes.capacity",
        READ_IN_PART,
    ),
    # Inference in bfloat16.
    Mutation(
        "the products of a token's attention in bfloat16",
        "inference/cached_attention.py",
        "jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)",
        "jnp.einsum(spec, a, b).astype(jnp.float32)",
        CENTRED,
    ),
    Mutation(
        "a token's logit with itself in bfloat16",
        "inference/cached_attention.py",
        "q.astype(jnp.float32), k.astype(jnp.float32))",
        "q, k).astype(jnp.float32)",
        CENTRED,
    ),
    Mutation(
        "the shares of the ring summed in bfloat16",
        "inference/cached_attention.py",
        "lax.psum(share * jnp.exp(m - highest)[..., None], ring)",
        "lax.psum((share * jnp.exp(m - highest)[..., None]).astype(v.dtype), ring).astype(jnp.float32)",
        CENTRED,
    ),
    Mutation(
        "the softmax's sum in bfloat16",
        "inference/cached_attention.py",
        "p.sum(axis=-1)[..., None]]",
        f"p.sum(axis=-1).{ROUND}[..., None]]",
        OFF_CENTRE,
    ),
    Mutation(
        "the next token's logits in bfloat16",
        "inference/decode_step.py",
        "jnp.einsum(spec, x, head, preferred_element_type=jnp.float32)",
        "jnp.einsum(spec, x, head).astype(jnp.float32)",
        "inference/test_decode_step.py::test_logits_of_the_next_token_are_float32[head]",
    ),
    Mutation(
        "the devices' parts of a product summed in bfloat16",
        "inference/decode_step.py",
        'lax.psum(jnp.einsum("br,rD->bD", x, share, preferred_element_type=jnp.float32), ALL)',
        'lax.psum(jnp.einsum("br,rD->bD", x, share), ALL)',
        "inference/test_decode_step.py::test_parts_of_a_product_are_float32_until_they_are_summed",
    ),
    Mutation(
        "positions in bfloat16 in decode",
        "inference/decode_step.py",
        "placements(c, positions[:, None])",
        "placements(c, positions[:, None].astype(jnp.bfloat16).astype(int))",
        READ_IN_PART,
    ),
    # Packed documents as rectangles of cuDNN's calls.
    Mutation(
        "the keys of a rectangle in their order",
        "ops/kernels/cudnn_shares.py",
        "return kv if view.lengths is None else kv[:, :, ::-1]",
        "return kv",
        DOCUMENTS,
    ),
    Mutation(
        "gradients of a rectangle's keys in reverse order",
        "ops/kernels/cudnn_shares.py",
        "dkv[..., ::-1, :]",
        "dkv",
        DOCUMENTS,
    ),
    Mutation(
        "rows and columns of a rectangle exchanged",
        "ops/kernels/cudnn_documents.py",
        "(q_ids == last).sum(axis=1), (k_ids == first).sum(axis=1)",
        "(k_ids == first).sum(axis=1), (q_ids == last).sum(axis=1)",
        DOCUMENTS,
    ),
    Mutation(
        "rows beyond a rectangle are not hidden",
        "ops/kernels/cudnn_shares.py",
        "jnp.arange(T) >= self.lengths[0][:, None]",
        "jnp.arange(T) >= T + self.lengths[0][:, None]",
        DOCUMENTS,
    ),
    Mutation(
        "one rectangle for all rows of the batch",
        "ops/kernels/cudnn_documents.py",
        "View(lengths=(rows.astype(jnp.int32), columns.astype(jnp.int32)))",
        "View(lengths=(0 * rows + rows[0], 0 * columns + columns[0]))",
        DOCUMENTS,
    ),
    Mutation(
        "a level of the own shard is left out",
        "ops/kernels/cudnn_documents.py",
        "    while pairs:\n",
        "    while pairs > 1:\n",
        DOCUMENTS,
    ),
    # Windows, sinks and capped logits.
    Mutation(
        "a window of one key more",
        BLOCK,
        "mask &= row + (pair.offset - work_list.window) < column",
        "mask &= row + (pair.offset - work_list.window) <= column",
        WINDOW("zigzag-4-17"),
    ),
    Mutation(
        "a window of one key more in the TPU kernels",
        "ops/kernels/kernel_tools.py",
        "(newest - window < repeated(key, Tq))",
        "(newest - window <= repeated(key, Tq))",
        "ops/test_windows.py::test_tpu_kernels[zigzag-180-options0]",
    ),
    Mutation(
        "pairs beyond the window are taken for whole",
        "ops/work_list.py",
        "sees_all &= q.size - 1 + offset < window",
        "sees_all &= offset < window",
        WINDOW("zigzag-4-17"),
    ),
    Mutation(
        "the keys of a window come from the next part",
        "ops/window_passes.py",
        "return self.moved(keys, 1)",
        "return self.moved(keys, -1)",
        WINDOW("contiguous-4-10"),
    ),
    Mutation(
        "the gradients of a window return one part too far",
        "ops/window_passes.py",
        "line.moved(dkeys, -line.hops)",
        "line.moved(dkeys, -line.hops - 1)",
        WINDOW("contiguous-4-31"),
    ),
    Mutation(
        "ranks before the window's keys take them for theirs",
        "ops/window_passes.py",
        "has_keys = [True if t == 0 else before >= t for before in self.parts_before]",
        "has_keys = [True for before in self.parts_before]",
        WINDOW("zigzag-4-35"),
    ),
    Mutation(
        "the window reaches one token less of the farthest part",
        "ops/window_passes.py",
        "tokens = self.window - 1 -",
        "tokens = self.window - 2 -",
        WINDOW("contiguous-8-22"),
    ),
    Mutation(
        "the first tokens are counted twice where the window has them",
        "ops/work_list.py",
        "- k.start[j] - window",
        "- k.start[j] - window + 1",
        WINDOW("zigzag-4-8"),
    ),
    Mutation(
        "the sinks' gradient forgets that of lse",
        RING,
        "dsinks = -(p * delta).sum(axis=(0, 2))",
        "dsinks = -(p * (delta + exchange.to_heads(dlse, tokens=2, heads=1))).sum(axis=(0, 2))",
        WINDOW("zigzag-4-8"),
    ),
    Mutation(
        "both streams of the same rows have the sinks",
        "ops/streams.py",
        "if sinks is None or self.tokens.start:",
        "if sinks is None:",
        "ops/test_windows.py::test_full_attention_with_sinks_and_capped_logits[both_ways-1]",
    ),
    Mutation(
        "every device has the sinks of the first heads",
        "ops/head_exchange.py",
        "lax.axis_index(self.axis_name) % self.ulysses * h",
        "0 * lax.axis_index(self.axis_name)",
        "ops/test_windows.py::test_heads_exchanged_around_windows[contiguous-8-4-40]",
    ),
    Mutation(
        "capped logits without their slope",
        BLOCK,
        "ds * scale if slope is None else ds * scale * slope",
        "ds * scale",
        WINDOW("zigzag-4-8"),
    ),
    # Several rings, and buckets.
    Mutation(
        "keys leave their ring",
        HOPS,
        "((f + a) * u + i, (f + b) * u + i)",
        "((f + a) * u + i, (f + self.size + b) % (self.size * self.rings) * u + i)",
        RINGS("8-2-zigzag-options0"),
    ),
    Mutation(
        "all ranks of a second ring take themselves for later ones",
        HOPS,
        "// self.exchange.ulysses % self.size",
        "// self.exchange.ulysses",
        RINGS("8-2-zigzag-options0"),
    ),
    Mutation(
        "a ring gathers the keys of other rings",
        HOPS,
        "list(range(first + i, first + ring, u))",
        "list(range(first // ring + i, self.rings * ring, u * self.rings))",
        RINGS("8-2-striped-options2"),
    ),
    Mutation(
        "pieces of a sequence share ids",
        "data/packing/buckets.py",
        "part.segment_ids + piece * length",
        "part.segment_ids",
        "data/packing/test_buckets.py::test_a_batch_has_documents_of_one_bucket_and_pieces_cut_none[mask]",
    ),
    Mutation(
        "batches of buckets in the order of one ring",
        "data/loader.py",
        "self._orders[self.rings(step)]",
        "self._orders[1]",
        "train/test_buckets.py::test_loss_and_gradients_of_a_batch_are_those_of_one_device[1,1,1,8-change0-expected_rings0]",
    ),
    Mutation(
        "short documents are dealt twice",
        "data/packing/buckets.py",
        "(k, WholeDocuments(store, seq_len >> k, seed, options, batch_size=batch_size << k, documents=selected[own]))",
        "(k, WholeDocuments(store, seq_len >> k, seed, options, batch_size=batch_size << k))",
        "data/packing/test_buckets.py::test_a_batch_has_documents_of_one_bucket_and_pieces_cut_none[mask]",
    ),
    Mutation(
        "a window of decoded tokens is one key longer",
        "inference/decode_step.py",
        "> positions[:, None] - window",
        ">= positions[:, None] - window",
        "inference/test_generator.py::test_greedy_tokens_in_a_window[1,1,1,1]",
    ),
    Mutation(
        "documents on small rings wait for the hops of a large one",
        "estimate/packed_documents.py",
        "hops = ranks // rings - 1",
        "hops = ranks - 1",
        "estimate/test_packed_documents.py::test_a_compiled_step_keeps_all_but_its_pairs_and_what_they_hide",
    ),
    # Families.
    Mutation(
        "biases are forgotten",
        "models/decoder_layers.py",
        "q, k, v = (y + b for y, b in zip((q, k, v), biases, strict=True))",
        "q, k, v = (y for y, b in zip((q, k, v), biases, strict=True))",
        "convert/test_families.py::test_logits_and_tensors[qwen2]",
    ),
    Mutation(
        "a norm over all heads covers those of one tp rank",
        "models/decoder_layers.py",
        "mean = lax.pmean(mean, tp)",
        "pass",
        "convert/test_families.py::test_greedy_tokens[1,1,2,4-olmo3]",
    ),
    Mutation(
        "windows have the rope of full attention",
        "models/families/layer_patterns.py",
        "LayerKind(self.window, self.local_theta)",
        "LayerKind(self.window, self.rope_theta)",
        "convert/test_families.py::test_logits_and_tensors[gemma3]",
    ),
    Mutation(
        "layers without positions have them",
        "models/families/layer_patterns.py",
        'None if letter == "N" else self.rope_theta',
        "self.rope_theta",
        "convert/test_families.py::test_logits_and_tensors[smollm3]",
    ),
    Mutation(
        "queries do not grow",
        "models/families/ministral3.py",
        "1 + self.query_growth * jnp",
        "1 + 0 * jnp",
        "convert/test_families.py::test_logits_and_tensors[ministral3]",
    ),
    Mutation(
        "embeddings are not scaled",
        "models/decoder.py",
        "x *= jnp.asarray(c.embedding_scale, x.dtype)",
        "pass",
        "convert/test_families.py::test_logits_and_tensors[gemma3]",
    ),
    Mutation(
        "decoded embeddings are not scaled",
        "inference/decode_step.py",
        "x *= jnp.asarray(c.embedding_scale, x.dtype)",
        "pass",
        "convert/test_families.py::test_greedy_tokens[1,1,2,4-gemma3]",
    ),
    Mutation(
        "logits have the scale of the head",
        "models/decoder_layers.py",
        '{"scale": c.logit_scale,',
        '{"scale": None,',
        "convert/test_families.py::test_logits_and_tensors[gemma3]",
    ),
    Mutation(
        "every layer has a window or none",
        "models/decoder_layers.py",
        '"window": kind.window or None',
        '"window": c.window or None',
        "convert/test_families.py::test_logits_and_tensors[qwen2]",
    ),
    Mutation(
        "decoded tokens see all keys in every layer",
        "inference/decode_step.py",
        "mask = valid[kind.window]",
        "mask = valid[0]",
        "convert/test_families.py::test_greedy_tokens[1,1,2,4-gemma3]",
    ),
    Mutation(
        "keys of layers are kept in another order",
        "models/layer_kinds.py",
        "first, kept = end, [*kept, here]",
        "first, kept = end, [here, *kept]",
        "convert/test_families.py::test_greedy_tokens[1,1,2,4-gemma3]",
    ),
    Mutation(
        "norms after attention are forgotten",
        "models/decoder_layers.py",
        'x + (y if norms == "before" else self.attention_output_norm(y))',
        "x + y",
        "convert/test_families.py::test_logits_and_tensors[olmo3]",
    ),
    Mutation(
        "a decoded norm is forgotten",
        "inference/decode_step.py",
        'norm(y, w["feedforward_output_norm"]["scale"])',
        "y",
        "convert/test_families.py::test_greedy_tokens[1,1,2,4-olmo3]",
    ),
    Mutation(
        "scales of norms without their 1",
        "models/rms_norm.py",
        "(scale if offset == 0 else offset + scale)",
        "scale",
        "convert/test_families.py::test_logits_and_tensors[gemma3]",
    ),
    Mutation(
        "q and k norms trade places",
        "convert/hf_weights.py",
        'tensors["layers", "attention", f"{x}_norm"]',
        'tensors["layers", "attention", f"{dict(q=\'k\', k=\'q\')[x]}_norm"]',
        "convert/test_families.py::test_logits_and_tensors[qwen3]",
    ),
]
