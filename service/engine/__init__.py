"""The serving engine: queue, micro-batches, admission, ranking of pools."""
