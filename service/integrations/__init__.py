"""Other people's protocols and programs, each of which imports the core and is imported by
nothing."""
