"""The fastest settings for a workload, with a proof."""
