"""A verb of the command line as its package adds it, without the table of verbs around it."""

from ringformer.cli.parser import Parser


def run_verb(add, *arguments: str):
    """What the verb returns, with `--config.KEY=VALUE` arguments as its overrides."""
    parser = Parser(prog="ringformer verb")
    run = add(parser)
    overrides = [word for word in arguments if word.startswith("--config.")]
    args = parser.parse_args([word for word in arguments if not word.startswith("--config.")])
    args.overrides = overrides
    return run(args)
