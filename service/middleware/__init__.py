"""What every request passes: keys, connections, the record of it."""
