"""Entry point for `python -m dubito`."""

import sys

from dubito.command import main

sys.exit(main())
