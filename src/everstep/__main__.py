"""`python -m everstep` is the `everstep` command."""

import sys

from everstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
