"""The Open Inference Protocol (V2): tensors on the wire, requests and answers of them, and what a
model takes."""
