"""Limits that no operator needs to choose. `settings.py` has those that operators choose.

Read them as `limits.NAME`, so that a test can set a smaller one.
"""

from model_store.inference.preflight_process import WORKING_BYTES

MAX_JSON_BYTES = 16 << 20  # of a body; JSON is much slower than arrays
MAX_IMAGE_PIXELS = 100_000_000  # of all image files of a request
MAX_ROW_DRAWS = 20_000_000  # rows x draws of a request
MAX_JOB_ROW_DRAWS = 10_000_000_000  # rows x draws of a job
MAX_ANSWER_NUMBERS = 5_000_000  # added by return_samples or explain
MAX_EXPLAINED_ROWS = 100  # of a /predict request with `explain`
READY_DRAW_SETS = 64  # fresh draw sets of each version with an alias, up to 64 MB
JOB_TURN_S = 60.0  # before a job yields to another client's

# Rows x draws that wait or run before requests are answered 429. A large request or pool counts
# with the 6,400 that are computed at once.
MAX_QUEUED_ROW_DRAWS = 200_000  # in a burst
OVERLOAD_ROW_DRAWS = 6_400  # under lasting overload, so that accepted requests are answered soon

# Memory of graphs while they predict. Preflights get this and six times the size of the version.
PREFLIGHT_BYTES = WORKING_BYTES
