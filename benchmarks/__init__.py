"""Speed and memory, side by side with what people use today: ratios of one run on one machine."""
