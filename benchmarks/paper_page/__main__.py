"""Write docs/tables.md and its figures from the files that `ringformer tables` fills:

python -m benchmarks.paper_page [--results=results/max_context.json] [--docs=docs]
"""

import argparse
from pathlib import Path

from benchmarks.paper_page.page import write_tables
from ringformer.paper.attempts import ResultFiles


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.paper_page", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/max_context.json"), help="attempts of Table 3")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of tables.md and figures/")
    args = parser.parse_args(words)
    if not args.results.is_file():
        parser.error(f"--results={args.results} does not exist: `ringformer tables` makes it, or name another")
    if args.docs.is_file():
        parser.error(f"--docs={args.docs} is a file; give a folder")
    for written in write_tables(ResultFiles.beside(args.results), args.docs):
        print(written)


if __name__ == "__main__":
    main()
