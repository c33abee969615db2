"""Whole data sets: predicted or ranked shard by shard, by the processors of one machine or by a cluster."""
