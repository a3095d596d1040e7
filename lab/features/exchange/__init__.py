"""To and from the formats and words of other programs: import, export, other-tools."""
