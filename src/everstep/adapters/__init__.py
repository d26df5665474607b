"""The outside world, one thing per file; foreign errors become everstep's own here."""
