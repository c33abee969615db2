"""The online half: a FastAPI application that draws posterior samples for every request."""

VERSION = "0.1.0"
