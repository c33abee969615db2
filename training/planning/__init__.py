"""Before a fit: what data are taken for, and the recipe that follows from them (docs/your-data.md)."""
