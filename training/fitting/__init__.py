"""The training loop with its stopping rules, checkpoints, warm starts and plots."""
