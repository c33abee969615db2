"""Other people's protocols and programs: one folder for each. They import the core."""
