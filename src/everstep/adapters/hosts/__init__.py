"""Lines between the hosts of a job: who joins, what they tell each other, what all may read."""
