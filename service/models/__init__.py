"""What is loaded: models, draws made ahead, and what live rows look like."""
