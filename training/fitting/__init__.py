"""The training loop, stopping rules, checkpoints, warm starts and plots."""
