"""The processes of one host: workers and what they are forked from, their pages, notes and logs."""
