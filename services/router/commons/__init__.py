"""What the router shows of the whole stack to people who watch: instances, tiers, sequences, loans."""
