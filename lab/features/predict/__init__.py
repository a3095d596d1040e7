"""How fast a model would be: here, and on devices that are not here."""
