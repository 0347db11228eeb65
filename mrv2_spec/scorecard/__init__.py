"""How well speculation does, from a Prometheus scrape."""
