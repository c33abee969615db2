"""What cells of text files say that hold nothing: one list for training and for the service."""

MISSING = (
    "",
    "NA",
    "N/A",
    "n/a",
    "NULL",
    "null",
    "NaN",
    "nan",
    "-NaN",
    "-nan",
    "#NA",
    "#N/A",
    "#N/A N/A",
)
