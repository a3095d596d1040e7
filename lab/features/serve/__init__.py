"""A model behind HTTP: server, measure --url, load."""
