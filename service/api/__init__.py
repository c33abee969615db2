"""The routes, the forms of requests and answers, and errors."""
