"""python -m linattn_tl is linattn-tl."""

import sys

from linattn_tl.cli import main

sys.exit(main())
