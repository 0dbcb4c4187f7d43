"""`python -m portamoe` is the command `portamoe`."""

import sys

from portamoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
