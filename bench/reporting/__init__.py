"""What the report is made of: reading, comparing, tables and plots."""
