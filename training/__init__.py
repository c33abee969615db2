"""The offline half: networks, posteriors, fitting, calibration and export.

`training.fit` is its door for Python, `python -m training` for the command line.
"""

import logging

# What training says as it goes. Its commands print it as plain lines.
log = logging.getLogger("dubito.training")
