"""`python -m polyflash`."""

import sys

from polyflash.cli import main

sys.exit(main())
