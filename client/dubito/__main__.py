"""Entry point of `python -m dubito`."""

import sys

from dubito.command import main

sys.exit(main())
