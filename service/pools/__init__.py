"""Pools: files of rows, read in parts of bounded memory."""
