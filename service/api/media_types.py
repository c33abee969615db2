"""Media types of requests and responses."""

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
FORM = "multipart/form-data"
NPY = "application/x-npy"
NPZ = "application/x-npz"
PARQUET = "application/vnd.apache.parquet"
FILE_ENDINGS = {NPZ: ".npz", PARQUET: ".parquet", "application/zip": ".zip", "text/csv": ".csv"}
ENDINGS = {**FILE_ENDINGS, NPY: ".npy"}
