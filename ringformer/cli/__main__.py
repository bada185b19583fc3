"""`python -m ringformer.cli`."""

import sys

from ringformer.cli import main

sys.exit(main())
