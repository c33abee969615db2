"""Media types of requests and answers."""

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
