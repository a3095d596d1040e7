"""Why two speeds differ: figures of any program, and their ratio as a product of causes."""
