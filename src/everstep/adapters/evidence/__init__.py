"""What tells why a job failed: stacks, dumps, the operation ring, and snapshots of them all."""
