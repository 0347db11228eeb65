"""Counting drafts on the host, and where users look: Prometheus and the log."""
