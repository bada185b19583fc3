"""An estimate as one JSON object for a program, and as text for a person."""

from ringformer.estimate.closed_forms import ADVICE, Hop, StepTime, assumption
from ringformer.estimate.compile_step import Estimate
from ringformer.estimate.overlap import Transfer
from ringformer.estimate.targets import Target
from ringformer.hardware import GiB


def as_json(estimate: Estimate, time: StepTime | None, hops: dict[str, Hop] | None = None) -> dict:
    """Bytes and seconds of one device and one step. What the compiler did not come to say is null.

    `hops`: those of the ring, "forward" and "backward", from `roofline.hop`.
    """
    s = estimate.schedule
    return {
        "fits": estimate.fits,
        "peak_bytes": estimate.peak_bytes,
        "hbm_bytes": estimate.hbm_bytes,
        "host_bytes": estimate.host_bytes,
        "fits_host": estimate.fits_host,
        "argument_bytes": estimate.argument_bytes,
        "temp_bytes": estimate.temp_bytes,
        "flops": s and s.flops,
        "hidden_permute_bytes": s and s.hidden_permute_bytes,
        "exposed_permute_bytes": s and s.exposed_permute_bytes,
        "exposed_in_ring_loops_bytes": s and s.exposed_in_ring_loops,
        "exposed_gather_bytes": s and s.exposed_gather_bytes,
        "max_link_hops": estimate.max_link_hops,
        "step_seconds_model": time and time.step,
        "tokens_per_second_model": time and time.tokens_per_second,
        "hops_model": hops and {name: vars(h) | {"flops_per_byte": h.intensity} for name, h in hops.items()},
        "compile_seconds": estimate.compile_seconds and round(estimate.compile_seconds, 1),
        "generated_code": estimate.generated_code,
        "collectives": s and [_row(t) for t in by_bytes(s.transfers)],
    }


def as_text(
    title: str,
    target: Target,
    estimate: Estimate,
    time: StepTime | None,
    parts: dict[str, float] | None = None,
    hops: dict[str, Hop] | None = None,
    budget: float | None = None,
) -> str:
    """What a person wants to know, the verdict first.

    `parts`: the closed form of `roofline.memory`; `hops` as above; `budget`: tokens to train on.
    """
    e, s = estimate, estimate.schedule
    verdict = "FITS" if e.fits else "DOES NOT FIT"
    lines = [
        title,
        f"  {verdict}: {e.peak_bytes / GiB:.2f} of {e.hbm_bytes / GiB:.2f} GiB on each {target.chip.name}",
    ]
    if s is None:
        if e.largest:
            lines.append("  what takes the memory, by the compiler:")
            lines += ["    " + line for line in e.largest.splitlines()[:24]]
        return "\n".join(lines + _parts(parts or {}))
    lines += [
        f"  arguments {e.argument_bytes / GiB:.2f} GiB, temporaries {e.temp_bytes / GiB:.2f} GiB"
        + (f", host {e.host_bytes / GiB:.2f} GiB a device" if e.host_bytes else "")
        + ("" if e.fits_host else f": MORE THAN A USUAL HOST HAS, {e.usual_host_bytes / GiB:.0f} GiB"),
        f"  {s.flops:.3g} FLOPs a device; modelled {time.step:.3g} s a step ({time.compute:.3g} s of {assumption()}, "
        f"{time.exposed:.3g} s of exposed communication), {time.tokens_per_second:,.0f} tokens/s",
        f"  ring: {s.hidden_permute_bytes / GiB:,.1f} GiB hidden, {s.exposed_permute_bytes / GiB:,.1f} GiB exposed, "
        f"of that {s.exposed_in_ring_loops / GiB:,.1f} GiB inside its loops"
        + (f"; longest hop {e.max_link_hops} link{'s' * (e.max_link_hops > 1)}" if e.max_link_hops else ""),
        f"  weights and gradients: {s.exposed_gather_bytes / GiB:,.1f} GiB exposed",
        *_modelled(time, target, hops or {}, budget),
        f"  compiled {'to machine code' if e.generated_code else 'and scheduled'} in {e.compile_seconds:.0f} s; its "
        "collectives, times executed:",
    ]
    lines += [f"    {t.count:>8,.0f} x {t.kind:18s} {t.dtype}{list(t.shape)}  {t.bytes / 2**20:,.1f} MiB, link "
              f"{t.seconds * 1e3:,.2f} ms, under {t.cover * 1e3:,.2f} ms of computation: "
              f"{'hidden' if t.hidden else 'exposed'}{'' if t.asynchronous else ' (synchronous)'}"
              for t in by_bytes(s.transfers) if t.bytes * t.count > 1e-4 * GiB]  # fmt: skip
    return "\n".join(lines)


def closed_form_as_json(target: Target, parts: dict[str, float], host: float) -> dict:
    """The answer without a compiler: what only a compiler can say is null."""
    peak = sum(parts.values())
    counted = Estimate(
        fits=peak <= target.budget, peak_bytes=round(peak), hbm_bytes=target.chip.hbm_bytes, host_bytes=round(host),
        usual_host_bytes=target.chip.host_bytes, argument_bytes=None, temp_bytes=None, schedule=None,
        max_link_hops=None, compile_seconds=None,
    )  # fmt: skip
    return {"closed_form": True} | as_json(counted, time=None)


def closed_form_as_text(title: str, target: Target, parts: dict[str, float]) -> str:
    peak = sum(parts.values())
    verdict = "should fit" if peak <= target.budget else "should not fit"
    have = target.chip.hbm_bytes / GiB
    return "\n".join(
        [f"{title}\n  closed form, not compiled: {verdict}, {peak / GiB:.1f} of {have:.2f} GiB", *_parts(parts)]
    )


def budget_as_json(time: StepTime, target: Target, tokens: float) -> dict:
    """What it takes to train on so many tokens, modelled."""
    days = time.days(tokens)
    return {"days_model": days, "device_hours_model": 24 * days * target.num_devices}


def _modelled(time: StepTime, target: Target, hops: dict[str, Hop], budget: float | None) -> list[str]:
    lines = []
    for name, h in hops.items():
        times = f"{h.compute * 1e3:,.2f} ms of computation over {h.link * 1e3:,.2f} ms of link"
        lines.append(
            f"  a hop {name}, at peak rates: {times} ({h.compute / h.link:.2f}x), {h.intensity:,.0f} FLOPs a byte"
        )
    if budget:
        days, hours = budget_as_json(time, target, budget).values()
        lines.append(f"  {budget:.3g} tokens: {days:,.1f} days, {hours:,.0f} device-hours, modelled")
    return lines


def _parts(parts: dict[str, float]) -> list[str]:
    lines = ["  by the closed form, and what makes it smaller:"] if parts else []
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        lines.append(f"    {size / GiB:6.2f} GiB  {name}: {ADVICE[name]}")
    return lines


def by_bytes(transfers: list[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: -t.bytes * t.count)


def _row(t: Transfer) -> dict:
    return {
        "kind": t.kind, "dtype": t.dtype, "shape": list(t.shape), "executed": t.count, "bytes": t.bytes,
        "link_seconds": t.seconds, "compute_seconds_meanwhile": t.cover, "asynchronous": t.asynchronous,
        "in_ring_loop": t.in_ring_loop, "hidden": t.hidden,
    }  # fmt: skip
