"""From a fitted model to a published version."""
