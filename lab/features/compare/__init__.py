"""Whether two setups differ, and by how much: compare, ab."""
