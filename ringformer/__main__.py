"""`python -m ringformer VERB`: the command `ringformer` where its script is not on the path."""

import sys

from ringformer.cli import main

sys.exit(main())
