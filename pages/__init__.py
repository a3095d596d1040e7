"""What writes the generated parts of the pages, and draws their pictures."""
