"""`python -m dubito` is `dubito`."""

import sys

from dubito.command import main

sys.exit(main())
