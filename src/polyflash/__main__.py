"""The command `polyflash`, and `python -m polyflash`."""

import sys

from polyflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
