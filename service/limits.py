"""Fixed limits. The configurable limits are in `settings.py`.

Access limits as `limits.NAME`, so that tests can lower them.
"""

MAX_JSON_BYTES = 16 << 20  # per body; JSON is much slower to parse than arrays
MAX_IMAGE_PIXELS = 100_000_000  # in all image files of a request
MAX_ROW_DRAWS = 20_000_000  # rows x draws per request
MAX_JOB_ROW_DRAWS = 10_000_000_000  # rows x draws per job
MAX_ANSWER_NUMBERS = 5_000_000  # added by return_samples or explain
MAX_EXPLAINED_ROWS = 100  # per /predict request with `explain`
READY_DRAW_SETS = 64  # prepared draw sets per version with an alias, up to 64 MB
JOB_TURN_S = 60.0  # before a job yields to another client's job

# Queued and running rows x draws beyond which the service responds 429. A large request or pool
# counts as one micro-batch, 6,400.
MAX_QUEUED_ROW_DRAWS = 200_000  # in a burst
OVERLOAD_ROW_DRAWS = 12_800  # during lasting overload, to keep the latency low

# Working memory of graphs. A preflight gets this plus six times the size of the version.
PREFLIGHT_BYTES = 1 << 30
