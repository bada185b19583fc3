"""Estimates of the stages of a config: what each trains, whether it fits, what it takes for the stage's tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ringformer.estimate import closed_forms, report
from ringformer.estimate.compile_step import Estimate, compile_step_apart
from ringformer.estimate.longest_context import Saving, likely_savings
from ringformer.estimate.targets import MissingCompiler, Target
from ringformer.hardware import GiB
from ringformer.mesh import mesh_shape
from ringformer.models.flops import executed_flops
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.config import Config


class Work(NamedTuple):
    """A train step, and how many tokens to train on with it (None: nobody said)."""

    name: str
    model: LlamaConfig
    mesh_dim: str
    seq_len: int
    batch_size: int = 1
    accumulate: int = 1
    budget: float | None = None

    @property
    def step_tokens(self) -> int:
        return self.seq_len * self.batch_size

    def local(self, goal: Target) -> int:
        """Tokens of a microbatch on a device."""
        return self.step_tokens // self.accumulate // goal.num_devices

    def shards(self, goal: Target) -> dict[str, int]:
        """The devices that share the state, and those of a tp group."""
        _, fsdp, tp, sp = mesh_shape(self.mesh_dim, goal.num_devices)
        return {"devices": fsdp * tp * sp, "tp": tp}

    def memory(self, goal: Target) -> dict[str, float]:
        """`closed_forms.memory`, and with microbatches the sum of their gradients."""
        parts = closed_forms.memory(self.model, self.local(goal), **self.shards(goal))
        if self.accumulate > 1:
            state = "parameters, optimizer and gradients"
            parts[state] += 4 * self.model.num_params / self.shards(goal)["devices"]
        return parts


def work(configs: list[Config]) -> list[Work]:
    """What the runs of `parse_stages` train, each with all of its steps' tokens."""
    return [
        Work(f"stage {n}" if len(configs) > 1 else "run", c.model, c.mesh_dim, c.seq_len, c.batch_size, c.accumulate,
             c.steps * c.batch_size * c.seq_len)
        for n, c in enumerate(configs, 1)
    ]  # fmt: skip


def judge(
    one: Work, goal: Target, choose: bool, log: Callable[[str], None], generate_code: bool = False
) -> tuple[Work, Estimate | None]:
    """The compiled step, None without a compiler; with `choose`, of the first likely memory settings that fit.

    `generate_code`: down to machine code, instead of to the schedule. The returned `Work` has the settings that were
    compiled.
    """
    m = one.model
    settings = [Saving(m.head_groups, m.remat_group, m.q_chunk, m.k_chunk)]
    if choose:
        settings = likely_savings(m, goal, one.local(goal), **one.shards(goal))
    found = None
    for saving in settings:
        one = one._replace(model=replace(m, **vars(saving)))
        log(f"compiling for {goal.topology} with {saving}; {'minutes' if generate_code else 'half a minute'}")
        try:
            found = compile_step_apart(one.model, goal, one.mesh_dim, seq_len=one.seq_len, batch_size=one.batch_size,
                                       accumulate=one.accumulate, generate_code=generate_code)  # fmt: skip
        except MissingCompiler as missing:
            log(str(missing))
            return one, None
        if found.fits:
            break
    return one, found


def row(one: Work, goal: Target, found: Estimate | None) -> dict:
    """A stage as one JSON object: bytes of a device, modelled seconds of a step, days and device-hours of its tokens.

    Without a compiler it is the closed form, whose seconds are those of the computation alone.
    """
    if found is None:
        parts, host = one.memory(goal), closed_forms.host_bytes(one.model, one.local(goal))
        answer = report.closed_form_as_json(goal, parts, host)
        forwards = 2 + (one.model.remat_group > 1)
        flops = one.batch_size * executed_flops(one.model, one.seq_len, forwards) / goal.num_devices
        seconds = closed_forms.compute_seconds(flops, goal.chip.flops(one.model.compute_dtype))
        time = closed_forms.StepTime(seconds, 0.0, one.step_tokens)
        answer |= {"step_seconds_model": time.step, "tokens_per_second_model": time.tokens_per_second}
    else:
        time = found.schedule and closed_forms.step_time(found.schedule, one.step_tokens)
        answer = {"closed_form": False} | report.as_json(found, time)
    if time and one.budget:
        answer |= report.budget_as_json(time, goal, one.budget)
    shape = {"seq_len": one.seq_len, "batch_size": one.batch_size, "accumulate": one.accumulate,
             "mesh_dim": one.mesh_dim, "rope_theta": one.model.rope_theta, "tokens": one.budget}  # fmt: skip
    settings = {name: getattr(one.model, name) for name in ("head_groups", "remat_group", "offload")}
    return {"stage": one.name} | shape | settings | answer


def table(rows: list[dict]) -> str:
    """Of rows as above, for a person."""
    lines = [f"{'stage':9}{'context':>10}{'batch':>6}  {'mesh':13}{'peak GiB':>16}{'host GiB':>9}{'s/step':>9}"
             f"{'days':>8}{'device-hours':>14}"]  # fmt: skip
    for r in rows:
        verdict = "fits" if r["fits"] else "DOES NOT FIT"
        memory = f"{r['peak_bytes'] / GiB:.1f} of {r['hbm_bytes'] / GiB:.1f}"
        times = [r["step_seconds_model"], r.get("days_model"), r.get("device_hours_model")]
        seconds, days, hours = ("-" if x is None else f"{x:,.{d}f}" for x, d in zip(times, (1, 2, 0), strict=True))
        kind = "closed form, not compiled; {} alone" if r["closed_form"] else "compiled; time modelled, {}"
        how = kind.format(closed_forms.assumption())
        lines.append(f"{r['stage']:9}{r['seq_len']:>10,}{r['batch_size']:>6}  {r['mesh_dim']:13}{memory:>16}"
                     f"{r['host_bytes'] / GiB:>9.1f}{seconds:>9}{days:>8}{hours:>14}  {verdict} ({how})")  # fmt: skip
    return "\n".join(lines)
