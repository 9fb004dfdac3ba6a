"""The page of `armillary web`: read-only views of plans, catalogue, runs, servers and diagnoses."""
