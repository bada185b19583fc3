"""`ringformer eval`: its evaluations, and the report of them."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

from ringformer.cli.dataclass_flags import add_flags
from ringformer.data.optional_packages import needed_for
from ringformer.evals.options import (
    EvaluationOptions,
    HarnessOptions,
    HelmetOptions,
    LinesOptions,
    LongBenchOptions,
    LongPPLOptions,
    MrcrOptions,
    NeedleOptions,
    NolimaOptions,
    PerplexityOptions,
    PromptOptions,
    RulerOptions,
    SlidingOptions,
)
from ringformer.inference.options import add_model_options, add_template_option, check_template_option

Run = Callable[[argparse.Namespace], None]


def add_harness(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval harness`."""
    return _add(parser, HarnessOptions, "evaluate_harness", "harness")


def add_lines(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval lines`."""
    return _add(parser, LinesOptions, "evaluate_lines")


def add_needle(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval needle`."""
    return _add(parser, NeedleOptions, "evaluate_needle")


def add_ruler(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval ruler`."""
    return _add(parser, RulerOptions, "evaluate_ruler")


def add_nolima(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval nolima`."""
    return _add(parser, NolimaOptions, "evaluate_nolima")


def add_mrcr(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval mrcr`."""
    return _add(parser, MrcrOptions, "evaluate_mrcr")


def add_longbench(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval longbench`."""
    return _add(parser, LongBenchOptions, "evaluate_longbench", "longbench.evaluate")


def add_helmet(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval helmet`."""
    return _add(parser, HelmetOptions, "evaluate_helmet", "helmet.evaluate")


def add_perplexity(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval perplexity`."""
    return _add(parser, PerplexityOptions, "evaluate_perplexity", "perplexity.evaluate")


def add_sliding(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval sliding`."""
    return _add(parser, SlidingOptions, "evaluate_sliding", "perplexity.evaluate")


def add_longppl(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval longppl`."""
    return _add(parser, LongPPLOptions, "evaluate_longppl", "perplexity.evaluate")


def add_report(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval report`."""
    parser.description = (
        "One table of all evaluations of a model's checkpoint, with 95% intervals: printed as Markdown, and written "
        "beside the evaluations as Markdown, JSON and a figure. Exports have it in their model card."
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        help="the folder of a run, of a stage of one, of a converted model, or of a Hugging Face checkpoint",
    )
    parser.add_argument("--evals", metavar="DIR", help="folder of the evaluations; default: evals in the run's folder")
    parser.add_argument("--out", metavar="DIR", help="folder of the report; default: evals/report in the run's folder")

    def run(args: argparse.Namespace) -> None:
        import_module("ringformer.evals.report.write").report(args)

    return run


def _add(
    parser: argparse.ArgumentParser, options: type[EvaluationOptions], function: str, module: str = "evaluate"
) -> Run:
    """Add the options of an evaluation, which its class describes; return its function in a module of this room."""
    parser.description = options.__doc__
    add_model_options(
        parser,
        "the folder of a run, of a stage of one, of a converted model, or of a Hugging Face checkpoint, which is "
        "converted temporarily",
    )
    add_flags(parser, options)
    chats = issubclass(options, PromptOptions | HarnessOptions | LongBenchOptions | HelmetOptions)
    if chats:
        add_template_option(parser)

    def run(args: argparse.Namespace) -> None:
        if chats:
            check_template_option(args)
        with needed_for("eval harness", "harness") if module == "harness" else nullcontext():
            evaluate = import_module(f"ringformer.evals.{module}")
        getattr(evaluate, function)(args)

    return run
