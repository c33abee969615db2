"""Active learning, simulated: labels are asked for one batch after the other, of rows whose labels
are known."""
