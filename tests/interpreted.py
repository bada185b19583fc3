"""The TPU kernels inside the train step on the CPU: Pallas' interpreter, of arrays that vary over mesh axes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax._src import callback, config, core, effects
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Programs that are compiled in here have TPU kernels interpreted; types are checked (`check_vma`) around them.

    The interpreter knows no varying axes: it is handed the types without them, and nothing within it is checked.
    What it asks of the host may be asked again by rematerialisation.
    """
    lower_fun = mlir.lower_fun

    def lower_interpreter(fun, *args, **options):
        rule = lower_fun(fun, *args, **options)
        if getattr(fun, "func", None) is not interpret_pallas_call.interpret_pallas_call:
            return rule

        def rule_without_axes(context, *operands):
            types = [aval.update_manual_axis_type(core.empty_mat) for aval in context.avals_in]
            with config._check_vma(False):
                inner = context.replace(avals_in=types)
                results = rule(inner, *operands)
            context.set_tokens_out(inner.tokens_out)
            return results

        return rule_without_axes

    repeatable = effects.EffectTypeSet()
    for kind in (*effects.remat_allowed_effects._effect_types, callback.IOEffect, callback.OrderedIOEffect):
        repeatable.add_type(kind)
    with (
        mock.patch.object(mlir, "lower_fun", lower_interpreter),
        mock.patch.object(effects, "remat_allowed_effects", repeatable),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield
