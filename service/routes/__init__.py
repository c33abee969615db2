"""The routes, a router each: a few steps from request to answer."""
