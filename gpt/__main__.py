"""`python -m gpt` is the command `gpt`."""

import sys

from gpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
