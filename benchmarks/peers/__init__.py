"""The same model and draws behind Dubito and behind what people serve models with today."""
