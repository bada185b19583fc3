"""`python -m ringformer VERB`: the command `ringformer`, for use when its script is not on the path."""

import sys

from ringformer.cli import main

sys.exit(main())
