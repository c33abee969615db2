"""Who may do what: keys, their file and their scopes."""
