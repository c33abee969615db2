"""The commands of `python -m training`: a module each, with its options beside what it runs."""
