"""Jobs on whole pools: read from files, computed in a process of their own, kept until they are fetched."""
