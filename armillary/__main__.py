"""`python -m armillary` is the same as `armillary`."""

import sys

from armillary.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
