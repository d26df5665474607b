"""Pure pictures of a ledger: report, live view, tables. Delete them and recompute."""
