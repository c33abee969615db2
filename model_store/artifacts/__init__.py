"""Storage for model versions and their manifests, aliases, signatures and reports."""
